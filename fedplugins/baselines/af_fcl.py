"""AF-FCL — Wuerkaixi et al., Accurate Forgetting for Heterogeneous Federated Continual Learning,
ICLR 2024. https://openreview.net/forum?id=ShQrnAsbPI

    paper          here                                paper       here
    h_a, h_b       net.base, net.head                  theta       theta
    g (the flow)   refs.flow, weights "flow/…"         k_flow      k_flow
    last task's    refs.last                           k_last      k_last
    p(u|D)         ``credibility``

For each mini-batch, in turn: the flow learns the embeddings and rehearses what its predecessor
draws; the head learns from embeddings the flow draws, as far as they are credible among this
client's own (wrong memories are forgotten); the whole net learns the batch and is held to its
predecessor.

Readings. The head is all that comes after h, so no layer is added between a ResNet-20's pool and
its head. A task of these streams may last one round and recur: the predecessor is everyone's model
when the client's new task begins, as released. Any label counts as known that some client
announced. Gaussians are fitted and evaluated in the flow's latent space; the released code
evaluates them elsewhere than it fits them (``preset``). More: docs/methods/af-fcl.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from fedmodels.config.bounds import Count, NonNegative, PositiveCount
from fedmodels.errors import PayloadError
from fedmodels.host.devices import to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.numerics.algebra import padded
from fedmodels.numerics.distances import distillation
from fedmodels.numerics.randomness import derive_seed, seeded
from fedmodels.techniques.continual import (
    ClassMasks,
    add_clients,
    beside_training,
    labels_from,
    mask_of,
    masks_spec,
)
from fedmodels.techniques.moments import grown_moments, load_moments, moments_of
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.roles import part_of, tensors_of, under, without
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.contexts import ClientContext, ServerContext, ServerState
from fedmodels.training.loop import EpochLoop
from fedmodels.training.method import Payload
from fedmodels.training.optimizer import Adam, descend, optimizer_of
from fedmodels.training.run import RunFacts
from fedmodels.training.stepped import Batch, Output
from fedmodels.training.steps import begin_phase
from fedplugins.baselines.flow import Flow, check_orders, is_order

TEMPERATURE = 2.0
MIN_VARIANCE = 1e-2
"""Of a class's Gaussian, in each coordinate; embeddings of few examples would have none."""
BEFORE = "before"
"""In the private state: which classes anybody had trained on when the client's task began."""


@dataclass
class Predecessor:
    """The predecessor's net and flow, frozen."""

    net: SplitNet
    flow: Flow
    classes: Tensor  # (c,) labels anybody had trained on by then; on the processor


@dataclass
class AfFclReferences:
    """References of the loss in one interaction."""

    flow: Flow
    seen: Tensor  # (c,) labels that any client announced up to now; on the processor
    y: Tensor  # (n,) labels of the training set; on the processor
    last: Predecessor | None
    kept: Weights
    """``last/…`` and ``before`` as the private state has them."""
    moments: Weights
    draw: torch.Generator
    adams: Mapping[str, torch.optim.Optimizer]
    """By role: ``net``, ``head``, ``flow``; there while it trains."""
    flow_steps: Count = 0
    figures: dict[str, Tensor] = field(default_factory=dict)
    """What the last step tells of itself, read when the training has ended."""


@register("af-fcl")
class AFFCL(FedAvg):
    """A flow of embeddings beside the classifier, and credible ones of old classes replayed."""

    citation: ClassVar[str] = "Wuerkaixi et al., ICLR 2024"
    takes_targets: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    tells_classes: ClassVar[bool] = True
    trains_on: ClassVar[TrainsOn] = "memory"

    preset: Literal["paper", "released"] = "paper"
    """Where Gaussians judge drawn embeddings: both in latent space, or fitted there and evaluated
    at the embeddings themselves, as in the released code."""
    k_flow: NonNegative = 0.5
    """Weight of learning from drawn embeddings (EMNIST: 0.5)."""
    k_last: NonNegative = 0.1
    """Weight of the flow's rehearsal (EMNIST: 0.4)."""
    theta: NonNegative = 0.1
    """Lower bound of the weight of drawn embeddings (EMNIST: 0)."""
    k_kd: NonNegative = 0.2
    """Weight of the distillation from the predecessor; 0 with k_flow = 0 is FedAvg."""
    kd_features: NonNegative = 0.5
    """Weight of the embeddings' distance in the distillation."""
    kd_logits: NonNegative = 0.1
    """Weight of the logits' divergence in the distillation."""
    flow_lr: NonNegative = 5e-3
    """The flow's learning rate, with Adam (EMNIST: 1e-4)."""
    flow_steps: Count = 0
    """The flow trains in this many first batches of an interaction; 0 is all (pFedGRP: 100)."""
    flow_hidden: PositiveCount = 512
    """Width of the flow's conditioners."""

    def reported(self, run: RunFacts) -> frozenset[str]:
        return frozenset({"flow_loss", "flow_density", "credibility"})

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        own = Bundle(weights=under("flow", tensors_of(self._flow(run))))
        return replace(super().init_server(run), own=own)

    def _flow(self, run: RunFacts) -> Flow:
        """Build everybody's first flow; the orders of its coordinates stay as they are."""
        with seeded(derive_seed(run.experiment.seed, "flow", 0, "init")):
            return Flow(run.width, run.problem.num_classes, self.flow_hidden)

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        both = {**run.forms, **_learned(under("flow", tensors_of(self._flow(run))))}
        return BundleSpec.of(Bundle(weights=both)) | scalar_spec("num_examples")

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        flow = BundleSpec.of(Bundle(weights=under("flow", tensors_of(self._flow(run)))))
        common, _ = super().payload_spec(run)
        return common, BundleSpec(optional=(flow | masks_spec(run.problem.num_classes)).required)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads)
        if mean is state:
            return state
        weights = mean.common.weights
        flow = {**state.own.weights, **under("flow", part_of(weights, "flow"))}
        own = Bundle(weights=flow, histogram=add_clients(ctx, state.own.histogram, uploads))
        return ServerState(Bundle(weights=without(weights, "flow")), own, state.clients)

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, beside_training(ctx, state.own.weights, {}, state.own)

    # --- client half ---------------------------------------------------------------------------

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, "flow")

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> AfFclReferences:
        if payload.histogram is None or not part_of(payload.weights, "flow"):
            raise PayloadError("the server sent no flow to train")
        check_orders(payload.weights)
        masks, y = ClassMasks.of(payload.histogram), ctx.stream.train(ctx.task)[1].cpu()
        seen = (masks.seen | mask_of(y, ctx.run.problem.num_classes)).nonzero().flatten()
        kept = self._kept(ctx, payload, state, masks.before)
        last = self._frozen(ctx, kept) if kept else None
        flow = self._filled(ctx, payload.weights)
        draw = ctx.generator("method")
        return AfFclReferences(flow, seen, y, last, kept, state.weights, draw, {})

    def _kept(self, ctx: ClientContext, payload: Bundle, state: Bundle, before: Tensor) -> Weights:
        """Return ``last/…`` and ``before``: the state's within a task, new ones when it is over.

        A client whose first training is on a later task takes the model that it received.
        """
        if state.scalars.get("task") == ctx.task:
            held = state.weights.items()
            return {k: t for k, t in held if k.startswith("last/") or k == BEFORE}
        if "task" not in state.scalars and ctx.task == 0:
            return {}
        return {**under("last", payload.weights), BEFORE: before.cpu()}

    def _filled(self, ctx: ClientContext, weights: Weights) -> Flow:
        flow = self._flow(ctx.run)
        flow.load_state_dict(dict(part_of(weights, "flow")))
        return flow.to(ctx.device)

    def _frozen(self, ctx: ClientContext, kept: Weights) -> Predecessor:
        found, net = part_of(kept, "last"), kept_copy(ctx.net, "last")
        load_weights(net, without(found, "flow"))
        flow = self._filled(ctx, found)
        for module in (net, flow):
            module.requires_grad_(False).eval()
        return Predecessor(net, flow, kept[BEFORE].nonzero().flatten())

    def taught(self, ctx: ClientContext, x: Tensor, refs: AfFclReferences) -> tuple[Tensor, ...]:
        if refs.last is None or not self.k_kd:
            return ()
        features = refs.last.net.features(x)
        return features, refs.last.net.head(features)

    @property
    def steps_per_batch(self) -> int:
        return 2 if self.k_flow else 1  # of the net, and of its head on drawn embeddings

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: AfFclReferences) -> float:
        decay, loop = ctx.run.experiment.training.weight_decay, EpochLoop(self, ctx, x, y, refs)
        (phase,) = self.phases(ctx)
        whole = begin_phase([ctx.net], phase, ctx)
        head = {"params": list(ctx.net.head.parameters()), "weight_decay": decay}
        refs.adams = {
            "net": whole,
            "head": optimizer_of([head], ctx),
            "flow": Adam(refs.flow.parameters(), self.flow_lr),
        }
        load_moments(_adams(refs), refs.moments)
        for batch, _ in loop.batches(phase):
            features = ctx.net.features(batch.x)
            h = features.detach()  # neither the flow nor the head's own step moves the base
            self._train_flow(ctx, h, batch.y, refs)
            self._train_head(ctx, h, batch, refs)
            out = Output(features, ctx.net.head(features))
            loop.end_step(batch, descend(self.loss(ctx, batch, out, refs), whole))
        return loop.end()

    def _train_flow(self, ctx: ClientContext, h: Tensor, y: Tensor, refs: AfFclReferences) -> None:
        """Step down -log p(h|y) + k_last (-log p(u|y)), u drawn from the predecessor."""
        if self.flow_steps and refs.flow_steps >= self.flow_steps:
            return
        loss = -refs.flow.log_density(h, y).mean()
        refs.figures["flow_loss"] = loss.detach().double() / refs.flow.width
        if self.k_last and refs.last is not None and len(refs.last.classes):
            labels = to_device(labels_from(refs.last.classes, len(y), refs.draw), y.device)
            u, _ = refs.last.flow.sample(labels, refs.draw)
            loss = loss - self.k_last * refs.flow.log_density(u, labels).mean()
        descend(loss, refs.adams["flow"])
        refs.flow_steps += 1

    def _train_head(
        self, ctx: ClientContext, h: Tensor, batch: Batch, refs: AfFclReferences
    ) -> None:
        """Step down the head's loss on embeddings drawn from the flow."""
        if not self.k_flow:
            return
        told = labels_from(refs.seen, len(batch.y), refs.draw)
        labels = to_device(told, h.device)
        u, noise = refs.flow.sample(labels, refs.draw)
        with torch.no_grad():
            z, log_det = refs.flow(h, batch.y)
            p = refs.flow.log_density_of(z, log_det).div(refs.flow.width).exp().mean()
            drawn = noise if self.preset == "paper" else u
            w = credibility(z, refs.y[batch.positions], drawn, told, p)
        refs.figures |= {"flow_density": p, "credibility": w.mean()}
        teacher = None if refs.last is None else refs.last.net.head(u)
        descend(self.drawn_loss(ctx.net.head(u), labels, w, p, teacher), refs.adams["head"])

    def drawn_loss(
        self, logits: Tensor, y: Tensor, w: Tensor, p: Tensor, teacher: Tensor | None
    ) -> Tensor:
        """Return the loss on drawn embeddings.

        Args:
            logits: (m, K).
            y: labels (m,).
            w: credibility (m,).
            p: mean density per coordinate of the real embeddings, ().
            teacher: the predecessor's logits (m, K).
        """
        fit = (w * cross_entropy(logits, y, reduction="none")).mean()
        loss = ((1 - self.theta) * p + self.theta) * fit
        if teacher is not None:
            loss = loss + self.k_kd * self.kd_logits * distillation(teacher, logits, TEMPERATURE)
        return self.k_flow * loss

    def loss(self, ctx: ClientContext, batch: Batch, out: Output, refs: AfFclReferences) -> Tensor:
        loss = super().loss(ctx, batch, out, refs)
        if refs.last is None or not self.k_kd:
            return loss
        features, logits = batch.taught
        held = self.kd_features * mse_loss(out.features, features)
        held = held + self.kd_logits * distillation(logits, out.logits, TEMPERATURE)
        return loss + self.k_kd * held

    def after_local(self, ctx: ClientContext, state: Bundle, refs: AfFclReferences) -> Bundle:
        ctx.metrics.update({name: float(value) for name, value in refs.figures.items()})
        weights = {**refs.kept, **moments_of(_adams(refs))}
        return Bundle(weights=weights, scalars={"task": float(ctx.task)})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: AfFclReferences) -> Bundle:
        flow = _learned(under("flow", tensors_of(refs.flow)))  # orders are the server's alone
        weights = {**weights_of(ctx.net), **flow}
        return Bundle(weights=weights, scalars={"num_examples": float(ctx.num_examples)})

    def grown(self, run: RunFacts, state: Bundle) -> Weights:
        """Return the moments of the optimisers, and what was met before, with room for a class."""
        net, flow, held = run.make_net(), self._flow(run), state.weights
        optimised = {"net": net, "head": net.head, "flow": flow}
        found = grown_moments(held, {k: [*part.parameters()] for k, part in optimised.items()})
        if "before" in held:
            found = {**found, "before": padded(held["before"], (run.problem.num_classes,))}
        return under("weights", found)


def _learned(weights: Weights) -> Weights:
    return {key: tensor for key, tensor in weights.items() if not is_order(key)}


def _adams(refs: AfFclReferences) -> dict[str, torch.optim.Adam]:
    """Return the optimisers whose state outlives the interaction; SGD's momentum does not."""
    return {k: o for k, o in refs.adams.items() if isinstance(o, torch.optim.Adam)}


def credibility(z: Tensor, y: Tensor, drawn: Tensor, labels: Tensor, otherwise: Tensor) -> Tensor:
    """Return w (m,), the density per coordinate of drawn points under their classes' Gaussians.

    Args:
        z: the batch's real points (B, d).
        y: their labels (B,), on the processor.
        drawn: points (m, d).
        labels: their labels (m,), on the processor.
        otherwise: w of classes of which the batch has fewer than two.
    """
    w = otherwise.expand(len(labels)).clone()
    for label in torch.unique(labels).tolist():
        of_batch, of_drawn = ((each == label).nonzero().flatten() for each in (y, labels))
        if len(of_batch) > 1:
            own, rows = z[to_device(of_batch, z.device)], to_device(of_drawn, z.device)
            variance = own.var(0, correction=0).clamp_min(MIN_VARIANCE)
            log_density = -0.5 * (
                (drawn[rows] - own.mean(0)).square() / variance + (2 * math.pi * variance).log()
            )
            w[rows] = log_density.exp().mean(1)
    return w
