"""pFedGraph-replay — pFedGraph whose clients replay the classes they met, as in pFedGRP.
Tan and Liu, https://arxiv.org/abs/2410.01502v2, appendices B and D.1

    paper       here                                paper       here
    theta_i     clients[i].weights                  A_{i,c}     private generators, one a class
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

Generators never leave a client. The personal model filters; the model trained from it says which
generators are trained again. Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.bases.collaborating import Collaborating
from fedmodels.methods.bases.replay import GenerativeReplay
from fedmodels.techniques.class_replay import Rehearsal
from fedmodels.techniques.collaboration import reference_in
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Batch, Output


@dataclass(frozen=True)
class PFedGraphReplayReferences:
    """References of the loss in one interaction."""

    replay: Rehearsal
    neighbours: Weights | None
    """u_i."""


@register("pfedgraph-replay")
@dataclass(frozen=True, kw_only=True)
class PFedGraphReplay(Collaborating, GenerativeReplay):
    """pFedGraph with class replay; no alignment."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        return PFedGraphReplayReferences(
            super().prepare(ctx, payload, state), reference_in(payload.weights, ctx.device)
        )

    def training_data(self, ctx: ClientContext, refs: Any) -> tuple[Tensor, Tensor]:
        return super().training_data(ctx, refs.replay)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        plain = super().loss(ctx, batch, out, refs)
        return self.attracted(ctx.net, plain, refs.neighbours)  # eq. 5

    def after_local(self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Any) -> Bundle:
        return super().after_local(ctx, payload, state, refs.replay)
