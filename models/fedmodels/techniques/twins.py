"""A second net of a client, trained beside the one that travels, on the same batches.

Its weights rest in the client's private state under ``twin/…``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import part_of
from fedmodels.training.contexts import ClientContext
from fedmodels.training.optimizer import optimizer_of

TWIN = "twin"
"""The role of a twin's weights in a private state."""


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


def begin_twin(ctx: ClientContext, state: Bundle) -> Twin:
    """Return the twin of a private state, with the run's optimiser, in training mode."""
    net = ctx.net.copy()
    load_weights(net, part_of(state.weights, TWIN))
    net.requires_grad_(True).train()
    decay = ctx.run.experiment.training.weight_decay
    groups = [{"params": list(net.parameters()), "weight_decay": decay}]
    return Twin(net, optimizer_of(groups, ctx), ctx.generator("method"))
