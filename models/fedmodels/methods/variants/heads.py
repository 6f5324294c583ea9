"""Variants of methods with private heads: heads that live for one round, heads sent up for scores.

Papers that keep heads private leave open which head a client begins a round with. In a code base by
authors of two of these papers the server averages all weights: every round begins with one head for
all, and a client goes on with its own within the round. Tables of such papers also score a global
model with the mean of the heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from fedmodels.methods.fedavg import FedAvg
from fedmodels.methods.variants import Variants
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques import evaluation_heads
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import of_role, under
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload
from fedmodels.training.run import RunFacts

ROUND = "round"
"""In a private state: the round that its head belongs to."""


def is_head(name: str) -> bool:
    """Tell whether a weight is the head's."""
    return name.startswith("head/")


class HeadsOfARound(FedAvg):
    """Every round begins with the mean of the participants' heads, which are private within it."""

    has_global_head: ClassVar[bool] = True

    @property
    def views(self) -> tuple[str, ...]:
        return ("global", "after_local", "after_downlink")

    def shares(self, run: RunFacts, name: str) -> bool:
        return is_head(name) or super().shares(run, name)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        super().load(ctx, payload, state)
        if state.scalars.get(ROUND) == ctx.round and not ctx.view:  # it goes on within the round
            heads = {name: w for name, w in state.weights.items() if is_head(name)}
            load_weights(ctx.net, heads, strict=False)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        kept = super().after_local(ctx, state, refs)
        weights = {**kept.weights, **weights_of(ctx.net, is_head)}
        return replace(kept, weights=weights, scalars={**kept.scalars, ROUND: float(ctx.round)})


class ScoredHeads(FedAvg):
    """Private weights go up for scores alone: a global model has their mean.

    Their bytes are counted apart, and nobody trains from them.
    """

    has_global_head: ClassVar[bool] = True

    @property
    def views(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(("global", *super().views)))

    def shared(self, run: RunFacts, weights: Weights) -> Weights:
        private = {name: w for name, w in weights.items() if not self.shares(run, name)}
        return {**super().shared(run, weights), **under(evaluation_heads.EVAL, private)}

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        common, own = super().broadcast(ctx, state)
        if ctx.scores:
            heads = of_role(state.common.weights, evaluation_heads.EVAL)
            own = evaluation_heads.beside_own(ctx.run, own, heads)
        return evaluation_heads.trained_part(common), own

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        return evaluation_heads.in_own_part(common, own)

    def global_weights(self, common: Bundle) -> Weights:
        return super().global_weights(evaluation_heads.as_scored(common))


OF = {
    "fedper": Variants(switches={"eval_upload_head": {False: None, True: ScoredHeads}}),
    "fedrep": Variants(
        readings={"heads": {"private": None, "round": HeadsOfARound}},
        switches={"eval_upload_head": {False: None, True: ScoredHeads}},
    ),
}
