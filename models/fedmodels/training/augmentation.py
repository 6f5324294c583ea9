"""Random changes of training images that leave their class as it is, by the name in a config.

Images (B, C, H, W) are normalised already. Every draw comes from the generator given, so a client's
images change alike wherever it trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmodels.config.training import Training
from fedmodels.host.devices import to_device

BORDER = 4
"""Pixels around an image out of which ``crop-flip`` cuts."""
DEGREES, SHIFT, ZOOM = 15.0, 0.1, 0.1
"""Limits of ``affine-flip``: angle, part of a side, part of the size."""
CONTRAST, BRIGHTNESS = 0.2, 0.2
"""Limits of ``jitter-flip``: part of the contrast, and deviations of the data."""


Draws = tuple[Tensor, ...]
"""What was drawn for B images, on the processor, (B, …) each."""


def augment(x: Tensor, training: Training, generator: torch.Generator) -> Tensor:
    """Return images (B, C, H, W), each changed at random as ``[training] augment`` says."""
    return augmented(x, [len(x)], training, generator) if len(x) else x


def augmented(
    x: Tensor, sizes: Sequence[int], training: Training, generator: torch.Generator
) -> Tensor:
    """Return the images (n, C, H, W) of batches of these sizes, drawn for one batch at a time."""
    draw, change = AUGMENTATIONS[training.augment]
    draws = [draw(size, x.shape[1:], generator) for size in sizes]
    return change(x, *(torch.cat([*part]) for part in zip(*draws, strict=True)))


def _flips(count: int, shape: torch.Size, generator: torch.Generator) -> Draws:
    return (torch.rand(count, generator=generator) < 0.5,)


def _flip(x: Tensor, flip: Tensor) -> Tensor:
    """Mirror every second image or so, left to right."""
    flip = to_device(flip, x.device)
    return torch.where(flip[:, None, None, None], x.flip(3), x)


def _crops(count: int, shape: torch.Size, generator: torch.Generator) -> Draws:
    shift = torch.randint(0, 2 * BORDER + 1, (2, count), generator=generator)
    return shift.T, *_flips(count, shape, generator)


def _crop(x: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
    """Cut each image out of a 4-pixel border around it, and mirror some."""
    count, height, width = len(x), x.shape[2], x.shape[3]
    shift, flip = to_device(shift, x.device), to_device(flip, x.device)
    rows = shift[:, 0, None] + torch.arange(height, device=x.device)  # (B, H)
    columns = shift[:, 1, None] + torch.arange(width, device=x.device)  # (B, W)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    image = torch.arange(count, device=x.device)[:, None, None]
    padded = F.pad(x, (BORDER,) * 4).permute(0, 2, 3, 1)
    return padded[image, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _turns(count: int, shape: torch.Size, generator: torch.Generator) -> Draws:
    step = _quarter_step(shape)
    quarters = step * torch.randint(0, 4 // step, (count,), generator=generator)
    return quarters, *_flips(count, shape, generator)


def _turn(x: Tensor, quarters: Tensor, flip: Tensor) -> Tensor:
    """Turn each image by quarters of a circle, by halves if it is no square, and mirror some."""
    out, step = x.clone(), _quarter_step(x.shape)
    for k in range(step, 4, step):
        rows = to_device((quarters == k).nonzero().flatten(), x.device)
        out[rows] = torch.rot90(x[rows], k, (2, 3))
    return _flip(out, flip)


def _quarter_step(shape: torch.Size) -> int:
    return 1 if shape[-2] == shape[-1] else 2


def _numbers(count: int, shape: torch.Size, generator: torch.Generator, *, each: int) -> Draws:
    """Draw numbers of -1 to 1 for ``each`` image, and which of them are mirrored."""
    numbers = 2 * torch.rand(each, count, generator=generator) - 1
    return numbers.T, *_flips(count, shape, generator)


def _translate(x: Tensor, numbers: Tensor, flip: Tensor) -> Tensor:
    """Turn each image a little, shift and zoom it, and mirror some; the border goes on outside."""
    height, width = x.shape[2], x.shape[3]
    draws = to_device(numbers.T.contiguous(), x.device).to(x.dtype)
    angle, zoom = math.radians(DEGREES) * draws[0], 1 + ZOOM * draws[1]
    cos, sin = zoom * angle.cos(), zoom * angle.sin()
    across, down = 2 * SHIFT * draws[2], 2 * SHIFT * draws[3]
    rows = (cos, -sin * height / width, across, sin * width / height, cos, down)
    matrix = torch.stack(rows, dim=1).reshape(-1, 2, 3)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    moved = F.grid_sample(x, grid, padding_mode="border", align_corners=False)
    return _flip(moved, flip)


def _jitter(x: Tensor, numbers: Tensor, flip: Tensor) -> Tensor:
    """Change contrast and brightness of each image a little, and mirror some."""
    draws = to_device(numbers.T.contiguous(), x.device).to(x.dtype)
    contrast, brightness = (draws[k][:, None, None, None] for k in (0, 1))
    middle = x.mean(dim=(1, 2, 3), keepdim=True)
    changed = middle + (1 + CONTRAST * contrast) * (x - middle) + BRIGHTNESS * brightness
    return _flip(changed, flip)


AUGMENTATIONS: dict[
    str, tuple[Callable[[int, torch.Size, torch.Generator], Draws], Callable[..., Tensor]]
] = {
    "none": (lambda count, shape, generator: (), lambda x: x),
    "flip": (_flips, _flip),
    "crop-flip": (_crops, _crop),
    "turn-flip": (_turns, _turn),
    "affine-flip": (partial(_numbers, each=4), _translate),
    "jitter-flip": (partial(_numbers, each=2), _jitter),
}
"""What draws how images are changed, and what changes them, by its name in a config."""
