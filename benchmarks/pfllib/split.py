"""The splits of PFLlib's leaderboard of Fashion-MNIST, by its rule and seed.

PFLlib joins the 60,000 training and 10,000 test pictures, deals all out, and cuts each client's
rows into three quarters and one. numpy's legacy generator draws in the order of PFLlib's, so rows
and their order are the same. With ``share`` a client keeps the first of its rows: of n for
training, one of ``share``; of n for testing, one of four.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np

CLASSES, CLIENTS, SEED = 10, 20, 1
LEAST = 40
"""Rows of the smallest client: a batch of 10 in the quarter for testing."""
TESTS_KEPT = 4
"""With ``share``, a client keeps one test row of so many."""

Rows = np.ndarray[Any, np.dtype[Any]]
Dealt = list[tuple[Rows, Rows]]
"""By client, indices for training and for testing."""


def _read(part: str, kind: str, skip: int) -> Rows:
    place = Path(os.environ["FEDTIDE_DATA"], "FashionMNIST", "raw")
    with gzip.open(place / f"{part}-{kind}-ubyte.gz") as file:
        return np.frombuffer(file.read(), np.uint8, offset=skip)


def labels() -> Rows:
    """Return the classes of all 70,000 pictures, those for training first."""
    parts = [_read(part, "labels-idx1", 8) for part in ("train", "t10k")]
    return np.concatenate(parts).astype(np.int64)


def pictures() -> Rows:
    """Return all 70,000 pictures, (n, 1, 28, 28) uint8."""
    parts = [_read(part, "images-idx3", 16).reshape(-1, 1, 28, 28) for part in ("train", "t10k")]
    return np.concatenate(parts)


def practical(share: int = 1, y: Rows | None = None) -> Dealt:
    """Deal class by class by Dirichlet(0.1); who has a 20th of all rows gets no more classes."""
    y, rng = labels() if y is None else y, np.random.RandomState(SEED)
    fair = len(y) / CLIENTS
    while True:
        owned = [np.empty(0, np.int64) for _ in range(CLIENTS)]
        for label in range(CLASSES):
            rows = np.flatnonzero(y == label)
            rng.shuffle(rows)
            part = rng.dirichlet(np.full(CLIENTS, 0.1))
            part = part * [len(each) < fair for each in owned]
            borders = (np.cumsum(part / part.sum()) * len(rows)).astype(int)[:-1]
            owned = [np.append(a, b) for a, b in zip(owned, np.split(rows, borders), strict=True)]
        if min(map(len, owned)) >= LEAST:
            return _cut(rng, owned, share)


def pathological(share: int = 1, y: Rows | None = None) -> Dealt:
    """Deal two classes a client in order: clients 0 to 3 share 0 and 1, and so on, unequally."""
    y, rng = labels() if y is None else y, np.random.RandomState(SEED)
    owned, free = [np.empty(0, np.int64) for _ in range(CLIENTS)], [2] * CLIENTS
    for label in range(CLASSES):
        rows = np.flatnonzero(y == label)
        who = [client for client in range(CLIENTS) if free[client]][: CLIENTS * 2 // CLASSES]
        fair = len(rows) / len(who)
        sizes = rng.randint(max(fair / 10, LEAST / CLASSES), fair, len(who) - 1).tolist()
        for client, piece in zip(who, np.split(rows, np.cumsum(sizes)), strict=True):
            owned[client] = np.append(owned[client], piece)
            free[client] -= 1
    return _cut(rng, owned, share)


def _cut(rng: np.random.RandomState, owned: list[Rows], share: int) -> Dealt:
    """Cut each client's rows into parts for training and testing, and keep the first of them."""
    dealt = list[tuple[Rows, Rows]]()
    for rows in owned:
        tests = len(rows) - int(0.75 * len(rows))
        order = rng.permutation(len(rows))
        train, test = rows[order[tests:]], rows[order[:tests]]
        if share > 1:
            train = train[: max(min(20, len(train)), len(train) // share)]
            test = test[: max(min(10, len(test)), len(test) // TESTS_KEPT)]
        dealt.append((train, test))
    return dealt
