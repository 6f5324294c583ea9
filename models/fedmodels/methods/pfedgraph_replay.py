"""pFedGraph-replay — pFedGraph whose clients replay the classes they met, as in pFedGRP.
Tan and Liu, https://arxiv.org/abs/2410.01502v2, appendices B and D.1

    paper       here                                paper       here
    theta_i     clients[i].weights                  A_{i,c}     private generators, one a class
    u_i         clients[i].weights "neighbours/…"   alpha, lam  alpha, lam

Generators never leave a client. The personal model filters; the model trained from it says which
generators are trained again. Deviations: docs/methods/pfedgraph.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.techniques.class_replay import Rehearsal
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
from fedmodels.techniques.replay_settings import Replay, nothing_met, reported_by_replay
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Batch, Output, Payload, Reduced
from fedmodels.training.pictures import Picture
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class Replayed:
    """References of the loss in one interaction."""

    replay: Rehearsal
    neighbours: Weights | None  # u_i


@register("pfedgraph-replay")
@dataclass(frozen=True, kw_only=True)
class PFedGraphReplay(FedAvg):
    """pFedGraph with class replay; no alignment."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2, baseline"
    tells_classes: ClassVar[bool] = True
    takes_frozen: ClassVar[bool] = False
    reduction: ClassVar[Reduction] = "each"
    takes_means: ClassVar[bool] = False
    trains_on: ClassVar[TrainsOn] = "replay"

    graph: Graph = field(default_factory=Graph)
    """How clients are compared, and how much they learn from each other."""
    replay: Replay = field(default_factory=Replay)
    """How generated examples are made, chosen and used."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")

    def reported(self, run: RunFacts) -> frozenset[str]:
        return reported_by_replay(run)

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

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return nothing_met(run)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Replayed:
        replay = self.replay.of(ctx.run).prepared(ctx, state)
        return Replayed(replay, reference_in(payload.weights, ctx.device))

    def training_data(self, ctx: ClientContext, refs: Replayed) -> tuple[Tensor, Tensor]:
        return refs.replay.training_data()

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Replayed) -> Tensor:
        plain = super().loss(ctx, batch, out, refs)
        return self.graph.attracted(ctx.net, plain, refs.neighbours)  # eq. 5

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Replayed) -> Bundle:
        return self.replay.of(ctx.run).kept(ctx, state, refs.replay)

    def pictures(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
    ) -> Mapping[str, Picture]:
        return self.replay.of(ctx.run).pictures(ctx, state)
