"""Dirichlet partitions: FedMLP's DDA, FedTP's balanced one, kNN-Per's pooled one, and Pachinko.

Shapes: n examples, K classes, O owners (pairs (client, task) or clients). All of them first draw a
table of counts (O, K) and then hand the shuffled examples of each class out by it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedcli.data.arrays import IntArray
from fedmodels.errors import ConfigError

TRIES = 1000
"""Redraws until every owner has its minimum; afterwards examples move from the largest owners."""


def class_cuts(proportions: np.ndarray, num_examples: int) -> IntArray:
    """Return the owners' counts when a class is cut at ``int(cumsum(p) * n)``.

    10 examples by (.5, .3, .2) give 5, 3, 2; by (.25, .35, .4) they give 2, 4, 4.
    """
    cuts = (np.cumsum(proportions)[:-1] * num_examples).astype(np.int64)
    return np.diff(np.concatenate([[0], np.minimum(cuts, num_examples), [num_examples]]))


def dirichlet_counts(
    class_sizes: IntArray, num_owners: int, alpha: float, rng: np.random.Generator
) -> IntArray:
    """Draw p ~ Dir(alpha) per class and return the counts (O, K) (FedMLP's DDA)."""
    return counts_of(rng.dirichlet(np.full(num_owners, alpha), size=len(class_sizes)), class_sizes)


def balanced_proportions(
    class_sizes: IntArray, num_owners: int, alpha: float, rng: np.random.Generator
) -> np.ndarray:
    """Draw proportions (K, O) with the balance trick: who holds n / O examples gets no more."""
    size = np.zeros(num_owners)
    share = class_sizes.sum() / num_owners
    out = np.zeros((len(class_sizes), num_owners))
    for k, n in enumerate(class_sizes):
        p = rng.dirichlet(np.full(num_owners, alpha)) * (size < share)
        out[k] = p / p.sum() if p.sum() > 0 else (size < share) / (size < share).sum()
        size += class_cuts(out[k], int(n))
    return out


def multinomial_counts(
    class_sizes: IntArray, num_owners: int, alpha: float, rng: np.random.Generator
) -> IntArray:
    """Draw w ~ Dir(alpha) and counts ~ Multinomial(n_k, w) per class (kNN-Per); (O, K)."""
    w = rng.dirichlet(np.full(num_owners, alpha), size=len(class_sizes))
    rows = [rng.multinomial(int(n), w[k]) for k, n in enumerate(class_sizes)]
    return np.stack(rows, axis=1).astype(np.int64)


def drawn_until(draw: Callable[[], IntArray], min_size: int) -> IntArray:
    """Draw counts (O, K) until every owner has ``min_size`` examples, then mend the last draw.

    Raises:
        ConfigError: there are not enough examples for all owners.
    """
    counts = draw()
    owners = len(counts)
    if counts.sum() < owners * min_size:
        raise ConfigError(
            f"[scenario] {counts.sum()} examples cannot give {min_size} to each of {owners} "
            "clients or tasks: lower min_size, clients or tasks"
        )
    for _ in range(TRIES - 1):
        if counts.sum(axis=1).min() >= min_size:
            return counts
        counts = draw()
    return moved_from_largest(counts, min_size)


def moved_from_largest(counts: IntArray, min_size: int) -> IntArray:
    """Move examples of the largest owner's largest class until all owners have ``min_size``."""
    counts = counts.copy()
    while (sizes := counts.sum(axis=1)).min() < min_size:
        rich = int(sizes.argmax())
        k = int(counts[rich].argmax())
        counts[rich, k] -= 1
        counts[int(sizes.argmin()), k] += 1
    return counts


def hand_out(labels: IntArray, counts: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Return each owner's examples, class by class: those of a class shuffled, by counts (O, K)."""
    owned: list[list[IntArray]] = [[] for _ in counts]
    for k in range(counts.shape[1]):
        members = rng.permutation(np.flatnonzero(labels == k))
        for pieces, piece in zip(owned, np.split(members, np.cumsum(counts[:-1, k])), strict=True):
            pieces.append(piece)
    return [np.concatenate(pieces).astype(np.int64) for pieces in owned]


def dirichlet(
    labels: IntArray,
    num_classes: int,
    num_owners: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    min_size: int = 10,
    balanced: bool = False,
) -> list[IntArray]:
    """Return each owner's examples, class by class, in proportions p ~ Dir(alpha) (FedMLP's DDA).

    Per class k the shuffled examples are cut at ``int(cumsum(p) * n_k)``. Everything is redrawn
    until each owner has ``min_size`` examples, up to 1000 times; then examples move from the
    largest owners. With ``balanced``, p_j becomes 0 once owner j holds n / O examples
    (``clients_then_chunk``).

    Raises:
        ConfigError: there are not enough examples for all owners.
    """
    sizes = np.bincount(labels, minlength=num_classes)

    def draw() -> IntArray:
        if not balanced:
            return dirichlet_counts(sizes, num_owners, alpha, rng)
        return counts_of(balanced_proportions(sizes, num_owners, alpha, rng), sizes)

    return hand_out(labels, drawn_until(draw, min_size), rng)


def counts_of(proportions: np.ndarray, class_sizes: IntArray) -> IntArray:
    """Return the counts (O, K) that proportions (K, O) make of classes of these sizes."""
    rows = [class_cuts(p, int(n)) for p, n in zip(proportions, class_sizes, strict=True)]
    return np.stack(rows, axis=1)


def pachinko_counts(
    class_sizes: IntArray,
    coarse: IntArray,
    num_owners: int,
    alpha: float,
    fine_alpha: float,
    rng: np.random.Generator,
) -> IntArray:
    """Draw each owner's examples down the class tree, without replacement (Pachinko, TFF).

    An owner draws coarse proportions ~ Dir(alpha) and within each coarse class fine ones ~
    Dir(fine_alpha), then n / O examples one by one, the first ``n mod O`` owners one more; an
    exhausted class is drawn no more. Returns the counts (O, K).
    """
    left = class_sizes.astype(np.int64).copy()
    members = [np.flatnonzero(coarse == c) for c in range(int(coarse.max()) + 1)]
    counts = np.zeros((num_owners, len(left)), dtype=np.int64)
    coarse_left = np.array([left[fine].sum() for fine in members])
    base, extra = divmod(int(left.sum()), num_owners)
    for owner in range(num_owners):
        p = rng.dirichlet(np.full(len(members), alpha))
        q = [rng.dirichlet(np.full(len(fine), fine_alpha)) for fine in members]
        for _ in range(base + (owner < extra)):
            c = _drawn(p, coarse_left > 0, rng)
            k = members[c][_drawn(q[c], left[members[c]] > 0, rng)]
            left[k] -= 1
            coarse_left[c] -= 1
            counts[owner, k] += 1
    return counts


def _drawn(weights: np.ndarray, possible: np.ndarray, rng: np.random.Generator) -> int:
    """Draw a possible index by weight; uniformly where their weights underflowed to 0."""
    weights = weights * possible
    if weights.sum() <= 0:
        weights = possible.astype(np.float64)
    cumulated = np.cumsum(weights)
    return int(np.searchsorted(cumulated, rng.random() * cumulated[-1], side="right"))
