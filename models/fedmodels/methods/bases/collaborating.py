"""What pFedGraph and its variant with replay share: models weighted by a collaboration graph.

Ye et al., ICML 2023. The graph itself is :mod:`fedmodels.techniques.collaboration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedmodels.config.bounds import NonNegative
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.techniques.collaboration import (
    ROWS,
    collaborated,
    graph_metrics,
    likeness,
    model_spec,
    own_model,
    personal_models,
)
from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.run import RunFacts


@dataclass(frozen=True, kw_only=True)
class Collaborating(FedAvg):
    """Each client gets a mean weighted towards clients whose updates are like its own."""

    reduction: ClassVar[Reduction] = "each"

    alpha: NonNegative = 0.8
    """How much the data shares count against likeness; 0 is likeness alone."""
    lam: NonNegative = 0.01
    """Weight of the likeness to the neighbours in the local loss."""
    similarity: Literal["all", "head"] = "all"
    """Parameters that are compared."""
    official_sign: bool = False
    """Repel, as all official ports do by their sign, instead of attract, as the paper says."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("after_local", "after_downlink")

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
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

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return BundleSpec(), model_spec(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        return collaborated(ctx, state, uploads, self.alpha, self.similarity, self.count)

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        if not uploads:
            return state, {}
        return state, graph_metrics(ctx, state.own.weights[ROWS], uploads)

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        load_weights(ctx.net, own_model(payload.weights))

    def attracted(self, net: SplitNet, plain: Tensor, neighbours: Weights | None) -> Tensor:
        """Return the plain loss with the likeness of the net to its neighbours u_i (eq. 5)."""
        if neighbours is None or not self.lam:
            return plain
        sign = 1 if self.official_sign else -1
        return plain + sign * self.lam * likeness(net, neighbours)
