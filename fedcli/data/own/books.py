"""Files that may hold several tables: workbooks, HDF5 and queries, each read by its library.

Which of its tables is meant, ``[data.columns] sheet`` says, or the columns that a run asks for.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import DAMAGED
from fedcli.data.folders import BOOKS, ending, shown
from fedcli.data.own.table_files import TableRows, check_twice
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import Recipe
from fedmodels.console.printable import printable
from fedmodels.errors import DataError, FedtideError, pip_line, reason_of, suggestion

BROKEN = (*DAMAGED, RuntimeError, AttributeError, ArithmeticError, NotImplementedError)
"""What the libraries raise for a damaged file."""
SHOWN, MAX_LETTERS = 8, 60
"""Tables that a line names, and letters of each name."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One table of a file."""

    name: str
    columns: Sequence[str]
    """Names of its columns; empty where one has none."""
    read: Callable[[], tuple[Any, NDArray[np.int64] | None]]
    """Returns a frame of pandas with these columns, and the places of its rows in the file (n,),
    from 0 on; None where it begins with its first row."""


def tables_of(
    path: Path, columns: Columns, recipe: Recipe, keep: Collection[str], since: Any = None
) -> list[tuple[TableRows, Recipe]]:
    """Read the tables of a file that a run asks for, with the file's own names of columns.

    Each comes with the recipe by which its columns are called.

    Raises:
        DataError: a package is missing, the file is damaged, or it has no such table.
    """
    place, extra = BOOKS[ending(path)]
    module = importlib.import_module(f"fedcli.data.own.{place}")
    try:
        with module.opened(path, columns, recipe, since) as parts:
            return [
                _rows(path, part, columns, recipe, keep, parts)
                for part in _chosen(path, parts, columns, recipe)
            ]
    except FedtideError:
        raise
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}: {pip_line(extra)}") from None
    except BROKEN as error:
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        reason = (reason_of(cause) or type(cause).__name__).splitlines()[0]
        raise DataError(f"{path} cannot be read: {printable(reason, 300)}") from None


def _chosen(path: Path, parts: Sequence[Part], columns: Columns, recipe: Recipe) -> Sequence[Part]:
    """Return the tables that are meant: by name, else those with all columns that are asked for.

    Where none has all of them, it is the one with most, and who reads it says what it lacks.
    """
    if columns.sheet is not None:
        known = [part.name for part in parts]
        if columns.sheet not in known:
            raise DataError(
                f"{path} holds no sheet or table {columns.sheet!r}."
                f"{suggestion(columns.sheet, known)} It holds: {_named(parts)}"
            )
        return [part for part in parts if part.name == columns.sheet]
    if len(parts) < 2:
        if not parts:
            raise DataError(f"{path} holds no table")
        return parts
    asked = columns.features or (), columns.named
    lacks = [
        tuple(sum(own.called(name) not in part.columns for name in names) for names in asked)
        for part in parts
        for own in [recipe.resolved(part.columns, path)]
    ]
    least = min(lacks)  # a new file needs no labels
    chosen = [part for part, missing in zip(parts, lacks, strict=True) if missing == least]
    if least[0]:
        return chosen[:1]
    if left := [part for part in parts if part not in chosen]:
        log.warning("note: %s: read are %s; left out, as they lack columns, are %s; [data.columns] "
                    "sheet names one", shown(path), _named(chosen), _named(left))  # fmt: skip
    return chosen


def _named(parts: Sequence[Part]) -> str:
    names = ", ".join(repr(printable(part.name, MAX_LETTERS)) for part in parts[:SHOWN])
    return names + (f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")


def _rows(
    path: Path,
    part: Part,
    columns: Columns,
    recipe: Recipe,
    keep: Collection[str],
    several: Sequence[Part],
) -> tuple[TableRows, Recipe]:
    recipe = recipe.resolved(part.columns, path)
    where = f"{path} [{printable(part.name, MAX_LETTERS)}]" if len(several) > 1 else path
    of_file = recipe.in_files(columns)
    left = check_twice(part.columns, of_file, where)
    frame, places = part.read()
    unnamed = [name for name in frame.columns if not name or name in left]
    rows = TableRows.of_frame(frame.drop(columns=unnamed), where, of_file, recipe, keep)
    apart = {name: _joined_by(part, other) for other in reversed(several) for name in other.columns}
    return replace(rows, file=path, part=part.name, places=places, apart=apart), recipe


def _joined_by(part: Part, other: Part) -> str:
    """Return in words how a table gets the columns of another one."""
    it = printable(other.name, MAX_LETTERS)
    both = [name for name in part.columns if name and name in other.columns]
    if not both:
        return f"{it!r} has it, and no column that says which rows are of one: add one to both"
    first, second = (repr(f"{printable(one.name, MAX_LETTERS)}.csv") for one in (part, other))
    equal = ", ".join('"{}"'.format(printable(name).replace('"', '""')) for name in both)
    query = f"SELECT * FROM {first} JOIN {second} USING ({equal})"
    return f"{it!r} has it: save both as CSV, and give a file join.sql beside them: {query}"


def frame_of(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> Any:
    """Return records of Python values as a frame; of columns of one name none is there."""
    pandas = importlib.import_module("pandas")
    once = {name for name, count in Counter(names).items() if count == 1}
    found = {
        name: pandas.Series([row[at] if at < len(row) else None for row in rows], dtype=object)
        for at, name in enumerate(names) if name in once
    }  # fmt: skip
    return pandas.DataFrame(found, index=range(len(rows)))
