"""The long tail of Cao et al., Learning Imbalanced Datasets with LDAM, NeurIPS 2019, section 5."""

from __future__ import annotations

import numpy as np

from fedcli.data.arrays import IntArray


def long_tail_counts(n_max: int, num_classes: int, gamma: float) -> IntArray:
    """Return how many examples (K,) each class keeps, ``int(n_max * gamma ** (k / (K - 1)))``.

    Class 0 is the most frequent one; gamma lies in (0, 1]. For ``long_tail_counts(5000, 10, 0.5)``
    these are 5000 4629 4286 3968 3674 3401 3149 2916 2700 2500.
    """
    last = max(num_classes - 1, 1)
    counts = [int(n_max * gamma ** (k / last)) for k in range(num_classes)]
    return np.array(counts, dtype=np.int64)


def keep_per_class(labels: IntArray, counts: IntArray, rng: np.random.Generator) -> IntArray:
    """Return the indices of ``counts[k]`` random examples of each class k, in ascending order.

    A class with fewer examples keeps all it has.
    """
    kept = [rng.permutation(np.flatnonzero(labels == k))[:count] for k, count in enumerate(counts)]
    return np.sort(np.concatenate(kept)).astype(np.int64)


def long_tail(
    labels: IntArray, num_classes: int, gamma: float, rng: np.random.Generator
) -> IntArray:
    """Return the indices, ascending, that remain after the tail is cut; all of them for gamma 1.

    ``n_max`` is the mean class size, rounded down, clipped to the size of each class.
    """
    if gamma == 1:
        return np.arange(len(labels), dtype=np.int64)
    counts = long_tail_counts(len(labels) // num_classes, num_classes, gamma)
    return keep_per_class(labels, counts, rng)
