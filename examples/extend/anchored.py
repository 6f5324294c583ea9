"""A minimal prototype method: embeddings are pulled towards the global class means.

fedsrv launch quickstart --out run --set method.name=examples/extend/anchored.py:Anchored
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from fedtide import (
    Batch,
    Bundle,
    BundleSpec,
    ClientContext,
    FedAvg,
    Output,
    Prototypes,
    RunFacts,
    ServerContext,
    ServerState,
    Uploads,
    prototype_spec,
)
from fedtide.prototypes import ByClass, class_prototypes, embeddings


class Anchored(FedAvg):
    """FedAvg plus lam |z - c_y|^2, c_y the mean of the clients' mean embeddings of class y."""

    lam: float = 0.1
    """Weight of the pull; 0 is FedAvg."""

    def init_server(self, run: RunFacts) -> ServerState:
        state = super().init_server(run)
        nothing = {"class": Prototypes.of({}, run.width)}
        return replace(state, common=replace(state.common, prototypes=nothing))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        sent = prototype_spec("class", run.width, run.problem.num_classes)
        return super().upload_spec(run) | sent

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        after = super().aggregate(ctx, state, uploads)
        classes, width = ctx.run.problem.num_classes, ctx.run.width
        means = uploads.mean_prototypes("class", classes, width, uniform=False)
        return replace(after, common=replace(after.common, prototypes={"class": means}))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> ByClass:
        known = payload.prototypes.get("class")
        return ByClass.of(known, ctx.run.problem.num_classes, ctx.net.width, ctx.device)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: ByClass) -> Tensor:
        pull = (out.features - refs.vectors[batch.y]).square().sum(1) * refs.known[batch.y]
        return super().loss(ctx, batch, out, refs) + self.lam * pull.mean()

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Any) -> Bundle:
        x, y = ctx.stream.train(ctx.task)
        found = class_prototypes(embeddings(ctx.net, x).cpu(), y.cpu(), ctx.run.problem.num_classes)
        upload = super().uplink(ctx, state, refs)
        return replace(upload, prototypes={"class": found})
