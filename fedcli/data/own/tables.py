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

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.examples import SHOWN, Examples, coded, dataset_of, last_of_each
from fedcli.data.own.table_files import UNNAMED, files_of, read_frame
from fedcli.data.sets.dataset import Dataset, Source
from fedcli.data.sets.windows import window_starts
from fedmodels.config.data import Columns
from fedmodels.errors import DataError, suggestion

PARTS = ("train", "test")
Names = dict[str, tuple[str, str]]
"""By a name without the spaces around it: the name as it was first met, and where that was."""


@dataclass(frozen=True)
class Rows:
    """Rows of tables in recording order, or windows cut from them."""

    x: NDArray[np.float32]  # (n, C), windows (n, L, C)
    label: NDArray[np.str_]  # (n,)
    client: NDArray[np.str_]  # (n,), empty texts where no column names the clients
    part: NDArray[np.str_]  # (n,), likewise
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
    root, columns = source.roots[0], source.data.columns or Columns()
    files = files_of(root)
    rows, columns = joined(((read_frame(path, columns), path) for path in files), columns)
    if columns.window is not None:
        rows = windowed(rows, columns.window, columns.hop or columns.window, root)
    return made(rows, columns, "table", str(root), f"{len(files)} files")


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


def rows_of(frame: Any, columns: Columns, where: object) -> Rows:
    """Check a frame's columns, and return its rows.

    Args:
        frame: of pandas.
        columns: what they are.
        where: the file, for error lines.

    Raises:
        DataError: a column is missing or holds something else; names the row, counted from 1.
    """
    check_columns([str(column) for column in frame.columns], columns, where)
    named = (columns.label, columns.client, columns.split)
    features = columns.features or features_of(frame, columns, where)
    x = np.stack([_numbers(frame[name], name, where) for name in features], axis=1)
    label, client, part = (_texts(frame, column, where) for column in named)
    wrong = np.flatnonzero(~np.isin(part, PARTS))
    if columns.split and len(wrong):
        raise DataError(
            f"{where}: column {columns.split!r} holds {str(part[wrong[0]])!r} in row "
            f"{wrong[0] + 1}; it must say train or test"
        )
    changes = np.zeros(len(x), dtype=bool)
    for values in (label, client, part):
        changes[1:] |= values[1:] != values[:-1]
    stretch = np.cumsum(changes)
    first = np.flatnonzero(np.diff(stretch, prepend=-1))
    start = np.arange(len(x)) - first[stretch]
    return Rows(x, label, client, part, stretch, start)


def check_columns(known: Sequence[str], columns: Columns, where: object) -> None:
    """Check that every named column is there.

    Raises:
        DataError: names the first one that is not, and the nearest.
    """
    for name in (columns.label, columns.client, columns.split, *(columns.features or ())):
        if name is not None and name not in known:
            raise DataError(
                f"{where} has no column {name!r}.{suggestion(name, known)} "
                f"It has: {', '.join(known[:SHOWN])}"
            )


def joined(frames: Iterable[tuple[Any, object]], columns: Columns) -> tuple[Rows, Columns]:
    """Put the rows of several files together; a stretch stays within its file.

    Also return the columns with the features that were found.

    Args:
        frames: of pandas, each with its name for error lines; the first one says which columns a
            net sees, unless ``columns`` does.
        columns: what the columns are.

    Raises:
        DataError: no file has a row; files differ in their columns of numbers; or names of classes
            or clients differ in spaces alone.
    """
    tables, asked, empty = list[Rows](), columns, list[object]()
    seen = Names(), Names()
    for frame, where in frames:
        if frame.empty:
            empty.append(where)
            continue
        if not asked.features:
            asked = columns.model_copy(update={"features": features_of(frame, columns, where)})
        elif not columns.features:
            _check_same(asked.features, features_of(frame, columns, where), where)
        rows = rows_of(frame, asked, where)
        _check_spaces(rows.label, columns.label, where, seen[0])
        _check_spaces(rows.client, columns.client, where, seen[1])
        tables.append(rows)
    if not tables:
        raise DataError(f"{empty[0]} holds no row below the names of its columns")
    shifts = np.cumsum([0, *(rows.stretch.max(initial=-1) + 1 for rows in tables)])
    joint = {
        name: np.concatenate([getattr(rows, name) for rows in tables])
        for name in Rows.__dataclass_fields__
        if name != "stretch"
    }
    stretch = np.concatenate([r.stretch + s for r, s in zip(tables, shifts, strict=False)])
    return Rows(**joint, stretch=stretch), asked


def features_of(frame: Any, columns: Columns, where: object) -> tuple[str, ...]:
    """Return a frame's columns of numbers but the label, the client and the split.

    A column without a name is none: it holds the numbers of rows, which often tell the class.

    Raises:
        DataError: there is none.
    """
    named = (columns.label, columns.client, columns.split)
    others = [str(column) for column in frame.columns if str(column) not in named]
    others = [name for name in others if not name.startswith(UNNAMED)]
    found = tuple(name for name in others if frame[name].dtype.kind in "iufb")
    if not found:
        raise DataError(f"{where} has no column of numbers beside the label: set features")
    return found


def _check_same(first: tuple[str, ...], found: tuple[str, ...], where: object) -> None:
    """Check that a file has the columns of numbers of the first one, in whatever order."""
    for name in (*first, *found):
        if name not in found or name not in first:
            has = "no" if name in first else "a"
            raise DataError(
                f"{where} has {has} column of numbers {name!r}, unlike the first file: name the "
                "columns in [data.columns] features"
            )


def _check_spaces(values: NDArray[np.str_], column: str | None, where: object, seen: Names) -> None:
    """Check that no two names differ in the spaces around them alone.

    Args:
        values: a file's names (n,).
        column: which column they are.
        where: the file, for error lines.
        seen: what earlier files had; gets what this one has.
    """
    found, first = np.unique(values, return_index=True)
    for at, name in sorted(zip(first.tolist(), found.tolist(), strict=True)):
        like, place = seen.setdefault(name.strip(), (name, f"row {at + 1} of {where}"))
        if like != name:
            raise DataError(
                f"{where}: column {column!r} holds {name!r} in row {at + 1} and {like!r} in "
                f"{place}, which differ in spaces alone: write equal names alike"
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
        raise DataError(
            f"{where} gives no window of {length} rows: the longest stretch of one client and "
            f"class has {sizes.max(initial=0)}; set [data.columns] window to that or less"
        )
    places = np.array(begins)
    cut = rows.at(places)
    x = rows.x[places[:, None] + np.arange(length)]  # (n, length, C)
    return Rows(x, cut.label, cut.client, cut.part, cut.stretch, cut.start)


def _shares_rows(rows: Rows, test: NDArray[np.bool_], length: int) -> NDArray[np.bool_]:
    """Tell which windows overlap a test window."""
    begins = np.full(int(rows.stretch.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(begins, rows.stretch[test], rows.start[test])  # where a stretch's test begins
    overlaps: NDArray[np.bool_] = rows.start + length > begins[rows.stretch]
    return overlaps


def _numbers(column: Any, name: str, where: object) -> NDArray[np.float32]:
    """Return a column's numbers (n,)."""
    pandas = importlib.import_module("pandas")
    if column.dtype.kind in "mM":
        raise DataError(
            f"{where}: column {name!r} holds times: make numbers of them, such as seconds since "
            "the beginning, or leave the column out of features"
        )
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is named
        found = pandas.to_numeric(column, errors="coerce")
        fits = np.isfinite(found.to_numpy(dtype=np.float64, na_value=np.nan))
        values = found.to_numpy(dtype=np.float32, na_value=np.nan)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        more = f" and in {len(wrong) - 1} more" if len(wrong) > 1 else ""
        why = "is too large for float32" if fits[wrong[0]] else "is no finite number"
        raise DataError(
            f"{where}: column {name!r} holds {_said(column.iloc[wrong[0]])} in row "
            f"{wrong[0] + 1}{more}, which {why}: mend or drop these rows, or leave the column out "
            "of features"
        )
    out: NDArray[np.float32] = values
    return out


def _said(value: Any) -> str:
    """Return a value as an error line has it: texts in quotes."""
    return repr(value) if isinstance(value, str) else str(value)


def _texts(frame: Any, column: str | None, where: object) -> NDArray[np.str_]:
    """Return a column as texts (n,); empty ones where there is no such column."""
    if column is None:
        return np.full(len(frame), "", dtype=np.str_)
    empty = np.flatnonzero(frame[column].isna() | (frame[column] == ""))
    if len(empty):
        raise DataError(f"{where}: column {column!r} is empty in row {empty[0] + 1}")
    return np.array([str(value) for value in frame[column]], dtype=np.str_)
