"""The numerical problems of the methods, as functions of tensors and arrays."""

from __future__ import annotations

from fedmodels.numerics.algebra import replay_volumes, simplex_projection
from fedmodels.numerics.clustering import kmeans
from fedmodels.numerics.optimal_transport import sinkhorn_plan

__all__ = ["kmeans", "replay_volumes", "simplex_projection", "sinkhorn_plan"]
