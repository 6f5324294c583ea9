"""Which examples are for testing where the data have no test part of their own: the last ones.

Natural clients, each a subject with a device, are split along time (FedAli §5.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray
from fedcli.data.cuts.cut_input import rng_of
from fedmodels.errors import ConfigError

SHARE = 0.2
"""Part for testing unless a config says another."""
FEW = 10
"""Examples below which what has one value, such as a month, is no task by itself."""


def last_of_each(keys: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Tell which examples are for testing (n,): the last of each key, one at least of two or more.

    Examples of one key (n,) stand in the order of time.
    """
    test = np.zeros(len(keys), dtype=bool)
    _, sizes = np.unique(keys, return_counts=True)
    for places in np.split(np.argsort(keys, kind="stable"), np.cumsum(sizes)[:-1]):
        count = min(max(round(share * len(places)), 1), len(places) - 1)
        test[places[len(places) - count :]] = True
    return test


def last_groups(owners: IntArray, groups: IntArray, share: float) -> NDArray[np.bool_]:
    """Tell which examples are for testing (n,): the last groups of each owner, as wholes.

    Groups are numbered in their order; the last ones reach ``share`` together if they can. An owner
    of several groups has one at least for testing, and one at least for training.
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


def drawn_of_each(keys: NDArray[Any], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Tell which examples are for testing (n,): some of each key, one at least of two or more."""
    order = rng.permutation(len(keys))
    test = np.zeros(len(keys), dtype=bool)
    test[order] = last_of_each(keys[order], share)
    return test


def drawn_groups(
    labels: IntArray, groups: IntArray, share: float, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Tell which examples are for testing (n,): whole groups, about a share of each class.

    Groups come in an order that is drawn. A group is for testing where the number of test examples
    of each class comes nearer to the share by it, in squared distance. Of two groups or more one is
    for testing, and one for training.
    """
    _, owners = np.unique(groups, return_inverse=True)
    held = np.zeros((int(owners.max(initial=-1)) + 1, int(labels.max(initial=-1)) + 1))
    np.add.at(held, (owners, labels), 1)
    wanted, chosen = share * held.sum(0), np.zeros(len(held), dtype=bool)
    order = rng.permutation(len(held))
    for group in order:
        with_it = wanted - held[group]
        if with_it @ with_it < wanted @ wanted:
            chosen[group], wanted = True, with_it
    if len(held) > 1 and not chosen.any():
        chosen[order[held[order].sum(1).argmin()]] = True
    if len(held) and chosen.all():
        chosen[order[held[order].sum(1).argmin()]] = False
    found: NDArray[np.bool_] = chosen[owners]
    return found


@dataclass(frozen=True)
class Put:
    """In which part groups are already, as an earlier task of their owner put them there."""

    parts: IntArray  # (G,) of each group by its number: 1 for testing, 0 for training, -1 if new
    groups: int = 0
    """How many groups the owner has in all, also others than these."""
    tested: int = 0
    """How many of these are for testing."""


def dealt_groups(
    owners: IntArray,
    tasks: IntArray,
    labels: IntArray,
    groups: IntArray,
    share: float,
    rng: np.random.Generator | None,
    put: Put | None,
) -> NDArray[np.bool_]:
    """Tell which examples are for testing (n,): whole groups, of which each stays where it is.

    A group that an owner has in several tasks is dealt in the first of them. New ones are dealt as
    :func:`last_groups` does, or :func:`drawn_groups` where ``rng`` draws.

    Args:
        owners: (n,) from 0 on; likewise tasks, labels and groups.
        tasks: (n,) task of each example.
        labels: (n,) class of each example.
        groups: (n,) numbered in their order.
        share: part that is for testing.
        rng: draws groups.
        put: which groups are in a part already.
    """
    test, before = np.zeros(len(owners), dtype=bool), put or Put(np.zeros(0, dtype=np.int64))
    for owner in np.unique(owners):
        most = max(int(groups.max(initial=-1)) + 1, len(before.parts))
        known = np.full(most, -1, dtype=np.int64)
        known[: len(before.parts)] = before.parts
        for task in np.unique(tasks[owners == owner]):
            mine = np.flatnonzero((owners == owner) & (tasks == task))
            there = known[groups[mine]]
            new, trains = mine[there < 0], bool((there == 0).any())
            test[mine[there == 1]] = True
            test[new] = _dealt(labels[new], groups[new], share, rng, before, trains=trains)
            known[groups[new]] = test[new]
    return test


def _dealt(
    labels: IntArray,
    groups: IntArray,
    share: float,
    rng: np.random.Generator | None,
    before: Put,
    *,
    trains: bool,
) -> NDArray[np.bool_]:
    """Tell which examples of new groups (n,) are for testing.

    Where an owner has groups already, so many are that all of them together come to the share, as
    one or two new ones have no fifth. ``trains`` tells whether others of the task are trained on.
    """
    count = len(np.unique(groups))
    if before.groups and count:
        owed = share * (before.groups + count) - before.tested
        if owed < 0.5 or (count == 1 and not trains):
            return np.zeros(len(groups), dtype=bool)
        if count == 1:
            return np.ones(len(groups), dtype=bool)
        share = min(owed / count, 1.0)
    if rng is None:
        return last_groups(np.zeros_like(groups), groups, share)
    return drawn_groups(labels, groups, share, rng)


def tasks_in_order(
    owners: IntArray, tasks: Sequence[int], wholes: IntArray | None = None
) -> IntArray:
    """Return the task of each example (n,): an owner's are cut in as many pieces as it has tasks.

    Examples stand in the order of time. A group is of the task in which it begins.

    Args:
        owners: (n,) from 0 on.
        tasks: of each owner; one task where the list ends.
        wholes: (n,) group of each example, where groups stay whole.
    """
    found = np.zeros(len(owners), dtype=np.int64)
    for owner, count in enumerate(tasks):
        mine = np.flatnonzero(owners == owner)
        pieces = [np.full(len(p), m) for m, p in enumerate(np.array_split(mine, count))]
        task = np.concatenate(pieces).astype(np.int64)
        if wholes is not None and len(mine):
            _, first, group = np.unique(wholes[mine], return_index=True, return_inverse=True)
            task = task[first][group]
        found[mine] = task
    return found


def tasks_by_value(
    owners: IntArray, values: NDArray[np.str_], wholes: IntArray | None = None, least: int = FEW
) -> tuple[IntArray, dict[int, list[tuple[str, int]]]]:
    """Return the task of each example (n,), and of each owner the name and size of each task.

    A task is what has one value, such as a month; an owner's are numbered in the order in which
    they begin. A group is of the task in which it begins. A task with fewer than ``least`` examples
    goes with the one after it, the last one with the one before.

    Args:
        owners: (n,) from 0 on. Examples stand in the order of time.
        values: (n,) likewise.
        wholes: (n,) group of each example, where groups stay whole.
        least: examples of a task.
    """
    found, named = np.zeros(len(owners), dtype=np.int64), dict[int, list[tuple[str, int]]]()
    for owner in np.unique(owners).tolist():
        mine = np.flatnonzero(owners == owner)
        names, first, code = np.unique(values[mine], return_index=True, return_inverse=True)
        if wholes is not None:
            _, begin, group = np.unique(wholes[mine], return_index=True, return_inverse=True)
            code = code[begin][group]
        pieces = list[tuple[list[int], int]]()  # values of a task, and its examples
        for value in np.argsort(first).tolist():
            size = int((code == value).sum())
            if not size:  # its groups began earlier
                continue
            if pieces and pieces[-1][1] < least:
                pieces[-1] = ([*pieces[-1][0], value], pieces[-1][1] + size)
            else:
                pieces.append(([value], size))
        if len(pieces) > 1 and pieces[-1][1] < least:
            last, size = pieces.pop()
            pieces[-1] = ([*pieces[-1][0], *last], pieces[-1][1] + size)
        for task, (members, _) in enumerate(pieces):
            found[mine[np.isin(code, members)]] = task
        named[owner] = [(" and ".join(names[some].tolist()), size) for some, size in pieces]
    return found, named


def held_out(
    owners: IntArray,
    tasks: IntArray,
    labels: IntArray,
    share: float,
    wholes: IntArray | None = None,
    seed: int | None = None,
    put: Put | None = None,
) -> NDArray[np.bool_]:
    """Tell which examples are for testing (n,): a share of each owner and task.

    These are the last ones of each class, or the last groups. With a seed they are drawn. A group
    stays in its part over all tasks of its owner.

    Args:
        owners: (n,) from 0 on; likewise tasks and labels.
        tasks: (n,) task of each example.
        labels: (n,) class of each example.
        share: part that is for testing.
        wholes: (n,) groups that stay whole, numbered in their order.
        seed: draws the examples or groups.
        put: in which part groups are already.
    """
    rng = None if seed is None else rng_of(seed, "test part")
    if wholes is not None:
        return dealt_groups(owners, tasks, labels, wholes, share, rng, put)
    pairs = owners * (int(tasks.max(initial=0)) + 1) + tasks
    keys = pairs * (int(labels.max(initial=0)) + 1) + labels
    return last_of_each(keys, share) if rng is None else drawn_of_each(keys, share, rng)


def near_tests(
    owners: IntArray, places: IntArray, test: NDArray[np.bool_], reach: int
) -> NDArray[np.bool_]:
    """Tell which training examples (n,) begin less than ``reach`` rows from one for testing.

    Args:
        owners: (n,) examples of others are never near.
        places: (n,) first row of each example, in the order of the recordings.
        test: (n,) whether an example is for testing.
        reach: rows of an example, and of the gap beside it.
    """
    apart = int(places.max(initial=0)) + reach + 1
    rows = owners * apart + places
    held = np.sort(rows[test])
    ends = np.array([-reach, *held, rows.max(initial=0) + reach])  # nobody is near the first, last
    after = np.searchsorted(held, rows) + 1
    near = np.minimum(ends[after] - rows, rows - ends[after - 1]) < reach
    found: NDArray[np.bool_] = ~test & near
    return found


# --- along time -----------------------------------------------------------------------------------


FOLDS = 10


def stratified_folds(labels: IntArray, num_folds: int = FOLDS) -> IntArray:
    """Return the fold (n,) of each example: stratified by class, contiguous within each class.

    Examples are in recording order. The folds are those of scikit-learn's
    ``StratifiedKFold(num_folds, shuffle=False)``, which FedAli's code uses, but classes smaller
    than ``num_folds`` are no error.
    """
    classes, first, coded = np.unique(labels, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))  # classes in order of appearance
    ordered = np.sort(ranks[coded])
    sizes = np.array(
        [np.bincount(ordered[f::num_folds], minlength=len(classes)) for f in range(num_folds)]
    )
    folds = np.empty(len(labels), dtype=np.int64)
    for k, rank in enumerate(ranks):
        folds[labels == classes[k]] = np.repeat(np.arange(num_folds), sizes[:, rank])
    return folds


def natural_clients(groups: IntArray, num_clients: int) -> list[IntArray]:
    """Return the examples of the first ``num_clients`` groups, in recording order.

    Raises:
        ConfigError: there are fewer groups than clients.
    """
    ids = np.unique(groups)
    if num_clients > len(ids):
        raise ConfigError(
            f"[schedule] clients = {num_clients}, but the data set has {len(ids)} natural clients"
        )
    return [np.flatnonzero(groups == g).astype(np.int64) for g in ids[:num_clients]]


def split_along_time(
    indices: IntArray, labels: IntArray, train_folds: int
) -> tuple[IntArray, IntArray]:
    """Split one client's examples: the first ``train_folds`` of ten folds of each class train.

    Indices are in recording order; labels (n,) are those of the whole data set. Overlapping windows
    at the border of two folds leak a little into the test part.
    """
    folds = stratified_folds(labels[indices])
    return indices[folds < train_folds], indices[folds >= train_folds]
