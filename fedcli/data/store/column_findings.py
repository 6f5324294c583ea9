"""What may not be meant in a column of a table.

Numbers that stand for none, a running number, one that is far from all others, and a column that
tells the class by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.facts.data_description import ProblemFile, channel_axis

SHOWN = 5
"""Names that a line lists."""
MAX_LETTERS = 40
"""Letters of a name that a line has, at most."""
FEW = 20
"""Examples below which nothing counts as a running number, or as one that is far out."""
MANY_VALUES, OF_EACH = 64, 10
"""A column tells the class by itself with so many values at most, each met so often on average."""
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
    """The least and the greatest values of a column, and how often each occurs.

    Among them are numbers that may stand for missing ones, such as -999: far from all others, and
    repeated.
    """

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

    def far_out(self) -> tuple[list[float], float, float] | None:
        """Return values far from all others, and the least and greatest of these; None if none are.

        There are few of them, none is repeated as a stand-in is, and they are on one side.
        """
        known = sorted(self.counts)
        if self.size < FEW or any(True for _ in self.stand_ins()):
            return None
        for far in range(1, min(KEPT, len(known) - 2)):
            for out, rest in ((known[:far], known[far:]), (known[-far:], known[:-far])):
                gap = min(abs(value - near) for value in out for near in (rest[0], rest[-1]))
                times = sum(self.counts[value] for value in out)
                if times < TIMES + 1 and gap > FAR * (rest[-1] - rest[0]) > 0:
                    return out, rest[0], rest[-1]
        return None


@dataclass
class Column:
    """A column of a client's examples."""

    name: str
    channels: tuple[int, ...]
    """Its places among the numbers of a row; several where it is one of categories."""
    axis: int
    """The axis of these in an example."""
    extremes: Extremes = field(default_factory=Extremes)
    _label_of: dict[float, float] | None = field(default_factory=dict)
    """The class of each value; None once a value has two, or there are many values."""
    _runs: bool = True
    _count: int = 0

    @property
    def is_levels(self) -> bool:
        """Whether it is one of categories."""
        return len(self.channels) > 1

    def add(self, x: NDArray[Any], y: NDArray[np.int64]) -> None:
        """Take in some examples: inputs (n, …) as the files have them, and labels (n,)."""
        found = np.take(x, self.channels, axis=1 + self.axis)
        values = np.moveaxis(found, 1 + self.axis, -1).reshape(len(x), -1, len(self.channels))
        values = values.argmax(-1) if self.is_levels else values[..., 0]  # (n, L)
        self._count += len(y)
        self._look_for_labels(values, y)
        if self.is_levels:
            self._runs = False
            return
        self.extremes.add(values[np.isfinite(values)])
        if self._runs:
            self._runs = _counts_up(values)

    def _look_for_labels(self, values: NDArray[Any], y: NDArray[np.int64]) -> None:
        """Note the class of each value (n, L), while each has one, by labels (n,)."""
        known, self._label_of = self._label_of, None
        if known is None or len(np.unique(values[: FEW * FEW])) > MANY_VALUES:
            return
        pairs = np.stack([values.reshape(-1), np.repeat(y, values.shape[1])], axis=1)
        for value, label in np.unique(pairs, axis=0).tolist():
            if known.setdefault(value, label) != label or len(known) > MANY_VALUES:
                return
        self._label_of = known

    def lines(self) -> Iterator[str]:
        """Yield what may not be meant in it."""
        shown = printable(self.name, MAX_LETTERS)
        known, size = self.extremes.counts, self.extremes.size
        if self._runs and size >= FEW and max(known) - min(known) < 2 * size:
            yield (
                f"column {shown} counts up, from {min(known):.10g} to {max(known):.10g}, as a "
                "running number or a time does: leave it out of features, or a net learns the "
                "order of the rows"
            )
        labels = self._label_of or {}
        if len({*labels.values()}) > 1 and self._count >= OF_EACH * max(len(labels), SHOWN):
            yield (
                f"column {shown} tells the class of every example by itself, with {len(labels)} "
                "values: leave it out of features, unless it is known before the class is"
            )


def _counts_up(values: NDArray[Any]) -> bool:
    """Tell whether values (n, L) are whole and all differ; of windows, rise by the same steps."""
    if values.shape[1] == 1:
        return bool((values % 1 == 0).all()) and len(np.unique(values)) == len(values)
    steps = np.diff(values, axis=1)
    return bool(steps[0, 0] > 0 and np.allclose(steps, steps[0, 0], rtol=1e-3, atol=0))


def columns_of(file: ProblemFile) -> list[Column]:
    """Return the columns of a client's examples, of which nothing was seen yet."""
    axis = channel_axis(file.input_shape)
    size = file.input_shape[axis]
    try:
        how = parse_transform(file.transform, "")
    except DataError:
        how = None
    if not isinstance(how, TableTransform) or len(how.columns.channels) != size:
        return [Column(str(place), (place,), axis) for place in range(size)]
    found, begin = list[Column](), 0
    for name in how.columns.features or ():
        end = begin + len(how.columns.channels_of(name))
        found.append(Column(name, tuple(range(begin, end)), axis))
        begin = end
    return found


def found_in_all(clients: Sequence[Sequence[Column]], *, is_table: bool) -> Iterator[str]:
    """Yield what may not be meant in the columns of clients together, each of whom has the same."""
    for same in zip(*clients, strict=True):
        of_all = Extremes()
        for column in same:
            of_all.join(column.extremes)
        shown = printable(same[0].name, MAX_LETTERS)
        for value, count in of_all.stand_ins():
            advice = (
                f"[data.columns] missing_values = [{value:.15g}] makes empty cells of them, and "
                "missing says what becomes of these"
                if is_table
                else "leave these examples out, or put numbers in their place"
            )
            yield (
                f"column {shown} holds {value:.7g} in {count} of {of_all.size} places, far from "
                f"all other values: if it stands for a missing number, {advice}"
            )
        if (found := of_all.far_out()) is not None:
            values, low, high = found
            some = " and ".join(f"{value:.7g}" for value in values)
            yield (
                f"column {shown} holds {some}, far from all other values ({low:.7g} to "
                f"{high:.7g}): if that is a mistake or another unit, mend or leave out those rows"
            )
