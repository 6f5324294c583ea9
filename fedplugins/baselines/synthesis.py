"""TARGET's synthesis: images that a frozen classifier takes for its classes, made without data.

Zhang et al., ICCV 2023, section 3.2. https://arxiv.org/abs/2303.06937

    L_BN   statistics_distance      L_KL   disagreement
    L_CE   cross_entropy_among, weighed by ``oh``

Images are made batch by batch: noise and a copy of the generator are optimised for the batch, and
the generator follows the copy's last gradient (first-order MAML).

Shapes: B batch, K classes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.config.bounds import Count, NonNegative, Positive, PositiveCount, Share
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.distances import divergence
from fedmodels.techniques.continual import cross_entropy_among
from fedmodels.techniques.datafree import (
    LayerMoments,
    MomentWatch,
    as_inputs,
    follow,
    quantise,
    shuffle,
)
from fedmodels.techniques.server_memory import check_loss
from fedmodels.training.augmentation import augment
from fedmodels.training.contexts import ServerContext
from fedmodels.training.optimizer import SGD, Adam, descend
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import SharedSettings
from fedplugins.baselines.upsampling import Upsampling

BETAS = (0.5, 0.999)
DECAY = 1e-4
"""Weight decay of the student, as released."""


def statistics_distance(
    layers: Sequence[LayerMoments], earlier: Sequence[LayerMoments], momentum: float
) -> Tensor:
    """Return L_BN: the summed distances of means and of variances from the remembered ones.

    Args:
        layers: of this batch.
        earlier: moving averages over earlier batches, which count ``momentum``; or none.
        momentum: of the moving averages.
    """
    total = torch.zeros(())
    for number, each in enumerate(layers):
        mean, var = each.mean, each.var
        if earlier:
            mean = momentum * earlier[number].mean + (1 - momentum) * mean
            var = momentum * earlier[number].var + (1 - momentum) * var
        apart = (mean - each.running_mean).norm() + (var - each.running_var).norm()
        total = total.to(apart.device) + apart
    return total


def follow_moments(
    layers: Sequence[LayerMoments], earlier: Sequence[LayerMoments], momentum: float
) -> list[LayerMoments]:
    """Return the moving averages of means and variances after one more batch."""
    now = [LayerMoments(e.mean.detach(), e.var.detach(), *e.running) for e in layers]
    return [
        LayerMoments(
            momentum * was.mean + (1 - momentum) * each.mean,
            momentum * was.var + (1 - momentum) * each.var,
            *each.running,
        )
        for was, each in zip(earlier or now, now, strict=True)
    ]


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    """Return -KL(teacher || student) over rows (B, K) where both say the same class, batch mean."""
    same = (teacher.argmax(1) == student.argmax(1)).float()
    return -(same * divergence(teacher, student)).mean()


def distillation(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """Return the cross-entropy of softened logits (B, K); no factor T²."""
    return cross_entropy(student / temperature, (teacher / temperature).softmax(1))


@dataclass(frozen=True, kw_only=True)
class Synthesised(SharedSettings):
    """How images are made."""

    preset: Literal["paper", "released"] = "paper"
    """``released``: a warm-up of 20 batches, of which there are 10, so that the student and L_KL
    never take part, as in the released settings for CIFAR-100."""
    batches: PositiveCount = 10
    """Batches that are synthesised after a task."""
    synthesis_batch: PositiveCount = 256
    """Images of each batch."""
    g_steps: PositiveCount = 10
    """Steps on the noise and the generator's copy for each."""
    lr_g: NonNegative = 2e-3
    """Learning rate of the copy, with Adam; that of the generator is ``g_steps`` times it."""
    lr_z: NonNegative = 0.01
    """Learning rate of the noise."""
    bn: NonNegative = 10.0
    """Weight of L_BN."""
    bn_momentum: Share = 0.9
    """Momentum of the moving averages that L_BN compares."""
    oh: NonNegative = 0.5
    """Weight of the cross-entropy with the wanted classes."""
    adv: NonNegative = 1.0
    """Weight of L_KL, which looks for images on which the student differs."""
    kd_steps: Count = 400
    """Steps of the student after each batch, on all images up to then."""
    student_temperature: Positive = 20.0
    """Of its distillation."""
    student_lr: NonNegative = 0.2
    """Learning rate of the student, with momentum 0.9 and weight decay 1e-4."""
    latent: PositiveCount = 256
    """Coordinates of the noise."""
    generator_width: PositiveCount = 64
    """Channels of the generator's last layers."""

    @property
    def warm_up(self) -> int:
        """Return how many batches are made before the student takes part."""
        return 0 if self.preset == "paper" else 20

    def fresh_generator(self, run: RunFacts) -> Upsampling:
        """Return an untrained generator of images in [0, 1]."""
        return Upsampling(run.problem.input_shape, self.latent, self.generator_width, "images")


class Synthesis:
    """The images of one task's end while they are made, and the nets that make them."""

    def __init__(
        self,
        settings: Synthesised,
        ctx: ServerContext,
        old: SplitNet,
        known: Tensor,
        watch: MomentWatch,
    ) -> None:
        self.settings, self.ctx, self.old, self.known, self.watch = settings, ctx, old, known, watch
        self.device, self.draw = known.device, ctx.generator()
        self.classes = known.nonzero().flatten()
        self.generator = settings.fresh_generator(ctx.run).to(self.device)
        meta_lr = settings.lr_g * settings.g_steps
        self.adam = Adam(self.generator.parameters(), lr=meta_lr, betas=BETAS)
        role = f"server/student/{ctx.interaction}"
        self.student = ctx.run.make_net("method", role).to(self.device)
        self.sgd = SGD(
            self.student.parameters(), lr=settings.student_lr, momentum=0.9, weight_decay=DECAY
        )
        self.pool: list[Tensor] = []
        self.wanted: list[Tensor] = []
        self.earlier: list[LayerMoments] = []
        self.losses: list[float] = []

    def add(self, number: int) -> float:
        """Synthesise one batch, then teach the student; return the batch's lowest loss.

        Raises:
            PayloadError: no step had a finite loss.
        """
        adversarial = number >= self.settings.warm_up
        images, loss = self._batch(adversarial)
        check_loss(self.ctx, "the synthesis", loss, "method.lr_g, lr_z and student_lr")
        self.pool.append(images)
        self.losses.append(loss)
        if adversarial:
            self._teach()
        return loss

    def _batch(self, adversarial: bool) -> tuple[Tensor, float]:
        """Return the images of lowest loss on the way of the noise and of a generator's copy."""
        settings, size = self.settings, self.settings.synthesis_batch
        z = torch.randn(size, settings.latent, generator=self.draw).to(self.device)
        z.requires_grad_(True)
        y = self.classes[torch.randint(len(self.classes), (size,), generator=self.draw)]
        fast = copy.deepcopy(self.generator).train()
        inner = Adam(fast.parameters(), lr=settings.lr_g, betas=BETAS)
        inner.add_param_group({"params": [z], "lr": settings.lr_z})
        best, lowest = torch.empty(0), float("inf")
        summed = [torch.zeros_like(p) for p in fast.parameters()]
        for _ in range(settings.g_steps):
            images = fast(z)
            loss = float(descend(self._loss(images, y, adversarial), inner))
            for total, parameter in zip(summed, fast.parameters(), strict=True):
                assert parameter.grad is not None, "the images depend on every weight"
                total += parameter.grad
            if loss < lowest:
                best, lowest = quantise(images), loss
        self.earlier = follow_moments(self.watch.layers(), self.earlier, settings.bn_momentum)
        follow(self.generator, fast, summed, self.adam)
        self.wanted.append(y)
        return best, lowest

    def _loss(self, images: Tensor, y: Tensor, adversarial: bool) -> Tensor:
        settings = self.settings
        x = as_inputs(images, self.ctx.limits)
        x = augment(x, self.ctx.run.experiment.training, self.draw)
        teacher = self.old(x)
        layers = self.watch.layers()
        loss = settings.oh * cross_entropy_among(teacher, y, self.classes)
        distance = statistics_distance(layers, self.earlier, settings.bn_momentum)
        loss = loss + settings.bn * distance.to(loss.device)
        if adversarial:
            student = self.student.eval()(x)[:, self.classes]
            loss = loss + settings.adv * disagreement(teacher[:, self.classes], student)
        return loss

    def _teach(self) -> None:
        """Distil the old model into the student on all images up to now."""
        settings, pool = self.settings, torch.cat(self.pool)
        order = shuffle(len(pool), settings.synthesis_batch, self.draw)
        self.student.requires_grad_(True).train()
        for _ in range(settings.kd_steps):
            x = as_inputs(pool[next(order)], self.ctx.limits)
            x = augment(x, self.ctx.run.experiment.training, self.draw)
            with torch.no_grad():
                teacher = self.old(x)[:, self.classes]
            student = self.student(x)[:, self.classes]
            softness = settings.student_temperature
            descend(softness**2 * distillation(teacher, student, softness), self.sgd)
        self.student.requires_grad_(False)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the share of images that the old model takes for the classes they were made as."""
        hits = [
            (self.old(as_inputs(x, self.ctx.limits))[:, self.classes].argmax(1))
            == torch.searchsorted(self.classes, y)
            for x, y in zip(self.pool, self.wanted, strict=True)
        ]
        return float(torch.cat(hits).float().mean()) if hits else 0.0
