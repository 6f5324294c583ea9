"""What every way to cut starts from and ends in: labels and owners, and a partition of indices.

Pairs are (client, task), numbered client by client; K is the number of classes, U that of pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedcli.data.arrays import IntArray
from fedmodels.console.printable import printable
from fedmodels.facts.data_description import MAX_LETTERS


def rng_of(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return the generator of one purpose of the data side, the same in every process.

    Different purposes are independent, and so are further numbers, e.g. a client's id. Training
    draws from ``fedmodels/numerics/randomness.py``.
    """
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.default_rng(np.random.SeedSequence([seed, word, *ids]))


@dataclass(frozen=True)
class TaskIndices:
    """The examples of one task of one client."""

    train: IntArray  # (n,)
    test: IntArray  # (m,)


@dataclass(frozen=True)
class Partition:
    """Index arrays for every client and task, and for the global test set."""

    clients: tuple[tuple[TaskIndices, ...], ...]
    global_test: IntArray
    pooled: bool = False
    """Indices count through training examples followed by test examples, as one list."""
    zscore: Literal["none", "per_client_channel", "official"] = "none"
    """How inputs are normalised where the data set's own mean and deviation are not used."""
    names: tuple[str, ...] = ()
    """Names of natural clients, by number; empty where clients are not natural."""

    def name_of(self, client: int) -> str:
        """Return what a client announces as its name; empty where it has none."""
        return printable(self.names[client], MAX_LETTERS) if self.names else ""


@dataclass(frozen=True)
class CutInput:
    """What the partition of one run starts from."""

    train: IntArray  # labels (n,)
    test: IntArray  # labels (m,)
    num_classes: int
    tasks: list[int]  # of each client
    seed: int
    groups: IntArray | None  # (n + m,)
    coarse: IntArray | None  # (K,)
    has_own_parts: bool = False
    """Whether the owner of the data chose the test part."""
    overlapping: bool = False
    """Whether examples may share rows of a recording."""
    own_tasks: IntArray | None = None  # (n + m,)
    """Task of each example, where natural clients were cut along time as they were read."""
    domain: int = 0
    """Of the examples, where each domain is dealt out by itself: its draws are its own."""

    @property
    def num_pairs(self) -> int:
        """Number of pairs (client, task)."""
        return sum(self.tasks)

    @property
    def pooled_labels(self) -> IntArray:
        """Labels (n + m,) of training examples followed by test examples."""
        return np.concatenate([self.train, self.test])

    def rng(self, purpose: str, *ids: int) -> np.random.Generator:
        """Return the generator of one purpose of this run."""
        return rng_of(self.seed, purpose, *ids, *([self.domain] if self.domain else []))

    def by_client(self, train: list[IntArray], test: list[IntArray]) -> Partition:
        """Return the partition whose pairs, numbered client by client, hold these indices."""
        pairs = iter(zip(train, test, strict=True))
        clients = tuple(tuple(TaskIndices(*next(pairs)) for _ in range(m)) for m in self.tasks)
        return Partition(clients, np.arange(len(self.test), dtype=np.int64))

    def with_held_tests(self, train: list[IntArray]) -> Partition:
        """Return the partition whose test examples follow the classes of its training ones."""
        holds = class_table(self.train, train, self.num_classes) > 0
        return self.by_client(train, held_tests(self.test, holds, self.rng("test")))


def chunks(owned: Sequence[IntArray], tasks: list[int]) -> list[IntArray]:
    """Cut each client's indices in as many equal chunks as it has tasks; client by client."""
    return [
        piece
        for indices, num_tasks in zip(owned, tasks, strict=True)
        for piece in np.array_split(indices, num_tasks)
    ]


def class_table(labels: IntArray, owned: Sequence[IntArray], num_classes: int) -> IntArray:
    """Return (U, K) int64: how many examples of each class each index array holds."""
    rows = [np.bincount(labels[indices], minlength=num_classes) for indices in owned]
    return np.stack(rows).astype(np.int64)


def held_tests(
    labels: IntArray, holds: np.ndarray, rng: np.random.Generator | None = None
) -> list[IntArray]:
    """Deal test examples out to the pairs that train on their class (FedMLP's A_sel).

    Each of the h holders of class k gets ``floor(n_k / h)`` examples and the last one the rest: 10
    examples and 3 holders give 3, 3, 4. Examples of a class nobody holds are left out.

    Args:
        labels: (m,) class of each test example.
        holds: (U, K) bool, whether the pair has a training example of the class.
        rng: shuffles the examples; without it they keep their order.

    Returns:
        For each pair the indices of its test examples, ascending; disjoint.
    """
    pieces: list[list[IntArray]] = [[np.empty(0, np.int64)] for _ in holds]
    for k in range(holds.shape[1]):
        members = np.flatnonzero(labels == k)
        if rng is not None:
            members = rng.permutation(members)
        holders = np.flatnonzero(holds[:, k])
        for h, u in enumerate(holders):
            size = len(members) // len(holders)
            stop = len(members) if h == len(holders) - 1 else (h + 1) * size
            pieces[u].append(members[h * size : stop])
    return [np.sort(np.concatenate(p)).astype(np.int64) for p in pieces]
