"""Generators of images per class: the WGAN-GP of pFedGRP, and the DCGAN form of it.

Gulrajani et al., Improved Training of Wasserstein GANs, NeurIPS 2017.
https://arxiv.org/abs/1704.00028 Its algorithm 1 is :mod:`fedmodels.techniques.generator_training`.

Images are (B, C, S, S) in [-1, 1], S in {8, 16, 32}; z is (B, 100). Images of other sizes are
padded to S with -1, the value of black, and generated ones are cropped.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError

LATENT = 100
"""Coordinates of z."""


def canvas_of(input_shape: tuple[int, ...]) -> int:
    """Return the S of 8, 16, 32 that holds images of this shape; ConfigError if none does."""
    if len(input_shape) == 3:
        for canvas in (8, 16, 32):
            if max(input_shape[1:]) <= canvas:
                return canvas
    raise ConfigError(f"the GAN makes images of at most 32x32, not {list(input_shape)}")


def _check(arch: str, canvas: int) -> None:
    """Check the two choices of a generator or critic."""
    if arch not in ("wgan", "dcgan"):
        raise ConfigError(f"GAN arch={arch!r} must be 'wgan' or 'dcgan'")
    if canvas not in (8, 16, 32):
        raise ConfigError(f"the GAN's canvas is 8, 16 or 32, not {canvas}")


class Generator(nn.Module):
    """z (B, 100) -> images (B, C, height, width) in [-1, 1]; sample it in evaluation mode.

    Args:
        input_shape: (C, height, width) of the images.
        dim: width; 16 for MNIST, 64 for CIFAR-10. A canvas of 32 starts with 8 dim channels.
        arch: ``"wgan"``, or ``"dcgan"``: convolutions only, without bias, starting at 4x4.
        latent: coordinates of z.
    """

    def __init__(
        self, input_shape: tuple[int, ...], dim: int = 16, arch: str = "wgan", latent: int = LATENT
    ) -> None:
        super().__init__()
        self.input_shape, self.canvas = tuple(input_shape), canvas_of(input_shape)
        _check(arch, self.canvas)
        channels = input_shape[0]
        self.fc: nn.Linear | None = None
        layers: list[nn.Module] = []
        if arch == "wgan":
            width = dim * self.canvas // 4
            self.fc = nn.Linear(latent, width * 4)
        else:
            width = dim * self.canvas // 8
            layers += [nn.ConvTranspose2d(latent, width, 4, 1, 0, bias=False)]
            layers += [nn.BatchNorm2d(width), nn.ReLU()]
        bias, side = arch == "wgan", 2 if arch == "wgan" else 1
        self.cells = nn.Unflatten(-1, (-1, side, side))
        while width > dim:
            layers += [nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=bias)]
            layers += [nn.BatchNorm2d(width // 2), nn.ReLU()]
            width //= 2
        layers.append(nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=bias))
        self.layers = nn.Sequential(*layers)
        self.first, self.last = nn.ReLU(), nn.Tanh()

    @property
    def steps(self) -> list[nn.Module]:
        """All layers, in their order."""
        vectors = [] if self.fc is None else [self.fc, self.first]
        return [*vectors, self.cells, *self.layers, self.last]

    def forward(self, z: Tensor) -> Tensor:
        """Return images, cropped to their size."""
        return crop(self.paint(z), self.input_shape)

    def paint(self, z: Tensor) -> Tensor:
        """Return the whole canvas (B, C, S, S), which is what the critic judges."""
        for layer in self.steps:
            z = layer(z)
        return z


class Critic(nn.Module):
    """Images (B, C, S, S) -> scores (B,), unbounded: no sigmoid, no batch normalisation.

    The gradient penalty is one per sample, which normalising over the batch would spoil.

    Args:
        input_shape: (C, height, width) of the images.
        dim: width, as of the generator.
        arch: as of the generator.
    """

    def __init__(self, input_shape: tuple[int, ...], dim: int = 16, arch: str = "wgan") -> None:
        super().__init__()
        canvas = canvas_of(input_shape)
        _check(arch, canvas)
        width, side, fan_in = dim, canvas // 2, input_shape[0]
        bias, last = arch == "wgan", 2 if arch == "wgan" else 4
        layers: list[nn.Module] = []
        while True:
            layers += [nn.Conv2d(fan_in, width, 4, 2, 1, bias=bias), nn.LeakyReLU(0.2)]
            if side == last:
                break
            fan_in, width, side = width, 2 * width, side // 2
        if arch == "wgan":
            layers += [nn.Flatten(), nn.Linear(width * 4, 1)]
        else:
            layers += [nn.Conv2d(width, 1, 4, 1, 0, bias=False), nn.Flatten()]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """Return how real each image looks (B,)."""
        scores: Tensor = self.layers(images)
        return scores.squeeze(-1)


def pad(images: Tensor, canvas: int, value: float = -1.0) -> Tensor:
    """Return images (B, C, H, W) in the middle of a canvas (B, C, S, S) of ``value``."""
    rows, columns = canvas - images.shape[-2], canvas - images.shape[-1]
    around = (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2)
    return F.pad(images, around, value=value)


def crop(images: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """Return the middle (B, C, height, width) of a canvas: the inverse of :func:`pad`."""
    height, width = input_shape[1:]
    top, left = (images.shape[-2] - height) // 2, (images.shape[-1] - width) // 2
    return images[..., top : top + height, left : left + width]
