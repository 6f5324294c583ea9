"""Heads that live for one round: rebuilt from the participants' mean, private only within it.

Papers that keep heads private leave open which head a round begins with. A code base by
authors of two of them averages all weights: every round then begins with one head for all. In a
round of several interactions a client goes on with the head it trained.
"""

from __future__ import annotations

from fedmodels.nets.split import weights_of
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.method import ClientContext

ROUND = "round"


def is_head(name: str) -> bool:
    """Tell whether a weight is the head's."""
    return name.startswith("head/")


def going_on(ctx: ClientContext, state: Bundle) -> Weights:
    """Return the head a client trains on with: its own in the round it is of, and else none.

    What a client is scored with after a downlink is what it received.
    """
    same = state.scalars.get(ROUND) == ctx.round and not ctx.view
    return {k: v for k, v in state.weights.items() if is_head(k) and same}


def kept(ctx: ClientContext, state: Bundle) -> Bundle:
    """Return a private state that holds the net's head, and the round it is of."""
    head = weights_of(ctx.net, is_head)
    weights = {**state.weights, **head}
    scalars = {**state.scalars, ROUND: float(ctx.round)}
    return Bundle(weights, state.prototypes, state.generators, state.histogram, scalars)
