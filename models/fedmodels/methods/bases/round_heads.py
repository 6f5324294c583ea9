"""What the methods with private heads share: the heads may live for one round only.

Papers that keep heads private leave open which head a client begins a round with. It may be the
client's own. In a code base by authors of two of these papers the server averages all weights, so
that it is one head for all; within a round of several interactions a client goes on with its own.
``[method.reading] heads`` chooses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedmodels.methods.bases.private_parts import PRIVATE_VIEWS, PrivateParts
from fedmodels.methods.readings.heads import HeadsReading
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques import evaluation_heads
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts

ROUND = "round"


def is_head(name: str) -> bool:
    """Tell whether a weight is the head's."""
    return name.startswith("head/")


@dataclass(frozen=True, kw_only=True)
class RoundHeads(PrivateParts):
    """FedAvg over all but the head, or over all with heads that are private within a round."""

    reading: HeadsReading = field(default_factory=HeadsReading)
    """How the paper is read where it leaves something open."""

    @property
    def heads_travel(self) -> bool:
        """Whether every round begins with the mean of the participants' heads."""
        return self.reading.heads == "round"

    @property
    def has_global_head(self) -> bool:
        """Whether a head comes down, to train from or for scores alone."""
        return self.eval_upload_head or self.heads_travel

    @property
    def views(self) -> tuple[str, ...]:
        return ("global", *PRIVATE_VIEWS) if self.heads_travel else super().views

    def shares(self, name: str) -> bool:
        return self.heads_travel or not is_head(name)

    def withheld(self, weights: Weights) -> Weights:
        """Return the part of a net's weights that stays with the client for good."""
        return {name: tensor for name, tensor in weights.items() if not self.shares(name)}

    def shared(self, weights: Weights) -> Weights:
        stays = self.withheld(weights)
        return evaluation_heads.travelling(
            weights, lambda name: name not in stays, self.eval_upload_head
        )

    def keeps_state(self, run: RunFacts) -> bool:
        return self.heads_travel or super().keeps_state(run)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, {**self.net_weights(payload), **self.own_weights(ctx, state)})

    def own_weights(self, ctx: ClientContext, state: Bundle) -> Weights:
        """Return the weights of its state that a client puts into the net it received.

        Where heads travel, a client that goes on training within a round takes its own head. For
        scores after a downlink it takes the head that it received.
        """
        stays = self.withheld(weights_of(ctx.net))
        own = {name: tensor for name, tensor in state.weights.items() if name in stays}
        if not (self.heads_travel and state.scalars.get(ROUND) == ctx.round and not ctx.view):
            return own
        return {**own, **{name: w for name, w in state.weights.items() if is_head(name)}}

    def after_local(self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Any) -> Bundle:
        return self.with_head(ctx, super().after_local(ctx, payload, state, refs))

    def with_head(self, ctx: ClientContext, state: Bundle) -> Bundle:
        """Return a private state with the net's head and its round, if heads travel."""
        if not self.heads_travel:
            return state
        weights = {**state.weights, **weights_of(ctx.net, is_head)}
        scalars = {**state.scalars, ROUND: float(ctx.round)}
        return Bundle(weights, state.prototypes, state.generators, state.histogram, scalars)
