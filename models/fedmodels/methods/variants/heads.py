"""Variants of methods with private heads: heads that live for one round, heads sent up for scores.

Papers that keep heads private leave open which head a client begins a round with. In a code base by
authors of two of these papers the server averages all weights: every round begins with one head for
all, and a client goes on with its own within the round. Tables of such papers also score a global
model with the mean of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fedmodels.methods.fedavg import FedAvg
from fedmodels.methods.variants import Variants
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import of_role, part_of, under, without
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
        return {**super().shared(run, weights), **under(EVAL, private)}

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        common, own = super().broadcast(ctx, state)
        if ctx.scores:
            heads = of_role(state.common.weights, EVAL)
            own = beside_own(ctx.run, own, heads)
        return trained_part(common), own

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        return in_own_part(common, own)

    def global_weights(self, common: Bundle) -> Weights:
        return super().global_weights(as_scored(common))


EVAL = "eval"
"""Role of private weights that travel for scores alone. They are counted apart from the method's
own bytes, and never trained from."""


def trained_part(bundle: Bundle) -> Bundle:
    """Return a bundle without ``eval/…``; the same object where there is nothing to leave out."""
    kept = without(bundle.weights, EVAL)
    return bundle if kept is bundle.weights else replace(bundle, weights=kept)


def as_scored(bundle: Bundle) -> Bundle:
    """Return a bundle whose weights have the net's names; ``eval/…`` stands in for what it names.

    The same object where there is no ``eval/…``.
    """
    scored = part_of(bundle.weights, EVAL)
    kept = without(bundle.weights, EVAL)
    return replace(bundle, weights={**kept, **scored}) if scored else bundle


def beside_own(
    run: RunFacts, own: Mapping[ClientId, Bundle], weights: Weights
) -> Mapping[ClientId, Bundle]:
    """Return the parts of every client and the evaluator with further weights, as one bundle.

    Without any, the parts stay as they are. So far there are none, or one for all.
    """
    if not weights:
        return own
    before = next(iter(own.values()), Bundle()).weights
    clients: list[ClientId] = [*range(run.experiment.schedule.clients), EVALUATOR]
    return dict.fromkeys(clients, Bundle({**before, **weights}))


def in_own_part(common: BundleSpec, own: BundleSpec) -> tuple[BundleSpec, BundleSpec]:
    """Return the specs of a payload's parts, with ``eval/…`` of the common part in the own one."""
    moved = {k: one for k, one in common.required.items() if k.startswith(f"weights/{EVAL}/")}
    kept = {k: one for k, one in common.required.items() if k not in moved}
    return BundleSpec(kept, common.optional), own | BundleSpec(optional=moved)


OF = {
    "fedper": Variants(switches={"eval_upload_head": {False: None, True: ScoredHeads}}),
    "fedrep": Variants(
        readings={"heads": {"private": None, "round": HeadsOfARound}},
        switches={"eval_upload_head": {False: None, True: ScoredHeads}},
    ),
}
