"""What is new in a table that only grows: rows beyond the mark that was read last.

A site's recipe names the column, ``mark = "id"``: a running number, or the time of an entry.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np

from fedcli.data.own.table_files import Since, TableRows
from fedmodels.errors import DataError

RISES = "a mark is a number or a date that only rises, such as 17 or 2026-05-31 12:00"


def only_new(table: TableRows, mark: str, since: Since) -> TableRows:
    """Return the rows of a table beyond a mark, and the last mark that it has.

    Raises:
        DataError: it has no such column, or a cell of it is no mark; or of another kind than the
            last one.
    """
    if mark not in table.frame.columns:
        known = ", ".join(table.names[:20])
        raise DataError(f"{table.where} has no column {mark!r}, the recipe's mark. It has: {known}")
    pandas = importlib.import_module("pandas")
    column = table.frame[mark]
    if column.dtype.kind not in "iufM":
        numbers = pandas.to_numeric(column, errors="coerce")
        column = numbers if numbers.notna().all() else _dates(column)
    elif column.dtype.kind == "M":
        column = _dates(column)
    wrong = np.flatnonzero(column.isna().to_numpy())
    if len(wrong):
        held = table.frame[mark].iloc[wrong[0]]
        what = "is empty" if held is None or held != held else f"holds {str(held)!r}"
        raise DataError(
            f"{table.where}: column {mark!r} {what} in {table.at(int(wrong[0]))}: {RISES}"
        )
    if not len(column):
        return table
    if since is not None:
        before = value_of(since)
        if isinstance(before, pandas.Timestamp) != (column.dtype.kind == "M"):
            raise DataError(
                f"{table.where}: column {mark!r} is of another kind than {since!r}, which was read "
                "last: make it as it was"
            )
        is_new = (column > before).to_numpy()
        table = replace(table.kept(is_new), old=int((~is_new).sum()))
        column = column[is_new]
    return table if not len(column) else replace(table, mark=_plain(column.max()))


def value_of(since: Since) -> Any:
    """Return a mark as it is compared: a number, or a point in time."""
    pandas = importlib.import_module("pandas")
    return pandas.Timestamp(since) if isinstance(since, str) else since


def beyond(path: Any, mark: str, since: Since) -> dict[str, Any]:
    """Return with which filter pandas reads what is new of a parquet file alone, if it can."""
    arrow = importlib.import_module("pyarrow")
    schema = importlib.import_module("pyarrow.parquet").read_schema(path)
    if since is None or mark not in schema.names:
        return {}
    kind, value = schema.field(mark).type, value_of(since)
    if arrow.types.is_timestamp(kind) and isinstance(since, str):
        value = value.tz_localize("UTC") if kind.tz is not None else value
        return {"filters": [(mark, ">", value)]}
    fits = arrow.types.is_integer(kind) or arrow.types.is_floating(kind)
    return {"filters": [(mark, ">", value)]} if fits and not isinstance(since, str) else {}


def _dates(column: Any) -> Any:
    """Return points in time (n,) as UTC, without a zone."""
    pandas = importlib.import_module("pandas")
    found = pandas.to_datetime(column, errors="coerce", format="ISO8601", utc=True)
    return found.dt.tz_localize(None)


def _plain(value: Any) -> float | int | str:
    """Return a mark as JSON has it."""
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    number = value.item() if hasattr(value, "item") else value
    return int(number) if float(number).is_integer() else float(number)
