"""FedMLP's levels: clusters of prototypes and the minority J, and how the two travel.

The cluster of each global prototype and one bit a class for J travel among the weights, as
``levels/…``, beside the prototypes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedmodels.numerics.algebra import padded
from fedmodels.numerics.clustering import cluster
from fedmodels.numerics.prototypes import ByClass
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.contexts import ClientContext, ServerContext
from fedmodels.training.run import RunFacts

CLUSTER, MINORITY = "levels/cluster", "levels/minority"
COUNTS = "counts/"
"""In the server's own state, before client and task: examples of each class."""
EARLIER = "earlier"
"""Stands in place of a task's number for all tasks before a client's present one."""


def levels_of(cluster: Tensor, minority: Iterable[int], num_classes: int) -> Weights:
    """Return the cluster (G,) of each global prototype, and J as bits (ceil(K / 8),)."""
    bits = np.zeros(num_classes, dtype=bool)
    bits[list(minority)] = True
    return {CLUSTER: cluster.int(), MINORITY: torch.from_numpy(np.packbits(bits))}


def minority_of(weights: Weights, num_classes: int) -> Tensor:
    """Return whether each class belongs to J, (K,) bool."""
    bits = np.unpackbits(weights[MINORITY].numpy())[:num_classes]
    return torch.from_numpy(bits.astype(bool))


def minority_by_counts(weights: Weights) -> Sequence[int]:
    """Return J: the lower half of the known classes, by the examples that clients reported.

    Where all known classes have equally many examples, J is empty.
    """
    tables = [counts for name, counts in weights.items() if name.startswith(COUNTS)]
    totals = torch.stack(tables).sum(0) if tables else torch.zeros(0, dtype=torch.int64)
    balanced = len(set(totals[totals > 0].tolist())) <= 1
    return [] if balanced else minority_classes(totals)


def cluster_rows(points: Tensor, size: int, run: RunFacts) -> tuple[Tensor, Tensor]:
    """Return up to ``size`` centres (v, d) of points (n, d), and the centre of each (n,)."""
    if len(points) == 0:
        return points, torch.zeros(0, dtype=torch.int64)
    return cluster(points, min(size, len(points)), seed=run.experiment.seed)


def semantic_by_class(ctx: ClientContext, payload: Bundle) -> ByClass:
    """Return P[a(k)], the semantic prototype of each class k of J, laid out by class."""
    g, p = payload.prototypes["class"], payload.prototypes["semantic"].vectors
    a, classes = payload.weights[CLUSTER].long(), ctx.run.problem.num_classes
    if not len(p):  # nothing was clustered so far
        return ByClass.of(None, classes, ctx.net.width, ctx.device)
    rare = minority_of(payload.weights, classes).to(ctx.device)
    found = ByClass.of(replace(g, vectors=p[a]), classes, ctx.net.width, ctx.device)
    return ByClass(found.vectors, found.known & rare)


def class_counts(ctx: ServerContext, before: Weights, uploads: Mapping[int, Bundle]) -> Weights:
    """Return the server's own weights with the examples of each class that clients report now.

    They are (K,) int32 for each client and task. In an open run no client goes back to a task, and
    those of its earlier tasks are one sum.
    """
    found = dict(before)
    for client, upload in uploads.items():
        rows = upload.prototypes["class"]
        counts = torch.zeros(ctx.run.problem.num_classes, dtype=torch.int32)
        counts[rows.labels.long()] = rows.counts
        found[f"{COUNTS}{client}/{ctx.task_of(client)}"] = counts
    return _folded(found, ctx.tasks) if ctx.tasks else found


def _folded(weights: Weights, tasks: Mapping[int, int]) -> Weights:
    """Return weights in which each client has counts of its present task and of all before it."""
    found = dict[str, Tensor]()
    for name, tensor in weights.items():
        client, _, task = name.removeprefix(COUNTS).partition("/")
        if name.startswith(COUNTS) and task != str(tasks.get(int(client), task)):
            name = f"{COUNTS}{client}/{EARLIER}"
        found[name] = found[name] + tensor if name in found else tensor
    return found


def counts_of_others(weights: Weights, clients: Collection[int]) -> Weights:
    """Return the server's own weights without the counts of these clients."""
    theirs = tuple(f"{COUNTS}{client}/" for client in clients)
    return {name: tensor for name, tensor in weights.items() if not name.startswith(theirs)}


def grown_levels(weights: Weights, classes: int) -> Weights:
    """Return counts and J among these weights for K classes, one more than they were made for."""
    sizes = {name: classes for name in weights if name.startswith(COUNTS)}
    sizes |= {MINORITY: math.ceil(classes / 8)} if MINORITY in weights else {}
    return {name: padded(weights[name], (size,)) for name, size in sizes.items()}


def minority_classes(counts: ArrayLike) -> list[int]:
    """Return J, the lower half of the known classes by global training count (FedMLP).

    Args:
        counts: (K,); classes with 0 are unknown. Among equals the higher index is taken first.
    """
    n = np.asarray(counts, dtype=np.int64)
    known = np.flatnonzero(n)
    rising = sorted(known.tolist(), key=lambda k: (n[k], -k))
    return sorted(rising[: len(known) // 2])
