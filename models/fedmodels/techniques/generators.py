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
What is drawn depends on the generator, the seed and the count only: noise comes from the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.generative import ddpm, dpm_solver, gan
from fedmodels.numerics.optimizers import Adam
from fedmodels.numerics.randomness import generator, seeded
from fedmodels.techniques.moments import load_moments, moments_of
from fedmodels.tensors.bundle import Weights

Arch = Literal["wgan", "dcgan", "ddpm"]
Tick = Callable[[int, int, Tensor], None]

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

CRITIC_STEPS = 5
"""Steps of the GAN's critic for each step of its generator."""

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
    """The U-Net computes in bfloat16; the GAN's second derivatives are taken in float32."""

    def __post_init__(self) -> None:
        """Check that the generators fit the inputs.

        Raises:
            ConfigError: the inputs are no images, or larger than the GAN makes.
        """
        if self.arch != "ddpm":
            gan.canvas_of(self.input_shape)
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
                return {**tensors, **_tensors("net/", net), **_tensors("online/", net)}
            critic = gan.Critic(self.input_shape, self.usual()[0], self.arch)
            return {**tensors, **_tensors("net/", net), **_tensors("critic/", critic)}

    def public_shapes(self) -> Weights:
        """Return tensors shaped like those that may leave a client."""
        edge = torch.zeros(self.input_shape[0])
        return public(self.fresh(0, (edge, edge)))

    def trained(
        self, tensors: Weights, inputs: Tensor, seed: int, tick: Tick | None = None
    ) -> Weights:
        """Return the generator after it trained on, from where it was, on inputs (n, C, H, W).

        Args:
            tensors: of :meth:`fresh`, or of an earlier training.
            inputs: as the classifier sees them.
            seed: of batches and noise.
            tick: told after every step: epoch, step, loss.
        """
        images = to_images(tensors, inputs)
        train = _train_unet if self.arch == "ddpm" else _train_gan
        with seeded(seed):  # the U-Net's dropout
            found = train(self, tensors, images, generator(seed), tick or (lambda *_: None))
        kept = {key: t for key, t in tensors.items() if key.startswith("affine/")}
        return {**kept, **found}


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
            self.net = family.net()
        _load(self.net, tensors, "net/")
        self.net.to(device).eval()
        if not (family.arch == "ddpm" and family.mixed_precision):  # slower with it
            self.net.to(memory_format=torch.channels_last)
        self.family, self.tensors = family, tensors

    @torch.no_grad()
    def images(self, count: int, seed: int) -> Tensor:
        """Return ``count`` images in [-1, 1]; the same for the same seed and count."""
        if isinstance(self.net, gan.Generator):
            return gan.sample(self.net, count, generator(seed))
        return dpm_solver.sample(self.net, (count, *self.family.input_shape), generator(seed))

    def inputs(self, count: int, seed: int) -> Tensor:
        """Return ``count`` images as the classifier sees them."""
        return to_inputs(self.tensors, self.images(count, seed))


# --- training -------------------------------------------------------------------------------------


def _train_gan(
    family: Family, tensors: Weights, images: Tensor, noise: torch.Generator, tick: Tick
) -> Weights:
    """Train a WGAN-GP (Gulrajani et al., algorithm 1): pFedGRP, eq. 7."""
    width, epochs, lr = family.usual()
    device = images.device
    maker = gan.Generator(family.input_shape, width, family.arch).to(device)
    critic = gan.Critic(family.input_shape, width, family.arch).to(device)
    for net in (maker, critic):
        net.to(memory_format=torch.channels_last)  # about an eighth faster on a CPU
    _load(maker, tensors, "net/")
    _load(critic, tensors, "critic/")
    adams = {
        role: Adam(net.parameters(), lr=lr, betas=(0.5, 0.9))
        for role, net in (("net", maker), ("critic", critic))
    }
    load_moments(adams, tensors)
    real, step = gan.pad(images, maker.canvas), 0

    def paint(count: int) -> Tensor:
        return maker.paint(torch.randn(count, gan.LATENT, generator=noise).to(device))

    for epoch in range(epochs):
        for index in _shuffle(len(real), family.batch_size, noise):
            batch = real[index.to(device)]
            with torch.no_grad():
                fake = paint(len(batch))
            mix = torch.rand(len(batch), generator=noise).to(device)
            loss = gan.critic_loss(critic, batch, fake, mix)
            _step(adams["critic"], loss)
            step += 1
            if step % CRITIC_STEPS == 0:
                _step(adams["net"], gan.generator_loss(critic, paint(family.batch_size)))
            tick(epoch, step, loss.detach())
    kept = moments_of(adams) if family.moments else {}
    return {**_tensors("net/", maker), **_tensors("critic/", critic), **kept}


def _train_unet(
    family: Family, tensors: Weights, images: Tensor, noise: torch.Generator, tick: Tick
) -> Weights:
    """Train a diffusion model (Ho et al., algorithm 1) and its moving average."""
    _, epochs, lr = family.usual()
    online, average = family.net().to(images.device), family.net().to(images.device)
    _load(online, tensors, "online/")
    _load(average, tensors, "net/")
    adams = {"online": Adam(online.parameters(), lr=lr)}
    load_moments(adams, tensors)
    step = 0
    for epoch in range(epochs):
        for index in _shuffle(len(images), family.batch_size, noise):
            batch = images[index.to(images.device)]
            times = torch.randint(ddpm.STEPS, (len(batch),), generator=noise).to(batch.device)
            target = torch.randn(batch.shape, generator=noise).to(batch.device)
            loss = ddpm.ddpm_loss(online, batch, times, target)
            _step(adams["online"], loss, clip=1.0)
            ddpm.follow(average, online)
            step += 1
            tick(epoch, step, loss.detach())
    kept = moments_of(adams) if family.moments else {}
    return {**_tensors("net/", average), **_tensors("online/", online), **kept}


def _shuffle(n: int, batch_size: int, order: torch.Generator) -> tuple[Tensor, ...]:
    """Return the index tensors of one epoch; the last batch is kept."""
    return torch.split(torch.randperm(n, generator=order), batch_size)


def _step(adam: torch.optim.Optimizer, loss: Tensor, clip: float | None = None) -> None:
    """Take one step down a loss."""
    adam.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        held = [p for group in adam.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(held, clip)
    adam.step()


# --- tensors --------------------------------------------------------------------------------------


def _affine(tensors: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and shift, shaped to broadcast over (B, C, H, W)."""
    scale, shift = (tensors[f"affine/{name}"].to(device) for name in ("scale", "shift"))
    return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


def _tensors(prefix: str, net: nn.Module) -> Weights:
    """Return copies of a net's tensors on the CPU under a prefix."""
    plain = torch.contiguous_format
    state = net.state_dict().items()
    return {prefix + k: t.detach().to("cpu", copy=True, memory_format=plain) for k, t in state}


def _load(net: nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Copy the tensors under a prefix into a net."""
    found = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    net.load_state_dict(found)
