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

Deviations: all that the paper leaves open is a field here, whose default is argued on the method's
page; Eq. 6, whose index stands outside of its sum, is a mean over the minority examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import Count, NonNegative, Positive
from fedmodels.methods import register
from fedmodels.methods.bases.released_prototypes import ReleasedPrototypes
from fedmodels.methods.bases.round_heads import RoundHeads, is_head
from fedmodels.methods.readings.fedmlp import FedMLPReading
from fedmodels.nets.split import weights_of
from fedmodels.numerics.algebra import class_means, nearest
from fedmodels.numerics.distances import divergence, smooth_l1
from fedmodels.numerics.prototypes import ByClass, moved, nearest_scores, uncounted
from fedmodels.techniques import levels
from fedmodels.techniques.shallow import travelling_names
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.method import Batch, Output
from fedmodels.training.run import RunFacts


@dataclass(frozen=True)
class Levels:
    """References of the regularisers in one interaction: constants; tables are by class."""

    global_class: ByClass  # G
    global_semantic: ByClass  # P[a(k)]; known for k in J alone
    local_class: ByClass  # C_m
    local_semantic: Tensor  # O_m (u, d), maybe without a row


@register("fedmlp")
@dataclass(frozen=True, kw_only=True)
class FedMLP(RoundHeads, ReleasedPrototypes):
    """A shared extractor under regularisers of three kinds of prototypes, and private heads."""

    citation: ClassVar[str] = "Guo et al., Pattern Recognition 2024"
    reduction: ClassVar[Reduction] = "each"

    alpha: NonNegative = 1.0
    """Weight of L_S."""
    tau: Positive = 1.0
    """Temperature of L_I. The paper has none, which is 1; no interval tells 8 apart from it
    (docs/results/fedmlp.md)."""
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

    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights: 1 / the number of participants, as the paper's; or n_k / n."""
    reading: FedMLPReading = field(default_factory=FedMLPReading)
    """How the paper is read where it leaves something open."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("global", "after_local") if self.reading.share == "all" else super().views

    @property
    def rules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.reading.inference, "classifier", "prototype")))

    @property
    def local_view(self) -> str:
        return "after_local" if self.reading.eval_base == "local" else super().local_view

    def withheld(self, weights: Weights) -> Weights:
        travels = travelling_names(weights, self.reading.share)
        heads = set(filter(is_head, weights)) if self.heads_travel else set()
        return {name: tensor for name, tensor in weights.items() if name not in travels | heads}

    def net_weights(self, payload: Bundle) -> Weights:
        found = super().net_weights(payload).items()
        return {name: tensor for name, tensor in found if not name.startswith("levels/")}

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        empty = levels.levels_of(torch.zeros(0), (), run.problem.num_classes)
        nothing = Prototypes.by_position(torch.zeros(0, run.width))
        prototypes = {"class": nothing, "semantic": nothing}
        return ServerState(Bundle({**self.shared(run.initial_weights), **empty}, prototypes))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) | self.prototype_spec(run)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        common, own = super().payload_spec(run)
        return common | levels.levels_spec(run), own

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads).common.weights
        reported = {client: upload.prototypes["class"] for client, upload in uploads.items()}
        classes = ctx.run.problem.num_classes
        tables = {c: levels.class_counts(rows, classes) for c, rows in reported.items()}
        counts = {f"counts/{client}/{ctx.task}": table for client, table in tables.items()}
        clients = state.clients
        if self.reading.proto_agg == "all_latest":
            clients = {**clients, **levels.with_latest(clients, reported)}
            reported = {i: clients[i].prototypes["class"] for i in sorted(clients)}
        found = self.everyones(ctx.run, reported, uniform=True)  # eq. 3
        g = moved(uncounted(state.common.prototypes["class"]), found, 0.0)  # eq. 4
        prototypes = {**state.common.prototypes, "class": g}
        common = Bundle({**state.common.weights, **mean}, prototypes)
        own = Bundle({**state.own.weights, **counts})
        return ServerState(common, own, clients)

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        classes, g = ctx.run.problem.num_classes, state.common.prototypes["class"]
        size = self.v or math.ceil(math.sqrt(classes))
        p, a = self._clustered(g.vectors, size, ctx.run)
        found = levels.levels_of(a, self._minority(ctx, state), classes)
        prototypes = {"class": g, "semantic": Prototypes.by_position(p)}
        common = Bundle({**state.common.weights, **found}, prototypes)
        return replace(state, common=common), {"known_share": len(g.labels) / classes}

    def _minority(self, ctx: ServerContext, state: ServerState) -> Sequence[int]:
        """Return J: the lower half of the known classes; every (client, task) counts once."""
        if self.reading.minority == "oracle":
            return ctx.minority
        tables = [c for k, c in state.own.weights.items() if k.startswith("counts/")]
        return levels.minority_by_counts(tables, when_balanced=self.reading.minority_when_balanced)

    def _clustered(self, points: Tensor, size: int, run: RunFacts) -> tuple[Tensor, Tensor]:
        """Return up to ``size`` centres (v, d) of points (n, d), and the centre of each (n,)."""
        return levels.clustered(points, size, self.reading.clustering, run.experiment.seed)

    # --- client half ---------------------------------------------------------------------------

    def keeps_state(self, run: RunFacts) -> bool:
        return True

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        memory = {"class": Prototypes.of({}, run.width)}
        return Bundle(self.withheld(run.initial_weights), memory)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Levels:
        g, memory = payload.prototypes["class"], state.prototypes["class"]
        centres, a = payload.prototypes["semantic"].vectors, payload.weights[levels.CLUSTER].long()
        rare = levels.minority_of(payload.weights, ctx.run.problem.num_classes).to(ctx.device)
        semantic = self.by_class(ctx, replace(g, vectors=centres[a]))  # P[a(k)]
        size = self.u or math.ceil(math.sqrt(len(memory.labels)))
        return Levels(
            self.by_class(ctx, g),
            ByClass(semantic.vectors, semantic.known & rare),
            self.by_class(ctx, memory),
            self._clustered(memory.vectors, size, ctx.run)[0].to(ctx.device),
        )

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
        known = refs.global_class.known[y]
        return self._distance(z[known], refs.global_class.vectors[y[known]]).sum() / len(y)

    def inter_task_loss(self, z: Tensor, y: Tensor, refs: Levels) -> Tensor:
        """Return L_I: the mean divergence from the remembered prototype (eq. 7)."""
        old, target = refs.local_class.known[y], refs.local_class.vectors[y]  # eq. 8, first case
        if len(refs.local_semantic):
            points = z.detach()
            if self.reading.c_new == "class_mean":
                means = class_means(points, y, len(refs.local_class.known))
                points = torch.stack([means[k][0] for k in y.tolist()])
            initial = refs.local_semantic[nearest(points, refs.local_semantic)]  # eq. 9
            target, old = torch.where(old[:, None], target, initial), torch.ones_like(old)
        rows = divergence(z[old], target[old], self.tau, self.reading.kl_norm, self.reading.kl_dir)
        return rows.sum() / len(y)

    def semantic_loss(self, z: Tensor, y: Tensor, refs: Levels) -> Tensor:
        """Return L_S: the distance of minority examples to their cluster's prototype (eq. 6)."""
        rare = refs.global_semantic.known[y]
        rows = self._distance(z[rare], refs.global_semantic.vectors[y[rare]])
        if self.reading.ls_norm == "class_sum":
            return (rows / torch.bincount(y[rare])[y[rare]]).sum()
        return rows.sum() / (len(y) if self.reading.ls_norm == "batch_mean" else max(len(rows), 1))

    def _distance(self, z: Tensor, target: Tensor) -> Tensor:
        return smooth_l1(z, target, self.reading.smooth_l1_threshold, self.reading.sl1_reduction)

    def after_local(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, refs: Levels
    ) -> Bundle:
        found = self.class_means(ctx, *ctx.stream.train(ctx.task))  # eq. 1
        before = state.prototypes["class"] if self.reading.history == "accumulate" else None
        latest = moved(before, found, 0.0)
        return self.with_head(ctx, Bundle(self.withheld(weights_of(ctx.net)), {"class": latest}))

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Levels, num_examples: int) -> Bundle:
        upload = super().uplink(ctx, state, refs, num_examples)
        current = set(ctx.stream.train(ctx.task)[1].tolist())
        rows = {k: row for k, row in state.prototypes["class"].rows().items() if k in current}
        sent = self.released(ctx, Prototypes.of(rows, ctx.net.width))
        return replace(upload, prototypes={"class": sent})  # eq. 2

    def predict(
        self, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor
    ) -> Mapping[str, Tensor]:
        z, g = ctx.net.features(x), self.by_class(ctx, payload.prototypes["class"])
        by_rule = {"classifier": ctx.net.head(z), "prototype": nearest_scores(z, g, g.known)}
        return {rule: by_rule[rule] for rule in self.rules}
