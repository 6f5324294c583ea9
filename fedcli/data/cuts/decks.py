"""Examples dealt from decks that are shuffled anew when they run out, to any number of clients."""

from __future__ import annotations

import numpy as np

from fedcli.data.arrays import IntArray


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
    """Deal each pair about equally many examples of each of its classes.

    Seven examples of the classes 2 and 5 are four of class 2 and three of class 5.

    Args:
        labels: (n,) class of each example.
        rows: (U, C) the different classes of each pair.
        size: examples of each pair.
        rng: shuffles the decks, one for each class.

    Returns:
        For each pair the indices of its examples, ascending; no index twice in one of them.
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
