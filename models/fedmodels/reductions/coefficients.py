"""Rules and pre-steps that are sums of uploads: from inner products to what each upload counts.

Let x_i be the difference of upload i from what clients were given, and G (n, n) the inner products
of these differences. Distances between any sums of them follow from G, so that a rule is arithmetic
on a few numbers, and uploads are read twice: for G, and for the result
``given + sum_i a_i x_i``, of which the coefficients a (n,) are found here.

    krum, multi_krum   Blanchard et al., NeurIPS 2017
    bulyan             El Mhamdi et al., ICML 2018
    norm_clipped       Sun et al., Can You Really Backdoor Federated Learning?, 2019
    geometric_median   Pillutla et al., Robust Aggregation for Federated Learning, 2022
    centered_clipping  Karimireddy et al., Learning from History, ICML 2021
    nearest            Allouah et al., Fixing by Mixing, AISTATS 2023
    bucketing   Karimireddy et al., Byzantine-Robust Learning on Heterogeneous Data, ICLR 2022
"""

from __future__ import annotations

import numpy as np

from fedmodels.reductions.rows import Numbers

SMOOTHING = 1e-6
"""nu: distances below it count as it, so that an upload may be the geometric median itself."""


def distances(gram: Numbers) -> Numbers:
    """Return the squared distances (n, n) between rows; one that is not finite is infinite."""
    own = np.diag(gram)
    with np.errstate(invalid="ignore"):
        squared = np.maximum(own[:, None] + own[None, :] - 2 * gram, 0.0)
    found: Numbers = np.nan_to_num(squared, nan=np.inf, posinf=np.inf)
    np.fill_diagonal(found, 0.0)
    return found


def norm_clipped(gram: Numbers, norm: float | None, factor: float) -> Numbers:
    """Return the coefficients of the mean of clipped differences.

    Args:
        gram: G.
        norm: longer differences are scaled to this norm; None: to ``factor`` times the median norm.
        factor: the multiple.
    """
    return _clip(np.sqrt(np.diag(gram)), norm, factor) / len(gram)


def centered_clipping(gram: Numbers, norm: float | None, factor: float, iterations: int) -> Numbers:
    """Return the coefficients of v after ``iterations`` of v <- v + mean_i clip(x_i - v) from 0."""
    count = len(gram)
    v = np.zeros(count)
    for _ in range(iterations):
        clip = _clip(_lengths_from(gram, v), norm, factor) / count
        v = v * (1 - clip.sum()) + clip
    return v


def geometric_median(gram: Numbers, iterations: int, smoothing: float = SMOOTHING) -> Numbers:
    """Return the coefficients of z after ``iterations`` of smoothed Weiszfeld from z = 0.

    ``z <- sum_i b_i x_i / sum_i b_i`` with ``b_i = 1 / max(nu, |x_i - z|)``.
    """
    z = np.zeros(len(gram))
    for _ in range(iterations):
        b = 1 / np.maximum(_lengths_from(gram, z), smoothing)
        z = b / b.sum()
    return z


def _lengths_from(gram: Numbers, z: Numbers) -> Numbers:
    """Return |x_i - sum_j z_j x_j| (n,)."""
    squared = np.diag(gram) - 2 * gram @ z + z @ gram @ z
    found: Numbers = np.sqrt(np.maximum(np.nan_to_num(squared, nan=np.inf, posinf=np.inf), 0.0))
    return found


def _clip(lengths: Numbers, norm: float | None, factor: float) -> Numbers:
    """Return the factors (n,) that shorten lengths to the norm, or to a multiple of the median."""
    bound = factor * float(np.sort(lengths)[(len(lengths) - 1) // 2]) if norm is None else norm
    found: Numbers = np.where(
        lengths > bound, bound / np.maximum(lengths, np.finfo(float).tiny), 1.0
    )
    return found


def krum_scores(squared: Numbers, neighbours: int) -> Numbers:
    """Return the sum (n,) of each row's squared distances to its ``neighbours`` nearest others."""
    found: Numbers = np.sort(squared, axis=1)[:, 1 : 1 + neighbours].sum(axis=1)
    return found


def krum(squared: Numbers, attackers: int, chosen: int) -> list[int]:
    """Return the ``chosen`` rows with the lowest scores, ascending.

    Of rows with equal scores, such as two that are one another's nearest, those count first whose
    next neighbour is nearer, and then those that come first.
    """
    neighbours = max(1, len(squared) - attackers - 2)
    scores, more = (krum_scores(squared, n) for n in (neighbours, neighbours + 1))
    order = np.lexsort((more, scores))
    return sorted(order[:chosen].tolist())


def bulyan_selection(squared: Numbers, attackers: int) -> list[int]:
    """Return the n - 2 f rows that Krum chooses one after the other, each among those left."""
    left, chosen = list(range(len(squared))), list[int]()
    while len(chosen) < len(squared) - 2 * attackers:
        (first,) = krum(squared[np.ix_(left, left)], attackers, 1)
        chosen.append(left.pop(first))
    return sorted(chosen)


def nearest_mixing(squared: Numbers, attackers: int) -> Numbers:
    """Return the mixing (n, n) of each row with its nearest ones: the mean of n - f rows."""
    count = len(squared) - attackers
    found: Numbers = np.zeros(squared.shape)
    for row, order in zip(found, np.argsort(squared, axis=1, kind="stable"), strict=True):
        row[order[:count]] = 1 / count
    return found


def bucketing(count: int, size: int, seed: int) -> Numbers:
    """Return the mixing (m, n) of rows to the means of buckets; the seed deals the rows out."""
    order = np.random.default_rng(seed).permutation(count)
    buckets = [order[i : i + size] for i in range(0, count, size)]
    found: Numbers = np.zeros((len(buckets), count))
    for row, bucket in zip(found, buckets, strict=True):
        row[bucket] = 1 / len(bucket)
    return found
