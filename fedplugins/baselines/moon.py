"""MOON — Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.
https://arxiv.org/abs/2103.16257

    paper    here                               paper     here
    w^t      the payload                        z         out.features
    w_i^t-1  state.weights["previous/base/…"]   z_glob    batch.taught[0]
    mu       mu                                 z_prev    batch.taught[1]
    tau      temperature

Deviations: z is the net's embedding, without a projection of its own, so that every method trains
the same net (FedAli's published code does so too); the last batch of an epoch is kept; a client's
first "previous" model has the run's initial weights (docs/methods/moon.md).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from fedmodels.config.bounds import NonNegative, Positive
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.roles import of_role, part_of, under
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

PREVIOUS = "previous"
Teachers = tuple[SplitNet, SplitNet]
"""The two models a client's features are compared with, frozen: received, previous."""


@register("moon")
class Moon(FedAvg):
    """FedAvg with features drawn to those of the received model, away from the client's last."""

    citation: ClassVar[str] = "Li et al., CVPR 2021"
    takes_targets: ClassVar[bool] = False

    mu: NonNegative = 1.0
    """Weight of the contrastive term; 0 is FedAvg."""
    temperature: Positive = 0.5
    """tau of the contrastive term."""

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return _previous(run.initial_weights)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Teachers:
        received, previous = _frozen(ctx.net, "received"), _frozen(ctx.net, PREVIOUS)
        load_weights(previous, part_of(state.weights, PREVIOUS), strict=False)
        return received, previous

    def taught(self, ctx: ClientContext, x: Tensor, refs: Teachers) -> tuple[Tensor, ...]:
        received, previous = refs
        return received.features(x), previous.features(x)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Teachers) -> Tensor:
        supervised = super().loss(ctx, batch, out, refs)
        z_glob, z_prev = batch.taught
        z = out.features
        similarity = torch.stack([cosine_similarity(z, z_glob), cosine_similarity(z, z_prev)], 1)
        first = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        contrastive = cross_entropy(similarity / self.temperature, first)  # eq. 3
        return supervised + self.mu * contrastive  # eq. 4

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        return _previous(weights_of(ctx.net))


def _previous(weights: Weights) -> Bundle:
    """Return what is kept of a model for the next time: the part that makes features."""
    return Bundle(under(PREVIOUS, of_role(weights, "base")))


def _frozen(net: SplitNet, name: str) -> SplitNet:
    """Return a copy in evaluation mode that takes no gradient."""
    return kept_copy(net, name).eval().requires_grad_(False)
