"""A second net of a client, trained beside the one that travels, on the same batches.

Its weights rest in the client's private state under ``twin/…``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Weights
from fedmodels.training.contexts import ClientContext
from fedmodels.training.optimizer import optimizer_of

PREFIX = "twin/"


def to_state(weights: Mapping[str, Tensor]) -> Weights:
    """Return a twin's weights under the names they have in a private state."""
    return {PREFIX + name: tensor for name, tensor in weights.items()}


def from_state(weights: Mapping[str, Tensor]) -> Weights:
    """Return the twin's weights of a private state under the net's names."""
    return {k.removeprefix(PREFIX): t for k, t in weights.items() if k.startswith(PREFIX)}


@dataclass
class Twin:
    """A twin while it trains."""

    net: SplitNet
    optimizer: torch.optim.Optimizer
    rng: torch.Generator
    """Seeds what its layers draw: the other net's randomness does not depend on the twin."""
    steps: int = 0

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do one step with randomness of its own."""
        with seeded(int(torch.randint(2**62, (), generator=self.rng))):
            yield
        self.steps += 1


def begin_twin(ctx: ClientContext, weights: Mapping[str, Tensor]) -> Twin:
    """Return a twin that starts from ``weights``, with the run's optimiser, in training mode."""
    net = ctx.net.copy()
    load_weights(net, weights)
    net.requires_grad_(True).train()
    decay = ctx.run.experiment.training.weight_decay
    groups = [{"params": list(net.parameters()), "weight_decay": decay}]
    return Twin(net, optimizer_of(groups, ctx), ctx.generator("method"))
