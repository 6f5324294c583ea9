"""A client's private state: the method's own part, and what parts of the client keep with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedcli.runtime.client_part import Client
from fedcli.runtime.setups import SetUp
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.hooks import init_client
from fedpb.v1 import coordinator_pb2 as rpc


@dataclass(frozen=True)
class Private:
    """A client's private state as it is stored, by what it consists of."""

    state: Bundle
    """The method's own."""
    learnt: Bundle
    """That, with what parts keep and the run has learnt."""
    kept: Weights
    """What parts keep, by name with its prefix."""


class PrivateState:
    """The private state of one client, from one interaction to the next."""

    def __init__(self, client: Client) -> None:
        """Read nothing yet."""
        self.client = client
        self._fixed: tuple[SetUp, Bundle] | None = None

    @property
    def lasts(self) -> bool:
        """Whether there is one on the disk."""
        return self.client.set_up.keeps or self.client.set_up.wire.keeps

    def has(self, interaction: int) -> bool:
        """Tell whether that of an interaction is on the disk, where one has to be."""
        return not self.lasts or interaction in self.client.states.versions()

    def follow(self, order: rpc.Order) -> None:
        """Drop what an order says is no longer needed."""
        if self.lasts:
            self.client.states.settle(order.base, order.committed)
            self.client.states.prune(order.durable)

    def at(self, order: rpc.Order) -> Private:
        """Return that to start from; PayloadError for the evaluator, who has none."""
        client, set_up = self.client, self.client.set_up
        if not isinstance(client.client, int):
            raise PayloadError("the evaluator has no private state to train with")
        if not self.lasts:
            return Private(self._first, self._first, {})
        stored = client.states.load(order.base, self._first if order.base < 0 else Bundle())
        learnt, beside = _parted(stored, set_up.beside)
        if not set_up.keeps:
            return Private(self._first, self._first, beside)
        if order.base >= 0:
            classes = client.states.classes_of(order.base) or len(client.set_ups.classes)
            for part in client.parts:
                learnt = part.loaded(learnt, classes)
        state, owed = _parted(learnt, set_up.owed)
        return Private(state, learnt, {**owed, **beside})

    @property
    def _first(self) -> Bundle:
        """The one before the first order; kept in memory where it is that of all orders."""
        client, set_up = self.client, self.client.set_up
        if self._fixed is not None and self._fixed[0] is set_up:
            return self._fixed[1]
        assert isinstance(client.client, int)
        first = init_client(client.method, client.run, client.client)
        if not set_up.keeps:
            self._fixed = set_up, first
        return first

    def check_names(self, state: Bundle) -> None:
        """Check that no name of a method's private state is that of something a part keeps."""
        sections = self.client.set_up.owed + self.client.set_up.beside
        if taken := [name for name in state.weights if name.startswith(sections)]:
            raise ConfigError(
                f"after_local of {type(self.client.method).__name__} keeps {taken[0]!r}, and the "
                "run keeps something of its own under this name: give it another one"
            )

    def save(self, interaction: int, state: Bundle, sections: Mapping[str, Tensor]) -> None:
        """Store a method's state, and what parts keep by name with its prefix."""
        if self.lasts:
            stored = replace(state, weights={**state.weights, **sections}) if sections else state
            self.client.states.save(interaction, stored)


def _parted(stored: Bundle, sections: tuple[str, ...]) -> tuple[Bundle, Weights]:
    """Return a stored state without what is kept under these prefixes, and that by name."""
    apart = {name: t for name, t in stored.weights.items() if name.startswith(sections)}
    if not apart:
        return stored, {}
    rest = {name: t for name, t in stored.weights.items() if name not in apart}
    return replace(stored, weights=rest), apart
