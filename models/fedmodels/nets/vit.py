"""``vit-tiny``: a small vision transformer, with FedAli's alignment layers where wanted.

Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021, section 3.1.
https://arxiv.org/abs/2010.11929
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.cnn import image_shape
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

DIM, HEADS, BLOCKS = 192, 3, 6


class _Block(nn.Module):
    """Pre-norm block: the residual adds to the block's input, not to the aligned tokens."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, alp: nn.Module, mlp_ratio: int, dropout: float, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.alp = nn.LayerNorm(DIM, eps=1e-6), alp
        self.attention = Attention(DIM, HEADS, DIM // HEADS, dropout)
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6)
        self.mlp = FeedForward(DIM, mlp_ratio * DIM, F.gelu, dropout)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attention(self.alp(self.norm1(x))))
        y: Tensor = x + self.drop_path(self.mlp(self.norm2(x)))
        return y


class _VitBase(nn.Module):
    """Patches, a class token, learned positions, blocks, layer normalisation, pool."""

    rows_are_independent: ClassVar[bool] = True
    one_for_each_row: ClassVar[tuple[str, ...]] = ("cls", "positions")

    def __init__(self, shape: tuple[int, int, int], patch: int, blocks: list[_Block], pool: str):
        super().__init__()
        channels, height, width = shape
        tokens = (height // patch) * (width // patch) + 1
        self.patches = nn.Conv2d(channels, DIM, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, DIM))
        self.positions = nn.Parameter(torch.empty(1, tokens, DIM))
        nn.init.trunc_normal_(self.positions, std=0.02)
        nn.init.trunc_normal_(self.cls, std=0.02)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(DIM, eps=1e-6)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, Z - 1, d)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.positions  # (B, Z, d)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x[:, 0] if self.pool == "cls" else x.mean(1)  # (B, d)


def vit_tiny(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    patch: int = 4,
    mlp_ratio: int = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
    pool: str = "cls",
    blocks: int = BLOCKS,
    alp: bool = False,
    prototypes: Sequence[int] = PROTOTYPES,
    alignment: Mapping[str, object] | None = None,
) -> SplitNet:
    """Build FedAli's vision net: 6 blocks, 3 heads, d = 192; 2,693,578 parameters for CIFAR-10.

    Args:
        num_classes: K.
        input_shape: (channels, height, width), sides divisible by ``patch``.
        patch: side of a patch; 4 is ours, the paper gives none.
        mlp_ratio: hidden width of the feed-forward part over d.
        dropout: of attention weights and hidden units.
        drop_path: of the last block; it grows linearly from 0.
        pool: what the head reads, the ``"cls"`` token or the ``"mean"``.
        blocks: how many; fewer make a quick net.
        alp: put an alignment layer in each block.
        prototypes: how many, per block.
        alignment: switches of the alignment layers, a table: ``fedmodels.nets.alp.ALP`` has them.

    Raises:
        ConfigError: the patches do not tile the image, or an option has no such value.
    """
    shape = image_shape("vit-tiny", input_shape, patch)
    if shape[1] % patch or shape[2] % patch:
        raise ConfigError(f"patches of side {patch} do not tile images {list(input_shape)}")
    if blocks < 1:
        raise ConfigError(f"option blocks={blocks} of net 'vit-tiny' must be 1 or more")
    if pool not in ("cls", "mean"):
        raise ConfigError(f"option pool={pool!r} of net 'vit-tiny' must be 'cls' or 'mean'")
    counts = prototypes if alp else None
    check_rates("vit-tiny", dropout=dropout, drop_path=drop_path)
    layers = alignments("vit-tiny", DIM, blocks, counts, alignment or {})
    rates = rising(drop_path, blocks)
    stack = [_Block(a, mlp_ratio, dropout, r) for a, r in zip(layers, rates, strict=True)]
    base = _VitBase(shape, patch, stack, pool)
    return SplitNet(base, nn.Linear(DIM, num_classes), DIM, mixes_examples=alp)
