"""Random changes of training images that leave their class as it is, by the name in a config.

Images (B, C, H, W) are normalised already. Every draw comes from the generator given, so a client's
images change alike wherever it trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmodels.config.training import Training
from fedmodels.devices import to_device

BORDER = 4
"""Pixels around an image out of which ``crop-flip`` cuts."""
DEGREES, SHIFT, ZOOM = 15.0, 0.1, 0.1
"""Limits of ``affine-flip``: angle, part of a side, part of the size."""
CONTRAST, BRIGHTNESS = 0.2, 0.2
"""Limits of ``jitter-flip``: part of the contrast, and deviations of the data."""


def augment(x: Tensor, training: Training, generator: torch.Generator) -> Tensor:
    """Return images (B, C, H, W), each changed at random as ``[training] augment`` says."""
    return AUGMENTATIONS[training.augment](x, generator) if len(x) else x


def _keep(x: Tensor, _: torch.Generator) -> Tensor:
    return x


def _flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror every second image or so, left to right."""
    flip = to_device(torch.rand(len(x), generator=generator) < 0.5, x.device)
    return torch.where(flip[:, None, None, None], x.flip(3), x)


def _crop(x: Tensor, generator: torch.Generator) -> Tensor:
    """Cut each image out of a 4-pixel border around it, and mirror some."""
    count, height, width = len(x), x.shape[2], x.shape[3]
    shift = to_device(torch.randint(0, 2 * BORDER + 1, (2, count), generator=generator), x.device)
    flip = to_device(torch.rand(count, generator=generator) < 0.5, x.device)
    rows = shift[0, :, None] + torch.arange(height, device=x.device)  # (B, H)
    columns = shift[1, :, None] + torch.arange(width, device=x.device)  # (B, W)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    image = torch.arange(count, device=x.device)[:, None, None]
    padded = F.pad(x, (BORDER,) * 4).permute(0, 2, 3, 1)
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _rotate(x: Tensor, generator: torch.Generator) -> Tensor:
    """Turn each image by quarters of a circle, by halves if it is no square, and mirror some."""
    step = 1 if x.shape[2] == x.shape[3] else 2
    quarters = step * torch.randint(0, 4 // step, (len(x),), generator=generator)
    out = x.clone()
    for k in range(step, 4, step):
        rows = to_device((quarters == k).nonzero().flatten(), x.device)
        out[rows] = torch.rot90(x[rows], k, (2, 3))
    return _flip(out, generator)


def _translate(x: Tensor, generator: torch.Generator) -> Tensor:
    """Turn each image a little, shift and zoom it, and mirror some; the border goes on outside."""
    height, width = x.shape[2], x.shape[3]
    draws = to_device(2 * torch.rand(4, len(x), generator=generator) - 1, x.device).to(x.dtype)
    angle, zoom = math.radians(DEGREES) * draws[0], 1 + ZOOM * draws[1]
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    across, down = 2 * SHIFT * draws[2], 2 * SHIFT * draws[3]
    rows = (cos, -sin * height / width, across, sin * width / height, cos, down)
    matrix = torch.stack(rows, dim=1).reshape(-1, 2, 3)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return _flip(moved, generator)


def _jitter(x: Tensor, generator: torch.Generator) -> Tensor:
    """Change contrast and brightness of each image a little, and mirror some."""
    draws = to_device(2 * torch.rand(2, len(x), generator=generator) - 1, x.device).to(x.dtype)
    contrast, brightness = (draws[k][:, None, None, None] for k in (0, 1))
    middle = x.mean(dim=(1, 2, 3), keepdim=True)
    changed = middle + (1 + CONTRAST * contrast) * (x - middle) + BRIGHTNESS * brightness
    return _flip(changed, generator)


AUGMENTATIONS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": _keep,
    "flip": _flip,
    "crop-flip": _crop,
    "turn-flip": _rotate,
    "affine-flip": _translate,
    "jitter-flip": _jitter,
}
"""What changes images, by its name in a config."""
