"""The cells of a table: which columns hold numbers, and their content as numbers or as texts."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.table_files import MISSING, Table
from fedmodels.config.data import Columns
from fedmodels.errors import DataError, suggestion
from fedmodels.printable import printable

SHOWN = 20
"""Columns that an error line lists."""
UNNAMED = "Unnamed: "
"""How pandas begins the name of a column without one, such as the row numbers that it writes."""
MAX_LETTERS = 60
"""Of a cell that an error line quotes."""
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds in each unit of time."""


def check_columns(known: Sequence[str], columns: Columns, where: object) -> None:
    """Check that every named column is there.

    Raises:
        DataError: names the first one that is not, and the nearest.
    """
    for name in (*columns.named, *(columns.features or ())):
        if name not in known:
            raise DataError(
                f"{where} has no column {name!r}.{suggestion(name, known)} "
                f"It has: {', '.join(known[:SHOWN])}"
            )


def features_of(table: Table, columns: Columns) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of numbers that have no other role, and why other columns are none.

    A column without a name is none: it holds the numbers of rows, which often tell the class.

    Raises:
        DataError: there is none, or a text stands among a column's numbers.
    """
    others = [name for name in map(str, table.frame.columns) if name not in columns.named]
    why = {name: _why_none(table, name) for name in others}
    found = tuple(name for name in others if not why[name])
    if not found:
        raise DataError(f"{table.where} has no column of numbers beside the label: set features")
    return found, {name: reason for name, reason in why.items() if reason}


def _why_none(table: Table, name: str) -> str:
    """Return why a column is none of numbers; empty text if it is one.

    Raises:
        DataError: most of its cells are numbers, and a text is among them; names the row.
    """
    column = table.frame[name]
    if name.startswith(UNNAMED):
        return "no name"
    if column.dtype.kind in "mM":
        return "times"
    numbers, filled = _parsed(table, name)
    wrong = filled & np.isnan(numbers)
    if not filled.any():
        return "" if column.dtype.kind in "iufb" else "empty"
    if 2 * wrong.sum() >= filled.sum():
        return "texts"
    if wrong.any():
        row = int(wrong.argmax())
        more = f" and other texts in {wrong.sum() - 1} more" if wrong.sum() > 1 else ""
        raise DataError(
            f"{table.where}: column {name!r} holds {_said(column.iloc[row])} in {table.at(row)}"
            f"{more}, and numbers elsewhere: mend or drop these rows, or name the columns of "
            "numbers in [data.columns] features"
        )
    return ""


def _parsed(table: Table, name: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column's numbers (n,), NaN where a cell is none, and which cells hold anything.

    Numbers may be written as texts, or be decimals of parquet.
    """
    pandas, column = importlib.import_module("pandas"), table.frame[name]
    filled = column.notna().to_numpy()
    if column.dtype.kind not in "iufb":
        filled = filled & ~column.isin(MISSING).to_numpy()
        if (
            table.style is not None and table.style.decimal == ","
        ):  # one text makes texts of a whole column
            column = column.str.replace(",", ".")
    found = pandas.to_numeric(column, errors="coerce")
    return found.to_numpy(dtype=np.float64, na_value=np.nan), filled


def numbers_of(table: Table, name: str, *, may_miss: bool = False) -> NDArray[np.float64]:
    """Return a column's numbers (n,); NaN in empty cells, where these may be.

    Raises:
        DataError: a cell holds none, or one beyond float32; names the row.
    """
    column = table.frame[name]
    if column.dtype.kind in "mM":
        raise DataError(
            f"{table.where}: column {name!r} holds times: make numbers of them, such as seconds "
            "since the beginning, or leave the column out of features"
        )
    numbers, filled = _parsed(table, name)
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is named
        wrong = np.flatnonzero(~np.isfinite(numbers.astype(np.float32)) & (filled | ~may_miss))
    if not len(wrong):
        return numbers
    more = f" and in {len(wrong) - 1} more" if len(wrong) > 1 else ""
    where = f"{table.where}: column {name!r}"
    if not filled[wrong[0]]:
        raise DataError(
            f"{where} is empty in {table.at(int(wrong[0]))}{more}: set [data.columns] missing = "
            "'drop', 'interpolate' or 'mean', or leave the column out of features"
        )
    why = "too large for float32" if np.isfinite(numbers[wrong[0]]) else "no finite number"
    raise DataError(
        f"{where} holds {_said(column.iloc[wrong[0]])} in {table.at(int(wrong[0]))}{more}, which "
        f"is {why}: mend or drop these rows, or leave the column out of features"
    )


def times_of(table: Table, columns: Columns) -> NDArray[np.float64]:
    """Return the times of rows (n,) in seconds from the first one on.

    Raises:
        DataError: a cell holds none; names the row.
    """
    assert columns.time is not None
    pandas = importlib.import_module("pandas")
    column = table.frame[columns.time]
    numbers = None if column.dtype.kind in "mM" else _parsed(table, columns.time)[0]
    if numbers is not None and not np.isnan(numbers[column.notna()]).any():
        found = numbers * SECONDS[columns.time_unit or "s"]
    elif columns.time_unit is not None:
        raise DataError(
            f"{table.where}: column {columns.time!r} holds no numbers: leave out time_unit"
        )
    else:
        stamps = pandas.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
        if stamps.notna().any():
            since = stamps - stamps[stamps.notna()].iloc[0]
        else:
            since = pandas.to_timedelta(column, errors="coerce")
        found = since.dt.total_seconds().to_numpy(dtype=np.float64, na_value=np.nan)
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        raise DataError(
            f"{table.where}: column {columns.time!r} holds {_said(column.iloc[wrong[0]])} in "
            f"{table.at(int(wrong[0]))}, which is no time: write numbers, or texts such as "
            "2026-05-31T12:00:00.5 or 12:00:00.5"
        )
    return np.asarray(found - found.min(initial=np.inf), dtype=np.float64)


def _said(value: Any) -> str:
    """Return a value as an error line has it: texts in quotes."""
    return f"'{printable(value, MAX_LETTERS)}'" if isinstance(value, str) else str(value)


def texts_of(table: Table, column: str | None, *, may_miss: bool = False) -> NDArray[np.str_]:
    """Return a column as texts (n,); empty ones where there is no such column.

    Raises:
        DataError: a cell is empty, and none may be; names the row.
    """
    if column is None:
        return np.full(len(table.frame), "", dtype=np.str_)
    values = table.frame[column]
    empty = (values.isna() | (values == "")).to_numpy(dtype=bool)
    if empty.any() and not may_miss:
        row = table.at(int(empty.argmax()))
        raise DataError(f"{table.where}: column {column!r} is empty in {row}")
    texts = [str(value) for value in values]
    return np.where(empty, "", np.array(texts, dtype=np.str_)) if texts else np.array([], np.str_)
