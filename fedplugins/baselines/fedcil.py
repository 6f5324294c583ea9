"""FedCIL — Qi, Zhao, Li, Better Generative Replay for Continual Federated Learning, ICLR 2023.
https://arxiv.org/abs/2302.13001

    paper, released code           here
    classifier, discriminator      base/…, head/… (the run's net) and source/…
    generator                      generator/…, of z (B, ``latent``) whose first K say the class
    last generator                 refs.last: the client's own, at the end of its previous task
    global generator               refs.received
    model consolidation            ``finish``: on images of the clients' generators
    consistency enforcement        ``_consistency``

The task model is the ACGAN itself: [net] ``acgan`` is the paper's, and any net of images will do.

Readings. The released code multiplies all three consistency terms by 0 (``preset = "released"``);
the paper gives no weights for them. They refer to classes that somebody has trained on before, as
the received generator knows no others.
Classes of these streams recur: what is replayed is every class of the client's earlier tasks. The
coordinator reads a client's last generator from its own copy of what that client uploaded last on
its previous task. Deviations and more: docs/methods/fedcil.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedmodels.config.bounds import Count, NonNegative, PositiveCount, Share
from fedmodels.errors import PayloadError, TrainingFailed
from fedmodels.host.devices import device_of, to_device
from fedmodels.methods import register
from fedmodels.methods.fedavg import FedAvg
from fedmodels.nets.generative import acgan
from fedmodels.nets.generative.gan import Generator
from fedmodels.nets.split import SplitNet, load_weights, weights_of
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
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import TrainsOn
from fedmodels.tensors.roles import of_role, part_of, tensors_of, under, without
from fedmodels.tensors.uploads import Reduction, Uploads
from fedmodels.training.augmentation import augment
from fedmodels.training.contexts import ClientContext, Metrics, ServerContext, ServerState
from fedmodels.training.loop import batches, mean_loss, placed
from fedmodels.training.method import Payload, Reduced
from fedmodels.training.run import RunFacts
from fedplugins.baselines.acgan_replay import Acgan, ConditionalGenerator, GeneratorPool

ROLES = ("source", "generator")
"""What goes beside the run's net: the critic's other head, and the generator."""
NOW, LAST = "now", "last"
"""A client's generator after its last upload, and at the end of its previous task."""
LABELLED = "fc.weight"
"""The generator's layer that sees the label, (…, latent)."""
REPORTS = 10
"""How many times consolidation reports its progress."""


@dataclass
class FedCilReferences:
    """References of the loss in one interaction."""

    model: Acgan
    last: ConditionalGenerator | None
    """The client's generator at the end of its previous task."""
    received: ConditionalGenerator
    classes: Histogram
    """Of 0 and 1: classes of this task, and of the client's earlier ones."""
    known: Tensor  # (c,) labels the received generator is asked for; on the processor
    kept: Weights
    """``last/…`` as the private state has it."""
    draw: torch.Generator


@torch.no_grad()
def teacher_logits(teacher: SplitNet, x: Tensor) -> Tensor:
    """Return a teacher's logits (B, K) in evaluation mode; the teacher's own mode stays."""
    mode = teacher.training
    teacher.eval()
    logits: Tensor = teacher(x)
    teacher.train(mode)
    return logits


@register("fedcil")
class FedCIL(FedAvg):
    """An ACGAN on every client that replays its past, consolidated on the coordinator."""

    citation: ClassVar[str] = "Qi et al., ICLR 2023"
    takes_targets: ClassVar[bool] = False
    takes_frozen: ClassVar[bool] = False
    tells_classes: ClassVar[bool] = True
    reads_singly: ClassVar[str] = "images of each client's generator train the server's models"
    trains_on: ClassVar[TrainsOn] = "memory"
    reduction: ClassVar[Reduction] = "each"

    preset: Literal["paper", "released"] = "paper"
    """``released``: the consistency terms count nothing, as in the released code."""
    iterations: PositiveCount = 400
    """Local iterations of an interaction, one mini-batch each; local_epochs counts nothing here."""
    replay_batch: PositiveCount = 32
    """Replayed images of an iteration; real ones are [training] batch_size (FedCIL: 32)."""
    importance: Share = 0.5
    """Weight of the new task in the loss; replay has the rest to 1."""
    consistency: NonNegative = 1.0
    """Weight of each of the three consistency terms."""
    lr: NonNegative = 1e-4
    """Adam's learning rate (CIFAR: 2e-4)."""
    beta1: Share = 0.5
    """Adam's first decay."""
    beta2: Share = 0.99
    """Adam's second decay (CIFAR: 0.999)."""
    weight_decay: NonNegative = 1e-5
    """Adam's."""
    latent: PositiveCount = 110
    """Coordinates of z, K of them for the class."""
    generator_width: PositiveCount = 16
    """Channels of the generator's widest resolution (CIFAR: 64)."""
    md_iter: Count = 100
    """Iterations of consolidation; 0 leaves the mean as it is."""
    md_batch: PositiveCount = 32
    """Images of current classes, and as many of past ones, in one iteration."""
    device: Literal["cpu", "auto"] = "cpu"
    """Where consolidation runs: on the coordinator's cores, or on its GPU if it has one."""

    # --- both halves ---------------------------------------------------------------------------

    def _fresh(self, run: RunFacts) -> tuple[acgan.SourceHead, Generator]:
        """Build what the ACGAN has beside the run's net, as everybody starts with it."""
        problem = run.problem
        with seeded(derive_seed(run.experiment.seed, "acgan", 0, "init")):
            made = acgan.conditional_generator(
                problem.input_shape, problem.num_classes, self.latent, self.generator_width
            )
            return acgan.SourceHead(run.width), made

    def _maker(
        self,
        run: RunFacts,
        weights: Weights,
        limits: tuple[Tensor, Tensor] | None,
        device: torch.device,
    ) -> ConditionalGenerator:
        _, net = self._fresh(run)
        net.load_state_dict(dict(weights))
        return ConditionalGenerator(net.to(device), run.problem.num_classes, self.latent, limits)

    def _model(self, net: SplitNet, source: acgan.SourceHead, maker: ConditionalGenerator) -> Acgan:
        betas, decay = (self.beta1, self.beta2), self.weight_decay
        return Acgan(
            net, source, maker, self.importance, lr=self.lr, betas=betas, weight_decay=decay
        )

    def _extra_spec(self, run: RunFacts) -> BundleSpec:
        return BundleSpec.of(Bundle(weights=_extra(*self._fresh(run))))

    def reported(self, run: RunFacts) -> frozenset[str]:
        return frozenset({"generator_loss"})

    # --- server half ---------------------------------------------------------------------------

    def init_server(self, run: RunFacts) -> ServerState:
        run.make_net().check_batches(replay_batch=self.replay_batch, md_batch=self.md_batch)
        return replace(super().init_server(run), own=Bundle(weights=_extra(*self._fresh(run))))

    def upload_spec(self, run: RunFacts) -> BundleSpec:
        sets = masks_spec(run.problem.num_classes)
        return super().upload_spec(run) | self._extra_spec(run) | sets

    def payload_spec(self, run: RunFacts) -> tuple[BundleSpec, BundleSpec]:
        own = self._extra_spec(run) | masks_spec(run.problem.num_classes)
        return super().payload_spec(run)[0], BundleSpec(optional=own.required)

    def aggregate(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> ServerState:
        mean = super().aggregate(ctx, state, uploads)
        if mean is state:
            return state
        weights, clients = mean.common.weights, dict(state.clients)
        for client, upload in uploads.items():
            task = ctx.task_of(client)
            clients[client] = _update_kept(clients.get(client), upload, ctx.interaction, task)
        extra = {k: t for role in ROLES for k, t in of_role(weights, role).items()}
        own = Bundle(weights=extra, histogram=add_clients(ctx, state.own.histogram, uploads))
        return ServerState(Bundle(weights=without(weights, *ROLES)), own, clients)

    def finish(self, ctx: ServerContext, state: ServerState, uploads: Uploads) -> Reduced:
        if not self.md_iter:
            return state, {}
        device = device_of(self.device)
        cohort = {c: state.clients[c] for c in uploads if c in state.clients}
        pools = [self._pool(ctx, cohort, name, device) for name in (NOW, LAST)]
        pools = [pool for pool in pools if pool.holders]
        if not pools:
            return state, {}
        with seeded(ctx.seed("dropout")):  # layers with randomness of their own draw from here
            model, metrics = self._consolidated(ctx, state, pools, device)
        common = Bundle(weights=weights_of(model.net))
        own = Bundle(weights=_extra(model.source, model.maker.net), histogram=state.own.histogram)
        return ServerState(common, own, state.clients), metrics

    def broadcast(self, ctx: ServerContext, state: ServerState) -> Payload:
        return state.common, beside_training(ctx, state.own.weights, {}, state.own)

    def _pool(
        self, ctx: ServerContext, cohort: Mapping[int, Bundle], name: str, device: torch.device
    ) -> GeneratorPool:
        """Return the generators of one name that know a class, by client."""
        holders: dict[int, list[int]] = {}
        makers: dict[int, ConditionalGenerator] = {}
        for client, held in cohort.items():
            assert held.histogram is not None
            sets = held.histogram.round if name == NOW else held.histogram.total
            labels = sets.nonzero().flatten().tolist() if name in held.generators else []
            for label in labels:
                holders.setdefault(label, []).append(client)
            if labels:
                tensors = held.generators[name].tensors
                makers[client] = self._maker(ctx.run, tensors, ctx.limits, device).frozen()
        return GeneratorPool(makers, holders)

    def _consolidated(
        self,
        ctx: ServerContext,
        state: ServerState,
        pools: Sequence[GeneratorPool],
        device: torch.device,
    ) -> tuple[Acgan, Metrics]:
        """Train the mean on class-balanced images of clients' generators, new and last ones."""
        run, draw = ctx.run, ctx.generator("method")
        net, (source, _) = run.make_net().to(device), self._fresh(run)
        load_weights(net, state.common.weights)
        source.load_state_dict(dict(part_of(state.own.weights, "source")))
        maker = self._maker(run, part_of(state.own.weights, "generator"), ctx.limits, device)
        model = self._model(net, source.to(device), maker)
        every = -(-self.md_iter // REPORTS)
        for step in range(1, self.md_iter + 1):
            parts = [pool.batch(self.md_batch, draw) for pool in pools]
            labels = [y for _, y in parts]
            loss = model.train_critic(parts, labels, draw)
            model.train_generator(labels, draw)
            if step % every == 0:
                ctx.tell("consolidation", step, self.md_iter, float(loss))
        net.eval()
        with torch.no_grad():
            right = torch.cat([net(x).argmax(1) == y for x, y in parts])
        return model, {"consolidation_agreement": float(right.float().mean())}

    # --- client half ---------------------------------------------------------------------------

    def global_weights(self, common: Bundle) -> Weights:
        return without(common.weights, *ROLES)

    def prepare(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> FedCilReferences:
        generator = part_of(payload.weights, "generator")
        if payload.histogram is None or not generator:
            raise PayloadError("the server sent no generator to train")
        run, limits = ctx.run, ctx.stream.limits()
        masks, (_, y) = ClassMasks.of(payload.histogram), ctx.stream.train(ctx.task)
        classes, kept = self._past(ctx, state, mask_of(y, run.problem.num_classes))
        source, _ = self._fresh(run)
        source.load_state_dict(dict(part_of(payload.weights, "source")))
        maker = self._maker(run, generator, limits, ctx.device)
        model = self._model(ctx.net, source.to(ctx.device), maker)
        load_moments(model.adams, state.weights)
        last = part_of(kept, LAST)
        return FedCilReferences(
            model,
            self._maker(run, last, limits, ctx.device).frozen() if last else None,
            self._maker(run, generator, limits, ctx.device).frozen(),
            classes,
            masks.before.nonzero().flatten(),
            kept,
            ctx.generator("method"),
        )

    def _past(self, ctx: ClientContext, state: Bundle, now: Tensor) -> tuple[Histogram, Weights]:
        """Return the classes of this task and of earlier ones, and ``last/…``."""
        held, current = state.histogram, now.cpu().to(torch.int32)
        if held is None:
            return Histogram(current, torch.zeros_like(current)), {}
        if state.scalars["task"] == ctx.task:
            return Histogram(current, held.total), under(LAST, part_of(state.weights, LAST))
        past = ((held.round > 0) | (held.total > 0)).to(torch.int32)
        return Histogram(current, past), under(LAST, part_of(state.weights, NOW))

    def training_length(self, ctx: ClientContext) -> str:
        return f"{self.iterations} batches"

    def fit(self, ctx: ClientContext, x: Tensor, y: Tensor, refs: FedCilReferences) -> float:
        training, model, draw = ctx.run.experiment.training, refs.model, ctx.generator("augment")
        losses, of_generator = list[tuple[Tensor, int]](), torch.zeros(())
        now, past = (c.nonzero().flatten() for c in vars(refs.classes).values())
        per_pass, of_all = max(1, -(-len(y) // training.batch_size)), y.cpu()
        endless = _endless(ctx, len(y), y.device)
        for step, (drawn, index) in zip(range(self.iterations), endless, strict=False):
            parts, told = [(augment(x[index], training, draw), y[index])], [of_all[drawn]]
            fakes = [self._labels(now, len(index), refs, y.device)]
            if refs.last is not None and len(past):
                told.append(labels_from(past, self.replay_batch, refs.draw))
                labels = to_device(told[1], y.device)
                parts.append((refs.last(labels, refs.draw), labels))
                fakes.append(self._labels(past, self.replay_batch, refs, y.device))
            further = self._consistency(model.net, parts, told, refs)
            loss = model.train_critic(parts, fakes, refs.draw, further)
            losses.append((loss, len(index)))
            of_generator = model.train_generator(fakes, refs.draw)
            ctx.tick(step // per_pass, step % per_pass, loss)
        for parameter in ctx.net.parameters():
            parameter.grad = None
        if losses:
            ctx.metrics["generator_loss"] = float(of_generator)
        mean = mean_loss(losses[-per_pass:])
        if losses and not math.isfinite(mean):
            raise TrainingFailed(f"training diverged: its loss is {mean}")
        return mean

    def _labels(
        self, classes: Tensor, count: int, refs: FedCilReferences, device: torch.device
    ) -> Tensor:
        return to_device(labels_from(classes, count, refs.draw), device)

    def _consistency(
        self,
        net: SplitNet,
        parts: Sequence[tuple[Tensor, Tensor]],
        told: Sequence[Tensor],
        refs: FedCilReferences,
    ) -> Tensor | float:
        """Return the consistency loss on the classes that the received generator knows.

        ``told`` has the labels of the parts on the processor.
        """
        if self.preset == "released" or not self.consistency or not len(refs.known):
            return 0.0
        device = parts[0][0].device
        loss = torch.zeros((), device=device)
        for (x, y), labels in zip(parts, told, strict=True):  # real images, and own earlier ones
            rows = to_device(torch.isin(labels, refs.known).nonzero().flatten(), device)
            if len(rows) > 1:  # a batch of one cannot be normalised
                received = refs.received(y[rows], refs.draw)
                wanted = teacher_logits(net, received)
                loss = loss + distillation(wanted, net(x[rows]))
        labels = self._labels(refs.known, self.replay_batch, refs, device)
        loss = loss + cross_entropy(net(refs.received(labels, refs.draw)), labels)
        return self.consistency * loss

    def after_local(self, ctx: ClientContext, state: Bundle, refs: FedCilReferences) -> Bundle:
        trained = under(NOW, tensors_of(refs.model.maker.net))
        weights = {**trained, **refs.kept, **moments_of(refs.model.adams)}
        return Bundle(weights, histogram=refs.classes, scalars={"task": float(ctx.task)})

    def uplink(self, ctx: ClientContext, state: Bundle, refs: FedCilReferences) -> Bundle:
        weights = {**weights_of(ctx.net), **_extra(refs.model.source, refs.model.maker.net)}
        scalars = {"num_examples": float(ctx.num_examples)}
        return Bundle(weights, histogram=refs.classes, scalars=scalars)

    def grown(self, run: RunFacts, state: Bundle) -> Weights:
        """Return the moments with room for a class, and generators with a column for its label."""
        source, generator = self._fresh(run)
        critic = [*run.make_net().parameters(), *source.parameters()]
        optimised = {"critic": critic, "generator": [*generator.parameters()]}
        found = dict(under("weights", grown_moments(state.weights, optimised)))
        label, first = run.problem.num_classes - 1, generator.state_dict()[LABELLED]
        for key, tensor in state.by_key().items():
            if key.split("/")[1] in ("generator", "now", "last"):
                found[key] = tensor
            if found.get(key) is tensor and key.endswith(f"/{LABELLED}"):
                found[key] = tensor.clone()  # the coordinate of this label was noise up to now
                found[key][:, label] = first[:, label]
        return found


def _endless(ctx: ClientContext, n: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the index tensors of shuffled passes, one after another; none if there is no batch.

    Each on the processor, and on the device.
    """
    order, training = ctx.generator("order"), ctx.run.experiment.training
    while found := list(batches(n, ctx.net, training, order)):
        ctx.skipped = n - sum(map(len, found))
        yield from zip(found, placed(found, device), strict=True)
    ctx.skipped = n


def _update_kept(held: Bundle | None, upload: Bundle, interaction: int, task: int) -> Bundle:
    """Return what the server keeps of a client: its generators, and the classes they know."""
    tensors = {k: t.clone() for k, t in part_of(upload.weights, "generator").items()}
    generators = dict(held.generators) if held else {}
    if held is not None and held.scalars["task"] != task:
        generators[LAST] = generators[NOW]
    generators[NOW] = GeneratorState(interaction, tensors)
    assert upload.histogram is not None
    label_counts = Histogram(*((t > 0).to(torch.int32) for t in vars(upload.histogram).values()))
    return Bundle(generators=generators, histogram=label_counts, scalars={"task": float(task)})


def _extra(source: nn.Module, generator: nn.Module) -> Weights:
    return {**under("source", tensors_of(source)), **under("generator", tensors_of(generator))}
