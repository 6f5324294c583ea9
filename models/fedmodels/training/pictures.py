"""Data for pictures of a client's model; only the client itself sees the pictures.

Shapes: n examples, d coordinates of an embedding, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.tensors.bundle import Prototypes


@dataclass(frozen=True)
class PrototypeMap:
    """Embeddings of a client's own data beside its known prototypes, in two dimensions."""

    points: Tensor  # (n, 2)
    labels: Tensor  # (n,) int64
    prototypes: Mapping[str, tuple[Tensor, Tensor]]
    """By owner: positions (m, 2) and classes (m,); class -1 means no class."""
    axes: str = "two principal directions"
    """What the two dimensions are."""

    @classmethod
    def of(cls, features: Tensor, labels: Tensor, known: Mapping[str, Prototypes]) -> PrototypeMap:
        """Project embeddings (n, d) and prototypes of width d.

        The projection is on the two directions in which the embeddings vary most (PCA).
        """
        mean = features.mean(0)
        _, _, directions = torch.linalg.svd(features - mean, full_matrices=False)
        axes = directions[:2]  # (2, d)
        largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
        axes = axes * largest.sign()  # a singular vector is known up to its sign
        placed = {
            whose: ((p.vectors.to(mean) - mean) @ axes.T, _classes(p)) for whose, p in known.items()
        }
        return cls((features - mean) @ axes.T, labels, placed)


def _classes(prototypes: Prototypes) -> Tensor:
    """Return the class of each row, -1 where rows are known by position only."""
    nothing = torch.full((len(prototypes.vectors),), -1)
    return prototypes.labels.long() if len(prototypes.labels) else nothing


@dataclass(frozen=True)
class Gallery:
    """Generated images of each class."""

    images: Mapping[str, Tensor]
    """By class: (m, C, H, W), values in [0, 1]."""


Picture = PrototypeMap | Gallery
