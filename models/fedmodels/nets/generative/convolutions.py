"""Convolutions of several nets at once: of 4x4 cells, stride 2 and padding 1, and their transposes.

Each form takes images (N, B, 2h, 2w, c) to images (N, B, h, w, o), and back.

Shapes: N nets, B examples of each, weights (N, o, 4, 4, c).
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

TAPS = 16
"""Weights of a kernel for each channel: 4x4."""
SIGHTS = 4
"""Small cells that see a large one, at the most."""
DENSE = 65_536
"""Numbers of the largest matrix that stands for a convolution; torch's are faster beyond: each cell
would give to many others, most of them out of its reach."""


class Convolution(Protocol):
    """A convolution with given weights, which may change, for images of one size."""

    def begin(self) -> None:
        """Take the weights as they are now."""

    def seen(self, x: Tensor) -> Tensor:
        """Return images (N, B, 2h, 2w, c) in the form that the other functions take."""

    def down(self, seen: Tensor) -> Tensor:
        """Return the convolution (N, B, h, w, o) of images."""

    def up(self, y: Tensor) -> Tensor:
        """Return the transposed convolution (N, B, 2h, 2w, c) of images (N, B, h, w, o)."""

    def slope(self, seen: Tensor, y: Tensor) -> Tensor:
        """Return the gradient (N, o, 4, 4, c) of ``sum(y * down(seen))`` for the weights."""


def convolution(weight: Tensor, height: int, width: int) -> Convolution:
    """Return a convolution that takes images to images of h times w cells, in the fastest form."""
    numbers = weight[0].numel() // TAPS * 4 * (height * width) ** 2
    kind = _Sliding if numbers > DENSE else _Patches if weight.shape[-1] == 1 else _Dense
    return kind(weight, height, width)


class _Patches:
    """A product of weights and of what each cell sees: for small images of one channel."""

    def __init__(self, weight: Tensor, height: int, width: int) -> None:
        self.weight, self.small = weight.flatten(2), (height, width)
        self.cells, self.places = _seen_cells(height, width, weight.device)

    def begin(self) -> None:
        pass

    def seen(self, x: Tensor) -> Tensor:
        """Return (N, B, h, w, 16)."""
        cells = F.pad(x.flatten(0, 1).flatten(1), (1, 0))
        return cells.index_select(1, self.cells).view(*x.shape[:2], *self.small, TAPS)

    def down(self, seen: Tensor) -> Tensor:
        return torch.bmm(seen.flatten(1, 3), self.weight.mT).view(*seen.shape[:-1], -1)

    def up(self, y: Tensor) -> Tensor:
        height, width = self.small
        parts = torch.bmm(y.flatten(1, 3), self.weight).view(-1, TAPS * height * width)
        parts = F.pad(parts, (1, 0)).index_select(1, self.places)
        x = parts.view(len(parts), SIGHTS, -1).sum(1)
        return x.view(*y.shape[:2], 2 * height, 2 * width, 1)

    def slope(self, seen: Tensor, y: Tensor) -> Tensor:
        found = torch.bmm(y.flatten(1, 3).mT, seen.flatten(1, 3))
        return found.view(*found.shape[:2], 4, 4, 1)


class _Dense:
    """A product with the matrix of what each cell gives to each: for small images.

    Down and for weights it is one for each row of small cells, which see few of the large rows.
    """

    def __init__(self, weight: Tensor, height: int, width: int) -> None:
        nets, out, *_, into = weight.shape
        self.weight, self.large = weight, (2 * height, 2 * width, into)
        self.rows, self.columns = _sights(height), _sights(width)
        numbers = weight.new_zeros(nets, height, width, out, *self.large)
        self.matrix = numbers.flatten(4).flatten(1, 3)
        self.parts = [numbers[:, row, :, :, seen] for row, (seen, _) in enumerate(self.rows)]
        self.copies = [
            (part[:, column, :, :, cells], weight[:, :, taps, kernel])
            for part, (_, taps) in zip(self.parts, self.rows, strict=True)
            for column, (cells, kernel) in enumerate(self.columns)
        ]
        self.matrices = [part.flatten(3).flatten(1, 2).mT for part in self.parts]

    def begin(self) -> None:
        for numbers, weights in self.copies:
            numbers.copy_(weights)

    def seen(self, x: Tensor) -> Tensor:
        return x

    def down(self, seen: Tensor) -> Tensor:
        y = [
            torch.bmm(seen[:, :, rows].flatten(2), matrix)
            for matrix, (rows, _) in zip(self.matrices, self.rows, strict=True)
        ]
        return torch.stack(y, 2).view(*seen.shape[:2], len(y), len(self.columns), -1)

    def up(self, y: Tensor) -> Tensor:
        return torch.bmm(y.flatten(2), self.matrix).view(*y.shape[:2], *self.large)

    def slope(self, seen: Tensor, y: Tensor) -> Tensor:
        found = torch.zeros_like(self.weight)
        for row, (part, (rows, taps)) in enumerate(zip(self.parts, self.rows, strict=True)):
            matrix = torch.bmm(y[:, :, row].flatten(2).mT, seen[:, :, rows].flatten(2))
            for column, (cells, kernel) in enumerate(self.columns):
                found[:, :, taps, kernel] += matrix.view(part.shape)[:, column, :, :, cells]
        return found


class _Sliding:
    """torch's convolutions: for large images."""

    def __init__(self, weight: Tensor, height: int, width: int) -> None:
        self.nets, self.shape = len(weight), weight.shape
        self.kernels = weight.flatten(0, 1).permute(0, 3, 1, 2)

    def begin(self) -> None:
        pass

    def seen(self, x: Tensor) -> Tensor:
        return x

    def down(self, seen: Tensor) -> Tensor:
        flat = _side_by_side(seen)
        return _apart(F.conv2d(flat, self.kernels, None, 2, 1, 1, self.nets), self.nets)

    def up(self, y: Tensor) -> Tensor:
        flat = _side_by_side(y)
        return _apart(F.conv_transpose2d(flat, self.kernels, None, 2, 1, 0, self.nets), self.nets)

    def slope(self, seen: Tensor, y: Tensor) -> Tensor:
        of_kernels: Tensor = torch.ops.aten.convolution_backward(
            _side_by_side(y), _side_by_side(seen), self.kernels, [0],
            [2, 2], [1, 1], [1, 1], False, [0, 0], self.nets, [False, True, False],
        )[1]  # fmt: skip
        return of_kernels.permute(0, 2, 3, 1).reshape(self.shape)


def _side_by_side(x: Tensor) -> Tensor:
    """Return images (B, N*c, H, W), channels last, of images (N, B, H, W, c)."""
    flat = x.permute(1, 0, 4, 2, 3).flatten(1, 2)
    return flat.contiguous(memory_format=torch.channels_last)


def _apart(x: Tensor, nets: int) -> Tensor:
    """Return images (N, B, H, W, c): the inverse of :func:`_side_by_side`."""
    return x.view(len(x), nets, -1, *x.shape[2:]).permute(1, 0, 3, 4, 2)


# --- who sees what --------------------------------------------------------------------------------


@cache
def _seen_cells(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what cells of a small image see of the large one, and by whom those are seen.

    Returns:
        The large cell that each small one sees by each weight (16hw,), from 1, 0 for what lies
        beyond the edge; and the places in that list of each large cell (4 * 4hw,), from 1, 0 for
        one place less.
    """
    numbers = torch.arange(1.0, 4 * height * width + 1).view(1, 1, 2 * height, 2 * width)
    seen = F.unfold(numbers, 4, padding=1, stride=2)[0].T.flatten().long()
    places = torch.zeros(SIGHTS, 4 * height * width, dtype=torch.int64)
    for place, cell in enumerate(seen.tolist(), 1):
        if cell:
            free = int((places[:, cell - 1] > 0).sum())
            places[free, cell - 1] = place
    return seen.to(device), places.flatten().to(device)


def _sights(size: int) -> list[tuple[slice, slice]]:
    """Return what each cell of a small image sees along an axis, and by which weights."""
    found = []
    for first in range(-1, 2 * size - 1, 2):
        low, high = max(0, first), min(2 * size, first + 4)
        found.append((slice(low, high), slice(low - first, high - first)))
    return found
