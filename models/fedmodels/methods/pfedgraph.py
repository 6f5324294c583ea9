"""pFedGraph — Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs,
ICML 2023, Algorithm 1. https://proceedings.mlr.press/v202/ye23b.html

    paper       here                                paper       here
    theta_i     clients[i].weights                  w_ij        own.weights["aggregation_weights"]
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

The graph itself is :mod:`fedmodels.techniques.collaboration`. ``pfedgraph-replay`` is pFedGraph
whose clients replay the classes they met, as in pFedGRP: Tan and Liu, arXiv 2410.01502v2,
appendices B and D.1. Generators never leave a client. The personal model filters; the model trained
from it says which generators are trained again.

Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.techniques.class_replay import (
    Rehearsal,
    Replay,
    nothing_met,
    reported_by_replay,
)
from fedmodels.techniques.collaboration import (
    NEIGHBOURS,
    ROWS,
    Graph,
    graph_metrics,
    grown_graph,
    model_spec,
    personal_models,
    reference_in,
)
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.roles import without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Batch, Output, Payload, Reduced
from fedmodels.training.pictures import Picture
from fedmodels.training.run import RunFacts


@register("pfedgraph")
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
        load_weights(ctx.net, without(payload.weights, NEIGHBOURS))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Weights | None:
        return reference_in(payload.weights, ctx.device)  # u_i

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Weights | None) -> Tensor:
        return self.graph.attracted(ctx.net, super().loss(ctx, batch, out, refs), refs)  # eq. 5


@dataclass(frozen=True)
class Replayed:
    """References of the loss in one interaction."""

    replay: Rehearsal
    neighbours: Weights | None  # u_i


@register("pfedgraph-replay")
class PFedGraphReplay(PFedGraph):
    """pFedGraph with class replay; no alignment."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"
    tells_classes: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "replay"

    replay: Replay = field(default_factory=Replay)
    """How generated examples are made, chosen and used."""

    def reported(self, run: RunFacts) -> frozenset[str]:
        return reported_by_replay(run)

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return nothing_met(run)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Any:
        replay = self.replay.of(ctx.run).prepared(ctx, state)
        return Replayed(replay, reference_in(payload.weights, ctx.device))

    def training_data(self, ctx: ClientContext, refs: Replayed) -> tuple[Tensor, Tensor]:
        return refs.replay.training_data()

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Any) -> Tensor:
        return super().loss(ctx, batch, out, refs.neighbours)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Replayed) -> Bundle:
        return self.replay.of(ctx.run).kept(ctx, state, refs.replay)

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        return self.replay.of(ctx.run).pictures(ctx, state)
