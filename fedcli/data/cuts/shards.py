"""Label shards: GLDP's [N, S, M] (after FedRep) and FedMLP's sharding (after McMahan et al.).

Below them: hands dealt from decks, which are shuffled anew when they run out, to any number of
clients.

Shapes: n examples, K classes, U pairs (client, task) numbered client by client, S shards a pair.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from fedcli.data.arrays import IntArray
from fedmodels.errors import ConfigError

log = logging.getLogger(__name__)


def shard_sizes(num_examples: int, num_shards: int) -> IntArray:
    """Return the sizes of shards that differ by one at most: 7 in 3 shards is 3, 2, 2."""
    size, extra = divmod(num_examples, num_shards)
    return np.array([size + (j < extra) for j in range(num_shards)], dtype=np.int64)


def label_rows(
    num_classes: int,
    num_pairs: int,
    shards: int,
    rng: np.random.Generator,
    *,
    distinct_labels: bool = False,
) -> IntArray:
    """Deal one label per shard out: (U, S') int64, row u the classes of pair u.

    Each class gives ``int(S * U / K)`` shards. Every row gets equally many labels; labels that are
    left over are dropped, so S' = S where K divides S * U. With ``distinct_labels``, labels are
    swapped between rows until no row holds one twice.

    Raises:
        ConfigError: there are too few shards for every class or pair to have one, or labels cannot
            be dealt out without a row that repeats one.
    """
    per_class = shards * num_pairs // num_classes
    width = per_class * num_classes // num_pairs
    if width < 1:
        raise ConfigError(
            f"[scenario] {shards * num_pairs} label shards cannot be cut evenly from {num_classes} "
            f"classes for {num_pairs} (client, task) pairs: raise shards"
        )
    if width != shards:
        log.warning(
            "%d classes do not divide %d label shards: each (client, task) gets %d, not %d",
            num_classes,
            shards * num_pairs,
            width,
            shards,
        )
    labels = rng.permutation(np.repeat(np.arange(num_classes), per_class))
    rows = labels[: num_pairs * width].reshape(num_pairs, width)
    return _without_repeats(rows, num_classes, rng) if distinct_labels else rows


def _without_repeats(rows: IntArray, num_classes: int, rng: np.random.Generator) -> IntArray:
    """Swap labels between rows until no row holds one twice; the labels as a whole stay."""
    num_pairs, width = rows.shape
    if width > num_classes:
        raise ConfigError(f"[scenario] {width} distinct labels do not exist: shards is too large")
    rows = rows.copy()
    for _ in range(100 * rows.size):
        repeat = _first_repeat(rows)
        if repeat is None:
            return rows
        u, j = repeat
        # a label that row u lacks, in a row that lacks the repeated label
        fits = ~np.isin(rows, rows[u]) & ~(rows == rows[u, j]).any(axis=1, keepdims=True)
        spots = np.argwhere(fits)
        v, i = spots[rng.integers(len(spots))] if len(spots) else (rng.integers(num_pairs), 0)
        rows[u, j], rows[v, i] = rows[v, i], rows[u, j]
    raise ConfigError("[scenario] distinct_labels: no way was found to deal the labels out")


def _first_repeat(rows: IntArray) -> tuple[int, int] | None:
    """Return the place (row, column) of a label that its row holds a second time."""
    for u, row in enumerate(rows):
        _, first = np.unique(row, return_index=True)
        if len(first) < len(row):
            return u, int(np.setdiff1d(np.arange(len(row)), first)[0])
    return None


def per_class_shards(
    labels: IntArray,
    num_classes: int,
    num_pairs: int,
    shards: int,
    rng: np.random.Generator,
    *,
    rows: IntArray | None = None,
    distinct_labels: bool = False,
) -> tuple[list[IntArray], IntArray]:
    """Cut every class into equally many shards and deal them out: GLDP's [N, S, M], U = N * M.

    Every class gives ``int(S * U / K)`` shards, whose sizes differ by one at most. For each label
    of its row, pair u takes one unused random shard of that class. CIFAR-10 with [20, 4, 5] or
    [100, 4, 1]: 40 shards of 125 per class, 500 examples a pair. A test set is given the rows (U,
    S') of its training set.

    Returns:
        For each pair the indices of its examples, ascending, and the rows (U, S').

    Raises:
        ConfigError: see :func:`label_rows`.
    """
    if rows is None:
        rows = label_rows(num_classes, num_pairs, shards, rng, distinct_labels=distinct_labels)
    per_class = shards * num_pairs // num_classes
    pieces: list[list[IntArray]] = []
    for k in range(num_classes):
        members = rng.permutation(np.flatnonzero(labels == k))
        cuts = np.cumsum(shard_sizes(len(members), per_class))[:-1]
        cut = np.split(members, cuts)
        pieces.append([cut[j] for j in rng.permutation(per_class)])
    return [_joined([pieces[k].pop() for k in row]) for row in rows], rows


def label_shards(
    labels: IntArray,
    num_pairs: int,
    shards: int,
    rng: np.random.Generator | None = None,
    *,
    order: Sequence[int] | IntArray | None = None,
) -> list[IntArray]:
    """Cut the label-sorted examples into U * S equal shards, and give each pair S random ones.

    Shards may straddle two classes and differ in size by one; nothing is dropped (FedMLP). Labels 0
    0 0 0 0 1 1 1 1 2 2 2 for 3 pairs with 2 shards: [00][00][01][11][12][22]; the order (3, 0, 5,
    1, 4, 2), in place of a random one, gives the pairs {1, 1, 0, 0}, {2, 2, 0, 0} and {1, 2, 0, 1}.
    Returns the indices of each pair's examples, ascending.

    Raises:
        ConfigError: there are fewer examples than shards.
    """
    num_shards = num_pairs * shards
    if len(labels) < num_shards:
        raise ConfigError(
            f"[scenario] {len(labels)} examples cannot fill {num_shards} shards: "
            "use fewer clients, tasks or shards, or more data"
        )
    if order is None:
        if rng is None:
            raise ValueError("either rng or order must be given")
        order = rng.permutation(num_shards)
    pieces = np.array_split(np.argsort(labels, kind="stable"), num_shards)
    return [
        _joined([pieces[j] for j in order[u * shards : (u + 1) * shards]]) for u in range(num_pairs)
    ]


def _joined(pieces: list[IntArray]) -> IntArray:
    """Return the union of disjoint index arrays, ascending."""
    return np.sort(np.concatenate(pieces)).astype(np.int64)


# --- hands of decks -------------------------------------------------------------------------------


class Deck:
    """Cards in random order, dealt in hands; no hand holds a card twice.

    All cards are dealt before any is dealt again, so hands are disjoint while the cards last.
    """

    def __init__(self, cards: IntArray, rng: np.random.Generator) -> None:
        """Shuffle ``cards`` (n,); ``rng`` also shuffles them anew."""
        self._cards, self._rng = cards, rng
        self._left = rng.permutation(cards)

    def hand(self, size: int) -> IntArray:
        """Return ``size`` different cards, ascending; all cards where there are fewer."""
        size = min(size, len(self._cards))
        if size > len(self._left):
            fresh = self._rng.permutation(self._cards)
            in_hand = np.isin(fresh, self._left)
            self._left = np.concatenate([self._left, fresh[~in_hand], fresh[in_hand]])
        hand, self._left = self._left[:size], self._left[size:]
        return np.sort(hand)


def drawn_hands(
    labels: IntArray, rows: IntArray, size: int, rng: np.random.Generator
) -> list[IntArray]:
    """Deal each pair about equally many examples of each of its classes, which are a row (U, C).

    Seven examples of the classes 2 and 5 are four of class 2 and three of class 5. Returns the
    indices of each pair's examples, ascending; no index twice in one of them.
    """
    decks = {int(k): Deck(np.flatnonzero(labels == k), rng) for k in np.unique(rows)}
    share, extra = divmod(size, rows.shape[1])
    return [
        np.sort(
            np.concatenate(
                [decks[int(k)].hand(share + (place < extra)) for place, k in enumerate(row)]
            )
        ).astype(np.int64)
        for row in rows
    ]


def class_rows(num_classes: int, num_pairs: int, width: int, rng: np.random.Generator) -> IntArray:
    """Return (U, C) int64: the different classes of each pair, all classes about equally often."""
    deck = Deck(np.arange(num_classes, dtype=np.int64), rng)
    return np.stack([rng.permutation(deck.hand(width)) for _ in range(num_pairs)])
