"""A small net of pieces for pictures and for windows, with or without an alignment layer.

A table of methods must not compare nets. FedBN needs batch normalisation, FedAli alignment, and
FedAli's own nets, HART and a vision transformer, take too long for a dozen methods with several
seeds on two cores. Here a token is a piece of the input: rows of a picture, moments of a window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fedmodels.nets.alp import ALP
from fedmodels.nets.split import SplitNet


def small_aligned(
    num_classes: int,
    input_shape: tuple[int, ...],
    *,
    pieces: int = 7,
    alp: bool = False,
    prototypes: int = 32,
    alignment: Mapping[str, Any] | None = None,
) -> SplitNet:
    """Embed each piece by one linear layer, and all of them by another: d = 64.

    Args:
        num_classes: K.
        input_shape: of one example; ``pieces`` divides its numbers.
        pieces: tokens of an example.
        alp: align the tokens with prototypes.
        prototypes: how many.
        alignment: switches of the alignment layer: ``fedmodels.nets.alp.ALP`` has them.
    """
    size = math.prod(input_shape) // pieces
    layers: list[nn.Module] = [
        nn.Flatten(), nn.Unflatten(1, (pieces, size)), nn.Linear(size, 32),
        _Transposed(), nn.BatchNorm1d(32), nn.ReLU(), _Transposed(),
    ]  # fmt: skip
    if alp:
        layers.append(ALP(32, prototypes, **(alignment or {})))
    layers += [nn.Flatten(), nn.Linear(32 * pieces, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return SplitNet(nn.Sequential(*layers), nn.Linear(64, num_classes), 64, mixes_examples=alp)


class _Transposed(nn.Module):
    """(B, a, b) -> (B, b, a)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)
