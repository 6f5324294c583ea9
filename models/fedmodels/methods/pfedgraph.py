"""pFedGraph — Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023, Algorithm 1. https://proceedings.mlr.press/v202/ye23b.html

    paper       here                                paper       here
    theta_i     clients[i].weights                  w_ij        own.weights["aggregation_weights"]
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

The graph itself is :mod:`fedmodels.techniques.collaboration`.
Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.bases.collaborating import Collaborating
from fedmodels.techniques.collaboration import reference_in
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Batch, Output


@register("pfedgraph")
@dataclass(frozen=True, kw_only=True)
class PFedGraph(Collaborating):
    """Each client gets a mean weighted towards clients whose updates are like its own."""

    citation: ClassVar[str] = "Ye et al., ICML 2023"

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights | None:
        return reference_in(payload.weights, ctx.device)  # u_i

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Weights | None) -> Tensor:
        return self.attracted(ctx.net, super().loss(ctx, batch, out, refs), refs)  # eq. 5
