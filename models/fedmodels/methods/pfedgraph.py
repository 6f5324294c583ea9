"""pFedGraph — Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023, Algorithm 1. https://proceedings.mlr.press/v202/ye23b.html

    paper       here                                paper       here
    theta_i     clients[i].weights                  w_ij        own.weights["aggregation_weights"]
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

The graph itself is :mod:`fedmodels.techniques.collaboration`.
Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.techniques.collaboration import (
    ROWS,
    Graph,
    graph_metrics,
    grown_graph,
    model_spec,
    own_model,
    personal_models,
    reference_in,
)
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Batch, Output, Payload, Reduced
from fedmodels.training.run import RunFacts


@register("pfedgraph")
@dataclass(frozen=True, kw_only=True)
class PFedGraph(FedAvg):
    """Each client gets a mean weighted towards clients whose updates are like its own."""

    citation: ClassVar[str] = "Ye et al., ICML 2023"
    views: ClassVar[tuple[str, ...]] = ("after_local", "after_downlink")
    takes_frozen: ClassVar[bool] = False
    reduction: ClassVar[Reduction] = "each"
    takes_means: ClassVar[bool] = False

    graph: Graph = field(default_factory=Graph)
    """How clients are compared, and how much they learn from each other."""

    def grown(self, run: RunFacts, state: Bundle) -> Mapping[str, Tensor]:
        return grown_graph(run, state)

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        return ServerState(Bundle())

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, personal_models(ctx.run, state, ctx.cohort)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return BundleSpec(), model_spec(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        return self.graph.collaborated(ctx, state, uploads, self.count)  # eq. 3 and 4

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        return state, graph_metrics(ctx, state.own.weights[ROWS], uploads) if uploads else {}

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, own_model(payload.weights))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights | None:
        return reference_in(payload.weights, ctx.device)  # u_i

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Weights | None) -> Tensor:
        return self.graph.attracted(ctx.net, super().loss(ctx, batch, out, refs), refs)  # eq. 5
