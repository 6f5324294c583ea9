"""``hart``: the human activity recognition transformer, for windows of inertial sensors.

Ek, Portet, Lalanda, Lightweight Transformers for Human Activity Recognition on Mobile Devices,
2022, https://arxiv.org/abs/2209.11750; the net of FedAli's experiments.

Shapes: B batch, T time steps, Z = T / 16 tokens, d = 192. Channels 0…95 of a token come from the
accelerometer, 96…191 from the gyroscope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet
from fedmodels.nets.transformer import (
    PROTOTYPES,
    Attention,
    DropPath,
    FeedForward,
    alignments,
    check_rates,
    rising,
)
from fedmodels.numerics.randomness import apart

DIM, PATCH, HIDDEN, WIDTH = 192, 16, 384, 1024
KERNELS = (3, 7, 15, 31, 31, 31)
BRANCHES = (DIM // 4, DIM // 2, DIM // 4)  # accelerometer, both, gyroscope


class LiteConv(nn.Module):
    """Depth-wise convolution of the middle channels with softmax-normalised kernels, one per head.

    ``"time"`` convolves along the tokens of each sample. ``"official_flat"`` repeats the published
    code's reshapes, which convolve along channels and **mix the samples of a batch**; for
    comparison only.
    """

    def __init__(self, kernel: int, mode: str, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.mode = heads, mode
        limit = (3 / kernel) ** 0.5  # Glorot's, for a kernel of one channel
        self.kernel = nn.Parameter(torch.empty(heads, kernel).uniform_(-limit, limit))

    @property
    def rows_are_independent(self) -> bool:
        """Whether no sample of a batch sees another one."""
        return self.mode == "time"

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, Z, c) for (B, Z, c), zero-padded at both ends."""
        kernel = self.kernel.softmax(-1)
        padding = kernel.shape[1] // 2
        if self.mode == "official_flat":
            rows = x.reshape(-1, self.heads, x.shape[1])
            flat = F.conv1d(rows, kernel[:, None], padding=padding, groups=self.heads)
            return flat.transpose(0, 1).reshape(x.shape)
        channels = x.shape[-1]
        weight = kernel.repeat_interleave(channels // self.heads, 0)[:, None]  # (c, 1, k)
        y = F.conv1d(x.transpose(1, 2), weight, padding=padding, groups=channels)
        return y.transpose(1, 2)


class _Block(nn.Module):
    """Attention within each sensor, a convolution across both, then the feed-forward part."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(
        self, alp: nn.Module, kernel: int, lite_conv: str, dropout: float, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1, self.alp = nn.LayerNorm(DIM, eps=1e-6), alp
        self.accelerometer = Attention(BRANCHES[0], 3, 48, dropout)
        self.lite_conv = LiteConv(kernel, lite_conv)
        self.gyroscope = Attention(BRANCHES[2], 3, 48, dropout)
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = FeedForward(DIM, HIDDEN, F.silu, dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        acc, both, gyro = torch.split(self.alp(self.norm1(x)), list(BRANCHES), -1)
        branches = self.accelerometer(acc), self.lite_conv(both), self.gyroscope(gyro)
        x = x + torch.cat([self.drop_path(branch) for branch in branches], -1)
        y: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return y


class _HartBase(nn.Module):
    """Patches per sensor, learned positions, blocks, mean over tokens, one wide layer."""

    rows_are_independent: ClassVar[bool] = True
    one_for_each_row: ClassVar[tuple[str, ...]] = ("positions",)

    def __init__(self, steps: int, blocks: list[_Block], dropout: float) -> None:
        super().__init__()
        self.accelerometer = nn.Conv1d(3, DIM // 2, PATCH, PATCH)
        self.gyroscope = nn.Conv1d(3, DIM // 2, PATCH, PATCH)
        self.positions = nn.Parameter(torch.empty(1, steps // PATCH, DIM).uniform_(-0.05, 0.05))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.fc = nn.Linear(DIM, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        acc, gyro = x.transpose(1, 2).chunk(2, 1)  # (B, 3, T) each
        tokens = torch.cat([self.accelerometer(acc), self.gyroscope(gyro)], 1).transpose(1, 2)
        x = tokens + self.positions  # (B, Z, d)
        for block in self.blocks:
            x = block(x)
        x = F.silu(self.fc(self.norm(x).mean(1)))  # (B, 1024)
        return F.dropout(x, self.dropout, self.training)


def hart(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    lite_conv: str = "time",
    dropout: float = 0.3,
    drop_path: float = 0.3,
    blocks: int = len(KERNELS),
    alp: bool = False,
    prototypes: Sequence[int] = PROTOTYPES,
    alignment: Mapping[str, object] | None = None,
) -> SplitNet:
    """Build HART: six blocks, embeddings of width 1024; 1,445,918 parameters for six classes.

    Args:
        num_classes: K.
        input_shape: (time steps, 6), the steps divisible by 16: accelerometer, then gyroscope.
        lite_conv: ``"time"`` convolves along time; ``"official_flat"`` along channels, as the
            published code does.
        dropout: of attention weights and hidden units.
        drop_path: of the last block; it grows linearly from 0.
        blocks: how many of the six, from the input on; fewer make a quick net.
        alp: put an alignment layer in each block.
        prototypes: how many, per block.
        alignment: switches of the alignment layers, a table: ``fedmodels.nets.alp.ALP`` has them.

    Raises:
        ConfigError: the inputs are not such windows, or an option has no such value.
    """
    if len(input_shape) != 2 or input_shape[1] != 6 or not input_shape[0] or input_shape[0] % PATCH:
        raise ConfigError(
            f"net 'hart' takes windows (multiple of {PATCH}, 6), not {list(input_shape)}"
        )
    if lite_conv not in ("time", "official_flat"):
        raise ConfigError(f"option lite_conv={lite_conv!r} must be 'time' or 'official_flat'")
    if not 1 <= blocks <= len(KERNELS):
        raise ConfigError(f"option blocks={blocks} of net 'hart' must be 1 to {len(KERNELS)}")
    check_rates("hart", dropout=dropout, drop_path=drop_path)
    layers = alignments("hart", DIM, blocks, prototypes if alp else None, alignment or {})
    rates = rising(drop_path, blocks)
    stack = [
        _Block(layer, kernel, lite_conv, dropout, rate)
        for layer, kernel, rate in zip(layers, KERNELS[:blocks], rates, strict=True)
    ]
    base = _HartBase(input_shape[0], stack, dropout)
    net = SplitNet(base, nn.Linear(WIDTH, num_classes), WIDTH, mixes_examples=alp)
    of_layers = [module for layer in layers for module in layer.modules()]
    _initialise(module for module in net.modules() if module not in of_layers)
    with apart("gates"):
        _initialise(of_layers)
    return net


def _initialise(modules: Iterable[nn.Module]) -> None:
    """Draw the layers' weights as Glorot does, without biases."""
    for module in modules:
        if isinstance(module, nn.Linear | nn.Conv1d):
            nn.init.xavier_uniform_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
