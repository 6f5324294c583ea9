"""Generators behind one small interface: tensors in, trained tensors or images out.

A generator is a set of named tensors. What may leave a client is ``net/…`` and ``affine/…``; the
rest is what training goes on from::

    net/…            draws: a GAN's generator, or the moving average of a U-Net
    affine/scale     (C,) image in [-1, 1] -> classifier's input: ``image * scale + shift``
    affine/shift     (C,)
    critic/…         the GAN's critic
    online/…         the U-Net itself, which the average follows
    moments/…        Adam's, where they are kept

Images are (B, C, H, W) in [-1, 1]; inputs are the same, normalised as the classifier sees them.
What is drawn depends on the generator, the seed, the count and the number of batches only: noise
comes from the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.host.devices import to_device
from fedmodels.nets.generative import ddpm, dpm_solver, gan
from fedmodels.nets.generative.gan_groups import grouped, rows_of
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques.generator_training import (
    Arch,
    Course,
    Lesson,
    Tick,
    load,
    telling,
    tensors_of,
    train_gans,
    train_unet,
)
from fedmodels.tensors.bundle import Weights

USUAL: Mapping[tuple[Arch, Literal["grey", "colour"]], tuple[int, int, float]] = {
    ("wgan", "grey"): (16, 200, 1e-3),
    ("dcgan", "grey"): (16, 200, 1e-4),
    ("ddpm", "grey"): (32, 6000, 2e-4),
    ("wgan", "colour"): (64, 1000, 1e-4),
    ("dcgan", "colour"): (64, 1000, 1e-4),
    ("ddpm", "colour"): (32, 6000, 2e-4),
}
"""Width and epochs where none are given (pFedGRP, appendix C.3): for grey images as MNIST's, for
colour images as CIFAR's. Learning rates are ours: the paper gives none, and docs/results/pfedgrp.md
has what others come to."""

AT_ONCE = 256
"""Images that a GAN paints at a time, which bounds memory."""
EVALUATIONS = 20
"""Calls of a diffusion model for an image, unless it is said (pFedGRP, section 5.1)."""
PUBLIC = ("net/", "affine/")
"""Prefixes of the tensors that may leave a client."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """What all generators of a run are, and how they train."""

    input_shape: tuple[int, ...]
    arch: Arch = "wgan"
    width: int = 0
    """Channels of the widest resolution; 0 is the usual."""
    epochs: int = 0
    """Passes over the images of one training; 0 is the usual."""
    batch_size: int = 64
    lr: float = 0.0
    """Adam's; 0 is the usual."""
    moments: bool = False
    """Keep Adam's moments from one training to the next: three times the private state."""
    mixed_precision: bool = False
    """The U-Net computes in bfloat16; GANs train in float32."""
    evaluations: int = EVALUATIONS
    """Calls of the U-Net for an image."""

    def __post_init__(self) -> None:
        """Check that the generators fit the inputs.

        Raises:
            ConfigError: the inputs are no images, or larger than the GAN makes; or the evaluations
                are given, and a GAN draws in one.
        """
        if self.arch != "ddpm":
            gan.canvas_of(self.input_shape)
            if self.evaluations != EVALUATIONS:
                raise ConfigError(
                    f"[method] generator_evaluations is of diffusion models, and a {self.arch} "
                    "draws by one call: leave it out"
                )
        elif len(self.input_shape) != 3 or any(side % 4 for side in self.input_shape[1:]):
            raise ConfigError(
                f"the U-Net makes images with sides divisible by 4, not {list(self.input_shape)}"
            )

    def usual(self) -> tuple[int, int, float]:
        """Return width, epochs and learning rate, resolved."""
        width, epochs, lr = USUAL[self.arch, "grey" if self.input_shape[0] == 1 else "colour"]
        return self.width or width, self.epochs or epochs, self.lr or lr

    def net(self) -> nn.Module:
        """Build the net that draws."""
        width = self.usual()[0]
        if self.arch == "ddpm":
            return ddpm.UNet(self.input_shape[0], width, mixed_precision=self.mixed_precision)
        return gan.Generator(self.input_shape, width, self.arch)

    def fresh(self, seed: int, limits: tuple[Tensor, Tensor]) -> Weights:
        """Return an untrained generator.

        Args:
            seed: of its initial weights.
            limits: what the lowest and the highest value of each channel are as inputs, (C,) each.
        """
        low, high = (edge.detach().to("cpu", torch.float32) for edge in limits)
        tensors = {"affine/scale": (high - low) / 2, "affine/shift": (high + low) / 2}
        with seeded(seed):
            net = self.net()
            if self.arch == "ddpm":
                return {**tensors, **tensors_of("net/", net), **tensors_of("online/", net)}
            critic = gan.Critic(self.input_shape, self.usual()[0], self.arch)
            return {**tensors, **tensors_of("net/", net), **tensors_of("critic/", critic)}

    def public_shapes(self) -> Weights:
        """Return tensors shaped like those that may leave a client."""
        edge = torch.zeros(self.input_shape[0])
        return public(self.fresh(0, (edge, edge)))

    def trained(self, lessons: Sequence[Lesson], tick: Tick = lambda *_: None) -> list[Weights]:
        """Return the generators after one more training each.

        GANs train as one where that is faster. A generator comes to the same beside others as by
        itself, up to rounding.

        Args:
            lessons: what each one learns.
            tick: told after every step: epoch, step, loss.
        """
        width, epochs, lr = self.usual()
        course = Course(
            input_shape=self.input_shape,
            arch=self.arch,
            width=width,
            epochs=epochs,
            batch_size=self.batch_size,
            lr=lr,
            moments=self.moments,
        )
        if self.arch == "ddpm":
            found, tick = [], telling(course, lessons, tick)
            for lesson in lessons:
                with seeded(lesson.seed):  # dropout
                    online, average = (self.net().to(lesson.images.device) for _ in range(2))
                    found.append(train_unet(course, online, average, lesson, tick))
        else:
            found = train_gans(course, lessons, tick)
        return [
            {**{k: t for k, t in lesson.tensors.items() if k.startswith("affine/")}, **tensors}
            for lesson, tensors in zip(lessons, found, strict=True)
        ]


def public(tensors: Mapping[str, Tensor]) -> Weights:
    """Return the part of a generator that may leave a client."""
    return {key: tensor for key, tensor in tensors.items() if key.startswith(PUBLIC)}


def to_images(tensors: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return inputs (B, C, H, W) as images in [-1, 1]."""
    scale, shift = _affine(tensors, inputs.device)
    return ((inputs - shift) / scale).clamp(-1, 1)


def to_inputs(tensors: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Return images (B, C, H, W) as the classifier sees them."""
    scale, shift = _affine(tensors, images.device)
    return images * scale + shift


class Painter:
    """A generator ready to draw."""

    def __init__(
        self, family: Family, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> None:
        with seeded(0):
            net = family.net()
        if isinstance(net, gan.Generator):
            own = {key: tensors[f"net/{key}"].to(device) for key in net.state_dict()}
            net = grouped(net, 1, rows_of([own]))
        else:
            load(net, tensors, "net/")
            net.to(device)
            if not family.mixed_precision:  # slower with it
                net.to(memory_format=torch.channels_last)
        self.net, self.device = net.eval(), device
        self.family, self.tensors = family, tensors

    @torch.no_grad()
    def images(self, count: int, seed: int, batches: int = 1) -> Tensor:
        """Return batches of ``count`` images in [-1, 1].

        Those of batch k depend on the generator, the count and ``seed + k``, up to rounding on
        nothing else.
        """
        draws = [generator(seed + number) for number in range(batches)]
        if not isinstance(self.net, gan.Generator):
            shape = count, *self.family.input_shape
            calls = self.family.evaluations
            return torch.cat([dpm_solver.sample(self.net, shape, draw, calls) for draw in draws])
        z = torch.cat([torch.randn(count, gan.LATENT, generator=draw) for draw in draws])
        parts = torch.split(to_device(z, self.device)[None], AT_ONCE, dim=1)
        canvases = torch.cat([self.net.paint(part)[0] for part in parts]).permute(0, 3, 1, 2)
        return gan.crop(canvases, self.family.input_shape)

    def inputs(self, count: int, seed: int, batches: int = 1) -> Tensor:
        """Return batches of ``count`` images as the classifier sees them."""
        return to_inputs(self.tensors, self.images(count, seed, batches))


# --- tensors --------------------------------------------------------------------------------------


def _affine(tensors: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and shift, shaped to broadcast over (B, C, H, W)."""
    scale, shift = (tensors[f"affine/{name}"].to(device) for name in ("scale", "shift"))
    return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)
