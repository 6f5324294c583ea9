"""FedMLP's levels: clusters of prototypes and the minority J, and how the two travel.

The cluster of each global prototype and one bit a class for J travel among the weights, as
``levels/…``, beside the prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmodels.numerics.algebra import cluster
from fedmodels.numerics.clustering import finch
from fedmodels.numerics.metrics import minority_classes
from fedmodels.numerics.prototypes import moved
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec, prototype_spec
from fedmodels.training.run import RunFacts

CLUSTER, MINORITY = "levels/cluster", "levels/minority"


def levels_of(cluster: Tensor, minority: Iterable[int], num_classes: int) -> Weights:
    """Return the cluster (G,) of each global prototype, and J as bits (ceil(K / 8),)."""
    bits = np.zeros(num_classes, dtype=bool)
    bits[list(minority)] = True
    return {CLUSTER: cluster.int(), MINORITY: torch.from_numpy(np.packbits(bits))}


def minority_of(weights: Weights, num_classes: int) -> Tensor:
    """Return whether each class belongs to J, (K,) bool."""
    bits = np.unpackbits(weights[MINORITY].numpy())[:num_classes]
    return torch.from_numpy(bits.astype(bool))


def minority_by_counts(tables: Sequence[Tensor], *, when_balanced: bool) -> list[int]:
    """Return the lower half of the known classes, by their examples.

    Args:
        tables: examples of each class, (K,) int32, one table for each client and task.
        when_balanced: whether there is a minority if all known classes have equally many examples:
            the upper half of the ids.
    """
    totals = torch.stack(list(tables)).sum(0) if tables else torch.zeros(0, dtype=torch.int64)
    balanced = len(set(totals[totals > 0].tolist())) <= 1
    return minority_classes(totals) if when_balanced or not balanced else []


def clustered(points: Tensor, size: int, algorithm: str, seed: int) -> tuple[Tensor, Tensor]:
    """Return up to ``size`` centres (v, d) of points (n, d), and the centre of each (n,).

    Args:
        points: what to cluster; may have no row.
        size: how many centres; ``finch`` finds their number itself.
        algorithm: ``kmeans`` or ``finch``.
        seed: of k-means.
    """
    if len(points) == 0:
        return points, torch.zeros(0, dtype=torch.int64)
    if algorithm == "finch":
        return finch(points)
    return cluster(points, min(size, len(points)), seed=seed)


def levels_spec(run: RunFacts) -> BundleSpec:
    """Return the specification of prototypes on both levels, and of what relates the two."""
    classes, nothing = run.problem.num_classes, TensorSpec(torch.int32, (0,))
    levels = {
        f"weights/{CLUSTER}": TensorSpec(torch.int32, (None,), classes),
        f"weights/{MINORITY}": TensorSpec(torch.uint8, (math.ceil(classes / 8),)),
        "prototypes/semantic/vectors": TensorSpec(torch.float32, (None, run.width), classes),
        "prototypes/semantic/labels": nothing,
        "prototypes/semantic/counts": nothing,
    }
    return prototype_spec("class", run.width, classes, counted=False) | BundleSpec(levels)


def class_counts(rows: Prototypes, num_classes: int) -> Tensor:
    """Return the examples of each class behind the rows, (K,) int32."""
    counts = torch.zeros(num_classes, dtype=torch.int32)
    counts[rows.labels.long()] = rows.counts
    return counts


def with_latest(
    clients: Mapping[int, Bundle], reported: Mapping[int, Prototypes]
) -> dict[int, Bundle]:
    """Return the newest prototypes, of any task, of the clients that report now."""
    before = {i: b.prototypes["class"] for i, b in clients.items()}
    return {
        i: Bundle(prototypes={"class": moved(before.get(i), rows, 0.0)})
        for i, rows in reported.items()
    }
