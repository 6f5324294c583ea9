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
MOST_LETTERS = 60
"""Of a cell that an error line quotes."""


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


def features_of(table: Table, columns: Columns) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of numbers but the label, the client and the split; why others are none.

    A column without a name is none: it holds the numbers of rows, which often tell the class.

    Raises:
        DataError: there is none, or a text stands among a column's numbers.
    """
    named = (columns.label, columns.client, columns.split)
    others = [name for name in map(str, table.frame.columns) if name not in named]
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
    numbers, filled = _parsed(column)
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


def _parsed(column: Any) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column's numbers (n,), NaN where a cell is none, and which cells hold anything.

    Numbers may be written as texts, or be decimals of parquet.
    """
    pandas = importlib.import_module("pandas")
    filled = column.notna().to_numpy()
    if column.dtype.kind not in "iufb":
        filled = filled & ~column.isin(MISSING).to_numpy()
    found = pandas.to_numeric(column, errors="coerce")
    return found.to_numpy(dtype=np.float64, na_value=np.nan), filled


def numbers_of(table: Table, name: str) -> NDArray[np.float64]:
    """Return a column's numbers (n,).

    Raises:
        DataError: a cell holds none, or one beyond float32; names the row.
    """
    column = table.frame[name]
    if column.dtype.kind in "mM":
        raise DataError(
            f"{table.where}: column {name!r} holds times: make numbers of them, such as seconds "
            "since the beginning, or leave the column out of features"
        )
    numbers, _ = _parsed(column)
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is named
        wrong = np.flatnonzero(~np.isfinite(numbers.astype(np.float32)))
    if len(wrong):
        more = f" and in {len(wrong) - 1} more" if len(wrong) > 1 else ""
        fits = np.isfinite(numbers[wrong[0]])
        why = "is too large for float32" if fits else "is no finite number"
        raise DataError(
            f"{table.where}: column {name!r} holds {_said(column.iloc[wrong[0]])} in "
            f"{table.at(int(wrong[0]))}{more}, which {why}: mend or drop these rows, or leave the "
            "column out of features"
        )
    return numbers


def _said(value: Any) -> str:
    """Return a value as an error line has it: texts in quotes."""
    return f"'{printable(value, MOST_LETTERS)}'" if isinstance(value, str) else str(value)


def texts_of(table: Table, column: str | None) -> NDArray[np.str_]:
    """Return a column as texts (n,); empty ones where there is no such column."""
    if column is None:
        return np.full(len(table.frame), "", dtype=np.str_)
    values = table.frame[column]
    empty = np.flatnonzero(values.isna() | (values == ""))
    if len(empty):
        row = table.at(int(empty[0]))
        raise DataError(f"{table.where}: column {column!r} is empty in {row}")
    return np.array([str(value) for value in values], dtype=np.str_)
