"""Which examples are for testing where the data have no test part of their own: the last ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray

SHARE = 0.2
"""Part for testing unless a config says another."""


def last_of_each(keys: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Tell which examples are for testing: the last ones of each key, one at least of two or more.

    Args:
        keys: (n,) integers; examples of one key stand in the order of time.
        share: part for testing.
    """
    test = np.zeros(len(keys), dtype=bool)
    _, sizes = np.unique(keys, return_counts=True)
    for places in np.split(np.argsort(keys, kind="stable"), np.cumsum(sizes)[:-1]):
        count = min(max(round(share * len(places)), 1), len(places) - 1)
        test[places[len(places) - count :]] = True
    return test


def last_groups(owners: IntArray, groups: IntArray, share: float) -> NDArray[np.bool_]:
    """Tell which examples are for testing: the last groups of each owner, as wholes.

    An owner of several groups has one at least for testing, and one at least for training.

    Args:
        owners: (n,) whose each example is.
        groups: (n,) group of each example, numbered in their order.
        share: part for testing, which the last groups reach together if they can.
    """
    test = np.zeros(len(owners), dtype=bool)
    for owner in np.unique(owners):
        mine = owners == owner
        names, sizes = np.unique(groups[mine], return_counts=True)
        held = np.cumsum(sizes[::-1])[::-1]  # examples from this group to the last
        enough = np.flatnonzero(held >= share * sizes.sum())
        first = min(max(enough.max(initial=0), 1), len(names))
        test |= mine & np.isin(groups, names[first:])
    return test
