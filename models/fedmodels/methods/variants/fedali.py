"""What FedAli's paper and its code do differently; docs/methods/fedali.md has the sources."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedmodels.methods.fedali import FedAli
from fedmodels.methods.variants import Variants
from fedmodels.nets.alp import GLOBAL, LOCAL, sets_of
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.run import RunFacts


class BothSets(FedAli):
    """Local and global prototypes travel each way, as the paper counts; no result changes."""

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        common, own = super().broadcast(ctx, state)
        return _with_twins(common, common.prototypes), own

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        return common | _twin_spec(run), own

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) | _twin_spec(run)

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        return _with_twins(upload, sets_of(weights_of(ctx.net), GLOBAL))


class KeepsPrototypes(FedAli):
    """Clients keep their local prototypes between rounds, instead of starting from global ones."""

    @property
    def views(self) -> tuple[str, ...]:
        return (*super().views, "after_downlink")

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        super().load(ctx, payload, state)
        load_weights(ctx.net, state.weights, strict=False)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        return Bundle(weights_of(ctx.net, lambda name: name.endswith(LOCAL)))


class MeanPrototypes(FedAli):
    """Global prototypes are the weighted mean of the clients' ones, where k-means begins."""

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        return state, {}


def _twin_spec(run: RunFacts) -> BundleSpec:
    return BundleSpec.of(_with_twins(Bundle(), sets_of(run.forms)))


def _with_twins(bundle: Bundle, sets: dict[str, Prototypes]) -> Bundle:
    """Return a bundle with a further set of each block."""
    twins = {f"{block}/twin": rows for block, rows in sets.items()}
    return replace(bundle, prototypes={**bundle.prototypes, **twins})


OF = {
    "fedali": Variants(
        switches={
            "wire_prototypes": {"one": None, "both": BothSets},
            "keep_personal_prototypes": {False: None, True: KeepsPrototypes},
            "aggregate_prototypes": {"kmeans": None, "fedavg": MeanPrototypes},
        },
    )
}
