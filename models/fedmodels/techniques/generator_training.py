"""Training of generators: GANs of several classes as one net of groups, a U-Net by itself.

A stack of GANs makes one step of all of them (:mod:`fedmodels.nets.generative.gan_groups`). Every
GAN keeps its own batches and random numbers, in the order in which it has them alone, so that a
stack comes to the same as its GANs alone, up to rounding.
docs/decisions/095-gans-without-autograd.md has the reasons.

Shapes: N GANs of a stack, B examples of the largest batch, canvas S.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fedmodels.console.printable import duration, text_of
from fedmodels.host.devices import to_device
from fedmodels.nets.generative import ddpm, gan, gan_groups
from fedmodels.nets.generative.gan_groups import Layer, grouped, rows_of
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques.moments import load_moments, moments_of
from fedmodels.tensors.bundle import Weights
from fedmodels.times import LONG_S
from fedmodels.training.optimizer import Adam

log = logging.getLogger(__name__)
Arch = Literal["wgan", "dcgan", "ddpm"]
Tick = Callable[[int, int, Tensor], None]
"""Told after every step: epoch, step, loss."""

TIMED = 5
"""Steps that such an estimate is made of."""
CRITIC_STEPS = 5
"""Steps of a GAN's critic for each step of its generator."""
PENALTY = 10.0
"""Weight of the gradient penalty."""
CELLS = {"cpu": 40_960}
"""Cells of the canvases in a step of a stack, N B S². Beyond that a CPU gains nothing."""
CELLS_BEYOND = 655_360
"""The same on other devices: ten GANs of batches of 64 and canvases of 32."""


@dataclass(frozen=True, kw_only=True)
class Course:
    """How generators train."""

    input_shape: tuple[int, ...]
    arch: Arch
    width: int
    epochs: int
    batch_size: int
    lr: float
    moments: bool
    """Keep Adam's moments."""


@dataclass(frozen=True)
class Lesson:
    """What one training of one generator starts from."""

    tensors: Weights
    """Of the generator, untrained or after an earlier training."""
    images: Tensor
    """(n, C, H, W), n at least 1."""
    seed: int
    """Of batches and noise."""


class _Learner:
    """A GAN while it trains: its tensors, its images on their canvas, and its random numbers."""

    def __init__(self, course: Course, lesson: Lesson) -> None:
        self.tensors, self.noise = lesson.tensors, generator(lesson.seed)
        self.images = gan.pad(lesson.images, gan.canvas_of(course.input_shape))
        self.epochs, self.batch_size = course.epochs, course.batch_size
        self.batches = batches(len(self.images), self.epochs, self.batch_size, self.noise)
        self.per_epoch = math.ceil(len(self.images) / self.batch_size)
        self.largest = min(len(self.images), self.batch_size)
        self.rest = len(self.images) - (self.per_epoch - 1) * self.batch_size

    def sizes(self, first: int, last: int) -> list[int]:
        """Return how many images the batches of these steps have."""
        steps = range(first, last + 1)
        return [self.largest if step % self.per_epoch else self.rest for step in steps]

    @property
    def steps(self) -> int:
        """How many steps it makes, in all."""
        return self.epochs * self.per_epoch

    @property
    def begun(self) -> tuple[int, ...]:
        """How many steps its kept moments have; equal in a stack, whose optimiser counts once."""
        keys = (f"moments/{role}/0/step" for role in ("net", "critic"))
        return tuple(int(self.tensors[key]) if key in self.tensors else 0 for key in keys)


def train_gans(course: Course, lessons: Sequence[Lesson], tick: Tick) -> list[Weights]:
    """Train WGAN-GPs (Gulrajani et al., algorithm 1): pFedGRP, eq. 7."""
    learners = [_Learner(course, lesson) for lesson in lessons]
    for members in _stacks(learners, gan.canvas_of(course.input_shape)):
        done = 0
        for end in sorted({learner.steps for learner in members}):
            left = [learner for learner in members if learner.steps >= end]
            stack = _Stack(course, left)
            while done < end:
                last = min(end, done + CRITIC_STEPS - done % CRITIC_STEPS)
                for step, loss in enumerate(stack.steps(done + 1, last), done + 1):
                    tick((step - 1) // left[0].per_epoch, step, loss)
                done = last
            for learner, tensors in zip(left, stack.tensors(), strict=True):
                learner.tensors = tensors
    return [_kept(course, learner.tensors) for learner in learners]


def _kept(course: Course, tensors: Weights) -> Weights:
    """Return what is kept after a training, with moments only where they are wanted."""
    return {k: t for k, t in tensors.items() if course.moments or not k.startswith("moments/")}


def _stacks(learners: Sequence[_Learner], canvas: int) -> Iterator[list[_Learner]]:
    """Yield GANs that train as one: bounded steps, no batch below a quarter of the largest."""
    members: list[_Learner] = []
    for learner in sorted(learners, key=lambda each: (each.begun, -each.largest)):
        first = members[0] if members else learner
        most = CELLS.get(learner.images.device.type, CELLS_BEYOND)
        fits = (len(members) + 1) * first.largest * canvas**2 <= most
        alike = learner.begun == first.begun and 4 * learner.largest >= first.largest
        if members and not (fits and alike):
            yield members
            members = []
        members.append(learner)
    yield members


class _Stack:
    """Several GANs whose steps are one."""

    def __init__(self, course: Course, learners: Sequence[_Learner]) -> None:
        self.learners, self.device = learners, learners[0].images.device
        self.batch_size = course.batch_size
        rows = rows_of([learner.tensors for learner in learners])
        with seeded(0):
            self.maker = gan.Generator(course.input_shape, course.width, course.arch)
            self.critic = gan.Critic(course.input_shape, course.width, course.arch)
        self.nets = {"net": self.maker, "critic": self.critic}
        for role, net in self.nets.items():
            own = {key: rows[f"{role}/{key}"].to(self.device) for key in net.state_dict()}
            grouped(net, len(learners), own)
        self.makers = cast(list[Layer], self.maker.steps)
        self.judges = cast(list[Layer], list(self.critic.layers))
        self.adams = {
            role: Adam(net.parameters(), lr=course.lr, betas=(0.5, 0.9), fused=True)
            for role, net in self.nets.items()
        }
        load_moments(self.adams, rows)
        images = torch.cat([learner.images for learner in learners])
        self.images = self._seen(images.permute(0, 2, 3, 1)[None])[0]
        sizes = torch.tensor([0, *(len(learner.images) for learner in learners)])
        self.first = sizes.cumsum(0)[:-1]  # of each GAN's images among all

    @torch.no_grad()
    def steps(self, first: int, last: int) -> Iterator[Tensor]:
        """Make steps of every critic, and of every generator where one is due after the last.

        The generators paint the images of all these steps at once.

        Args:
            first: number of the first step, from 1.
            last: of the last; none of those before is due for a generator.

        Yields:
            The mean of the critics' losses, after each step.
        """
        count = last + 1 - first
        drawn = self._drawn(first, last)
        z, mix, index, share = (to_device(each, self.device) for each in drawn)
        _, painted = self._paint(z.flatten(1, 2), share)
        fakes = self._seen(painted).view(*mix.shape, *self.images.shape[1:])
        for number in range(count):
            real, fake = self.images[index[:, number]], fakes[:, number]
            given = real, fake, mix[:, number], share[:, number]
            losses = gan_groups.learn(self.judges, *given, penalty=PENALTY)
            self.adams["critic"].step()
            if first + number == last and last % CRITIC_STEPS == 0:
                self._improve()
            yield losses.mean()

    def _drawn(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what chance brings to these critics' steps, (N, steps, B, …) each.

        Returns:
            z, u, the numbers of the real images among all, and the examples' shares in means.
        """
        sizes = torch.tensor([each.sizes(first, last) for each in self.learners])
        most = int(sizes.max())
        mix = torch.zeros(*sizes.shape, most)
        z, index = torch.zeros(*mix.shape, gan.LATENT), torch.zeros(mix.shape, dtype=torch.int64)
        for net, learner in enumerate(self.learners):
            for chosen, noise, between in zip(index[net], z[net], mix[net], strict=True):
                batch = next(learner.batches)
                chosen[: len(batch)] = batch
                noise[: len(batch)].normal_(generator=learner.noise)
                between[: len(batch)].uniform_(generator=learner.noise)
        index += self.first[:, None, None]
        share = (torch.arange(most) < sizes[..., None]) / sizes[..., None]
        return z, mix, index, share

    def _improve(self) -> None:
        """Make a step of every generator, down ``-E critic(fake)``."""
        sizes = [self.batch_size, gan.LATENT]
        z = torch.stack([torch.randn(sizes, generator=each.noise) for each in self.learners])
        share = torch.full(z.shape[:2], 1 / self.batch_size, device=self.device)
        taken, painted = self._paint(to_device(z, self.device), share[:, None])
        inputs, _ = gan_groups.score(self.judges, self._seen(painted))
        slope = gan_groups.image_slopes(self.judges, inputs, -share)
        gan_groups.improve(self.makers, taken, slope)
        self.adams["net"].step()

    def tensors(self) -> list[Weights]:
        """Return the tensors of each GAN, with its moments, on the CPU."""
        rows = dict(moments_of(self.adams))
        for role, net in self.nets.items():
            rows |= tensors_of(f"{role}/", net)
        return list(gan_groups.tensors_of(rows, len(self.learners)))

    def _seen(self, images: Tensor) -> Tensor:
        """Return images (N, B, S, S, C) as the critics' first layer takes them."""
        return self.judges[0].seen(images)

    def _paint(self, z: Tensor, share: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return what the generators' layers take of noise (N, B, 100), and the canvases.

        Args:
            z: noise.
            share: of the examples of each batch.
        """
        for layer in self.makers:
            if isinstance(layer, gan_groups.BatchNorm):
                layer.share = share
        return gan_groups.run(self.makers, z)


# --- one by one -----------------------------------------------------------------------------------


def train_unet(
    course: Course, online: nn.Module, average: nn.Module, lesson: Lesson, tick: Tick
) -> Weights:
    """Train a diffusion model (Ho et al., algorithm 1) and its moving average, in these nets."""
    tensors, images, noise = lesson.tensors, lesson.images, generator(lesson.seed)
    load(online, tensors, "online/")
    load(average, tensors, "net/")
    adams = {"online": Adam(online.parameters(), lr=course.lr)}
    load_moments(adams, tensors)
    per_epoch = math.ceil(len(images) / course.batch_size)
    for step, index in enumerate(batches(len(images), course.epochs, course.batch_size, noise), 1):
        batch = images[to_device(index, images.device)]
        when = torch.randint(ddpm.STEPS, (len(batch),), generator=noise)
        drawn = when, torch.randn(batch.shape, generator=noise)
        times, target = (to_device(each, batch.device) for each in drawn)
        loss = ddpm.ddpm_loss(online, batch, times, target)
        _step(adams["online"], loss, clip=1.0)
        ddpm.follow(average, online)
        tick((step - 1) // per_epoch, step, loss.detach())
    kept = moments_of(adams) if course.moments else {}
    return {**tensors_of("net/", average), **tensors_of("online/", online), **kept}


def telling(course: Course, lessons: Sequence[Lesson], tick: Tick) -> Tick:
    """Return a tick that says after a few steps how long all of them take, where that is long."""
    steps = sum(course.epochs * math.ceil(len(each.images) / course.batch_size) for each in lessons)
    began, done = time.perf_counter(), 0

    def told(epoch: int, step: int, loss: Tensor) -> None:
        nonlocal done
        done += 1
        each = (time.perf_counter() - began) / done
        if done == TIMED and each * steps > LONG_S:
            log.warning(
                "note: %d diffusion models train for about %s, %d steps of %s; fewer [method] "
                "generator_epochs or a smaller generator_width take less",
                len(lessons), duration(each * steps), steps, text_of(each, "seconds"),
            )  # fmt: skip
        tick(epoch, step, loss)

    return told


def batches(n: int, epochs: int, batch_size: int, order: torch.Generator) -> Iterator[Tensor]:
    """Yield the index tensors of all epochs; the last batch of each is kept."""
    for _ in range(epochs):
        permuted = torch.randperm(n, generator=order)
        for first in range(0, n, batch_size):
            yield permuted[first : first + batch_size]


def _step(adam: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> None:
    """Take one step down a loss."""
    adam.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        held = [p for group in adam.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(held, clip)
    adam.step()


def tensors_of(prefix: str, net: nn.Module) -> Weights:
    """Return copies of a net's tensors on the CPU under a prefix."""
    plain = torch.contiguous_format
    state = net.state_dict().items()
    return {prefix + k: t.detach().to("cpu", copy=True, memory_format=plain) for k, t in state}


def load(net: nn.Module, tensors: Weights, prefix: str) -> None:
    """Copy the tensors under a prefix into a net."""
    found = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    net.load_state_dict(found)
