"""Small convolutional nets: ``digits-cnn`` for a first run, ``cnn5`` for MNIST and FEMNIST."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet


def image_shape(net: str, input_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return ``input_shape`` as (channels, height, width); ConfigError if it is no fit image's."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise ConfigError(
            f"net {net!r} takes images (channels, height, width) of at least "
            f"{smallest}x{smallest}, not {list(input_shape)}"
        )
    channels, height, width = input_shape
    return channels, height, width


def normalisation(net: str, kind: str, channels: Sequence[int], width: int) -> nn.ModuleList:
    """Return what follows each convolution and, last, the embedding's layer before its ReLU.

    It keeps embeddings bounded. Groups and layers do so by each example alone: a client may have
    few. ``"none"`` adds no weights.

    Raises:
        ConfigError: there is no such normalisation.
    """
    if kind not in ("none", "group", "layer", "batch"):
        raise ConfigError(
            f"option norm={kind!r} of net {net!r} must be none, group, layer or batch"
        )
    if kind == "none":
        return nn.ModuleList(nn.Identity() for _ in range(len(channels) + 1))
    if kind == "batch":
        return nn.ModuleList([*map(nn.BatchNorm2d, channels), nn.BatchNorm1d(width)])
    groups = 8 if kind == "group" else 1  # one group is layer normalisation of the whole map
    maps = [nn.GroupNorm(groups, count) for count in channels]
    return nn.ModuleList([*maps, nn.LayerNorm(width)])


class _DigitsBase(nn.Module):
    """Three convolutions, and a pool to 2x2 cells of 64 channels; 3x3 of sides of 6 or 7 pixels."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, channels: int, height: int, width: int, norm: str) -> None:
        super().__init__()
        self.norms = normalisation("digits-cnn", norm, (16, 32, 64), 64)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1)
        # A pool of fixed size: the adaptive one has no deterministic gradient on CUDA.
        self.pool = (height // 4, width // 4)
        cells = (height // 2 // self.pool[0]) * (width // 2 // self.pool[1])
        self.fc = nn.Linear(64 * cells, 64)

    def forward(self, x: Tensor) -> Tensor:
        norm1, norm2, norm3, last = self.norms
        x = F.relu(norm1(self.conv1(x)))  # (B, 16, H, W)
        x = F.max_pool2d(F.relu(norm2(self.conv2(x))), 2)  # (B, 32, H/2, W/2)
        x = F.avg_pool2d(F.relu(norm3(self.conv3(x))), self.pool)  # (B, 64, 2, 2)
        return F.relu(last(self.fc(x.flatten(1))))  # (B, 64)


def digits_cnn(num_classes: int, input_shape: tuple[int, ...], *, norm: str = "none") -> SplitNet:
    """Build the net of the quick example: d = 64; 40,394 parameters for digits (1, 8, 8).

    Args:
        num_classes: K.
        input_shape: (channels, height, width) of the images.
        norm: ``"none"``, ``"group"``, ``"layer"`` or ``"batch"``; what follows each convolution.
    """
    base = _DigitsBase(*image_shape("digits-cnn", input_shape, 4), norm)
    return SplitNet(base, nn.Linear(64, num_classes), 64)


class _Cnn5Base(nn.Module):
    """conv5-32, pool, conv5-64, pool, 512, 128."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, channels: int, height: int, width: int, norm: str) -> None:
        super().__init__()
        self.norms = normalisation("cnn5", norm, (32, 64), 128)
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * rows * columns, 512)
        self.fc2 = nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Tensor:
        norm1, norm2, last = self.norms
        x = F.max_pool2d(F.relu(norm1(self.conv1(x))), 2)  # (B, 32, 12, 12) of 28x28
        x = F.max_pool2d(F.relu(norm2(self.conv2(x))), 2)  # (B, 64, 4, 4)
        x = F.relu(self.fc1(x.flatten(1)))  # (B, 512)
        return F.relu(last(self.fc2(x)))  # (B, 128)


def cnn5(num_classes: int, input_shape: tuple[int, ...], *, norm: str = "none") -> SplitNet:
    """Build the five-layer CNN of FedMLP on MNIST and FEMNIST: d = 128, no batch normalisation.

    The paper says no more than "5-layer CNN"; the widths are ours, and so is ``norm``.

    Args:
        num_classes: K.
        input_shape: (channels, height, width) of the images.
        norm: ``"none"``, ``"group"``, ``"layer"`` or ``"batch"``; what follows each convolution.
    """
    base = _Cnn5Base(*image_shape("cnn5", input_shape, 16), norm)
    return SplitNet(base, nn.Linear(128, num_classes), 128)
