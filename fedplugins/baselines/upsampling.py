"""The generator of data-free training: from noise to images by two upsamplings.

Chen et al., Data-Free Learning of Student Networks, ICCV 2019. https://arxiv.org/abs/1904.01186
MFCL and TARGET train one on their server.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.generative.gan import crop

Ending = Literal["inputs", "images"]


class Upsampling(nn.Module):
    """z (B, latent) -> (B, C, height, width), by convolutions on quarter, half and full size.

    Args:
        input_shape: (C, height, width).
        latent: coordinates of z.
        width: channels at full size; smaller sizes have twice as many.
        ending: ``"inputs"`` as a classifier sees them, normalised by a last layer that has
            statistics but no weights; or ``"images"`` in [0, 1].

    Raises:
        ConfigError: the shape is not an image's.
    """

    def __init__(
        self, input_shape: tuple[int, ...], latent: int, width: int = 64, ending: Ending = "inputs"
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise ConfigError(
                "a server that trains a generator makes images (channels, height, width), "
                f"not inputs of shape {list(input_shape)}"
            )
        channels, height, breadth = input_shape
        self.input_shape, self.latent = input_shape, latent
        self.cells = (2 * width, -(-height // 4), -(-breadth // 4))
        self.fc = nn.Linear(latent, 2 * width * self.cells[1] * self.cells[2])
        last = [nn.Tanh(), nn.BatchNorm2d(channels, affine=False)]
        self.layers = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            *(last if ending == "inputs" else [nn.Sigmoid()]),
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return what noise (B, latent) becomes, cropped to its size."""
        cells = self.fc(z).view(-1, *self.cells).to(memory_format=torch.channels_last)
        return crop(self.layers(cells), self.input_shape)
