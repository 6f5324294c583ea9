"""pFedGRP — Tan and Liu, Personalized Federated Learning on Data with Dynamic Heterogeneity under
Limited Storage, 2024, Algorithm 1. https://arxiv.org/abs/2410.01502v2

    paper           here                                paper       here
    C_g             state.common.weights                Y_i, S_i    histogram.round, .total
    C_{g,i}         clients[i].weights "personal/…"     A_{i,c}     generators["c"]
    C_i^{t,*}       uploads[i].weights                  TH_G        th_g
    W_i             row i of ``rows`` in ``finish``     lambda      lam

The replay is techniques/class_replay.py, the search for W techniques/aggregation_weights.py.
Deviations: docs/methods/pfedgrp.md. Ablations that change functions: variants/pfedgrp.py.
"""

from __future__ import annotations

from dataclasses import field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.bounds import NonNegative, PositiveCount
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.split import load_weights
from fedmodels.techniques import collaboration, server_replay
from fedmodels.techniques.aggregation_weights import LearnedWeights
from fedmodels.techniques.class_replay import (
    PersonalReplay,
    Rehearsal,
    nothing_met,
    reported_by_replay,
)
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import DeclaredCounts, TrainsOn
from fedmodels.tensors.roles import part_of, under, without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

PERSONAL = "personal"
"""Prefix of the weights of C_{g,i} in a payload and in the server's state."""


@register("pfedgrp")
class PFedGRP(FedAvg):
    """Replay of past classes on clients, aggregation weights learned on generated data."""

    citation: ClassVar[str] = "Tan and Liu, arXiv 2410.01502v2"
    views: ClassVar[tuple[str, ...]] = ("global", "after_local", "after_downlink")
    reduction: ClassVar[Reduction] = "each"
    trains_on: ClassVar[TrainsOn] = "replay"

    lam: NonNegative = 0.3
    """lambda: how much replayed outputs are held to the personal model's; 0 is ablation ASG."""
    server_volume: PositiveCount = 200
    """V: generated examples of the client's most frequent class on the server."""
    weighting: Literal["examples", "uniform"] = "uniform"
    """Aggregation weights of the mean model C_g."""
    replay: PersonalReplay = field(default_factory=PersonalReplay)
    """How generated examples are made, chosen and used."""
    learned: LearnedWeights = field(default_factory=LearnedWeights)
    """How eq. 8 is minimised."""

    def reported(self, run: RunFacts) -> frozenset[str]:
        return reported_by_replay(run)

    # --- client half ---------------------------------------------------------------------------

    def init_client(self, run: RunFacts, client: int) -> Bundle:
        return nothing_met(run)

    def load(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        personal = {} if ctx.view == "global" else part_of(payload.weights, PERSONAL)
        load_weights(ctx.net, personal or self.global_weights(payload))

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, PERSONAL)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Rehearsal:
        refs = self.replay.of(ctx.run).prepared(ctx, state)  # ctx.net is C_{g,i} of the last round
        if self.lam and len(refs.replayed.y):
            refs.teacher = refs.judge(refs.replayed.x)
        load_weights(ctx.net, self.global_weights(payload))  # C <- C_g
        return refs

    def training_data(self, ctx: ClientContext, refs: Rehearsal) -> tuple[Tensor, Tensor]:
        return refs.training_data()

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: Rehearsal) -> float:
        return EpochLoop(self, ctx, x, y, refs, refs.renewed(teaches=self.lam > 0)).run()

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Rehearsal) -> Tensor:
        loss = self.supervised(batch, out, refs)
        if refs.teacher is not None and len(refs.teacher):
            replayed, place = self.replayed(batch, refs)
            apart = (out.logits - refs.teacher[place]).square().mean(1)
            loss = loss + self.lam * (apart * replayed).mean()
        return loss  # eq. 6

    def replayed(self, batch: Batch, refs: Rehearsal) -> tuple[Tensor, Tensor]:
        """Tell which examples of a batch are replayed, (B,) bool; and which ones, (B,), else 0."""
        place = batch.index - len(refs.real[1])
        return place >= 0, place.clamp(min=0)

    def supervised(self, batch: Batch, out: Output, refs: Rehearsal) -> Tensor:
        """Return the first mean of eq. 6, over real and replayed examples."""
        return cross_entropy(out.logits, batch.y)

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Rehearsal) -> Bundle:
        return self.replay.of(ctx.run).kept(ctx, state, refs)  # eq. 7, where TH_G says so

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Rehearsal) -> Bundle:
        upload = super().uplink(ctx, state, refs)  # C_i^{t,*}
        told = server_replay.select_sent(state, refs.trained)  # A_{i,c}^{t,*} and S_i
        return replace(upload, generators=told.generators, histogram=told.histogram)

    # --- server half ---------------------------------------------------------------------------

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        told = server_replay.sent_spec(self.replay.of(run), run.problem.num_classes)
        return super().upload_spec(run) | told

    def check_upload(
        self, ctx: ServerContext, state: ServerState, upload: Bundle, announced: DeclaredCounts
    ) -> None:
        super().check_upload(ctx, state, upload, announced)
        server_replay.check_generators(upload.generators, announced, ctx.interaction)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads)  # C_g
        clients = dict(state.clients)
        for client, upload in uploads.items():
            before = clients.get(client, Bundle())
            personal = before.weights or under(PERSONAL, mean.common.weights)
            held = replace(before, weights=personal)
            clients[client] = server_replay.with_latest(held, upload)  # A_i and S_i
        return ServerState(mean.common, state.own, clients)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        if not uploads:
            return state, {}
        models, replay = [u.weights for u in uploads.values()], self.replay.of(ctx.run)
        volume, device = self.server_volume, self.learned.device
        searches, metrics = server_replay.searches(ctx, replay, state, uploads, volume, device)
        found = self.learned.found(ctx.run, models, searches)  # eq. 8 on each D_i
        rows, clients = torch.stack([each.w for each in found]), dict(state.clients)  # W
        for row, client in zip(rows, uploads, strict=True):
            weights = under(PERSONAL, collaboration.mix(models, row))  # C_{g,i} = sum_j w_ij C_j
            clients[client] = replace(clients[client], weights=weights)
        ctx.series["mixing_loss"] = [[f.uniform, f.loss] for f in found if f.loss == f.loss]
        metrics |= collaboration.graph_metrics(ctx, rows, uploads)
        return ServerState(state.common, state.own, clients), metrics

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        held = {c: state.clients[c].weights for c in ctx.cohort if c in state.clients}
        return state.common, {c: Bundle(weights) for c, weights in held.items()}  # else C_g is it

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        personal = Bundle(under(PERSONAL, run.forms))
        return super().payload_spec(run)[0], BundleSpec.of(personal)
