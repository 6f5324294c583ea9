"""Numbers that may stand for missing ones, such as -999: far from all others, and repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT = 4
"""Least and greatest values of a column that are counted."""
FAR, TIMES = 10.0, 3
"""A stand-in is so many ranges of the other values away from them, and occurs so often."""
USUAL_FAR, USUAL_TIMES = 1.0, 2
"""Likewise for the usual ones."""
USUAL = frozenset(
    sign * number for number in (999, 9999, 99999, 999999, 32767, 32768) for sign in (1, -1)
)
"""What people and devices write most in place of a missing number."""


@dataclass
class Extremes:
    """The least and the greatest values of a column, and how often each occurs."""

    counts: Counter[float] = field(default_factory=Counter)
    """How often values occur: exact for the extremes; others may be among them, counted in part."""
    size: int = 0

    def add(self, values: NDArray[Any]) -> None:
        """Take in some finite values (n,)."""
        self.size += len(values)
        found = dict[float, int]()
        for extreme_of, beyond in ((np.min, np.greater), (np.max, np.less)):
            left = values
            for _ in range(KEPT):
                if len(left):
                    extreme = extreme_of(left)
                    inner = left[beyond(left, extreme)]
                    found[float(extreme)] = len(left) - len(inner)
                    left = inner
        self.counts.update(found)

    def join(self, other: Extremes) -> None:
        """Take in the values of another column, which is the same of another client."""
        self.counts.update(other.counts)
        self.size += other.size

    def stand_ins(self) -> Iterator[tuple[float, int]]:
        """Yield each value that may stand for missing ones, and how often it occurs."""
        known = sorted(self.counts)
        while len(known) > 1:
            for value, near, rest in ((known[0], known[1], known[1:]),
                                      (known[-1], known[-2], known[:-1])):  # fmt: skip
                if self._stands_out(value, abs(value - near), rest[-1] - rest[0]):
                    yield value, self.counts[value]
                    known = rest
                    break
            else:
                return

    def _stands_out(self, value: float, gap: float, spread: float) -> bool:
        """Tell whether the least or the greatest value may be a stand-in.

        The gap is between it and the nearest other value; the others have a spread.
        """
        count = self.counts[value]
        if value in USUAL:
            return count >= USUAL_TIMES and gap > USUAL_FAR * spread
        return TIMES <= count < self.size / 2 and gap > FAR * spread > 0
