"""Class replay: generated examples stand in for classes a client has met but holds no more.

Tan and Liu (pFedGRP), arXiv 2410.01502v2, section 4. Three methods share it.

    S (K,) examples of each class met so far     Y (K,) real ones of this round
    A_c    the generator of class c              TH_G   th_g

A generator's key is its class, or ``"all"`` for the one that does not know classes (ablation AS3).
A *judge* is a classifier that filters what was generated and says when a generator has drifted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import Count, NonNegative, PositiveCount
from fedmodels.console.printable import duration, text_of
from fedmodels.nets.kept_copies import kept_copy
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.algebra import replay_volumes
from fedmodels.numerics.randomness import derive_seed
from fedmodels.techniques.generator_training import Arch, Lesson
from fedmodels.techniques.generators import EVALUATIONS, Family, Painter, public, to_images
from fedmodels.tensors.bundle import Bundle, GeneratorState, Histogram
from fedmodels.times import LONG_S
from fedmodels.training.contexts import ClientContext, Metrics
from fedmodels.training.pictures import Gallery, Picture
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings

log = logging.getLogger(__name__)
Seeds = Callable[[str], int]
"""Returns the seed of a purpose such as ``draw/3``; each purpose has its own random numbers."""

SHOWN = 10
"""Images of each class in a picture."""
METRICS = (
    "replay_acceptance", "replay_examples", "replay_shortage",
    "generators_trained", "generator_trainings",
)  # fmt: skip
"""Metrics that every client reports; beside them ``generator_ratio_K`` for each generator that it
judged, and ``replay_acceptance_K`` for each class that it drew."""
ALL = "all"
"""Key of the generator that draws any class."""


class Judge:
    """A classifier that returns logits (n, K), in evaluation mode and without gradient."""

    def __init__(self, net: SplitNet, batch_size: int = 256) -> None:
        self.net, self.batch_size = net, batch_size
        self.device = next(net.parameters()).device

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits (n, K) of inputs (n, …), and leave the net in the mode it had."""
        mode = self.net.training
        self.net.eval()
        try:
            return torch.cat([self.net(part) for part in self.net.split(x, self.batch_size)])
        finally:
            self.net.train(mode)


@dataclass
class ReplayedExamples:
    """Generated examples, and the counts of drawing them."""

    x: Tensor  # (n, C, H, W), as the classifier sees them
    y: Tensor  # (n,) int64
    soft: Tensor | None = None
    """(n, K) probabilities that take the place of ``y``."""
    asked: int = 0
    drawn: int = 0
    """Images that were drawn."""
    accepted: int = 0
    """Images among them that the judge took for their class."""
    shortage: int = 0
    """How many more examples were asked for than accepted, class by class."""
    by_class: dict[int, float] = field(default_factory=dict)
    """Share of a class's images that the judge took for it. A class that the judge hardly knows is
    drawn more often, and so weighs more in ``accepted / drawn``."""

    def metrics(self) -> Metrics:
        """Return the counts as metrics; a ratio only where something was drawn."""
        ratio = {"replay_acceptance": self.accepted / self.drawn} if self.drawn else {}
        counts = {"replay_examples": float(len(self.y)), "replay_shortage": self.shortage}
        shares = {f"replay_acceptance_{label}": a for label, a in self.by_class.items()}
        return {**ratio, **counts, **shares}


@dataclass
class Rehearsal:
    """What one local training replays."""

    judge: Judge
    histogram: Histogram
    """Y and S."""
    real: tuple[Tensor, Tensor]
    replayed: ReplayedExamples
    redraw: Callable[[int], ReplayedExamples] | None = None
    """Draws the replayed examples of an epoch, if epochs have different ones."""
    teacher: Tensor | None = None
    """(n, K) logits that outputs on replayed examples are held to; None holds them to nothing."""
    trained: frozenset[str] = frozenset()
    """Keys of the generators that were trained after the local training."""

    def renewed(self, *, teaches: bool) -> Callable[[int], tuple[Tensor, Tensor]] | None:
        """Return what gives the examples of an epoch; None where all epochs have the same.

        Args:
            teaches: whether outputs on replayed examples are held to the judge's.
        """
        redraw = self.redraw
        if redraw is None:
            return None

        def examples(epoch: int) -> tuple[Tensor, Tensor]:
            if epoch:
                self.replayed = redraw(epoch)
                self.teacher = self.judge(self.replayed.x) if teaches else None
            return self.training_data()

        return examples

    def training_data(self) -> tuple[Tensor, Tensor]:
        """Return all inputs and labels, replayed ones last."""
        (x, y), extra = self.real, self.replayed
        return (torch.cat([x, extra.x]), torch.cat([y, extra.y])) if len(extra.y) else (x, y)


@dataclass(frozen=True, kw_only=True)
class Replay(SharedSettings):
    """How clients replay the classes they met."""

    cap: Literal["total", "generated"] = "total"
    """The largest real class bounds every class: its real and replayed examples together, or its
    replayed ones alone."""
    replay_filter: bool = True
    """Keep only images that the received model takes for their class (false: ablation AS1)."""
    replay_attempts: PositiveCount = 10
    """Limit of images drawn for each one that is wanted."""
    shortage: Literal["truncate", "fill_top"] = "truncate"
    """Go without what the filter rejects, or take the rejected images nearest to the class."""
    th_g: NonNegative = 0.25
    """TH_G: a generator is trained again when the net recognises a smaller share of its images."""
    th_g_of: Literal["all", "fresh"] = "all"
    """``all``: th_g is the threshold. ``fresh``: the threshold is th_g times the share that was
    recognised right after the generator's last training, so data calibrate it."""
    n_check: PositiveCount = 200
    """Images drawn to measure the share."""
    generator_update: Literal["drift", "always"] = "drift"
    """Train a generator that fell below the threshold, or whenever its class is met (pFedGRP's
    ablation AS2)."""
    generator_arch: Arch = "wgan"
    """WGAN-GP, its DCGAN form, or a diffusion model sampled by DPM-Solver."""
    generator_width: Count = 0
    """Channels; 0 stands for 16 for GANs (64 where images are in colour), 32 for diffusion."""
    generator_epochs: Count = 0
    """Epochs of one training; 0 stands for 200 for GANs (1000 where images are in colour), 6000
    for diffusion."""
    generator_batch: PositiveCount = 64
    """Batch size of training and of drawing."""
    generator_lr: NonNegative = 0.0
    """Adam's learning rate; 0 stands for 1e-3 for the WGAN-GP of grey images, 1e-4 for other GANs,
    2e-4 for diffusion."""
    generator_evaluations: PositiveCount = EVALUATIONS
    """Calls of the U-Net for each image that a diffusion model draws, by DPM-Solver of order 3."""
    generator_restart: bool = False
    """Train from scratch each time, and not from the weights of before."""
    generator_moments: bool = False
    """Keep Adam's moments in the private state, which triples it."""

    def check(self, run: RunFacts) -> None:
        """Check that inputs are images that the generators can make."""
        self.of(run)

    def of(self, run: RunFacts) -> ClassReplay:
        """Return the settings of the replay."""
        family = Family(
            input_shape=run.problem.input_shape,
            arch=self.generator_arch,
            width=self.generator_width,
            epochs=self.generator_epochs,
            batch_size=self.generator_batch,
            lr=self.generator_lr,
            moments=self.generator_moments,
            evaluations=self.generator_evaluations,
            mixed_precision=run.experiment.training.mixed_precision,
        )
        return ClassReplay(family=family, settings=self)


@dataclass(frozen=True, kw_only=True)
class PersonalReplay(Replay):
    """Replay on clients and on the server, as pFedGRP has it, with its ablation AS3."""

    images: Literal["round", "epoch"] = "round"
    """How long generated images serve: all epochs of a round, or one, after which others are drawn
    for local training and for eq. 8: docs/results/pfedgrp.md has both."""
    replay_labels: Literal["hard", "soft"] = "hard"
    """A replayed example's class, or the classifier's probabilities."""
    generator_decouple: bool = True
    """One generator for each class, or one for all, trained every round (ablation AS3)."""
    generator_width_mult: PositiveCount = 1
    """Factor of the generators' width; 2 in ablation AS3."""

    def of(self, run: RunFacts) -> ClassReplay:
        """Return the settings of the replay, for both halves."""
        plain = super().of(run)
        width = self.generator_width_mult * plain.family.usual()[0]
        return replace(
            plain,
            family=replace(plain.family, width=width),
            decoupled=self.generator_decouple,
            renewed=self.images == "epoch" or not self.generator_decouple,
            soft=self.replay_labels == "soft",
        )


@dataclass(frozen=True, kw_only=True)
class ClassReplay:
    """How a method replays: its generators, its filter, and when generators are trained."""

    family: Family
    settings: Replay = field(default_factory=Replay)
    decoupled: bool = True
    """One generator for each class, or one for all."""
    renewed: bool = False
    """Draw other images for each epoch of local training, and of pFedGRP's search for weights."""
    soft: bool = False
    """Label generated examples by the judge's probabilities."""

    # --- a client's round -------------------------------------------------------------------------

    def prepared(self, ctx: ClientContext, state: Bundle) -> Rehearsal:
        """Return what to rehearse; a copy of the net in ``ctx``, as it is now, is the judge."""
        x, y = ctx.stream.train(ctx.task)
        label_counts = met(state.histogram, y, ctx.run.problem.num_classes)
        volumes = replay_volumes(label_counts.total, label_counts.round, cap=self.settings.cap)
        judge = Judge(kept_copy(ctx.net, "judge"))

        def draw(epoch: int) -> ReplayedExamples:
            return self.replayed(state.generators, volumes, judge, client_seeds(ctx, epoch))

        first = draw(0)
        ctx.metrics.update(first.metrics())
        again = self.renewed and len(first.y) > 0
        return Rehearsal(judge, label_counts, (x, y), first, draw if again else None)

    def kept(self, ctx: ClientContext, state: Bundle, refs: Rehearsal) -> Bundle:
        """Return the private state after local training: all generators, and S."""
        trained, fresh = self.refreshed(ctx, state, refs.real, refs.replayed)
        refs.trained = frozenset(trained)
        generators = {**state.generators, **trained}
        return Bundle(generators=generators, histogram=refs.histogram, scalars=fresh)

    # --- drawing ----------------------------------------------------------------------------------

    def replayed(
        self,
        generators: Mapping[str, GeneratorState],
        volumes: Tensor,
        judge: Judge,
        seeds: Seeds,
    ) -> ReplayedExamples:
        """Return generated examples of every class, ``volumes`` (K,) of each, ordered by class.

        Classes without a generator are left out and count as lacking.
        """
        if not self.decoupled:
            return self._any_class(generators.get(ALL), int(volumes.sum()), judge, seeds)
        nothing = torch.zeros(0, *self.family.input_shape, device=judge.device)
        total = ReplayedExamples(nothing, torch.zeros(0, dtype=torch.int64, device=judge.device))
        parts, began = [total], time.perf_counter()
        for label in volumes.nonzero().flatten().tolist():
            count, held = int(volumes[label]), generators.get(str(label))
            total.asked += count
            if held is None:
                total.shortage += count
            else:
                painter = Painter(self.family, held.tensors, judge.device)
                part = self.draw(painter, label, count, judge, seeds(f"draw/{label}"))
                if len(parts) == 1:
                    self._tell_length((time.perf_counter() - began) / part.drawn, volumes)
                total.drawn += part.drawn
                total.accepted += part.accepted
                total.shortage += part.shortage
                total.by_class[label] = part.accepted / part.drawn
                parts.append(part)
        total.x, total.y = torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])
        if self.soft:
            total.soft = judge(total.x).softmax(1)
        return total

    def _tell_length(self, seconds: float, volumes: Tensor) -> None:
        """Say how long a diffusion model's images of so many seconds each take, if that is long."""
        if self.family.arch != "ddpm":
            return
        attempts = self.settings.replay_attempts if self.settings.replay_filter else 1
        most = attempts * int(volumes.sum())
        if most * seconds > LONG_S:
            log.warning(
                "note: up to %d images are drawn, of %s each: up to %s; fewer [method] "
                "replay_attempts or generator_evaluations take less",
                most, text_of(seconds, "seconds"), duration(most * seconds),
            )  # fmt: skip

    def draw(
        self, painter: Painter, label: int, count: int, judge: Judge, seed: int
    ) -> ReplayedExamples:
        """Draw ``count`` images of a class that the judge takes for this class.

        Image k of batch b depends on the generator, ``seed``, b and the batch size alone, up to
        rounding.
        """
        limit = self.settings.replay_attempts * count if self.settings.replay_filter else count
        kept: list[Tensor] = []
        rejected: list[Tensor] = []
        chances: list[Tensor] = []
        drawn = accepted = number = 0
        size = self.family.batch_size
        while accepted < count and drawn < limit:
            batches = math.ceil(min(count - accepted, limit - drawn) / size)  # needed at the least
            x = painter.inputs(size, seed + number, batches)[: limit - drawn]
            number += batches
            if self.settings.replay_filter:
                scores = judge(x)
                hit = scores.argmax(1) == label
                rejected.append(x[~hit])
                chances.append(scores.log_softmax(1)[~hit, label])
            else:
                hit = torch.ones(len(x), dtype=torch.bool, device=x.device)
            drawn += len(x)
            accepted += int(hit.sum())
            kept.append(x[hit])
        x = torch.cat(kept)[:count]
        if self.settings.shortage == "fill_top" and len(x) < count:
            best = torch.cat(chances).argsort(descending=True, stable=True)[: count - len(x)]
            x = torch.cat([x, torch.cat(rejected)[best]])
        y = torch.full((len(x),), label, dtype=torch.int64, device=x.device)
        return ReplayedExamples(x, y, None, count, drawn, accepted, max(count - accepted, 0))

    def _any_class(
        self, held: GeneratorState | None, count: int, judge: Judge, seeds: Seeds
    ) -> ReplayedExamples:
        """Draw ``count`` images of any classes; the judge labels them."""
        x = torch.zeros(0, *self.family.input_shape, device=judge.device)
        if held is not None and count:
            painter = Painter(self.family, held.tensors, judge.device)
            size, seed = self.family.batch_size, seeds("draw/all")
            x = painter.inputs(size, seed, math.ceil(count / size))[:count]
        scores = judge(x)
        soft = scores.softmax(1) if self.soft else None
        return ReplayedExamples(x, scores.argmax(1), soft, count, len(x), len(x), count - len(x))

    def pictures(self, ctx: ClientContext, state: Bundle) -> dict[str, Picture]:
        """Return images of every generator the client holds, unfiltered, as a picture."""
        seeds, drawn = client_seeds(ctx), dict[str, Tensor]()
        for key in sorted(state.generators, key=lambda k: (len(k), k)):
            painter = Painter(self.family, state.generators[key].tensors, ctx.device)
            drawn[key] = painter.images(SHOWN, seeds(f"picture/{key}")).cpu() / 2 + 0.5
        return {"replayed": Gallery(drawn)} if drawn else {}

    # --- training ---------------------------------------------------------------------------------

    def ratio(self, painter: Painter, label: int, judge: Judge, seed: int) -> float:
        """Return r_c, the share of a generator's images that the judge takes for their class."""
        size, count = self.family.batch_size, self.settings.n_check
        x = painter.inputs(size, seed, math.ceil(count / size))[:count]
        return int((judge(x).argmax(1) == label).sum()) / count

    def has_drifted(self, ratio: float, fresh: float = 1.0) -> bool:
        """Tell whether a generator with this share of recognised images is trained again.

        Args:
            ratio: the share now.
            fresh: the share right after its last training, if the threshold is relative.
        """
        relative = fresh if self.settings.th_g_of == "fresh" else 1.0
        return self.settings.generator_update == "always" or ratio < self.settings.th_g * relative

    def refreshed(
        self,
        ctx: ClientContext,
        state: Bundle,
        real: tuple[Tensor, Tensor],
        replayed: ReplayedExamples,
    ) -> tuple[dict[str, GeneratorState], dict[str, float]]:
        """Train generators on this round's real examples, where that is due.

        The net in ``ctx``, which has just trained, judges their images. Counts and ratios go into
        ``ctx.metrics``.

        Returns:
            The trained generators, with their next version; and for each generator the share that
            its threshold is relative to.
        """
        held, fresh = state.generators, dict(state.scalars)
        x, y = real
        seeds, judge = client_seeds(ctx), Judge(ctx.net)
        if self.decoupled:
            work = {str(c): x[y == c] for c in torch.unique(y).tolist()}
        else:
            work = {ALL: torch.cat([x, replayed.x])} if len(y) else {}
        due: dict[str, Tensor] = {}
        for key, images in work.items():
            if key in held and self.decoupled and self.settings.generator_update == "drift":
                painter = Painter(self.family, held[key].tensors, ctx.device)
                ratio = self.ratio(painter, int(key), judge, seeds(f"check/{key}"))
                ctx.metrics[f"generator_ratio_{key}"] = ratio
                if not self.has_drifted(ratio, fresh.get(f"fresh/{key}", 1.0)):
                    continue
            due[key] = images
        trained = self._trained(ctx, held, due, seeds)
        if self.settings.th_g_of == "fresh" and self.decoupled:
            for key, new in trained.items():
                painter = Painter(self.family, new.tensors, ctx.device)
                fresh[f"fresh/{key}"] = self.ratio(painter, int(key), judge, seeds(f"fresh/{key}"))
        versions = {k: g.version for k, g in {**held, **trained}.items()}
        ctx.metrics["generators_trained"] = float(len(trained))
        ctx.metrics["generator_trainings"] = float(sum(versions.values()))  # since the beginning
        return trained, fresh

    def _trained(
        self,
        ctx: ClientContext,
        held: Mapping[str, GeneratorState],
        due: Mapping[str, Tensor],
        seeds: Seeds,
    ) -> dict[str, GeneratorState]:
        """Train the generators that are due on their images; all clients start alike."""
        lessons = []
        for key, inputs in due.items():
            if key not in held or self.settings.generator_restart:
                first = derive_seed(ctx.run.experiment.seed, f"generator/{key}", 0, "init")
                tensors = self.family.fresh(first, ctx.stream.limits())
            else:
                tensors = held[key].tensors
            lessons.append(Lesson(tensors, to_images(tensors, inputs), seeds(f"train/{key}")))
        found = zip(due, self.family.trained(lessons, ctx.tick), strict=True)
        versions = {key: held[key].version + 1 if key in held else 1 for key in due}
        return {key: GeneratorState(versions[key], tensors) for key, tensors in found}


def client_seeds(ctx: ClientContext, epoch: int = 0) -> Seeds:
    """Return the seeds of a client in this interaction, by word."""
    seed, at = ctx.run.experiment.seed, ctx.interaction
    return lambda word: derive_seed(seed, f"{ctx.client}/{epoch}/{word}", at, "method")


def met(before: Histogram | None, y: Tensor, num_classes: int) -> Histogram:
    """Return Y of these labels (n,), and S: the total before and Y."""
    now = torch.bincount(y.cpu(), minlength=num_classes).to(torch.int32)
    return Histogram(now, now if before is None else before.total + now)


def publish(state: Mapping[str, GeneratorState]) -> dict[str, GeneratorState]:
    """Return the parts of generators that may leave a client: nets and affine maps, no critics."""
    return {key: GeneratorState(g.version, public(g.tensors)) for key, g in state.items()}


def reported_by_replay(run: RunFacts) -> frozenset[str]:
    """Return the names that clients with replay put into ``ctx.metrics``."""
    names = ("generator_ratio", "replay_acceptance")
    ratios = (f"{name}_{k}" for name in names for k in range(run.problem.num_classes))
    return frozenset((*METRICS, *ratios))


def nothing_met(run: RunFacts) -> Bundle:
    """Return the private state of a client that has met no class yet."""
    nobody = torch.zeros(run.problem.num_classes, dtype=torch.int32)
    return Bundle(histogram=Histogram(nobody, nobody.clone()))
