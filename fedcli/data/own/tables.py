"""CSV and parquet files: each row an example, or windows of rows as sensors give them.

    [data]                                  [data.columns]
    name = "table"                          label = "activity"
    root = "recordings"                     features = ["ax", "ay", "az"]
                                            client = "person"
                                            window = 128

``root`` is a file, or a directory whose files ``*.csv`` and ``*.parquet`` are read in the order of
their names. A window never crosses the border of two files, clients, classes or parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.cuts.held_out import last_of_each
from fedcli.data.folders import note_left_out
from fedcli.data.own.cells import check_columns, features_of, numbers_of, texts_of
from fedcli.data.own.examples import coded, dataset_of
from fedcli.data.own.table_files import Table, files_of, read_table
from fedcli.data.sets.dataset import Dataset, Examples, Source
from fedcli.data.sets.windows import window_starts
from fedmodels.config.data import Columns, Data
from fedmodels.errors import DataError
from fedmodels.printable import printable

PARTS = ("train", "test")
MIXED = 3
"""Stretches for each client and class beyond which rows may be unsorted."""
MOST_LETTERS = 40
"""Of a column that a note names."""
Names = dict[str, tuple[str, tuple[Table, int]]]
"""By a name without the spaces around it: the name as it was first met, and its file and row."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rows:
    """Rows of tables in recording order, or windows cut from them."""

    x: NDArray[np.float64]  # (n, C), windows (n, L, C)
    label: NDArray[np.str_]  # (n,)
    client: NDArray[np.str_]  # (n,), empty texts where no column names the clients
    part: NDArray[np.str_]  # (n,), likewise
    recording: NDArray[np.int64]  # (n,) the file
    stretch: NDArray[np.int64]  # (n,) rows side by side with one file, label, client and part
    start: NDArray[np.int64]  # (n,) first row within the stretch

    def at(self, places: NDArray[Any]) -> Rows:
        """Return some of the rows, in the order of their places."""
        kept = (getattr(self, name)[places] for name in self.__dataclass_fields__)
        return Rows(*kept)


def table(source: Source) -> Dataset:
    """Load the tables in ``[data] root`` as ``[data.columns]`` describes them."""
    if source.data.root is None:
        raise DataError("table: say where the files lie, [data] root = 'recordings.csv'")
    root, columns = source.roots[0], columns_of(source.data)
    files = files_of(root)
    if root.is_dir():
        note_left_out(root, files)
    rows, columns = joined((read_table(path, columns) for path in files), columns)
    if columns.window is not None:
        rows = windowed(rows, columns.window, columns.hop or columns.window, root)
    return made(rows, columns, "table", str(root), f"{len(files)} files")


def columns_of(data: Data) -> Columns:
    """Return what the columns are; ``[data] test_share`` goes before that of the columns."""
    columns = data.columns or Columns()
    if data.test_share is None:
        return columns
    return columns.model_copy(update={"test_share": data.test_share})


def made(rows: Rows, columns: Columns, name: str, where: str, variant: str) -> Dataset:
    """Split rows into the training and the test part, and make a data set.

    Raises:
        DataError: a class is unknown, or a part is empty; says why, where that is known.
    """
    y, classes = coded(rows.label, columns.classes, f"{where}: column {columns.label!r}")
    groups, people = coded(rows.client, None, f"{where}: column {columns.client!r}")
    if columns.split is None:
        test = last_of_each(groups * len(classes) + y, columns.test_share)
        train = ~test & ~_shares_rows(rows, test, columns.window or 1)
    else:
        train, test = (rows.part == part for part in PARTS)
    _check_parts(train, test, columns, len(classes), where)
    parts = [
        Examples(rows.x[chosen], y[chosen], groups[chosen] if columns.client else None)
        for chosen in (train, test)
    ]
    return dataset_of(
        name, parts[0], parts[1], classes, variant, people if columns.client else (),
        overlapping=columns.window is not None and (columns.hop or columns.window) < columns.window,
        columns=columns.features or (),
    )  # fmt: skip


def _check_parts(
    train: NDArray[np.bool_], test: NDArray[np.bool_], columns: Columns, classes: int, where: str
) -> None:
    """Check that both parts hold an example.

    Args:
        train: tells which examples are for training (n,).
        test: tells which are for testing (n,).
        columns: what the columns are.
        classes: how many classes there are.
        where: the files, for error lines.
    """
    if train.any() and test.any():
        return
    part = "training" if not train.any() else "test"
    if columns.split is not None:
        why = f"column {columns.split!r} must say {PARTS[part == 'test']} of some row"
    elif part == "training":
        why = "all windows overlap with one for testing: give more rows, or a longer hop"
    elif classes == len(test):
        why = f"every class has one example: is {columns.label!r} the column of labels?"
    else:
        why = "that takes a client with two examples of a class: give more rows"
    raise DataError(f"{where}: there is no {part} example; {why}")


def rows_of(table: Table, columns: Columns) -> Rows:
    """Check a table's columns, and return its rows.

    Raises:
        DataError: a column is missing or holds something else; names the row.
    """
    check_columns([str(column) for column in table.frame.columns], columns, table.where)
    features = columns.features or features_of(table, columns)[0]
    x = np.stack([numbers_of(table, name) for name in features], axis=1)
    named = (columns.label, columns.client, columns.split)
    label, client, part = (texts_of(table, column) for column in named)
    wrong = np.flatnonzero(~np.isin(part, PARTS))
    if columns.split and len(wrong):
        raise DataError(
            f"{table.where}: column {columns.split!r} holds {str(part[wrong[0]])!r} in "
            f"{table.at(int(wrong[0]))}; it must say train or test"
        )
    changes = np.zeros(len(x), dtype=bool)
    for values in (label, client, part):
        changes[1:] |= values[1:] != values[:-1]
    stretch = np.cumsum(changes)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    start = np.arange(len(x)) - first[stretch]
    return Rows(x, label, client, part, np.zeros_like(stretch), stretch, start)


def joined(tables: Iterable[Table], columns: Columns) -> tuple[Rows, Columns]:
    """Put the rows of several files together; a stretch stays within its file.

    Also return the columns with the features that were found, and say in a line which they are.

    Args:
        tables: the files; the first one says which columns a net sees, unless ``columns`` does.
        columns: what the columns are.

    Raises:
        DataError: no file has a row; files differ in their columns of numbers; or names of classes
            or clients differ in spaces alone.
    """
    found, asked, empty = list[Rows](), columns, list[object]()
    seen = Names(), Names()
    for table in tables:
        if table.frame.empty:
            empty.append(table.where)
            continue
        check_columns([str(column) for column in table.frame.columns], columns, table.where)
        if not columns.features:
            features, others = features_of(table, columns)
            if asked.features:
                _check_same(asked.features, features, table.where)
            else:
                asked = columns.model_copy(update={"features": features})
                _tell_columns(features, others, table.where)
        rows = rows_of(table, asked)
        _check_spaces(rows.label, columns.label, table, seen[0])
        _check_spaces(rows.client, columns.client, table, seen[1])
        found.append(replace(rows, recording=rows.recording + len(found)))
    if not found:
        raise DataError(f"{empty[0]} holds no row below the names of its columns")
    shifts = np.cumsum([0, *(rows.stretch.max(initial=-1) + 1 for rows in found)])
    joint = {
        name: np.concatenate([getattr(rows, name) for rows in found])
        for name in Rows.__dataclass_fields__
        if name != "stretch"
    }
    stretch = np.concatenate([r.stretch + s for r, s in zip(found, shifts, strict=False)])
    return Rows(**joint, stretch=stretch), asked


def _tell_columns(features: Sequence[str], others: Mapping[str, str], where: object) -> None:
    """Say which columns a net sees, and why it sees no others."""
    used = ", ".join(printable(name, MOST_LETTERS) for name in features)
    left = ", ".join(f"{printable(name, MOST_LETTERS)} ({why})" for name, why in others.items())
    log.warning("note: %s: an example has the columns %s%s", where, used,
                f"; left out: {left}" if left else "")  # fmt: skip


def _check_same(first: tuple[str, ...], found: tuple[str, ...], where: object) -> None:
    """Check that a file has the columns of numbers of the first one, in whatever order."""
    for name in (*first, *found):
        if name not in found or name not in first:
            has = "no" if name in first else "a"
            raise DataError(
                f"{where} has {has} column of numbers {name!r}, unlike the first file: name the "
                "columns in [data.columns] features"
            )


def _check_spaces(values: NDArray[np.str_], column: str | None, table: Table, seen: Names) -> None:
    """Check that no two names differ in the spaces around them alone.

    Args:
        values: a file's names (n,).
        column: which column they are.
        table: the file.
        seen: what earlier files had; gets what this one has.
    """
    found, first = np.unique(values, return_index=True)
    for at, name in sorted(zip(first.tolist(), found.tolist(), strict=True)):
        like, place = seen.setdefault(name.strip(), (name, (table, at)))
        if like != name:
            before = f"{place[0].at(place[1])} of {place[0].where}"
            raise DataError(
                f"{table.where}: column {column!r} holds {name!r} in {table.at(at)} and {like!r} "
                f"in {before}, which differ in spaces alone: write equal names alike"
            )


def windowed(rows: Rows, length: int, hop: int, where: object) -> Rows:
    """Cut every stretch into windows (n, length, C); what is left over at its end is dropped.

    Raises:
        DataError: no stretch is long enough.
    """
    first = np.flatnonzero(rows.start == 0)
    sizes = np.diff([*first, len(rows.x)])
    begins = [
        at + s for at, n in zip(first, sizes, strict=True) for s in window_starts(n, length, hop)
    ]
    if not begins:
        owners = (rows.recording, rows.client, rows.label, rows.part)
        unsorted = len(sizes) > MIXED * len({*zip(*owners, strict=True)})
        advice = "sort the rows so that those of a recording follow each other, or "
        raise DataError(
            f"{where} gives no window of {length} rows: the longest stretch of one client and "
            f"class has {sizes.max(initial=0)}, of {len(sizes)} stretches; "
            f"{advice if unsorted else ''}set [data.columns] window to that or less"
        )
    places = np.array(begins)
    cut = rows.at(places)
    x = rows.x[places[:, None] + np.arange(length)]  # (n, length, C)
    return replace(cut, x=x)


def _shares_rows(rows: Rows, test: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Tell which windows overlap a test window."""
    begins = np.full(int(rows.stretch.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, rows.stretch[test], rows.start[test])  # where a stretch's test begins
    overlaps: NDArray[np.bool_] = rows.start + length > begins[rows.stretch]
    return overlaps
