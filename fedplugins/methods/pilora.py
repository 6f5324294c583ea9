"""PILoRA — Guo, Zhu, Liu, Zhang, Liu, PILoRA: Prototype Guided Incremental LoRA for Federated
Class-Incremental Learning, ECCV 2024. https://arxiv.org/abs/2401.02094. Formulas are those of the
authors' code, https://github.com/Ghy0501/PILoRA, where the paper's abstract does not say otherwise.

    paper, code          here                             paper, code    here
    A_i, B_i             rows of A, columns of B, _still  l_dce, l_pl    loss
    sum of B_i A_i       B A of one adapter               lambda         pl
    prototypes, centers  "head/weight"                    l_ort, gamma   ort, with l1
    feature average      upload.prototypes["class"]       compute_weight reweighted

The head's bias is -|p|^2 / 2, so that its logits choose the nearest prototype: z p - |p|^2 / 2 is
(|z|^2 - |z - p|^2) / 2. Deviations: docs/methods/pilora.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedmodels.config.bounds import NonNegative, Positive, PositiveCount
from fedmodels.errors import ConfigError
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.techniques.class_prototypes import PrototypeLimits, class_means, prototype_upload
from fedmodels.techniques.continual import ClassMasks, beside_training, mask_of, masks_spec
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import MAX_WEIGHT
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output

PROTOTYPES, BIAS = "head/weight", "head/bias"


@dataclass
class Work:
    """What a training refers to: what it may move, and what was there before it."""

    task: int
    moves: Weights
    """By key, which parts of the weights train: masks that broadcast to the weights."""
    before: Weights
    fresh: Prototypes = field(default_factory=lambda: Prototypes.of({}, 0))
    """Class means after local training."""


@register("pilora")
class Pilora(FedAvg):
    """Each task has a LoRA of its own, orthogonal to earlier ones; prototypes classify."""

    citation: ClassVar[str] = "Guo et al., ECCV 2024"
    takes_targets: ClassVar[bool] = False
    reads_singly: ClassVar[str] = "each class's prototype is mixed from the prototypes of others"
    reduction: ClassVar[Reduction] = "each"

    rank: PositiveCount = 4
    """Rank of each task's LoRA; adapters of the net have this rank times the number of tasks."""
    pl: NonNegative = 0.001
    """lambda, the weight of the distance to the own prototype."""
    ort: NonNegative = 0.5
    """gamma, the weight of what A has in common with A of earlier tasks."""
    l1: NonNegative = 0.01
    """Weight of the sum of the absolute numbers of A."""
    temperature: Positive = 0.2
    """By which closeness is divided before it weighs the clients' prototypes."""
    limits: PrototypeLimits = field(default_factory=PrototypeLimits)
    """What is let out of class means."""

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        self._check(run)
        first = super().init_server(run).common.weights
        return ServerState(Bundle({**first, BIAS: bias_of(first[PROTOTYPES])}))

    def _check(self, run: RunFacts) -> None:
        """Check that the number of tasks is known, and that adapters have room: ConfigError."""
        scenario, tasks = run.experiment.scenario, run.experiment.most_tasks
        known = scenario is not None and scenario.says_tasks
        if run.experiment.schedule.own_tasks or tasks is None or not known:
            raise ConfigError(
                "method 'pilora' has a LoRA for each task of all clients, and must know before "
                "round 1 how many: leave out open in [schedule], and let [scenario] say tasks"
            )
        head, form = run.forms.get(PROTOTYPES), (run.problem.num_classes, run.width)
        if head is None or head.shape != form or BIAS not in run.forms:
            raise ConfigError(
                "method 'pilora' learns a prototype of each class in a linear head with a bias, "
                "and the net has none that trains: take another [net]"
            )
        ranks = [run.forms[a].shape[0] for a in run.adapters]
        if not ranks or min(ranks) < self.rank * tasks:
            found = f"the smallest one's rank is {min(ranks)}" if ranks else "the net has none such"
            raise ConfigError(
                f"method 'pilora' needs adapters, A and B of which train, of rank {self.rank} for "
                f"each of {tasks} tasks, and {found}: set [net] adapters = {self.rank * tasks}, "
                "without adapter_a, of a net that takes adapters, such as mlp or timm"
            )

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, beside_training(ctx, {}, {}, state.own)

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        return super().payload_spec(run)[0], masks_spec(run.problem.num_classes)

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        return super().upload_spec(run) | prototype_upload(run)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = uploads.mean()  # of all A_i and B_i, by examples
        if mean is None:
            return state
        means = self.class_means_of(uploads)
        sent = torch.stack([uploads[client].weights[PROTOTYPES] for client in means])
        p = mean[PROTOTYPES].clone()
        for k in sorted({k for rows in means.values() for k in rows}):
            shown = torch.stack([rows[k][0] for rows in means.values() if k in rows])
            p[k] = self.reweighted(sent[:, k], shown)
        return replace(state, common=Bundle({**mean, PROTOTYPES: p}))

    def class_means_of(self, uploads: Uploads) -> dict[int, dict[int, tuple[Tensor, int]]]:
        """Return the class means of the clients that have trained, each with its count."""
        counting = {c: upload for c, upload in uploads.items() if self.count(upload)}
        return {c: upload.prototypes["class"].rows() for c, upload in counting.items()}

    def reweighted(self, sent: Tensor, shown: Tensor) -> Tensor:
        """Return a class's prototype, of the clients' (I, d) and of clients' class means (J, d)."""
        far = torch.cdist(sent, shown, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
        near = 1 / far.clamp_min(1e-12)
        low, high = near.min(), near.max()
        scaled = (near - low) / (high - low) if high > low else torch.zeros_like(near)
        return (scaled / self.temperature).softmax(0) @ sent

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        """Let nothing move but the task's A and B and the prototypes of classes with a mean."""
        if state is ctx.before:
            return state, {}
        now = torch.zeros(ctx.run.problem.num_classes, dtype=torch.bool)
        now[[k for rows in self.class_means_of(uploads).values() for k in rows]] = True
        moves = self.moves(ctx.run, ctx.task, now)
        kept = settled(state.common.weights, moves, ctx.before.common.weights)
        kept[BIAS] = bias_of(kept[PROTOTYPES])
        return replace(state, common=Bundle({**state.common.weights, **kept})), {}

    def moves(self, run: RunFacts, task: int, now: Tensor) -> Weights:
        """Return masks of what trains in a task: a block of each A and B, and some prototypes."""
        found = {PROTOTYPES: now[:, None]}
        for a, b in run.adapters.items():
            block = torch.arange(len(run.forms[a]), device=now.device) // self.rank == task
            found[a] = block.reshape(-1, *[1] * (run.forms[a].dim() - 1))
            found[b] = block.reshape(1, -1, *[1] * (run.forms[b].dim() - 2))
        return found

    # --- client half ---------------------------------------------------------------------------

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> Work:
        _, y = ctx.stream.train(ctx.task)
        now = mask_of(y, ctx.run.problem.num_classes)
        if payload.histogram is not None:
            now = now | ClassMasks.of(payload.histogram, ctx.device).now
        own, moves = ctx.net.tensors(), self.moves(ctx.run, ctx.task, now)
        return Work(ctx.task, moves, {key: own[key].detach().clone() for key in moves})

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: Work) -> Tensor:
        own = ctx.net.parameters_by_key()
        far = distances(out.features, own[PROTOTYPES])
        loss = ctx.criterion(-far, batch.y)  # l_dce
        loss = loss + self.pl * far.gather(1, batch.y[:, None]).mean()
        first, last = refs.task * self.rank, (refs.task + 1) * self.rank
        for key in ctx.run.adapters:
            a = own[key].flatten(1)
            loss = loss + self.l1 * a[first:last].abs().sum()
            loss = loss + self.ort * (a[:first].detach() @ a[first:last].T).abs().sum()
        return loss

    @torch.no_grad()
    def after_step(self, ctx: ClientContext, batch: Batch, refs: Work) -> None:
        own = ctx.net.tensors()
        for key, found in settled(own, refs.moves, refs.before).items():
            own[key].copy_(found)
        own[BIAS].copy_(bias_of(own[PROTOTYPES]))

    def after_local(self, ctx: ClientContext, state: Bundle, refs: Work) -> Bundle:
        refs.fresh = class_means(ctx, *self.training_data(ctx, refs))
        return Bundle()

    def uplink(self, ctx: ClientContext, state: Bundle, refs: Work) -> Bundle:
        upload = super().uplink(ctx, state, refs)
        return replace(upload, prototypes=self.limits.released(ctx, refs.fresh))


def settled(weights: Mapping[str, Tensor], moves: Weights, before: Weights) -> dict[str, Tensor]:
    """Return the weights that may move in part: the rest is what it was before."""
    return {key: torch.where(mask, weights[key], before[key]) for key, mask in moves.items()}


def bias_of(p: Tensor) -> Tensor:
    """Return the bias (K,) with which a linear head chooses the nearest prototype (K, d).

    It is no larger than a weight may be: else a forged prototype would stop all training. Of
    forms without values torch would import its compiler, to clamp them.
    """
    if p.is_meta:
        return p.new_empty(len(p))
    return (-p.square().sum(1) / 2).clamp_min(-MAX_WEIGHT)


def distances(z: Tensor, p: Tensor) -> Tensor:
    """Return the distance of embeddings (B, d) to prototypes (K, d) over the root of d, (B, K)."""
    squared = z.square().sum(1, keepdim=True) + p.square().sum(1) - 2 * z @ p.T
    return (squared / z.shape[1]).clamp_min(1e-12).sqrt()
