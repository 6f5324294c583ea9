"""pFedGraph-replay — pFedGraph whose clients replay the classes they met, as in pFedGRP.
Tan and Liu, https://arxiv.org/abs/2410.01502v2, section 5

    paper       here                                paper       here
    theta_i     clients[i].weights                  A_{i,c}     private generators, one a class
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

Generators never leave a client. The personal model filters; the model trained from it says which
generators are trained again. Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.bases.replay import Replaying
from fedmodels.nets.split import load_weights
from fedmodels.parts.class_replay import Rehearsal
from fedmodels.parts.collaboration import (
    ROWS,
    collaborated,
    graph_metrics,
    likeness,
    model_spec,
    own_model,
    personal_models,
    reference_in,
)
from fedmodels.tensors.bundle import Bundle, BundleSpec, ClientId, Weights
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.method import (
    Batch,
    ClientContext,
    Metrics,
    Output,
    Run,
    ServerContext,
    ServerState,
)


@dataclass(frozen=True)
class Refs:
    """What one interaction refers to."""

    replay: Rehearsal
    neighbours: Weights | None
    """u_i."""


@register("pfedgraph-replay")
@dataclass(frozen=True, kw_only=True)
class PFedGraphReplay(Replaying):
    """pFedGraph with class replay; no alignment."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"
    reduction: ClassVar[Reduction] = "each"

    alpha: float = 0.8
    """How much the data shares count against likeness; 0 is likeness alone."""
    lam: float = 0.01
    """Weight of the likeness to the neighbours in the local loss."""
    similarity: Literal["all", "head"] = "all"
    """Parameters that are compared."""
    official_sign: bool = False
    """Repel, as all official ports do by their sign, instead of attract, as the paper says."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: Run) -> ServerState:
        return ServerState(Bundle())

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, personal_models(ctx.run, state, ctx.cohort)

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        everybody = range(ctx.run.experiment.schedule.clients)
        return state.common, personal_models(ctx.run, state, everybody)

    def payload_spec(self, run: Run) -> tuple[BundleSpec, BundleSpec]:
        return BundleSpec(), model_spec(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        return collaborated(ctx, state, uploads, self.alpha, self.similarity)

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        if not uploads:
            return state, {}
        return state, graph_metrics(ctx, state.own.weights[ROWS], uploads)

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, own_model(payload.weights))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        return Refs(super().prepare(ctx, payload, state), reference_in(payload.weights, ctx.device))

    def training_data(self, ctx: ClientContext, refs: Any) -> tuple[Tensor, Tensor]:
        return super().training_data(ctx, refs.replay)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        plain = super().loss(ctx, batch, out, refs)
        if refs.neighbours is None or not self.lam:
            return plain
        sign = 1 if self.official_sign else -1
        return plain + sign * self.lam * likeness(ctx.net, refs.neighbours)  # eq. 5

    def after_local(self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Any) -> Bundle:
        return super().after_local(ctx, payload, state, refs.replay)
