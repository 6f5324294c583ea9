"""Centralized, in the two meanings the papers give the word.

``pooled`` (FedAli): one model on the union of all clients' data, the upper bound of a global
model. ``fedcli partition`` lays the union into client 0's directory, which alone trains; the
others only score.

``own`` (pFedGRP): every client trains on all real data it has met itself, nothing is aggregated;
the reference of the average forgetting measure.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.run import RunFacts


@register("centralized")
class Centralized(FedAvg):
    """Upper bounds: training on the pooled data of all, or on all own data so far."""

    citation: ClassVar[str] = "upper bound"
    trains_on: ClassVar[TrainsOn] = "history"

    data: Literal["pooled", "own"] = "pooled"
    """The union of all clients' data in one place, or each client's own history."""

    @property
    def private(self) -> tuple[str, ...]:
        return () if self.data == "pooled" else ("",)  # all weights

    @property
    def views(self) -> tuple[str, ...]:
        return ("global",) if self.data == "pooled" else super().views

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) if self.data == "pooled" else BundleSpec()

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        return super().aggregate(ctx, state, uploads) if self.data == "pooled" else state

    def training_data(self, ctx: ClientContext, refs: Any) -> tuple[Tensor, Tensor]:
        pooled = self.data == "pooled"
        return ctx.stream.train(ctx.task) if pooled else ctx.stream.train_up_to(ctx.task)

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        pooled = self.data == "pooled"
        return super().uplink(ctx, state, refs) if pooled else Bundle()
