"""What a server remembers of a round of several interactions: its mean model, its first prototypes.

It stands in the server's own state, beside the number of the round and of its interactions so far.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedmodels.numerics.algebra import weighted_mean
from fedmodels.techniques import evaluation_heads
from fedmodels.tensors.bundle import Bundle, BundleSpec, Prototypes, Weights
from fedmodels.training.method import ServerContext, ServerState

ROUND, STAGES = "round", "stages"


def goes_on(ctx: ServerContext, state: ServerState) -> bool:
    """Tell whether the server's memory is of the round that goes on."""
    return state.own.scalars.get(ROUND) == ctx.round


def mean_model(ctx: ServerContext, state: ServerState, common: Bundle) -> Weights:
    """Return the mean, over the round's interactions so far, of the models that clients train.

    It travels for scores alone, as ``eval/…``.

    Args:
        ctx: the interaction that ends.
        state: what the server remembers of the interactions before it.
        common: the model and prototypes after it.
    """
    latest = _scored_part(common)
    stages = state.own.scalars[STAGES] if goes_on(ctx, state) else 0.0
    if not stages:
        return latest
    share = stages / (stages + 1)
    return weighted_mean([state.own.weights, latest], [share, 1 - share])


def mean_model_spec(weights: Weights) -> BundleSpec:
    """Return what a client may get of a mean model, by the form of what clients send up."""
    return evaluation_heads.evaluation_spec(_scored_part(Bundle(weights)))


def remembered(
    ctx: ServerContext, state: ServerState, weights: Weights, prototypes: Mapping[str, Prototypes]
) -> Bundle:
    """Return the server's own state after an interaction; as before where nothing is remembered."""
    if not weights and not prototypes:
        return state.own
    stages = state.own.scalars[STAGES] if goes_on(ctx, state) else 0.0
    scalars = {ROUND: float(ctx.round), STAGES: stages + 1}
    return Bundle(weights, dict(prototypes), scalars=scalars)


def _scored_part(common: Bundle) -> Weights:
    return evaluation_heads.for_scores(evaluation_heads.trained_part(common).weights)
