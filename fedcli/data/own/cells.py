"""The cells of a table: which columns hold numbers; their content as numbers, texts or times."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedcli.data.folders import ending
from fedcli.data.own.csv_style import MISSING
from fedcli.data.own.number_marks import CALLED, OTHER, is_number, plain
from fedcli.data.own.site_lines import (
    HEAD,
    lines_for_columns,
    lines_for_number,
    unit_of,
    with_lines,
)
from fedcli.data.own.table_files import TableRows
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import EMPTY, Recipe, SiteColumn
from fedmodels.console.printable import printable
from fedmodels.errors import DataError, suggestion
from fedmodels.facts.class_names import alike, composed

SHOWN = 20
"""Columns that an error line lists."""
UNNAMED = "Unnamed: "
"""How pandas begins the name of a column without one, such as the row numbers that it writes."""
MISSING_TEXTS = "with [data.columns] missing_values which texts stand for empty cells"
MAX_LETTERS = 60
"""Letters of a cell that an error line quotes, at most."""
FILLING = "'drop', 'interpolate' or 'mean'", "'drop', as nothing fills what is to be predicted"
LEAVING = ", or leave the column out of features", ""
"""What the line of a wrong cell says otherwise of one that is to be predicted."""
FEW = 100
"""Cells that are looked at one by one."""


def check_columns(
    known: Sequence[str],
    columns: Columns,
    where: object,
    recipe: Recipe = EMPTY,
    apart: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise DataError unless every named column is there: with the first one that is not.

    ``known`` are the columns of a file, under their names in the run. ``apart`` says of columns of
    other tables how they come into this one.
    """
    asked = [*columns.named, *(columns.features or columns.categories or ())]
    if columns.features is None:
        asked += [name for name in recipe.columns if name not in asked]
    missing = [name for name in asked if name not in known]
    for name in missing:
        if (own := recipe.called(name)) in apart:
            raise DataError(f"{where} has no column {own!r}. {apart[own]}")
        if own != name:
            raise with_lines(
                DataError(
                    f"{where} has no column {own!r}, which is {name!r} by the recipe."
                    f"{suggestion(own, known)} It has: "
                    f"{', '.join(map(recipe.called, known[:SHOWN])) or 'no other'}"
                ),
                lines_for_columns([name], [other for other in known if other not in asked]),
            )
        else:
            places = {columns.client: "client", columns.label: "label"}
            from_place = (
                ". Where the file's name or its folder's says it, set "
                f"{places[name]}_from = 'file' or 'folder' instead"
                if name in places and isinstance(where, Path)
                else ""
            )
            raise with_lines(
                DataError(
                    f"{where} has no column {name!r}.{suggestion(name, known)} "
                    f"It has: {', '.join(known[:SHOWN])}{from_place}"
                ),
                lines_for_columns(missing, [other for other in known if other not in asked]),
            )


def features_of(
    table: TableRows, columns: Columns, *, skips: bool = False
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the columns of numbers that have no other role, and why other columns are none.

    Where rows with a text among numbers are set aside (``skips``), these are columns of numbers.

    A column without a name is left out: it holds the numbers of rows, which often tell the class.

    Raises:
        DataError: there is none, or a text stands among a column's numbers.
    """
    others = [name for name in map(str, table.frame.columns) if name not in columns.named]
    why = {name: _why_none(table, name, columns, skips) for name in others}
    found = tuple(name for name in others if not why[name])
    if not found:
        raise DataError(f"{table.where} has no numeric column besides the label: set features")
    return found, {name: reason for name, reason in why.items() if reason}


def _why_none(table: TableRows, name: str, columns: Columns, skips: bool) -> str:
    """Return why a column does not hold numbers; an empty text if it does.

    Raises:
        DataError: most of its cells are numbers, and a text is among them; or they are numbers with
            another decimal mark than the others of the file. Names the row.
    """
    column = table.frame[name]
    if name in (columns.categories or {}):
        return ""
    if name.startswith(UNNAMED):
        return "no name"
    if column.dtype.kind in "mM":
        return "times"
    numbers, filled = parsed(table, name, columns)
    wrong = filled & np.isnan(numbers)
    if not filled.any():
        return "" if column.dtype.kind in "iufb" else "empty"
    if not wrong.any():
        return ""
    row = int(wrong.argmax())
    where = f"{table.where}: column {name!r} holds {said(column.iloc[row])} in {table.at(row)}"
    if 2 * wrong.sum() >= filled.sum():
        others = sum(_has_other_mark(cell, table) for cell in column[wrong].iloc[:FEW])
        if unit_of(str(column.iloc[row])):
            return f"texts such as {said(column.iloc[row])}: the recipe of a site has units"
        if columns.decimal or 2 * others <= min(FEW, wrong.sum()):
            other_mark = CALLED[OTHER[table.marks.decimal]]
            return f"numbers with a decimal {other_mark}" if others else "texts"
        raise DataError(f"{where}, {_advice(column.iloc[row], table)}")
    if skips:
        return ""
    more = f" and other texts in {wrong.sum() - 1} more" if wrong.sum() > 1 else ""
    hint = (
        f", {_advice(column.iloc[row], table)}"
        if _has_other_mark(column.iloc[row], table)
        else (
            f": mend or drop these rows, say {MISSING_TEXTS}, or name the columns of numbers in "
            "features"
        )
    )
    raise with_lines(
        DataError(f"{where}{more}, and numbers elsewhere{hint}"),
        lines_for_number(name, column.iloc[row]),
    )


def _has_other_mark(value: Any, table: TableRows) -> bool:
    """Tell whether a text is a number whose decimal mark is unlike that of the file."""
    return isinstance(value, str) and is_number(value, OTHER[table.marks.decimal])


def _advice(value: Any, table: TableRows) -> str:
    """Return what to do about a number whose decimal mark is unlike that of the file."""
    own, other = table.marks.decimal, OTHER[table.marks.decimal]
    return (
        f"a number with a decimal {CALLED[other]}, and numbers are read with a decimal "
        f"{CALLED[own]}: write all alike, or set [data.columns] decimal = '{other}'"
    )


def parsed(
    table: TableRows, name: str, columns: Columns | None = None
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return a column's numbers (n,), NaN where a cell holds none, and which cells hold anything.

    Numbers may be written as texts, or be decimals of parquet. They are in the run's unit.
    """
    pandas, column = importlib.import_module("pandas"), table.frame[name]
    own = table.recipe.columns.get(name)
    missing = (*((columns and columns.missing_values) or ()), *((own and own.missing) or ()))
    filled = column.notna().to_numpy()
    if column.dtype.kind not in "iufb":
        _check_single(table, name, column[filled])
        texts = [value for value in missing if isinstance(value, str)]
        filled = filled & ~column.isin([*MISSING, *texts]).to_numpy()
        if filled.any() and hasattr(column, "str"):  # one text makes texts of a whole column
            if own is not None:
                column = column.map(lambda cell: own.bare(cell) if isinstance(cell, str) else cell)
            column = plain(column, table.marks.decimal)
    numbers = pandas.to_numeric(column, errors="coerce")
    found = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    filled = filled & ~np.isin(found, [value for value in missing if not isinstance(value, str)])
    if own is not None:
        found = _in_unit_of_run(found, table.frame[name], own)
    return np.where(filled, found, np.nan), filled


def _check_single(table: TableRows, name: str, cells: Any) -> None:
    """Raise DataError if the first cell holds several values, as a list of parquet does."""
    pandas = importlib.import_module("pandas")
    if len(cells) and not pandas.api.types.is_scalar(cells.iloc[0]):
        raise DataError(
            f"{table.where}: the cells of column {printable(name, 60)!r} hold several values each: "
            "give each value a column of its own, or leave the column out of features"
        )


def _in_unit_of_run(
    numbers: NDArray[np.float64], column: Any, own: SiteColumn
) -> NDArray[np.float64]:
    """Return numbers (n,) of a site in the unit of the run; those beyond a limit as it says."""
    found = numbers.copy()
    if own.below is not None or own.above is not None:
        for row, cell in enumerate(column):
            limit = own.limit_of(cell) if isinstance(cell, str) else None
            if limit == "half":
                found[row] /= 2
            elif isinstance(limit, float) and np.isfinite(found[row]):
                found[row] = limit
    return found if own.factor == 1 and not own.offset else found * own.factor + own.offset


def numbers_of(
    table: TableRows, name: str, columns: Columns, bad: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return a column's numbers (n,); NaN in empty cells, where these may be, and in ``bad`` rows.

    Raises:
        DataError: a cell holds no number, or one beyond float32; names the row.
    """
    column, may_miss = table.frame[name], columns.missing not in (None, "error")
    if column.dtype.kind in "mM":
        raise DataError(
            f"{table.where}: column {name!r} holds times: make numbers of them, such as seconds "
            "since the beginning, or leave the column out of features"
        )
    numbers, filled = parsed(table, name, columns)
    with np.errstate(over="ignore"):  # what is beyond float32 becomes infinite, and is named
        wrong = np.flatnonzero(~np.isfinite(numbers.astype(np.float32)) & (filled | ~may_miss))
    if bad is not None:
        wrong = wrong[~bad[wrong]]
    if not len(wrong):
        return numbers if bad is None else np.where(bad, np.nan, numbers)
    value = column.iloc[wrong[0]]
    more = f" and in {len(wrong) - 1} more" if len(wrong) > 1 else ""
    where = f"{table.where}: column {name!r}"
    if not filled[wrong[0]]:
        raise DataError(
            f"{where} is empty in {table.at(int(wrong[0]))}{more}: set [data.columns] missing = "
            "'drop', 'interpolate' or 'mean', or leave the column out of features"
        )
    where = f"{where} holds {said(value)} in {table.at(int(wrong[0]))}{more}"
    if _has_other_mark(value, table):
        raise DataError(f"{where}, {_advice(value, table)}")
    why = "too large for float32" if np.isfinite(numbers[wrong[0]]) else "no finite number"
    hint = f", say {MISSING_TEXTS}" if isinstance(value, str) else ""
    raise with_lines(
        DataError(
            f"{where}, which is {why}: mend or drop these rows{hint}, or leave the column out of "
            "features"
        ),
        lines_for_number(name, value),
    )


def said(value: Any) -> str:
    """Return a value as an error line has it: texts in quotes."""
    return f"'{printable(value, MAX_LETTERS)}'" if isinstance(value, str) else str(value)


def texts_of(
    table: TableRows, column: str | None, *, may_miss: bool = False,
    bad: NDArray[np.bool_] | None = None,
) -> NDArray[np.str_]:  # fmt: skip
    """Return a column as texts (n,); empty ones where there is no such column.

    ``bad`` rows may be empty.

    Raises:
        DataError: a cell is empty, and none may be; names the row.
    """
    if column is None:
        return np.full(len(table.frame), "", dtype=np.str_)
    values = table.frame[column]
    empty = (values.isna() | (values == "")).to_numpy(dtype=bool)
    wrong = empty if bad is None else empty & ~bad
    if wrong.any() and not may_miss:
        row = table.at(int(wrong.argmax()))
        raise DataError(f"{table.where}: column {column!r} is empty in {row}")
    texts = [str(value) for value in values]
    if not texts:
        return np.array([], np.str_)
    return np.where(empty, "", _as_the_run_has_it(np.array(texts, dtype=np.str_), column, table))


def _as_the_run_has_it(
    texts: NDArray[np.str_], column: str | None, table: TableRows
) -> NDArray[np.str_]:
    """Return the texts (n,) of a column, or classes where it is None, by the site's recipe."""
    if not table.recipe:
        return texts
    found, places = np.unique(texts, return_inverse=True)
    recipe = table.recipe
    of_run = [recipe.class_of(t) if column is None else recipe.text_of(column, t) for t in found]
    return np.array(of_run, dtype=np.str_)[places.reshape(-1)]


def labels_of(
    table: TableRows, columns: Columns, *, may_miss: bool = False,
    bad: NDArray[np.bool_] | None = None,
) -> NDArray[np.str_]:  # fmt: skip
    """Return the class of each row (n,), from its column, or from where its file lies.

    Raises:
        DataError: a cell is empty, and none may be; names the row.
    """
    if columns.targets:
        return np.full(len(table.frame), "", dtype=np.str_)
    if columns.label_from is not None:
        texts = named_by_place(table, columns.label_from)
    else:
        texts = texts_of(table, columns.label, may_miss=may_miss, bad=bad)
    return _as_the_run_has_it(texts, None, table)


def targets_of(
    table: TableRows, columns: Columns, bad: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """Return what is learned of each row in place of a class (n, T); T is 0 of classes.

    NaN stands in empty cells, where ``missing = "drop"`` leaves their rows out.

    Raises:
        DataError: a cell is empty, holds no number, or of labels none of 0 and 1; names the row.
    """
    drops = columns.missing == "drop"
    strict = columns if drops else columns.model_copy(update={"missing": None})
    found = np.zeros((len(table.frame), len(columns.targets)))
    for place, name in enumerate(columns.targets):
        try:
            found[:, place] = numbers_of(table, name, strict, bad)
        except DataError as error:
            raise DataError(str(error).replace(*FILLING).replace(*LEAVING)) from None
        wrong = ~np.isin(found[:, place], (0.0, 1.0)) & ~np.isnan(found[:, place])
        if columns.labels and wrong.any():
            row = int(wrong.argmax())
            held = said(table.frame[name].iloc[row])
            raise DataError(
                f"{table.where}: column {name!r} of labels holds {held} in {table.at(row)}: write "
                "1 where a row has the label and 0 where it lacks it, or name a column of numbers "
                "in [data.columns] target"
            )
    return found


def levels_of(
    table: TableRows, name: str, levels: Sequence[str], others: Counter[tuple[str, str]]
) -> NDArray[np.float64]:
    """Return 0 or 1 for each level of a column of categories, and one more for others (n, L + 1).

    Empty cells are of the others, which are counted by column and text. Case and spaces around a
    level do not matter.
    """
    found, places, counts = np.unique(
        texts_of(table, name, may_miss=True), return_inverse=True, return_counts=True
    )
    known = {alike(level): place for place, level in enumerate(levels)}
    of_each = np.array([known.get(alike(composed(t)), len(levels)) for t in found], dtype=np.int64)
    for place in np.flatnonzero(of_each == len(levels)):
        others[name, str(found[place])] += int(counts[place])
    return np.eye(len(levels) + 1)[of_each[places.reshape(-1)]]


def inputs_of(
    table: TableRows,
    columns: Columns,
    others: Counter[tuple[str, str]],
    bad: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """Return what a net sees of each row (n, C): numbers, and levels of categories.

    Texts that are none of the levels are counted in ``others``.

    Raises:
        DataError: a cell holds no number; names the row.
    """
    levels, parts, wrong = columns.categories or {}, list[NDArray[np.float64]](), list[DataError]()
    for name in columns.features or ():
        try:
            if name in levels:
                parts.append(levels_of(table, name, levels[name], others))
            else:
                parts.append(numbers_of(table, name, columns, bad)[:, None])
        except DataError as error:
            wrong.append(error)
    if wrong:  # one line says what is wrong with the first column, those for a recipe mend all
        lines = [line for error in wrong for line in error.lines if line != HEAD]
        raise with_lines(DataError(str(wrong[0])), lines)
    return np.concatenate(parts, axis=1)


def named_by_place(table: TableRows, kind: Literal["file", "folder", "sheet"]) -> NDArray[np.str_]:
    """Return the name of the table's file, or of the folder it lies in, for each row (n,).

    Raises:
        DataError: the rows lie in no file of their own.
    """
    where = table.where if isinstance(table.where, Path) else table.file
    if where is None:
        raise DataError(f"{table.where} is no file: name a column in place of that")
    if kind == "sheet":
        return np.full(len(table.frame), table.part or where.name)
    place = where.resolve() if table.file is None or where == table.file else where
    name = (
        where.name[: -len(ending(where))] if kind == "file"
        else place.parent.name.removesuffix(".zip")
    )  # fmt: skip
    return np.full(len(table.frame), name)
