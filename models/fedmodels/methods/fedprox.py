"""FedProx — Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Algorithm 2.
https://arxiv.org/abs/1812.06127

    paper   here                    paper   here
    w^t     refs                    mu      mu
    w_k     ctx.net                 eq. 2   loss

Deviations: local work is epochs of the run's optimiser, not a gamma-inexact solution; with Adam
the term's gradient goes through the moments.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from fedmodels.config.bounds import NonNegative
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.weight_terms import squared_distance
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.stepped import Batch, Output


@register("fedprox")
class FedProx(FedAvg):
    """FedAvg whose clients are held near the weights they were sent."""

    citation: ClassVar[str] = "Li et al., MLSys 2020"

    mu: NonNegative = 0.01
    """Weight of the proximal term; 0 is FedAvg."""

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> list[Tensor]:
        return [w.detach().clone() for w in ctx.net.parameters_by_key().values()]  # w^t

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: list[Tensor]) -> Tensor:
        proximal = squared_distance(ctx.net.parameters_by_key().values(), refs)
        return super().loss(ctx, batch, out, refs) + self.mu / 2 * proximal  # eq. 2
