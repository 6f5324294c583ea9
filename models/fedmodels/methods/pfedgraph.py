"""pFedGraph — Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023, Algorithm 1. https://proceedings.mlr.press/v202/ye23b.html

    paper       here                                paper       here
    theta_i     clients[i].weights                  w_ij        own.weights["aggregation_weights"]
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

The graph itself is :mod:`fedmodels.parts.collaboration`. Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
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


@register("pfedgraph")
@dataclass(frozen=True, kw_only=True)
class PFedGraph(FedAvg):
    """Each client gets a mean weighted towards clients whose updates are like its own."""

    citation: ClassVar[str] = "Ye et al., ICML 2023"
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

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights | None:
        return reference_in(payload.weights, ctx.device)  # u_i

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Weights | None) -> Tensor:
        plain = super().loss(ctx, batch, out, refs)
        if refs is None or not self.lam:
            return plain
        sign = 1 if self.official_sign else -1
        return plain + sign * self.lam * likeness(ctx.net, refs)  # eq. 5
