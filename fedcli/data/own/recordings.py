"""Rows of tables in the order of their recordings: sorted, mended, resampled, cut into windows.

A stretch is what a window may be cut from: rows that follow each other in one recording, with one
label, one client and one part.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import check_memory
from fedcli.data.own.cells import (
    check_columns,
    inputs_of,
    labels_of,
    named_by_place,
    said,
    targets_of,
    texts_of,
)
from fedcli.data.own.site_lines import HEAD, key, lines_for_texts, nearest
from fedcli.data.own.table_files import TableRows
from fedcli.data.own.times import LATE, NAMED_APART, calendar, points_of, times_of
from fedcli.data.sets.windows import window_starts
from fedmodels.config.columns import Columns
from fedmodels.config.data import TasksBy
from fedmodels.console.printable import printable
from fedmodels.errors import DataError

PARTS = ("train", "test")
MIXED = 3
"""Stretches for each client and class beyond which rows may be unsorted."""
GAP = 10
"""Usual steps of a recording beyond which a step is a gap, unless a config says how long one is."""
REPEATED = 0.1
"""Share of rows with the time of another one beyond which times of two recordings are mixed."""
SHOWN = 8
"""Texts that a note lists."""
MAX_LETTERS = 60
"""Letters of a name that a note has, at most."""
MAX_GROWTH = 100
"""A rate makes at most so many times the rows that were read."""
SLACK = 1e-6
"""Part of a step that rounding may take from a time."""
Mended = Counter[str]
"""How often something was mended, by what it was."""


@dataclass(frozen=True)
class RecordingRows:
    """Rows of tables in recording order, or windows cut from them."""

    x: NDArray[np.float64]  # (n, C), windows (n, L, C); NaN where a mean is to fill a cell
    label: NDArray[np.str_]  # (n,)
    client: NDArray[np.str_]  # (n,), empty texts where no column names the clients
    part: NDArray[np.str_]  # (n,), likewise
    group: NDArray[np.str_]  # (n,), likewise
    session: NDArray[np.str_]  # (n,), likewise
    task: NDArray[np.str_]  # (n,) what says of which task it is, such as a month; likewise
    time: NDArray[np.float64]  # (n,) seconds, 0 where no column has times
    date: NDArray[np.int64]  # (n,) point in time, microseconds; 0 where no calendar is asked for
    recording: NDArray[np.int64]  # (n,) number of the file
    first: NDArray[np.int64]  # (n,) row of the file, from 0 on; of a window its first one
    last: NDArray[np.int64]  # (n,) likewise, the last one
    stretch: NDArray[np.int64]  # (n,) what a window may be cut from
    start: NDArray[np.int64]  # (n,) place of the first row in its stretch
    place: NDArray[np.int64]  # (n,) place of the first row among all rows, in recording order
    target: NDArray[np.float64]  # (n, T) what is learned in place of a class; T is 0 of classes

    def at(self, places: NDArray[Any]) -> RecordingRows:
        """Return some of the rows, in the order of their places."""
        return RecordingRows(*(getattr(self, field.name)[places] for field in fields(self)))

    def changes(self, *names: str) -> NDArray[np.bool_]:
        """Tell which rows differ from the one before in one of these (n,)."""
        found = np.zeros(len(self.x), dtype=bool)
        for values in (getattr(self, name) for name in names):
            found[1:] |= values[1:] != values[:-1]
        return found

    def in_stretches(self, begins: NDArray[np.bool_]) -> RecordingRows:
        """Return the rows with their stretches numbered; a stretch begins at each row so told."""
        stretch = np.cumsum(begins, dtype=np.int64)
        first = np.flatnonzero(np.diff(stretch, prepend=-1))
        start = np.arange(len(stretch)) - np.repeat(first, np.diff([*first, len(stretch)]))
        return replace(self, stretch=stretch, start=start)


def rows_of(
    table: TableRows,
    columns: Columns,
    tasks: TasksBy | None = None,
    bad: NDArray[np.bool_] | None = None,
    *,
    is_new: bool = False,
) -> tuple[RecordingRows, Mended]:
    """Check a table's columns; return its rows in the order of their recordings, and what was done.

    ``tasks`` is what a task of a client is, as ``[data]`` says it. ``bad`` rows (n,) are left out,
    and no window goes over such a place. So are rows that ``is_new``, for a trained model, whose
    empty cells nothing tells.

    Raises:
        DataError: a column is missing or holds something else; names the row.
    """
    rows, mended = _read(table, columns, tasks, bad)
    kept = _whole(rows, columns)
    if bad is not None:
        rows, kept = replace(rows, x=np.where(bad[:, None], np.nan, rows.x)), kept & ~bad
    order = _order_of(rows, columns)
    rows, kept = rows.at(order), kept[order]
    _check_times(rows, table, columns)
    gaps = _gaps(rows, columns)
    mended["gaps"], mended["dropped"] = int(gaps.sum()), int((~kept).sum())
    mended["dropped"] -= 0 if bad is None else int(bad.sum())
    pieces = gaps | rows.changes("client", "session", "part", "group", "task")
    if columns.missing == "interpolate":
        mended["filled"] = int(np.isnan(rows.x).sum())
        rows = replace(rows, x=_interpolated(rows, pieces, table, columns, is_new=is_new))
        kept &= ~np.isnan(rows.x).any(axis=1)
    begins = pieces | rows.changes("label") | ~kept
    begins[1:] |= ~kept[:-1]
    rows = rows.in_stretches(begins).at(kept)
    rows = rows.in_stretches(rows.changes("stretch"))
    if columns.rate is not None:
        _check_growth(rows, columns, table)
        rows = _resampled(rows, columns.rate)
    return rows, mended


def _read(
    table: TableRows, columns: Columns, tasks: TasksBy | None, bad: NDArray[np.bool_] | None
) -> tuple[RecordingRows, Mended]:
    """Return the rows as they stand in the file, and what was done to their times."""
    check_columns(table.names, columns, table.where, table.recipe, table.apart)
    drops = columns.missing == "drop"
    others = Counter[tuple[str, str]]()
    x = inputs_of(table, columns, others, bad)
    label = labels_of(table, columns, may_miss=drops, bad=bad)
    named = (columns.client, columns.split, columns.group, columns.session, columns.task)
    client, part, group, session, task = (
        texts_of(table, name, may_miss=drops, bad=bad) for name in named
    )
    if columns.client_from is not None:
        client = named_by_place(table, columns.client_from)
    is_part = np.isin(part, (*PARTS, "") if drops else PARTS)
    wrong = np.flatnonzero(~is_part if bad is None else ~is_part & ~bad)
    if columns.split is not None and len(wrong):
        raise DataError(
            f"{table.where}: column {columns.split!r} holds {str(part[wrong[0]])!r} in "
            f"{table.at(int(wrong[0]))}; it must say train or test"
        )
    time, mended, zeros = np.zeros(len(x)), Mended(), np.zeros(len(x), dtype=np.int64)
    places, date = np.arange(len(x)), zeros
    if columns.time is not None:
        times = times_of(table, columns, (client, session))
        time, mended = times.seconds, times.done
        if tasks is not None and tasks != "session":
            task, date = calendar(times, tasks, table, columns)
        elif (tasks or columns.task) and times.dates is not None:
            date = points_of(times.dates)  # over files, tasks are in the order in which they begin
    if tasks == "session":
        file = table.where.name if isinstance(table.where, Path) else str(table.where)
        task = np.array([f"{file} {name}".strip() for name in session.tolist()], dtype=np.str_)
    mended.update({"\0".join(cell): count for cell, count in others.items()})
    rows = RecordingRows(
        x, label, client, part, group, session, task, time, date, zeros, places, places, zeros,
        zeros, zeros, targets_of(table, columns, bad),
    )  # fmt: skip
    return rows, mended


def _whole(rows: RecordingRows, columns: Columns) -> NDArray[np.bool_]:
    """Tell which rows are kept (n,): with ``missing = "drop"``, those without an empty cell."""
    kept = np.ones(len(rows.x), dtype=bool)
    if columns.missing == "drop":
        kept &= ~np.isnan(rows.x).any(axis=1) & ~np.isnan(rows.target).any(axis=1)
        for column, values in (
            (columns.label, rows.label), (columns.client, rows.client), (columns.split, rows.part),
            (columns.group, rows.group), (columns.session, rows.session),
            (columns.task, rows.task),
        ):  # fmt: skip
            kept &= (values != "") | (column not in columns.named)
    return kept


def _order_of(rows: RecordingRows, columns: Columns) -> NDArray[np.int64]:
    """Return the order of rows: by client, session and time, where columns tell them.

    Without times and sessions, rows stay as they stand in the file.
    """
    places = np.arange(len(rows.x))
    if columns.time is None and columns.session is None:
        return places
    keys = [_by_appearance(rows.session), _by_appearance(rows.client)]
    return np.lexsort((rows.time if columns.time else places, *keys))


def _by_appearance(names: NDArray[np.str_]) -> NDArray[np.int64]:
    """Return a number for each name (n,), rising in the order in which names appear."""
    _, first, coded = np.unique(names, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[coded]


def _check_times(rows: RecordingRows, table: TableRows, columns: Columns) -> None:
    """Raise DataError if many rows have the time of another row of their recording."""
    if columns.time is None:
        return
    same = ~(rows.changes("time", "client", "session"))
    same[:1] = False
    if same.mean() > REPEATED:
        row = int(rows.first[same.argmax()])
        raise DataError(
            f"{table.where}: column {columns.time!r} has the time of another row in "
            f"{table.at(row)} and in {same.sum() - 1} more: {NAMED_APART}"
        )


def _gaps(rows: RecordingRows, columns: Columns) -> NDArray[np.bool_]:
    """Tell before which rows (n,) a recording has a gap."""
    found = np.zeros(len(rows.x), dtype=bool)
    if columns.time is None or len(rows.x) < 2:
        return found
    steps = np.diff(rows.time)
    within = ~rows.changes("client", "session")[1:]
    usual = np.median(steps[within]) if within.any() else 0.0
    longest = columns.gap or (GAP * usual if usual > 0 else np.inf)
    found[1:] = within & (steps > longest * (1 + SLACK))
    return found


def _interpolated(
    rows: RecordingRows,
    pieces: NDArray[np.bool_],
    table: TableRows,
    columns: Columns,
    *,
    is_new: bool,
) -> NDArray[np.float64]:
    """Return inputs (n, C) whose empty cells lie between their neighbours in the same piece.

    Raises:
        DataError: a piece has a column without any number, and its rows are none for a model.
    """
    pandas = importlib.import_module("pandas")
    index = rows.time if columns.time else np.arange(len(rows.x), dtype=np.float64)
    x = rows.x.copy()
    holes = np.isnan(x).any(axis=1)
    numbers = np.cumsum(pieces)
    for piece in np.unique(numbers[holes]):
        mine = numbers == piece
        frame = pandas.DataFrame(x[mine], index=index[mine])
        x[mine] = frame.interpolate("index", limit_direction="both").to_numpy()
    left = np.argwhere(np.isnan(x))
    if len(left) and not (is_new and len(np.unique(left[:, 0])) < len(x)):
        row, column = left[0]
        raise DataError(
            f"{table.where}: column {columns.channels[column]!r} is empty in "
            f"{table.at(int(rows.first[row]))}, and in all rows of that recording: leave the "
            "column out of features, or set [data.columns] missing = 'drop' or 'mean'"
        )
    return x


def _check_growth(rows: RecordingRows, columns: Columns, table: TableRows) -> None:
    """Raise DataError if a rate makes over ``MAX_GROWTH`` times the rows, or no memory is free."""
    rate = columns.rate or 0.0
    begins = np.flatnonzero(rows.start == 0)
    ends = np.array([*begins[1:], len(rows.x)], dtype=np.int64) - 1
    made = float(((rows.time[ends] - rows.time[begins]) * rate + 1).sum())
    if made > MAX_GROWTH * len(rows.x):
        raise DataError(
            f"{table.where}: [data.columns] rate = {rate:g} makes {made:.3g} rows of "
            f"{len(rows.x)}: say with time_unit in what {columns.time!r} counts, or lower rate"
        )
    check_memory(
        2 * made * rows.x.shape[1] * rows.x.itemsize, f"{table.where}: {made:.3g} rows",
        f"lower [data.columns] rate = {rate:g}",
    )  # fmt: skip


def _resampled(rows: RecordingRows, rate: float) -> RecordingRows:
    """Return rows at so many a second, counted from the first row of each stretch.

    Rows within one step are averaged; between steps, values are interpolated.
    """
    pandas = importlib.import_module("pandas")
    begins = np.flatnonzero(rows.start == 0)
    since = rows.time - np.repeat(rows.time[begins], np.diff([*begins, len(rows.x)]))
    steps = np.floor(since * rate + SLACK).astype(np.int64)
    width = rows.x.shape[1]
    means = pandas.DataFrame(np.column_stack([since, rows.x, rows.target]))
    means = means.groupby([rows.stretch, steps]).mean()
    by_stretch = means.index.get_level_values(0).to_numpy()
    values, made = means.to_numpy(), list[RecordingRows]()
    for begin, end in zip(begins, [*begins[1:], len(rows.x)], strict=True):
        mine = values[np.searchsorted(by_stretch, rows.stretch[begin]) :][
            : np.count_nonzero(np.diff(steps[begin:end])) + 1
        ]
        grid = np.arange(steps[end - 1] + 1) / rate
        x = np.stack([np.interp(grid, mine[:, 0], column) for column in mine[:, 1:].T], axis=1)
        places = begin + np.searchsorted(since[begin:end], grid + SLACK / rate, "right") - 1
        made.append(
            replace(
                rows.at(places), x=x[:, :width], target=x[:, width:], start=np.arange(len(grid))
            )
        )
    return concatenated(made)


def concatenated(parts: Sequence[RecordingRows]) -> RecordingRows:
    """Put rows one after the other."""
    return RecordingRows(
        *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(RecordingRows))
    )


def joined(parts: Sequence[RecordingRows]) -> RecordingRows:
    """Put the rows of several files together; a stretch stays within its file."""
    shifted, shift = list[RecordingRows](), 0
    for number, rows in enumerate(parts):
        recording = np.full(len(rows.x), number, dtype=np.int64)
        shifted.append(replace(rows, recording=recording, stretch=rows.stretch + shift))
        shift += int(rows.stretch.max(initial=-1)) + 1
    rows = concatenated(shifted)
    return replace(rows, place=np.arange(len(rows.x), dtype=np.int64))


def windowed(rows: RecordingRows, columns: Columns, where: object) -> RecordingRows:
    """Cut every stretch into windows (n, length, C); what is left over at its end is dropped.

    Raises:
        DataError: no stretch is long enough; says what may help.
    """
    length = columns.window
    if length is None:
        return rows
    first = np.flatnonzero(rows.start == 0)
    sizes = np.diff([*first, len(rows.x)])
    hop, ahead = columns.hop or length, columns.horizon or 0
    begins = [
        at + s
        for at, n in zip(first, sizes, strict=True)
        for s in window_starts(n - ahead, length, hop)
    ]
    if not begins:
        owners = (rows.recording, rows.client, rows.session, rows.label, rows.part)
        unsorted = len(sizes) > MIXED * len({*zip(*owners, strict=True)})
        advice = (
            "sort the rows so that those of a recording follow each other, or name the column of "
            "times in [data.columns] time, or "
        )
        raise DataError(
            f"{where} gives no window of {length} rows: the longest stretch of one client and "
            f"class has {sizes.max(initial=0)}, of {len(sizes)} stretches; "
            f"{advice if unsorted and columns.time is None else ''}set [data.columns] window to "
            "that or less"
        )
    cells = float(len(begins)) * length * rows.x.shape[1]
    check_memory(
        2 * cells * rows.x.itemsize, f"{where}: {len(begins)} windows of {length} rows",
        "set a longer hop, a shorter window or fewer features",
    )  # fmt: skip
    places = np.array(begins)
    x = rows.x[places[:, None] + np.arange(length)]  # (n, length, C)
    end = places + length - 1
    return replace(rows.at(places), x=x, last=rows.last[end], target=rows.target[end + ahead])


def _of_others(column: str, levels: Sequence[str], mended: Mapping[str, int]) -> str:
    """Return in words which cells of a column are of no level; nothing where all are of one."""
    begin = f"{column}\0"
    texts = {key.removeprefix(begin): n for key, n in mended.items() if key.startswith(begin)}
    if not texts:
        return ""
    some = ", ".join(
        f"{said(text) if text else 'empty'} ({count})" for text, count in [*texts.items()][:SHOWN]
    )
    more = f" and {len(texts) - SHOWN} others" if len(texts) > SHOWN else ""
    found = [text for text in texts if nearest(text, levels) is not None]
    paste = [HEAD, *lines_for_texts(f"columns.{key(column)}.values", found, levels)]
    return (
        f"column {printable(column, MAX_LETTERS)} has cells that are none of the levels "
        f"{printable(', '.join(levels), MAX_LETTERS)}, and count as another one: {some}{more}"
        + ("\n".join([". If they are levels, written otherwise,", *paste]) if found else "")
    )


def told(mended: Mapping[str, int], columns: Columns) -> list[str]:
    """Return what was mended, in words."""
    lines = [
        line
        for column, levels in (columns.categories or {}).items()
        if (line := _of_others(column, levels, mended))
    ]
    if mended.get("dropped"):
        lines.append(f"{mended['dropped']} rows with an empty cell are left out")
    if mended.get("filled"):
        how = "by interpolation" if columns.missing == "interpolate" else "by the mean"
        lines.append(f"{mended['filled']} empty cells are filled {how}")
    if mended.get("gaps") and columns.window is not None:
        lines.append(f"recordings have {mended['gaps']} gaps, over which no window goes")
    if mended.get("midnights"):
        lines.append(
            f"times of day go over midnight {mended['midnights']} times: the next day is counted on"
        )
    if mended.get("shuffled"):
        lines.append(
            f"the rows of {mended['shuffled']} recordings are not in the order of their times of "
            "day, which are taken as those of one day: if there are more, write dates before them"
        )
    if mended.get("back"):
        lines.append(
            f"times go back {mended['back']} times by more than {LATE:.0f} seconds, and rows are "
            f"put in order by them: {NAMED_APART}"
        )
    return lines
