"""Approximate k-means for many rows that were moved a little from common places.

FedAli's clients start from the same prototypes and move each of them by a slow average, so row g of
every client lies near row g of the others. Lloyd's algorithm compares every point with every centre
all the same: O(C G² d) an iteration for C clients and G rows, of which nearly all is wasted. Here a
point is compared with the centres nearest to its present one only: O(G² d + C G m d).

Shapes: C clients, G rows, d width, m neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 1024
"""Rows compared at a time, so that what is gathered stays small."""


def cluster_near(
    points: Sequence[Tensor],
    init: Tensor,
    *,
    weights: Sequence[float] | None = None,
    neighbours: int = 16,
    max_iter: int = 300,
    tol: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """Cluster the rows of several sets, beginning with row g of every set in cluster g.

    No iteration makes the fit worse, since a point's own centre is among those it is compared with.
    An empty cluster takes the point farthest from its own centre; a row is never lost.

    Args:
        points: C sets (G, d).
        init: the first centres (G, d).
        weights: of the sets; all equal unless given.
        neighbours: m, centres a point is compared with, its own included.
        max_iter: most iterations.
        tol: ends when the centres move less than ``tol`` times the mean variance of a coordinate.

    Returns:
        Centres (G, d) in the dtype of ``init``, and the cluster of every point (C, G), int64.
    """
    count, width = init.shape
    shares = [1.0] * len(points) if weights is None else list(weights)
    labels = torch.arange(count).repeat(len(points), 1)
    stack = torch.stack([p.double().var(0, correction=0) for p in points])
    threshold = tol * float(stack.mean())
    centres = init
    for _ in range(max_iter):
        near = _neighbours(centres, min(neighbours, count))
        found = [_assign(p, own, centres, near) for p, own in zip(points, labels, strict=True)]
        labels = torch.stack([chosen for chosen, _ in found])
        _refill(labels, torch.stack([distance for _, distance in found]), count)
        moved = _means(points, labels, shares, count, width).to(init.dtype)
        shift = float((moved.double() - centres.double()).square().sum())
        centres = moved
        if shift <= threshold:
            break
    return centres, labels


def _neighbours(centres: Tensor, count: int) -> Tensor:
    """Return the indices (G, m), rising, of the centres nearest to each one, itself included."""
    squares = centres.square().sum(1)
    parts = []
    for rows in torch.split(torch.arange(len(centres)), ROWS):
        distance = torch.addmm(squares, centres[rows], centres.T, alpha=-2)  # less the row's own
        distance[torch.arange(len(rows)), rows] = -torch.inf
        parts.append(distance.topk(count, largest=False).indices.sort(1).values)
    return torch.cat(parts)


def _assign(points: Tensor, own: Tensor, centres: Tensor, near: Tensor) -> tuple[Tensor, Tensor]:
    """Return each point's nearest candidate (G,), the first among equals, and how far it is."""
    chosen, distances = [], []
    for rows in torch.split(torch.arange(len(points)), ROWS):
        candidates = near[own[rows]]  # (r, m)
        apart = (centres[candidates] - points[rows, None]).square().sum(-1)
        index = apart.argmin(1, keepdim=True)
        chosen.append(candidates.gather(1, index)[:, 0])
        distances.append(apart.gather(1, index)[:, 0])
    return torch.cat(chosen), torch.cat(distances)


def _refill(labels: Tensor, distances: Tensor, count: int) -> None:
    """Give every empty cluster the farthest point of a cluster that has others; in place."""
    members = torch.bincount(labels.flatten(), minlength=count)
    empty = (members == 0).nonzero().flatten().tolist()
    if not empty:
        return
    flat = labels.view(-1)
    farthest = iter(distances.flatten().argsort(descending=True, stable=True).tolist())
    for cluster in empty:
        point = next(p for p in farthest if members[flat[p]] > 1)
        members[flat[point]] -= 1
        members[cluster] += 1
        flat[point] = cluster


def _means(
    points: Sequence[Tensor], labels: Tensor, shares: Sequence[float], count: int, width: int
) -> Tensor:
    """Return the weighted mean of each cluster's points (G, d), float64."""
    total, mass = torch.zeros(count, width, dtype=torch.float64), torch.zeros(count).double()
    first = _first_members(points, labels, count)
    for p, own, share in zip(points, labels, shares, strict=True):
        apart = p.double() - first[own]  # equal points come out as themselves
        total.index_add_(0, own, apart, alpha=share)
        mass.index_add_(0, own, torch.full((len(own),), share, dtype=torch.float64))
    return first + total / mass[:, None]


def _first_members(points: Sequence[Tensor], labels: Tensor, count: int) -> Tensor:
    """Return one point of each cluster (G, d), float64: that of the first set that has any."""
    first = torch.zeros(count, points[0].shape[1], dtype=torch.float64)
    for p, own in zip(reversed(points), reversed(labels.unbind()), strict=True):
        first[own] = p.double()
    return first
