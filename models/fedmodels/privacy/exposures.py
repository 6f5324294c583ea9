"""Which examples took part in which trainings, and what that costs the most exposed one.

An example is a key of 64 bits. Its history says how many releases of each kind it was in. Examples
of one history are counted together. So the work grows with the number of histories, and not with
pairs of examples or of tasks.

Shapes: N examples that are known, n examples of one training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmodels.privacy.accounting import GaussianReleases, epsilon_of, renyi_epsilon_of

Keys = NDArray[np.uint64]
"""Keys of examples, ascending and each once (n,)."""
Kind = tuple[float, float]
"""Noise multiplier and rate of a release."""
History = tuple[tuple[Kind, int], ...]
"""How many releases of each kind an example was in, by ascending kind."""
MAX_KINDS = 16
"""Kinds of releases that the accountant is given, for each noise multiplier."""
MAX_COMPARED = 256
"""Histories of which each is looked at. More of them are taken for one that holds all of theirs."""
MAX_EXACT = 4
"""Histories whose cost is found by the slower accountant; a coarser bound of the others counts."""


def with_releases(history: History, releases: Iterable[GaussianReleases]) -> History:
    """Return the history of an example that was in some releases more."""
    found = dict(history)
    for one in releases:
        kind = one.noise, one.rate
        found[kind] = found.get(kind, 0) + one.times
    return tuple(sorted(found.items()))


def largest(histories: Iterable[History]) -> list[History]:
    """Return the histories that no other one holds; one that holds all where they are many."""
    known = {*histories}
    kinds = sorted({kind for history in known for kind, _ in history})
    times = np.array(
        [[dict(history).get(kind, 0) for kind in kinds] for history in known], dtype=np.int64
    ).reshape(len(known), len(kinds))
    front = np.empty((0, len(kinds)), dtype=np.int64)
    for row in times[np.argsort(-times.sum(1), kind="stable")]:  # what holds another is longer
        if not (row <= front).all(1).any():
            front = np.concatenate([front, row[None]])
    if len(front) > MAX_COMPARED:
        front = front.max(0)[None]
    return [tuple((kind, int(n)) for kind, n in zip(kinds, row, strict=True) if n) for row in front]


def epsilon_of_histories(histories: Iterable[History], delta: float) -> float:
    """Return the largest epsilon of some histories, at this delta.

    It is never less than that; of many histories that cost about the same, it is the coarser bound.
    """
    found = (coarse(history) for history in largest(histories))
    each = (tuple(GaussianReleases(z, n, q) for (z, q), n in history) for history in found)
    bounds = sorted(((renyi_epsilon_of(one, delta), one) for one in each), reverse=True)
    most = 0.0
    for number, (bound, releases) in enumerate(bounds):
        if bound <= most:
            break  # no other one costs more
        if number == MAX_EXACT:
            return bound
        most = max(most, epsilon_of(releases, delta))
    return most


def coarse(history: History) -> History:
    """Return a history of few kinds that costs no less: rates are rounded up to few of them.

    The accountant takes its time for each kind, and a file that grows has another rate each month.
    """
    if len(history) <= MAX_KINDS:
        return history
    low = min(q for (_, q), _ in history)
    step = (max(q for (_, q), _ in history) / low) ** (1 / (MAX_KINDS - 1))
    found: dict[Kind, int] = {}
    for (noise, rate), times in history:
        place = math.ceil(math.log(rate / low, step) - 1e-9) if step > 1 else 0
        kind = noise, min(1.0, low * step**place)
        found[kind] = found.get(kind, 0) + times
    return tuple(sorted(found.items()))


def joined(parts: Sequence[Sequence[History]]) -> list[History]:
    """Return what an example may have been in that is one of each part; nobody knows which."""
    found: list[History] = [()]
    for histories in parts:
        if len(found) * len(histories) > MAX_COMPARED:
            found, histories = [_all_of(found)], [_all_of(histories)]
        found = [_sum(one, other) for one in found for other in histories] or found
    return found


def _sum(one: History, other: History) -> History:
    return with_releases(one, (GaussianReleases(z, n, q) for (z, q), n in other))


def _all_of(histories: Sequence[History]) -> History:
    """Return the history that holds all of these."""
    most: dict[Kind, int] = {}
    for history in histories:
        most |= {kind: max(n, most.get(kind, 0)) for kind, n in history}
    return tuple(sorted(most.items()))


class Exposures:
    """The history of each example."""

    def __init__(self) -> None:
        """Know no example."""
        self._keys: Keys = np.empty(0, dtype=np.uint64)
        self._places = np.empty(0, dtype=np.int64)
        """The history of each example, by its place in the list of histories (N,)."""
        self._histories: list[History] = [()]
        self._known: dict[History, int] = {(): 0}
        self._counts = np.zeros(1, dtype=np.int64)
        """How many examples have each history."""

    def __len__(self) -> int:
        """Return how many examples are known."""
        return len(self._keys)

    def histories(
        self, keys: Keys | None = None, releases: Sequence[GaussianReleases] = ()
    ) -> list[History]:
        """Return the histories that occur, as if the examples of keys were in some releases more.

        Nothing changes.
        """
        taking, new = np.zeros_like(self._counts), 0
        if keys is not None:
            at, is_known = self._find(keys)
            new = int((~is_known).sum())
            taking = np.bincount(self._places[at[is_known]], minlength=len(self._counts))
        staying = [self._histories[place] for place in np.flatnonzero(self._counts - taking)]
        before = [self._histories[place] for place in np.flatnonzero(taking)]
        before += [()] if new and () not in before else []
        return [*staying, *(with_releases(history, releases) for history in before)]

    def learn(self, keys: Keys) -> None:
        """Know of examples, which were in nothing yet unless they are known."""
        at, is_known = self._find(keys)
        if is_known.all():
            return
        self._keys = np.insert(self._keys, at[~is_known], keys[~is_known])
        self._places = np.insert(self._places, at[~is_known], 0)
        self._counts[0] += int((~is_known).sum())

    def add(self, keys: Keys, releases: Sequence[GaussianReleases]) -> None:
        """Let the examples of keys be in some releases more."""
        self.learn(keys)
        at, _ = self._find(keys)
        taking = np.bincount(self._places[at], minlength=len(self._counts))
        after = np.zeros_like(taking)
        for place in np.flatnonzero(taking):
            after[place] = self._place(with_releases(self._histories[place], releases))
        self._places[at] = after[self._places[at]]
        self._counts[: len(taking)] -= taking
        np.add.at(self._counts, after[taking > 0], taking[taking > 0])

    def _place(self, history: History) -> int:
        if history not in self._known:
            self._known[history] = len(self._histories)
            self._histories.append(history)
            self._counts = np.append(self._counts, 0)
        return self._known[history]

    def _find(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return where keys are, or belong, and whether each is known (n,)."""
        at = np.searchsorted(self._keys, keys)
        if not len(self._keys):
            return at, np.zeros(len(keys), dtype=np.bool_)
        return at, self._keys[np.minimum(at, len(self._keys) - 1)] == keys
