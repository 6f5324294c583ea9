"""MOON — Li, He, Song, Model-Contrastive Federated Learning, CVPR 2021, Algorithm 1.
https://arxiv.org/abs/2103.16257

    paper    here                               paper     here
    w^t      the payload                        z         out.features
    w_i^t-1  state.weights["previous/base/…"]   z_glob    refs.features(batch)[0]
    mu       mu                                 z_prev    refs.features(batch)[1]
    tau      temperature

Deviations: z is the net's embedding, without a projection of its own, so that every method trains
the same net (FedAli's published code does so too); the last batch of an epoch is kept; a client's
first "previous" model has the run's initial weights (docs/methods/moon.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

from fedmodels.config.bounds import NonNegative, Positive
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.embedding import embeddings
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.roles import of_role, part_of, under
from fedmodels.training.contexts import ClientContext
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

PREVIOUS = "previous"


@dataclass(frozen=True)
class Teachers:
    """The two models a client's features are compared with, frozen."""

    nets: tuple[SplitNet, SplitNet]  # received, previous
    embedded: tuple[Tensor, Tensor] | None
    """Their features of the whole training set (n, d), where inputs are not augmented."""

    def features(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return z_glob and z_prev of a batch, (B, d) each."""
        if self.embedded is not None:
            received, previous = self.embedded
            return received[batch.index], previous[batch.index]
        with torch.no_grad():
            return self.nets[0].features(batch.x), self.nets[1].features(batch.x)


@register("moon")
class Moon(FedAvg):
    """FedAvg with features drawn to those of the received model, away from the client's last."""

    citation: ClassVar[str] = "Li et al., CVPR 2021"

    mu: NonNegative = 1.0
    """Weight of the contrastive term; 0 is FedAvg."""
    temperature: Positive = 0.5
    """tau of the contrastive term."""

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return _previous(run.initial_weights)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Teachers:
        received, previous = _freeze(ctx.net), _freeze(ctx.net)
        load_weights(previous, part_of(state.weights, PREVIOUS), strict=False)
        embedded = None
        if ctx.run.experiment.training.augment == "none":
            x, _ = self.training_data(ctx, None)
            embedded = embeddings(received, x), embeddings(previous, x)
        return Teachers((received, previous), embedded)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Teachers) -> Tensor:
        supervised = super().loss(ctx, batch, out, refs)
        z_glob, z_prev = refs.features(batch)
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


def _freeze(net: SplitNet) -> SplitNet:
    """Return a copy in evaluation mode that takes no gradient."""
    return net.copy().eval().requires_grad_(False)
