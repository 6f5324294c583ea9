"""What a server remembers of a round of several interactions: its mean model, its first prototypes.

The memory is in the server's own state, with the number of the round and the count of its
interactions so far. ``[method.reading] eval_model`` and ``gp_refresh`` say what belongs to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedmodels.methods.bases.round_heads import RoundHeads
from fedmodels.methods.readings.gldp import GldpReading
from fedmodels.numerics.algebra import weighted_mean
from fedmodels.techniques import evaluation_heads
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.training.contexts import ServerContext, ServerState
from fedmodels.training.run import RunFacts

ROUND, COUNT = "round", "stages"
"""In the server's own state: the round that goes on, and how many of its interactions ended."""


@dataclass(frozen=True, kw_only=True)
class RoundMemory(RoundHeads):
    """Private heads and prototypes of classes, in rounds of several interactions."""

    reading: GldpReading = field(default_factory=GldpReading)
    """How the paper is read where it leaves something open."""

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        common, own = super().broadcast(ctx, state)
        if self.reading.holds_prototypes and _goes_on(ctx, state):
            common = Bundle(common.weights, {"class": state.own.prototypes["class"]})
        return common, own

    def scored(self, state: ServerState) -> Weights:
        return {**super().scored(state), **state.own.weights}

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        if self.reading.averages_round:
            sent = _scored_part(Bundle(self.shared(run.forms)))
            own = own | evaluation_heads.evaluation_spec(sent)
        return common, own

    def remembered(self, ctx: ServerContext, state: ServerState, common: Bundle) -> Bundle:
        """Return the server's own state after an interaction; as before if nothing is remembered.

        Args:
            ctx: the interaction that ends.
            state: what the server held before it.
            common: the model and prototypes after it.
        """
        before = state.own.scalars[COUNT] if _goes_on(ctx, state) else 0.0
        weights = _mean_model(state, common, before) if self.reading.averages_round else {}
        first = self.broadcast(ctx, state)[0].prototypes if self.reading.holds_prototypes else {}
        if not weights and not first:
            return state.own
        scalars = {ROUND: float(ctx.round), COUNT: before + 1}
        return Bundle(weights, dict(first), scalars=scalars)


def _goes_on(ctx: ServerContext, state: ServerState) -> bool:
    """Tell whether the server's memory is of the round that goes on."""
    return state.own.scalars.get(ROUND) == ctx.round


def _mean_model(state: ServerState, common: Bundle, before: float) -> Weights:
    """Return the mean of the models after each of the round's interactions, as ``eval/…``.

    Args:
        state: the mean model of the interactions before this one.
        common: the model after it.
        before: how many interactions of the round came before.
    """
    latest = _scored_part(common)
    if not before:
        return latest
    share = before / (before + 1)
    return weighted_mean([state.own.weights, latest], [share, 1 - share])


def _scored_part(common: Bundle) -> Weights:
    return evaluation_heads.for_scores(evaluation_heads.received(common))
