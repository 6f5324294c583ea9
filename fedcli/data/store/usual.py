"""Whether a new task is like the earlier ones of its client: units, ranges and the mix of labels.

A *cell* is one class of one task. Of each channel of a cell (a column of a table, a colour of
images) five marks are kept, and the share of places without a number: least value, quantiles of 5,
50 and 95 %, greatest value. They stay at the client, beside the hashes of its rows. Robust marks
within classes do not move with a few wild values, nor with how often a class occurs. A new task is
compared with each earlier one over the classes that both have, and the nearest one counts. So what
earlier tasks differed in, as over seasons, is usual.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import Inputs, IntArray, strata
from fedcli.data.store.client_data import ClientData
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.facts.data_description import channel_axis

TABLE = (
    "CREATE TABLE IF NOT EXISTS cells (task INTEGER, label INTEGER, count INTEGER, marks BLOB, "
    "PRIMARY KEY (task, label)) WITHOUT ROWID"
)
QUANTILES = (0, 0.05, 0.5, 0.95, 1)
MOST, FEWEST = 512, 5
"""Examples of a cell that are looked at, and below which a cell says nothing."""
VALUES = 1 << 23
"""Values of a cell that are looked at, 64 MiB as numbers: of large images, fewer examples."""
WIDER, FARTHER = 8.0, 3.0
"""A range so many times as wide or as narrow is not usual, nor a median so many ranges away."""
FLOOR = 0.05
"""Part of the range of all earlier cells below which a range is no smaller: noise at rest."""
EMPTIER = 0.2
"""Share of the places of a channel that may be empty beyond that of any earlier task."""
MANY = 20
"""Examples of known classes below which the mix of labels says nothing."""
OTHERS, BEYOND = 0.5, 0.2
"""Share of the labels that may be others than in the nearest earlier task: this, and as much as
earlier tasks differ from each other, and so much more."""
LATEST = 60
"""The last tasks that count: a year of weeks. So a task costs no more as time goes on."""
SHOWN, MAX_LETTERS = 3, 40
"""Columns that a line names, and letters of a name."""
Marks = NDArray[np.float64]
"""Of each channel, (6, C): least, 5 %, 50 %, 95 %, greatest, and the share without a number.

The first five are NaN where there is no number at all."""


@dataclass(frozen=True)
class Cell:
    """One class of one task."""

    task: int
    label: int
    count: int
    marks: Marks


def cells_of(task: int, x: Inputs, y: IntArray) -> Iterator[Cell]:
    """Yield the cells of some inputs (n, …) with labels (n,).

    With numbers (n, T) in their place there is one cell, and each is a channel behind the inputs'.
    """
    axis, labels = channel_axis(x.shape[1:]), strata(y)
    most = min(MOST, max(FEWEST, VALUES // math.prod(x.shape[1:])))
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        some = places[:: -(-len(places) // most)]
        values = np.moveaxis(np.asarray(x[some], dtype=np.float64), 1 + axis, 0)
        marks = _marks_of(values.reshape(len(values), -1))
        if y.ndim == 2:
            marks = np.hstack([marks, _marks_of(y[some].T)])
        yield Cell(task, int(label), len(places), marks)


def _marks_of(values: NDArray[Any]) -> Marks:
    """Return the marks (6, C) of values (C, m)."""
    empty = ~np.isfinite(values)
    nothing: NDArray[np.bool_] = np.all(empty, axis=1)
    known = np.where(nothing[:, None], 0.0, np.where(empty, np.nan, values))
    marks = (np.nanquantile if empty.any() else np.quantile)(known, QUANTILES, axis=1)
    marks[:, nothing] = np.nan
    return np.vstack([marks, empty.mean(1)])


def comparable(held: ClientData, y: NDArray[Any]) -> NDArray[Any]:
    """Return the labels (n,) that tasks are compared by, or those targets that are numbers."""
    columns = (held.file.transform or {}).get("columns") or {}
    return y if y.ndim == 1 else y[:, : len(columns.get("target") or ())]


def take_in(db: sqlite3.Connection, held: ClientData) -> None:
    """Store the cells of tasks whose training data are there, once for each task."""
    db.execute(TABLE)
    db.execute("DELETE FROM cells WHERE task >= ?", (held.num_tasks,))
    known = {task for (task,) in db.execute("SELECT DISTINCT task FROM cells")}
    for task in {*range(held.num_tasks)} - known:
        with suppress(DataError):  # deleted, or damaged: whoever opens it says so
            x, y = held.arrays(task, "train")
            for cell in cells_of(task, x, comparable(held, y)):
                row = task, cell.label, cell.count, cell.marks.tobytes()
                db.execute("INSERT INTO cells VALUES (?, ?, ?, ?)", row)


def counting(held: ClientData) -> list[int]:
    """Return the earlier tasks that count, ascending; none that is set aside."""
    return [n for n, task in enumerate(held.tasks) if not task.set_aside][-LATEST:]


def earlier_cells(db: sqlite3.Connection, tasks: Sequence[int]) -> list[Cell]:
    """Return the cells of some tasks, ascending."""
    found, count = list[Cell](), {*tasks}
    query = "SELECT * FROM cells WHERE task >= ? ORDER BY task, label"
    for task, label, size, marks in db.execute(query, (min(count, default=0),)):
        if task in count:
            found.append(Cell(task, label, size, np.frombuffer(marks).reshape(6, -1)))
    return found


# --- what is not usual ----------------------------------------------------------------------------


def unlike(
    earlier: Sequence[Cell],
    new: Sequence[Cell],
    counts: Sequence[Sequence[int]],
    now: Sequence[int],
    names: Sequence[str] = (),
) -> list[str]:
    """Return in which ways a new task is not like the earlier ones of its client, in words.

    Args:
        earlier: cells of earlier tasks.
        new: cells of the new task.
        counts: training examples of each class, (K,), of each earlier task that counts.
        now: those of the new task, which may have further classes.
        names: of the channels; their numbers unless given.
    """
    earlier, new = ([c for c in cells if c.count >= FEWEST] for cells in (earlier, new))
    lines = list[str]()
    if earlier and new and earlier[0].marks.shape == new[0].marks.shape:
        called = names if len(names) == new[0].marks.shape[1] else range(new[0].marks.shape[1])
        lines += _columns(_of_channels(earlier, new), [*map(str, called)])
    if (far := _labels_away(counts, now)) is not None:
        lines.append(f"{far:.0%} of its labels are others than in the earlier task most like it")
    return lines


def _of_channels(earlier: Sequence[Cell], new: Sequence[Cell]) -> dict[str, dict[int, str]]:
    """Return by kind of line the channels that are not usual, and by how much."""
    found: dict[str, dict[int, str]] = {"constant": {}, "empty": {}, "width": {}, "middle": {}}
    empty, most = _empty(new), np.max([_empty(cells) for cells in _by_task(earlier)], axis=0)
    lows, highs = (
        op([c.marks[row] for c in new], axis=0)
        for op, row in ((np.fmin.reduce, 0), (np.fmax.reduce, 4))
    )
    labels, tasks = {cell.label for cell in new}, _by_task(earlier)
    alike = [some for cells in tasks if (some := [c for c in cells if c.label in labels])]
    varied = np.all([_spread(cells) > 0 for cells in alike or tasks], axis=0)
    ratios, shifts = _nearest(earlier, new)
    for k in range(len(empty)):
        if empty[k] > most[k] + EMPTIER:
            found["empty"][k] = f"{empty[k]:.0%} (at most {most[k]:.0%} before)"
        elif lows[k] == highs[k] and varied[k]:
            found["constant"][k] = ""
        elif not 1 / WIDER <= ratios[k] <= WIDER:
            found["width"][k] = _times(ratios[k])
        elif shifts[k] > FARTHER:
            found["middle"][k] = _times(shifts[k])
    return found


def _nearest(
    earlier: Sequence[Cell], new: Sequence[Cell]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how much wider each channel is, and by how many ranges it is moved, (C,) each.

    Each earlier task is compared over the classes that both have, where half of the new examples
    are of these. The one that is most like the new task counts, for each channel. Where there is
    none, all classes of all are compared, and deviations count as their square roots: classes
    differ.
    """
    floor = FLOOR * _spread(earlier)
    labels = {cell.label for cell in new}
    pairs = [
        (common, [cell for cell in new if cell.label in {c.label for c in common}])
        for cells in _by_task(earlier)
        if (common := [cell for cell in cells if cell.label in labels])
    ]
    size = sum(cell.count for cell in new)
    pairs = [(b, n) for b, n in pairs if 2 * sum(cell.count for cell in n) >= size]
    best = np.full(len(floor), np.inf)
    ratios, shifts = np.ones(len(floor)), np.zeros(len(floor))
    for before, now in pairs or [([*earlier], [*new])]:
        widths = [np.maximum(_spread(cells), floor) for cells in (now, before)]
        there = np.where(widths[1] > 0, widths[1], np.inf)  # it was constant: nothing to compare
        ratio = np.where(widths[1] > 0, widths[0] / there, 1.0)
        shift = np.abs(_middle(now) - _middle(before)) / there
        if not pairs:
            ratio, shift = np.sqrt(ratio), np.sqrt(shift)
        far = np.maximum(np.abs(np.log(ratio)) / math.log(WIDER), shift / FARTHER)
        ratios, shifts = np.where(far < best, ratio, ratios), np.where(far < best, shift, shifts)
        best = np.minimum(far, best)
    return ratios, shifts


def _middle(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """Return the median over classes of the medians of each channel, (C,)."""
    middles = np.array([cell.marks[2] for cell in cells])
    middles[:, np.isnan(middles).all(0)] = 0.0
    middle: NDArray[np.float64] = np.nanmedian(middles, axis=0)
    return middle


def _by_task(cells: Iterable[Cell]) -> list[list[Cell]]:
    tasks: dict[int, list[Cell]] = {}
    for cell in cells:
        tasks.setdefault(cell.task, []).append(cell)
    return [*tasks.values()]


def _empty(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """Return the share of places without a number in each channel, (C,)."""
    weights = np.array([cell.count for cell in cells], dtype=np.float64)
    shares: NDArray[np.float64] = np.average([c.marks[5] for c in cells], axis=0, weights=weights)
    return shares


def _spread(cells: Sequence[Cell]) -> NDArray[np.float64]:
    """Return the range of each channel over several cells, without the ends of each, (C,)."""
    lows, highs = (
        np.fmin.reduce([c.marks[1] for c in cells], axis=0),
        np.fmax.reduce([c.marks[3] for c in cells], axis=0),
    )
    spread: NDArray[np.float64] = np.nan_to_num(highs - lows)
    return spread


def _labels_away(counts: Sequence[Sequence[int]], now: Sequence[int]) -> float | None:
    """Return which share of the labels differs from the nearest earlier task; None if usual.

    Classes that no earlier task has do not count: a stream may bring new ones. One earlier task
    says nothing of how much tasks differ.
    """
    size = max(map(len, [now, *counts]))
    table = np.zeros((len(counts), size))
    for row, one in zip(table, counts, strict=True):
        row[: len(one)] = one
    known = table.sum(0) > 0
    last = np.zeros(size)
    last[: len(now)] = now
    last, table = last * known, table[table.sum(1) > 0]
    if len(table) < 2 or last.sum() < MANY:
        return None
    shares = np.vstack([table, last]) / np.vstack([table, last]).sum(1, keepdims=True)
    away = np.abs(shares[:, None] - shares[None]).sum(2) / 2
    np.fill_diagonal(away, np.inf)
    usual, found = float(away[:-1, :-1].min(1).max()), float(away[-1, :-1].min())
    return found if found > max(OTHERS, usual + BEYOND) else None


def _columns(found: Mapping[str, Mapping[int, str]], names: Sequence[str]) -> Iterator[str]:
    """Yield a line for each kind; it names the first columns, each with its figure."""
    words = {
        "constant": "has one value in all examples, and varied in each earlier task",
        "empty": "lacks numbers in {}",
        "width": "has {} the range of earlier tasks",
        "middle": "lies {} the range of earlier tasks away from them",
    }
    for kind, columns in found.items():
        if columns:
            first, figure = next(iter(columns.items()))
            others = [printable(names[k], MAX_LETTERS) for k in [*columns][1:]]
            more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
            also = f" (likewise {', '.join(others[:SHOWN])}{more})" if others else ""
            name = printable(names[first], MAX_LETTERS)
            yield f"column {name} {words[kind].format(figure)}{also}"


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"
