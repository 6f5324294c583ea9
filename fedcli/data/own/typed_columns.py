"""One form for the columns of a table, whatever file they were read from.

A column of texts (labels, clients, groups, categories …) holds ``str``, and None where a cell is
empty; a whole number is ``7`` and no ``7.0``. Another column holds numbers of numpy,
points in time, or, of mixed cells, texts and numbers side by side. Its empty cells are NaN,
NaT or None. Nothing but None, NaN, NaT, pandas' NA and a text of spaces is an empty cell here; what
a text such as ``NA`` means among numbers, their reader says.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from decimal import Decimal
from typing import Any

import numpy as np

NUMBERS = int, float, Decimal


def typed(frame: Any, texts: Collection[str]) -> Any:
    """Return a frame of pandas whose columns have the one form; some of them hold ``texts``."""
    pandas = importlib.import_module("pandas")
    columns = [
        pandas.Series(_as_texts(column) if str(name) in texts else _as_values(column))
        for name, column in frame.items()
    ]
    return pandas.DataFrame(dict(enumerate(columns)), index=range(len(frame))).set_axis(
        frame.columns, axis=1
    )


def text_of(value: Any) -> str:
    """Return a cell as a CSV has it: 7 is no 7.0."""
    if isinstance(value, float | np.floating) and value.is_integer():
        return f"{value:.0f}"
    if hasattr(value, "isoformat"):
        return str(value.isoformat()).replace("T", " ")
    return str(value)


def _as_texts(column: Any) -> Any:
    pandas = importlib.import_module("pandas")
    cells = [None if cell is None else text_of(cell) for cell in _cells(column)]
    return pandas.array(cells, dtype=object)


def _as_values(column: Any) -> Any:
    """Return a column in the type of its cells, where they have one."""
    pandas = importlib.import_module("pandas")
    if isinstance(column.dtype, np.dtype | pandas.DatetimeTZDtype) and column.dtype.kind != "O":
        return column.reset_index(drop=True)
    cells = _cells(column)
    kinds = {type(cell) for cell in cells if cell is not None}
    if kinds and all(issubclass(kind, NUMBERS) for kind in kinds):
        return np.array([np.nan if cell is None else cell for cell in cells], dtype=np.float64)
    if kinds and all(hasattr(kind, "isoformat") and hasattr(kind, "year") for kind in kinds):
        return pandas.to_datetime(pandas.Series(cells), errors="coerce")
    plain = [text_of(cell) if hasattr(cell, "isoformat") else cell for cell in cells]
    return pandas.array(plain, dtype=object)


def _cells(column: Any) -> list[Any]:
    """Return the cells of a column as values of Python; None for each empty one."""
    pandas = importlib.import_module("pandas")
    return [None if cell is None else _cell(cell, pandas) for cell in column.tolist()]


def _cell(cell: Any, pandas: Any) -> Any:
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8", "replace")
    if isinstance(cell, str):
        return cell if cell and not cell.isspace() else None
    if isinstance(cell, float):
        return cell if cell == cell else None
    return None if cell is pandas.NA or cell is pandas.NaT else cell
