"""Rows of a table with a cell that holds what its column cannot, or nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.cells import parsed, said
from fedcli.data.own.table_files import TableRows
from fedcli.data.own.times import unreadable_times
from fedcli.data.set_aside import SHOWN, SetAside
from fedmodels.config.columns import Columns
from fedmodels.errors import DataError

PARTS = ("train", "test")


def set_rows_aside(
    table: TableRows, columns: Columns, aside: SetAside
) -> tuple[TableRows, NDArray[np.bool_]]:
    """Return a table without the rows whose time is unknown, and which others are bad (n,).

    Where bad rows are refused, nothing is looked at. A row in its place keeps windows from going
    over it; one without a time has no place.
    """
    aside.total += len(table.frame)
    if not aside.skips:
        return table, np.zeros(len(table.frame), dtype=bool)
    bad, lost = tell_rows(table, columns, aside)
    return table.kept(~lost), bad[~lost]


def refuse(table: TableRows, columns: Columns, aside: SetAside, error: DataError) -> None:
    """Note the bad rows of a table, of which the error names the first.

    Raises:
        DataError: no row is bad, or all may be set aside: the error is of something else.
    """
    if aside.skips:
        raise error
    before, aside.first = aside.count, aside.first or error
    tell_rows(table, columns, aside)
    if aside.count == before:
        raise error


def tell_rows(
    table: TableRows, columns: Columns, aside: SetAside
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Note the bad rows of a table; return them, and those whose time is unknown (n,)."""
    found = faults_of(table, columns)
    lost = found.get(columns.time or "", np.zeros(len(table.frame), dtype=bool))
    bad = np.any([*found.values(), lost], axis=0)
    rows = np.flatnonzero(bad)
    for row in rows[:SHOWN].tolist():
        name, held = why_bad(table, found, row)
        aside.add(f"{table.name}, {table.at(row)}: {name!r} {held}")
    aside.count += max(0, len(rows) - SHOWN)
    return bad, lost


def faults_of(table: TableRows, columns: Columns) -> dict[str, NDArray[np.bool_]]:
    """Tell by column in which rows (n,) a cell holds what it cannot, or nothing and should."""
    found = _of_numbers(table, columns) | _of_texts(table, columns)
    if columns.time is not None:
        found[columns.time] = unreadable_times(table, columns)
    return found


def why_bad(table: TableRows, faults: Mapping[str, NDArray[np.bool_]], row: int) -> tuple[str, str]:
    """Return the first column that is at fault in a bad row, and what is wrong with its cell."""
    name = next(name for name, wrong in faults.items() if wrong[row])
    value = table.frame[name].iloc[row]
    is_empty = value is None or value != value or value == ""
    return name, "is empty" if is_empty else f"holds {said(value)}"


def _of_numbers(table: TableRows, columns: Columns) -> dict[str, NDArray[np.bool_]]:
    """Tell by column in which rows (n,) it holds no finite number, and should."""
    may_miss, found = columns.missing not in (None, "error"), dict[str, NDArray[np.bool_]]()
    for name in (*(columns.features or ()), *columns.targets):
        if name in (columns.categories or {}):
            continue
        numbers, filled = parsed(table, name, columns)
        with np.errstate(over="ignore"):
            wrong = ~np.isfinite(numbers.astype(np.float32))
        may = columns.missing == "drop" if name in columns.targets else may_miss
        found[name] = wrong & (filled | (not may))
    return found


def _of_texts(table: TableRows, columns: Columns) -> dict[str, NDArray[np.bool_]]:
    """Tell by column in which rows (n,) it is empty, and may not be; or is no part."""
    found = dict[str, NDArray[np.bool_]]()
    for name in columns.named:
        if name == columns.time or name in columns.targets:
            continue
        values = table.frame[name]
        empty = (values.isna() | (values == "")).to_numpy(dtype=bool)
        if name == columns.split:
            found[name] = ~values.isin(PARTS).to_numpy(dtype=bool)
        elif columns.missing != "drop":
            found[name] = empty
    return found
