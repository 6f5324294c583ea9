"""Sets of rows of several clients: the clusters of all their rows.

Shapes: G rows of a set, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedmodels.config.bounds import PositiveCount
from fedmodels.numerics.clustering import cluster
from fedmodels.numerics.neighbour_clustering import cluster_near
from fedmodels.training.settings import Part


@dataclass(frozen=True, kw_only=True)
class KMeans(Part):
    """How sets are clustered."""

    kmeans_solver: Literal["lloyd", "neighbours", "torch"] = "lloyd"
    """scikit-learn's; ``torch``: the same, on a GPU where there is one; ``neighbours``: points are
    compared with the nearest centres only, for many prototypes."""
    kmeans_neighbours: PositiveCount = 16
    """Centres a point is compared with by ``neighbours``."""
    kmeans_max_iter: PositiveCount = 300
    """Most iterations of a clustering."""

    def fitted(self, points: Sequence[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clusters' centres (G, d) of sets (G, d), and the cluster of each row.

        Row g of ``start`` becomes row g.
        """
        if self.kmeans_solver == "lloyd":
            return cluster(torch.cat(list(points)), start, max_iter=self.kmeans_max_iter)
        return cluster_near(
            points,
            start,
            neighbours=self.kmeans_neighbours if self.kmeans_solver == "neighbours" else None,
            device="cuda" if torch.cuda.is_available() else "cpu",
            max_iter=self.kmeans_max_iter,
        )
