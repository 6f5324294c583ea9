"""Local-only: every client trains alone; nothing travels. The lower bound of every comparison."""

from __future__ import annotations

from typing import Any, ClassVar

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.run import RunFacts


@register("local")
class Local(FedAvg):
    """No aggregation: a client's model is its private state."""

    citation: ClassVar[str] = "baseline"
    private: ClassVar[tuple[str, ...]] = ("",)  # all weights

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return BundleSpec()

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        return state

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        return Bundle()
