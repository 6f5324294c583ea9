"""Rules that take each coordinate by itself: the median, the trimmed mean, and Bulyan's last step.

Rows (n, c) are sorted by a network of minima and maxima of whole rows (Batcher's odd-even merge
sort), which takes a fraction of the time of sorting column by column. Of many rows the sort of
NumPy is the faster one.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from fedmodels.reductions.rows import Numbers

MAX_IN_NETWORK = 100
"""Rows up to which the network is faster."""


def median(rows: Numbers) -> tuple[Numbers, Numbers]:
    """Return the median (c,) of each column, and at how many columns each row was kept (n,).

    Of an even number of rows it is the mean of the two in the middle.
    """
    middle = (len(rows) - 1) // 2, len(rows) // 2
    return _mean_between(rows, *middle)


def trimmed_mean(rows: Numbers, trimmed: int) -> tuple[Numbers, Numbers]:
    """Return the mean (c,) of each column without its largest and smallest numbers.

    The second item is at how many columns each row was kept (n,).

    Args:
        rows: (n, c).
        trimmed: how many are left out at each end; fewer than half.
    """
    return _mean_between(rows, trimmed, len(rows) - 1 - trimmed)


def mean_near_median(rows: Numbers, kept: int) -> tuple[Numbers, Numbers]:
    """Return the mean (c,) of the ``kept`` numbers of each column that are nearest to its median.

    Of two numbers that are equally near, the smaller one is kept. The second item is at how many
    columns each row was kept (n,).
    """
    count = len(rows)
    ordered = np.stack(_sorted(rows, tuple(range(count)))).astype(np.float64)
    centre = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    starts = count - kept + 1
    far = np.maximum(centre - ordered[:starts], ordered[kept - 1 :] - centre)
    first = far.argmin(0)  # (c,)
    total = np.zeros(rows.shape[1])
    for number, row in enumerate(ordered):
        total += np.where((number >= first) & (number < first + kept), row, 0.0)
    columns = np.arange(rows.shape[1])
    low, high = ordered[first, columns], ordered[first + kept - 1, columns]
    return total / kept, _kept(rows, low, high)


def _mean_between(rows: Numbers, first: int, last: int) -> tuple[Numbers, Numbers]:
    """Return the mean (c,) of the sorted rows from first to last, and how often each was kept."""
    ordered = _sorted(rows, tuple(range(first, last + 1)))
    total = np.zeros(rows.shape[1])
    for row in ordered[first : last + 1]:
        total += row
    return total / (last + 1 - first), _kept(rows, ordered[first], ordered[last])


def _kept(rows: Numbers, low: Numbers, high: Numbers) -> Numbers:
    """Return at how many columns each row lies between two others."""
    found = [np.count_nonzero((row >= low) & (row <= high)) for row in rows]
    return np.array(found, np.float64)


def _sorted(rows: Numbers, wanted: tuple[int, ...]) -> list[Numbers]:
    """Return the rows of the matrix whose columns are sorted; only the wanted rows are right."""
    if len(rows) > MAX_IN_NETWORK:
        return list(np.sort(rows, axis=0))
    ordered, spare = list(rows.copy()), np.empty(rows.shape[1], rows.dtype)
    for i, j in _comparators(len(rows), wanted):
        low, high = ordered[i], ordered[j]
        np.minimum(low, high, out=spare)
        np.maximum(low, high, out=high)
        ordered[i], spare = spare, low
    return ordered


@lru_cache(maxsize=256)
def _comparators(count: int, wanted: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the comparators of Batcher's network that the wanted rows depend on, in order."""
    found, p = list[tuple[int, int]](), 1
    while p < count:
        k = p
        while k >= 1:
            for j in range(k % p, count - k, 2 * k):
                for i in range(j, j + min(k, count - j - k)):
                    if i // (2 * p) == (i + k) // (2 * p):
                        found.append((i, i + k))
            k //= 2
        p *= 2
    needed, kept = {*wanted}, list[tuple[int, int]]()
    for i, j in reversed(found):
        if i in needed or j in needed:
            needed |= {i, j}
            kept.append((i, j))
    return kept[::-1]
