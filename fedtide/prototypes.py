"""Class prototypes: how they are made, averaged, laid out by class and predicted with."""

from __future__ import annotations

from fedmodels.nets.split import embeddings
from fedmodels.numerics.prototypes import (
    ByClass,
    class_prototypes,
    moved,
    nearest_scores,
    released,
    uncounted,
)
from fedmodels.tensors.prototype_means import mean_prototypes

__all__ = [
    "ByClass",
    "class_prototypes",
    "embeddings",
    "mean_prototypes",
    "moved",
    "nearest_scores",
    "released",
    "uncounted",
]
