"""K-means for many rows that were moved a little from common places: approximate, or on a GPU.

FedAli's clients start from the same prototypes and move each of them by a slow average, so row g of
every client lies near row g of the others. Lloyd's algorithm compares every point with every centre
nevertheless: O(C G² d) an iteration for C clients and G rows, nearly all of it wasted. Here a
point is compared with the centres nearest to its present one only: O(G² d + C G m d). Compared with
all of them it is Lloyd's algorithm in one matrix product, which is what an accelerator is for.

Shapes: C clients, G rows, d width, m neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fedmodels.host.devices import device_of
from fedmodels.numerics.clustering import cluster

ROWS = 1024
"""Rows compared at a time, so that what is gathered stays small."""


Solver = Literal["lloyd", "neighbours", "torch"]
"""scikit-learn's k-means on one thread; :func:`cluster_near`; or that with all centres."""


def cluster_sets(
    points: Sequence[Tensor], init: Tensor, solver: Solver, *, neighbours: int, max_iter: int
) -> tuple[Tensor, Tensor]:
    """Return the clusters' centres (G, d) of C sets (G, d), and the cluster of each row.

    Row g of ``init`` becomes row g. A point is compared with so many ``neighbours`` alone by the
    solver of that name.
    """
    if solver == "lloyd":
        return cluster(torch.cat(list(points)), init, max_iter=max_iter)
    device = device_of("auto")
    near = neighbours if solver == "neighbours" else None
    return cluster_near(points, init, neighbours=near, device=device, max_iter=max_iter)


def cluster_near(
    points: Sequence[Tensor],
    init: Tensor,
    *,
    neighbours: int | None = 16,
    device: torch.device | str = "cpu",
    max_iter: int = 300,
    tol: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Cluster the rows of several sets, beginning with row g of every set in cluster g.

    No iteration makes the fit worse, since a point's own centre is among those it is compared with.
    An empty cluster takes the point farthest from its own centre; a row is never lost.

    Args:
        points: C sets (G, d).
        init: the first centres (G, d).
        neighbours: m, centres a point is compared with, its own included; all if None.
        device: where points are compared with all centres; means are taken on the CPU, in order.
        max_iter: most iterations.
        tol: ends when the centres move less than ``tol`` times the mean variance of a coordinate.

    Returns:
        Centres (G, d) in the dtype of ``init``, and the cluster of every point (C, G), int64.
    """
    count, sets = len(init), len(points)
    x = torch.cat(list(points))  # (C G, d)
    labels = torch.arange(count).repeat(sets)
    threshold = tol * float(x.var(0, correction=0).mean())
    centres, there = init, x.to(device)
    for _ in range(max_iter):
        if neighbours is None:
            labels, distances = (found.cpu() for found in _nearest(there, centres.to(device)))
        else:
            near = _neighbours(centres, min(neighbours, count))
            labels, distances = _assign(x, labels, centres, near)
        _refill(labels, distances, count)
        moved = _means(x, labels, count).to(init.dtype)
        shift = float((moved.double() - centres.double()).square().sum())
        centres = moved
        if shift <= threshold:
            break
    return centres, labels.view(sets, count)


def _neighbours(centres: Tensor, count: int) -> Tensor:
    """Return the indices (G, m), rising, of the centres nearest to each one, itself included."""
    squares = centres.square().sum(1)
    parts = []
    for rows in torch.split(torch.arange(len(centres)), ROWS):
        distance = torch.addmm(squares, centres[rows], centres.T, alpha=-2)  # less the row's own
        distance[torch.arange(len(rows)), rows] = -torch.inf
        parts.append(distance.topk(count, largest=False).indices.sort(1).values)
    return torch.cat(parts)


def _assign(x: Tensor, labels: Tensor, centres: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Return each point's nearest candidate (n,), the first among equals, and its distance squared.

    The points of a cluster share their candidates, so that they are compared cluster by cluster;
    clusters of like size are padded to one (b, s).
    """
    members = torch.bincount(labels, minlength=len(centres))
    order, begin = labels.argsort(stable=True), members.cumsum(0) - members
    chosen, distances = torch.empty_like(labels), x.new_empty(len(x))
    by_size = members.argsort(descending=True, stable=True)
    at = 0
    while at < len(by_size) and members[by_size[at]]:
        size = int(members[by_size[at]])
        group = by_size[at : at + max(1, 8 * ROWS // size)]  # (b,)
        at += len(group)
        slot = torch.arange(size)
        held = slot < members[group, None]  # (b, s)
        rows = order[(begin[group, None] + slot).clamp_max(len(x) - 1)]
        apart = x[rows] - centres[group, None]  # (b, s, d)
        towards = centres[near[group]] - centres[group, None]  # (b, m, d)
        change = towards.square().sum(2)[:, None] - 2 * apart @ towards.mT  # (b, s, m)
        index = change.argmin(2, keepdim=True)
        least = apart.square().sum(2) + change.gather(2, index)[..., 0]
        chosen[rows[held]] = near[group].gather(1, index[..., 0])[held]
        distances[rows[held]] = least[held]
    return chosen, distances


def _nearest(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Return each point's nearest centre of all (n,), and its distance squared."""
    squares = centres.square().sum(1)
    found = []
    for rows in torch.split(x, 8 * ROWS):
        least = torch.addmm(squares, rows, centres.T, alpha=-2).min(1)  # less the row's own
        found.append((least.indices, least.values + rows.square().sum(1)))
    labels, distances = zip(*found, strict=True)
    return torch.cat(labels), torch.cat(distances)


def _refill(labels: Tensor, distances: Tensor, count: int) -> None:
    """Give every empty cluster the farthest point of a cluster that has others; in place."""
    members = torch.bincount(labels, minlength=count)
    empty = (members == 0).nonzero().flatten().tolist()
    if not empty:
        return
    farthest = iter(distances.argsort(descending=True, stable=True).tolist())
    for own in empty:
        point = next(p for p in farthest if members[labels[p]] > 1)
        members[labels[point]] -= 1
        members[own] += 1
        labels[point] = own


def _means(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """Return the mean of each cluster's points (G, d), float64; no cluster is empty."""
    members = torch.bincount(labels, minlength=count)
    first = x[labels.argsort(stable=True)[members.cumsum(0) - members]].double()
    total = torch.zeros_like(first)
    for rows in torch.split(torch.arange(len(x)), 16 * ROWS):
        own = labels[rows]
        apart = x[rows].double() - first[own]  # equal points come out as themselves
        total.index_add_(0, own, apart)
    return first + total / members.double()[:, None]
