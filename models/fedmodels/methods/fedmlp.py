"""FedMLP — Guo et al., Dynamic Heterogeneous Federated Learning with Multi-Level Prototypes,
Pattern Recognition 153, 2024. https://arxiv.org/abs/2312.09881

    paper          here                             paper          here
    f_m, g_m       weights base/, head/             P              common, prototypes semantic
    c_m^k          uplink, prototypes class         J              common, levels/minority
    C_m            state, prototypes class          O_m            Levels.local_semantic
    G              common, prototypes class         z_i^k          out.features
    n_m,t^k        own, counts/m/t                  alpha, u, v    alpha, u, v

The cluster of each class of G travels beside P as ``levels/cluster``: a payload brings
|G| (8 + 4d) + 4 v d bytes of prototypes, and one bit a class for J.

Deviations: docs/methods/fedmlp.md. Eq. 6, whose index stands outside of its sum, is a mean over the
minority examples. Other readings of the paper: variants/fedmlp.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import Count, NonNegative, Positive
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.numerics.clustering import nearest
from fedmodels.numerics.distances import divergence, smooth_l1
from fedmodels.numerics.prototypes import (
    ByClass,
    moved,
    nearest_scores,
)
from fedmodels.techniques import levels
from fedmodels.techniques.class_prototypes import (
    PrototypeLimits,
    by_class,
    class_means,
    mean_class_prototypes,
    no_prototypes,
    prototype_upload,
)
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Reduced, Scores
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output


@dataclass(frozen=True)
class Levels:
    """References of the regularisers in one interaction: constants; tables are by class."""

    global_class: ByClass  # G
    global_semantic: ByClass  # P[a(k)]; known for k in J alone
    local_class: ByClass  # C_m
    local_semantic: Tensor  # O_m (u, d), maybe without a row


@register("fedmlp")
class FedMLP(FedAvg):
    """A shared extractor under regularisers of three kinds of prototypes, and private heads."""

    citation: ClassVar[str] = "Guo et al., Pattern Recognition 2024"
    reduction: ClassVar[Reduction] = "each"
    private: ClassVar[tuple[str, ...]] = ("head/",)

    alpha: NonNegative = 1.0
    """Weight of L_S."""
    tau: Positive = 1.0
    """Temperature of L_I; the paper has none, which is 1."""
    u: Count = 0
    """Local semantic prototypes; 0 is the root of the number of prototypes, rounded up."""
    v: Count = 0
    """Global semantic prototypes; 0 is the root of the number of classes, rounded up."""
    loss_p: bool = True
    """Whether embeddings are drawn to global prototypes, L_P."""
    loss_i: bool = True
    """Whether embeddings are held near local prototypes of earlier tasks, L_I."""
    loss_s: bool = True
    """Whether minority classes are drawn to semantic prototypes, L_S."""
    inference: Literal["classifier", "prototype"] = "classifier"
    """The rule that counts; the other one is scored beside it."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights: 1 / the number of participants, as the paper's; or n_k / n."""
    limits: PrototypeLimits = field(default_factory=PrototypeLimits)
    """What is let out of prototypes."""

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.inference, "classifier", "prototype")))

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, "levels")

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        unknown = levels.levels_of(torch.zeros(0), (), run.problem.num_classes)
        nothing = Prototypes.by_position(torch.zeros(0, run.width))
        weights = {**self.shared(run, run.initial_weights), **unknown}
        return ServerState(Bundle(weights, {"class": nothing, "semantic": nothing}))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) | prototype_upload(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads).common.weights
        found = mean_class_prototypes(ctx.run, uploads)  # eq. 3
        g = moved(state.common.prototypes["class"], found, 0.0)  # eq. 4
        own = levels.class_counts(ctx, state.own.weights, uploads)  # a (client, task) counts once
        prototypes = {**state.common.prototypes, "class": g}
        common = Bundle({**state.common.weights, **mean}, prototypes)
        return ServerState(common, Bundle(own), state.clients)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        classes, g = ctx.run.problem.num_classes, state.common.prototypes["class"]
        size = self.v or math.ceil(math.sqrt(classes))
        p, a = levels.cluster_rows(g.vectors, size, ctx.run)
        found = levels.levels_of(a, levels.minority_by_counts(state.own.weights), classes)  # J
        prototypes = {"class": g, "semantic": Prototypes.by_position(p)}
        common = Bundle({**state.common.weights, **found}, prototypes)
        return replace(state, common=common), {"known_share": len(g.labels) / classes}

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return replace(super().init_client(run, client), prototypes=no_prototypes(run))

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Levels:
        memory, p = state.prototypes["class"].vectors, levels.semantic_by_class(ctx, payload)
        size = self.u or math.ceil(math.sqrt(len(memory)))
        o = levels.cluster_rows(memory, size, ctx.run)[0].to(ctx.device)
        return Levels(by_class(ctx, payload), p, by_class(ctx, state), o)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Levels) -> Tensor:
        total = super().loss(ctx, batch, out, refs)  # eq. 10
        z, y = out.features, batch.y
        if self.loss_p:
            total = total + self.prototype_loss(z, y, refs)
        if self.loss_i:
            total = total + self.inter_task_loss(z, y, refs)
        if self.loss_s:
            total = total + self.alpha * self.semantic_loss(z, y, refs)
        return total  # eq. 11

    def prototype_loss(self, z: Tensor, y: Tensor, refs: Levels) -> Tensor:
        """Return L_P: the mean distance to the global prototype, 0 where there is none (eq. 5)."""
        known, g = refs.global_class.known[y], refs.global_class.vectors[y]
        return (known * smooth_l1(z, g)).sum() / len(y)

    def inter_task_loss(self, z: Tensor, y: Tensor, refs: Levels) -> Tensor:
        """Return L_I: the mean divergence from the remembered prototype (eq. 7)."""
        memory, o = refs.local_class, refs.local_semantic
        if not len(o):  # nothing is remembered
            return z.sum() * 0.0
        initial = o[nearest(z.detach(), o)]  # eq. 9
        target = torch.where(memory.known[y][:, None], memory.vectors[y], initial)  # eq. 8
        return self.divergence(z, target).sum() / len(y)

    def divergence(self, z: Tensor, c: Tensor) -> Tensor:
        """Return KL(z || c) of each row, as distributions over d: (n,)."""
        return divergence(z, c, self.tau)

    def semantic_loss(self, z: Tensor, y: Tensor, refs: Levels) -> Tensor:
        """Return L_S: the distance of minority examples to their cluster's prototype (eq. 6)."""
        rare, p = refs.global_semantic.known[y], refs.global_semantic.vectors[y]
        return (rare * smooth_l1(z, p)).sum() / rare.sum().clamp_min(1)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Levels) -> Bundle:
        found = class_means(ctx, *ctx.stream.train(ctx.task))  # eq. 1
        latest = moved(state.prototypes["class"], found, 0.0)
        return replace(super().after_local(ctx, state, refs), prototypes={"class": latest})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Levels) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        now = set(ctx.stream.train(ctx.task)[1].tolist())
        rows = {k: row for k, row in state.prototypes["class"].rows().items() if k in now}
        found = self.limits.released(ctx, Prototypes.of(rows, ctx.net.width))
        return replace(upload, prototypes=found)  # eq. 2

    def predict(self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor) -> Scores:
        z, g = ctx.net.features(x), ctx.once(by_class, payload)
        return {"classifier": ctx.net.head(z), "prototype": nearest_scores(z, g, g.known)}
