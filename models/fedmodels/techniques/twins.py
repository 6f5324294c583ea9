"""A second net of a client, trained beside the one that travels, on the same batches.

Its weights rest in the client's private state under ``twin/…``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.roles import part_of
from fedmodels.training.contexts import ClientContext
from fedmodels.training.optimizer import follow, optimizer_of, set_rates, tensors_of

TWIN = "twin"
"""The role of a twin's weights in a private state."""


class Twin:
    """A twin while it trains."""

    def __init__(self, net: SplitNet, ctx: ClientContext) -> None:
        """Train a net with the run's optimiser.

        What its layers draw, if they draw, has seeds of its own: the other net's randomness does
        not depend on the twin.
        """
        net.requires_grad_(True).train()
        decay = ctx.run.experiment.training.weight_decay
        groups = [{"params": list(net.parameters()), "weight_decay": decay}]
        self.net, self.optimizer = net, optimizer_of(groups, ctx)
        self._seeds = ctx.generator("method") if ctx.run.nets_draw else None
        self._ctx = weakref.ref(ctx)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Do one step with randomness of its own."""
        if self._seeds is None:
            yield
            return
        with seeded(int(torch.randint(2**62, (), generator=self._seeds))):
            yield

    def follow(self, ctx: ClientContext) -> None:
        """Take the rate of the round and the epoch of a context."""
        follow(self.optimizer, ctx)
        set_rates(self.optimizer)

    def everything(self) -> dict[str, Tensor]:
        """Return the tensors of the net and of the optimiser."""
        return {**self.net.everything(), **tensors_of(self.optimizer)}

    def copy(self) -> Twin:
        """Return a twin of equal weights and moments, while this one trains."""
        ctx = self._ctx()
        assert ctx is not None, "its training has ended"
        other = Twin(self.net.copy(), ctx)
        with torch.no_grad():
            for to, tensor in zip(
                tensors_of(other.optimizer).values(),
                tensors_of(self.optimizer).values(),
                strict=True,
            ):
                to.copy_(tensor)
        return other


def begin_twin(ctx: ClientContext, state: Bundle) -> Twin:
    """Return the twin of a private state, with the run's optimiser, in training mode."""
    net = kept_copy(ctx.net, TWIN)
    load_weights(net, part_of(state.weights, TWIN))
    return Twin(net, ctx)
