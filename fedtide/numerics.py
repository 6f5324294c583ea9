"""The numerical problems of the methods, as functions of tensors and arrays."""

from __future__ import annotations

from fedmodels.numerics.algebra import replay_volumes, simplex_projection
from fedmodels.numerics.clustering import kmeans
from fedmodels.numerics.optimal_transport import sinkhorn_plan
from fedmodels.numerics.weight_terms import inner_product, squared_distance, squared_norm, tilt

__all__ = [
    "inner_product", "kmeans", "replay_volumes", "simplex_projection", "sinkhorn_plan",
    "squared_distance", "squared_norm", "tilt",
]  # fmt: skip
