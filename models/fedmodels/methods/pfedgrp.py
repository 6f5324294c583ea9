"""pFedGRP — Tan and Liu, Personalized Federated Learning on Data with Dynamic Heterogeneity under
Limited Storage, 2024, Algorithm 1. https://arxiv.org/abs/2410.01502v2

    paper           here                                paper       here
    C_g             state.common.weights                Y_i, S_i    histogram.round, .total
    C_{g,i}         clients[i].weights "personal/…"     A_{i,c}     generators["c"]
    C_i^{t,*}       uploads[i].weights                  TH_G        th_g
    W_i             row i of ``_rows``                  lambda      lam

Deviations and what the paper leaves open: docs/methods/pfedgrp.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.bounds import NonNegative, PositiveCount
from fedmodels.methods import register
from fedmodels.methods.bases.replay import GenerativeReplay
from fedmodels.methods.readings.pfedgrp import PFedGRPReading
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.techniques import collaboration, server_replay
from fedmodels.techniques.class_replay import ClassReplay, Rehearsal, published
from fedmodels.techniques.mixing import Mixer, find_all
from fedmodels.tensors.announced import Announced
from fedmodels.tensors.bundle import Bundle, ClientId, Histogram, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.roles import part_of, under, without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.loop import run_phases
from fedmodels.training.method import Batch, Output
from fedmodels.training.run import RunFacts

PERSONAL = "personal"
"""Prefix of the weights of C_{g,i} in a payload and in the server's state."""
PARTS = 10**6
"""What S adds up to where clients send shares in place of counts."""


@register("pfedgrp")
@dataclass(frozen=True, kw_only=True)
class PFedGRP(GenerativeReplay):
    """Replay of past classes on clients, aggregation weights learned on generated data."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2"
    reduction: ClassVar[Reduction] = "each"

    lam: NonNegative = 0.3
    """lambda: how much replayed outputs are held to the personal model's; 0 is ablation ASG."""
    server_volume: PositiveCount = 200
    """V: generated examples of the client's most frequent class on the server."""
    aggregate_by: Literal["learned", "fedavg", "pfedgraph"] = "learned"
    """Personal aggregation weights: eq. 8, training set sizes, or the collaboration graph."""
    graph_alpha: NonNegative = 0.8
    """pFedGraph's alpha."""
    init_from: Literal["global", "personal"] = "global"
    """Where local training starts; ``personal`` with lam = 0 is ablation ASP."""
    replay_labels: Literal["hard", "soft"] = "hard"
    """A replayed example's class, or the classifier's probabilities."""
    generator_decouple: bool = True
    """One generator for each class, or one for all, trained every round (ablation AS3)."""
    generator_width_mult: PositiveCount = 1
    """Factor of the generators' width; 2 in ablation AS3."""

    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights of the mean model C_g."""
    reading: PFedGRPReading = field(default_factory=PFedGRPReading)
    """How the paper is read where it leaves something open."""

    @property
    def views(self) -> tuple[str, ...]:
        return ("global", "after_local", "after_downlink")

    def class_replay(self, run: RunFacts) -> ClassReplay:
        """Return the settings of the replay, for both halves."""
        plain = super().class_replay(run)
        width = self.generator_width_mult * plain.family.usual()[0]
        return replace(
            plain,
            family=replace(plain.family, width=width),
            decoupled=self.generator_decouple,
            renewed=self.reading.images == "epoch" or not self.generator_decouple,
            soft=self.replay_labels == "soft",
        )

    # --- server half ---------------------------------------------------------------------------

    def broadcast(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, self._personal(state, ctx.cohort)

    def evaluation(
        self, ctx: ServerContext, state: ServerState
    ) -> tuple[Bundle, Mapping[ClientId, Bundle]]:
        return state.common, self._personal(state, tuple(state.clients))

    def _personal(self, state: ServerState, clients: tuple[int, ...]) -> dict[ClientId, Bundle]:
        """Return C_{g,i} of clients that have one; the others take C_g for it."""
        held = {c: state.clients[c].weights for c in clients if c in state.clients}
        return {c: Bundle(weights=weights) for c, weights in held.items()}

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        label_counts = Histogram(
            *(torch.zeros(n, dtype=torch.int32) for n in (0, run.problem.num_classes))
        )
        spec = super().upload_spec(run) | BundleSpec.of(Bundle(histogram=label_counts))
        if self.aggregate_by != "learned":
            return spec
        return spec | server_replay.generators_spec(self.class_replay(run), run.problem.num_classes)

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: Announced
    ) -> None:
        in_parts = self.reading.label_dist == "freq"  # S over its sum
        most = torch.full_like(announced.trained, PARTS) if in_parts else announced.trained
        super().check_upload(ctx, state, upload, replace(announced, trained=most))
        server_replay.check_generators(upload.generators, announced, ctx.interaction)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        personal = under(PERSONAL, run.forms)
        return super().payload_spec(run)[0], BundleSpec.of(Bundle(weights=personal))

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads)  # C_g
        clients = dict(state.clients)
        for client, upload in uploads.items():
            before = clients.get(client, Bundle())
            personal = before.weights or under(PERSONAL, mean.common.weights)
            held = replace(before, weights=personal)
            clients[client] = server_replay.with_latest(held, upload)  # A_{i,c} and S_i
        return ServerState(mean.common, state.own, clients)

    def finish(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[ServerState, Metrics]:
        if not uploads:
            return state, {}
        models = [u.weights for u in uploads.values()]
        rows, metrics = self._rows(ctx, state, uploads)
        clients = dict(state.clients)
        for row, client in zip(rows, uploads, strict=True):
            weights = under(PERSONAL, collaboration.mixed(models, row))  # C_{g,i} = sum_j w_ij C_j
            clients[client] = replace(clients[client], weights=weights)
        metrics |= collaboration.graph_metrics(ctx, rows, uploads)
        return ServerState(state.common, state.own, clients), metrics

    def _rows(
        self, ctx: ServerContext, state: ServerState, uploads: Uploads
    ) -> tuple[Tensor, Metrics]:
        """Return W (n, n), the aggregation weights of every client of the cohort."""
        models = [u.weights for u in uploads.values()]
        shares = collaboration.proportions([u.scalars["num_examples"] for u in uploads.values()])
        if self.aggregate_by == "fedavg":
            return shares.expand(len(shares), -1).clone(), {}
        if self.aggregate_by == "pfedgraph":
            keys = collaboration.parameter_keys(ctx.run.make_net())
            d = collaboration.distances(models, ctx.run.initial_weights, keys)
            return collaboration.collaboration_graph(d, shares, self.graph_alpha), {}
        on_gpu = self.reading.w_device == "auto" and torch.cuda.is_available()
        device, threads = ("cuda", 1) if on_gpu else ("cpu", len(os.sched_getaffinity(0)))
        mixer = Mixer(ctx.run.make_net().to(device), models, bn=self.reading.bn)
        replay, most = self.class_replay(ctx.run), self.server_volume
        searches, metrics = server_replay.searches(ctx, replay, state, uploads, most, device)  # D_i
        found = find_all(mixer, searches, self.reading.search(), threads)  # eq. 8
        ctx.series["mixing_loss"] = [[f.uniform, f.loss] for f in found if f.loss == f.loss]
        return torch.stack([f.w for f in found]), metrics

    # --- client half ---------------------------------------------------------------------------

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        personal = part_of(payload.weights, PERSONAL)
        if personal:
            load_weights(ctx.net, personal)
        else:
            self.load_global(ctx, payload)

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, PERSONAL)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Rehearsal:
        refs = super().prepare(ctx, payload, state)  # ctx.net holds C_{g,i} of the last round
        if self.lam and len(refs.replayed.y):
            refs.teacher = refs.judge(refs.replayed.x)
        if self.init_from == "global":
            self.load_global(ctx, payload)  # C <- C_g
        return refs

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Rehearsal) -> float:
        redraw = refs.redraw
        if redraw is None:
            return run_phases(self, ctx, x, y, refs)

        def renewed(epoch: int) -> tuple[Tensor, Tensor]:
            if epoch:
                refs.replayed = redraw(epoch)
                refs.teacher = refs.judge(refs.replayed.x) if self.lam else None
            return refs.training_data()

        return run_phases(self, ctx, x, y, refs, renewed)

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Rehearsal) -> Tensor:
        first = len(refs.real[1])
        replayed = batch.index >= first
        if self.reading.loss_norm != "sum" and not bool(replayed.any()):
            return cross_entropy(out.logits, batch.y)
        rows, outputs = batch.index[replayed] - first, out.logits[replayed]
        if refs.replayed.soft is None:
            fit = cross_entropy(out.logits, batch.y, reduction="sum")
        else:
            fit = cross_entropy(out.logits[~replayed], batch.y[~replayed], reduction="sum")
            fit = fit + cross_entropy(outputs, refs.replayed.soft[rows], reduction="sum")
        held = torch.zeros_like(fit)
        if refs.teacher is not None:
            target = refs.teacher[rows]
            if self.reading.align == "probs":
                outputs, target = outputs.softmax(1), target.softmax(1)
            held = (outputs - target).square().mean(1).sum()
        if self.reading.loss_norm == "sum":
            return fit + self.lam * held
        over = len(batch.y) if self.reading.loss_norm == "joint" else len(rows)
        return fit / len(batch.y) + self.lam * held / over  # eq. 6

    def uplink(
        self, ctx: ClientContext, state: Bundle, refs: Rehearsal, num_examples: int
    ) -> Bundle:
        assert state.histogram is not None
        total = state.histogram.total
        if self.reading.label_dist == "freq":
            parts = PARTS * total.double() / total.sum().clamp_min(1)
            total = parts.round().to(torch.int32)
        new = {k: g for k, g in state.generators.items() if k in refs.trained}
        return Bundle(
            weights=weights_of(ctx.net),  # C_i^{t,*}
            generators=published(new) if self.aggregate_by == "learned" else {},
            histogram=Histogram(torch.zeros(0, dtype=torch.int32), total),  # S, not Y
            scalars={"num_examples": float(num_examples)},
        )
