"""The times of a table's rows: numbers, or texts with a date, a clock or both."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.own.cells import parsed, said
from fedcli.data.own.table_files import Table
from fedmodels.config.data import Columns
from fedmodels.errors import DataError

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds in each unit of time."""
_DATED = r"^\s*(\d{1,2})([./-])(\d{1,2})[./-](\d{4}|\d{2})[\sT,]*(.*)$"
"""A date that begins with the day or the month, and what stands behind it."""


def times_of(table: Table, columns: Columns) -> NDArray[np.float64]:
    """Return the times of rows (n,) in seconds from the first one on.

    Raises:
        DataError: a cell holds no time; names the row. Or days and months cannot be told apart.
    """
    assert columns.time is not None
    column = table.frame[columns.time]
    numbers = None if column.dtype.kind in "mM" else parsed(table, columns.time)[0]
    if numbers is not None and not np.isnan(numbers[column.notna()]).any():
        found = numbers * SECONDS[columns.time_unit or "s"]
    elif columns.time_unit is not None:
        raise DataError(
            f"{table.where}: column {columns.time!r} holds no numbers: leave out time_unit"
        )
    else:
        found = _of_texts(column, table, columns)
    wrong = np.flatnonzero(~np.isfinite(found))
    if len(wrong):
        raise DataError(
            f"{table.where}: column {columns.time!r} holds {said(column.iloc[wrong[0]])} in "
            f"{table.at(int(wrong[0]))}, which is no time: write numbers, or texts such as "
            "2026-05-31T12:00:00.5, 31.05.2026 12:00:00.5 or 12:00:00.5"
        )
    return np.asarray(found - found.min(initial=np.inf), dtype=np.float64)


def _of_texts(column: Any, table: Table, columns: Columns) -> NDArray[np.float64]:
    """Return the seconds (n,) of times that are texts; NaN where a text is no time."""
    pandas = importlib.import_module("pandas")
    if column.dtype.kind == "M":
        return _seconds(column - column.min())
    texts = column.astype(str).str.strip()
    dated = texts.str.extract(_DATED)
    if dated[0].notna().any():
        return _of_dates(dated, table, columns)
    stamps = _stamps(texts.str.replace(r",(\d+)", r".\1", regex=True))
    if stamps.notna().any():
        return _seconds(stamps - stamps[stamps.notna()].iloc[0])
    return _seconds(pandas.to_timedelta(texts.str.replace(",", "."), errors="coerce"))


def _of_dates(dated: Any, table: Table, columns: Columns) -> NDArray[np.float64]:
    """Return the seconds (n,) of times whose date begins with the day or the month.

    Args:
        dated: the first number, the mark, the second number, the year and the rest (n, 5).
        table: the file, for error lines.
        columns: what the columns are.

    Raises:
        DataError: either may be the day, and it matters.
    """
    first, second = (dated[k].fillna("0").astype(int) for k in (0, 2))
    day_first = columns.day_first
    if day_first is None and ((first > 12).any() or (dated[1] == ".").all()):
        day_first = True
    if day_first is None and (second > 12).any():
        day_first = False
    by_day, by_month = (_seconds_since_first(dated, *order) for order in ((0, 2), (2, 0)))
    if day_first is None and not np.array_equal(by_day, by_month, equal_nan=True):
        row = int((first != second).to_numpy().argmax())
        raise DataError(
            f"{table.where}: column {columns.time!r} holds "
            f"{said(table.frame[columns.time].iloc[row])} in {table.at(row)}, of which either "
            "number may be the day: set [data.columns] day_first = true or false"
        )
    return by_month if day_first is False else by_day


def _seconds_since_first(dated: Any, day: int, month: int) -> NDArray[np.float64]:
    """Return seconds (n,) since the first time; NaN where there is no such date."""
    year = dated[3].where(dated[3].str.len() != 2, "20" + dated[3])
    clock = dated[4].str.replace(",", ".").where(dated[4] != "", "00:00")
    iso = year + "-" + dated[month].str.zfill(2) + "-" + dated[day].str.zfill(2) + " " + clock
    stamps = _stamps(iso)
    known = stamps[stamps.notna()]
    return _seconds(stamps - known.iloc[0]) if len(known) else np.full(len(iso), np.nan)


def _stamps(texts: Any) -> Any:
    """Return points in time; texts begin with the year, and may have a clock of twelve hours."""
    pandas = importlib.import_module("pandas")
    found = pandas.to_datetime(texts, errors="coerce", format="ISO8601", utc=True)
    left = found.isna() & texts.str.contains(r"\d\s*[AaPp]\.?[Mm]\.?$", regex=True, na=False)
    if left.any():
        clocks = texts[left].str.replace(".m.", "m").str.upper()
        for form in ("%Y-%m-%d %I:%M:%S.%f %p", "%Y-%m-%d %I:%M:%S %p", "%Y-%m-%d %I:%M %p"):
            read = pandas.to_datetime(clocks, errors="coerce", format=form, utc=True)
            found = found.fillna(read)
    return found


def _seconds(spans: Any) -> NDArray[np.float64]:
    return np.asarray(spans.dt.total_seconds().to_numpy(dtype=np.float64, na_value=np.nan))
