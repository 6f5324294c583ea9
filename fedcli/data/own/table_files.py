"""Reading the files of tables, CSV and parquet, as frames of pandas."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.archives import Archives, is_archive
from fedcli.data.arrays import DAMAGED
from fedcli.data.folders import BOOKS, TABLE_ENDS, ending, files_below, shown
from fedcli.data.own.csv_style import (
    MISSING,
    RECORDS,
    Style,
    first_cells,
    lines_of,
    may_hold_numbers,
    style_of,
)
from fedcli.data.own.number_marks import Marks, marks_of
from fedcli.data.own.typed_columns import typed
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import EMPTY, Recipe
from fedmodels.console.printable import printable
from fedmodels.errors import DataError, pip_line, reason_of
from fedmodels.host.files import open_regular

OTHER_TABLES = {
    **dict.fromkeys((".xls", ".ods"), "save such spreadsheets as *.xlsx or CSV"),
    **dict.fromkeys(
        (".txt", ".dat", ".asc", ".log", ".data"),
        "tables of text are read under the names *.csv and *.tsv: rename these if they are some",
    ),
    **dict.fromkeys(
        (".json", ".jsonl", ".mat", ".feather"),
        "tables of these kinds are not read: save them as CSV or parquet",
    ),
    **dict.fromkeys(
        (".sqlite", ".db", ".duckdb"), "a database is read by a query, in a file *.sql next to it"
    ),
    ".gz": "a packed table is read where its name ends in .csv.gz",
}
"""How the names of files end that hold tables and are not read, and what to do with them."""
Since = float | int | str | None
"""The last value of a mark: rows beyond it are new; None before anything was read."""
KNOWN = "*.csv, *.tsv, *.parquet, *.xlsx, *.h5 or *.sql"
SHOWN, MAX_LETTERS = 8, 60
"""Names that a line lists, and letters of each."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableRows:
    """The rows of one file."""

    frame: Any
    """A pandas ``DataFrame``."""
    where: object
    """The file, for error lines."""
    style: Style | None = None
    """How a CSV is written; None where the file has no lines."""
    marks: Marks = field(default_factory=Marks)
    """The marks in numbers that are written as texts."""
    file: Path | None = None
    """Where the rows lie, unless ``where`` is that."""
    part: str = ""
    """The sheet of a workbook, or the table of another file that holds several."""
    mark: float | int | str | None = None
    """The last value of the column that a site's recipe calls ``mark``."""
    recipe: Recipe = EMPTY
    """What the site's files call columns, which have the run's names in the frame, and how they
    write what is in them."""
    places: NDArray[np.int64] | None = None
    """Which rows of the file these are (n,), where some were set aside."""
    apart: Mapping[str, str] = field(default_factory=dict)
    """By the file's name of a column: how it comes here from another table of the file."""
    old: int = 0
    """Rows up to the last mark, which are left out."""

    @classmethod
    def of_frame(
        cls,
        frame: Any,
        where: object,
        columns: Columns,
        recipe: Recipe = EMPTY,
        keep: Collection[str] = (),
    ) -> TableRows:
        """Return the rows of a file without lines, whose cells may be numbers or texts.

        Columns to ``keep`` hold texts.

        Raises:
            DataError: the decimal mark of its texts cannot be found.
        """
        frame, empty = (
            typed(frame, texts_in(columns, recipe, keep)),
            {*MISSING, *columns.missing_texts},
        )
        cells = {
            name: [
                recipe.bare(name, c)
                for c in frame[name].iloc[:RECORDS]
                if isinstance(c, str) and c not in empty
            ]
            for name in map(str, frame.columns)
            if frame[name].dtype.kind == "O" and may_hold_numbers(name, columns)
        }
        return cls(frame, where, None, marks_of(cells, columns.decimal, where))

    @property
    def names(self) -> list[str]:
        """The names of its columns."""
        return [str(name) for name in self.frame.columns]

    @property
    def unit(self) -> str:
        """What people count in the file: its lines, or its rows where it has no lines."""
        return "row" if self.style is None else "line"

    @property
    def told(self) -> str:
        """What is unlike the usual in how the file is written, in words."""
        return ", ".join(self.marks.words() if self.style is None else self.style.words())

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The line of each row in the file, or its number from 1 on, (n,)."""
        places = np.arange(len(self.frame)) if self.places is None else self.places
        if self.style is None or self.path is None:
            return places + 1
        return np.array(lines_of(self.path, self.style), dtype=np.int64)[places]

    def kept(self, rows: NDArray[np.bool_]) -> TableRows:
        """Return the table without the rows that are not so told (n,)."""
        places = np.arange(len(self.frame)) if self.places is None else self.places
        frame = self.frame[rows].reset_index(drop=True)
        return replace(self, frame=frame, places=places[rows])

    @property
    def path(self) -> Path | None:
        """The file of the rows, if they are of one."""
        return self.where if self.file is None and isinstance(self.where, Path) else self.file

    def within(self, packed: Archives) -> TableRows:
        """Return the table so that lines name the archive that holds it, if one does."""
        path = self.path
        if path is None or (shown := packed.shown(path)) == path:
            return self
        where = shown if self.where == path else str(self.where).replace(str(path), str(shown))
        return replace(self, where=where, file=path)

    @property
    def name(self) -> str:
        """What a list calls the file."""
        return self.where.name if isinstance(self.where, Path) else str(self.where)

    def at(self, row: int) -> str:
        """Return what error lines call a row, by its number from 0 on."""
        return f"{self.unit} {self.numbers[row]}"


def tell_styles(tables: Sequence[TableRows], where: object) -> None:
    """Say in a line for each way of writing how many files are written so.

    Raises:
        DataError: the decimal mark of one file is not certain, and another one has a comma.
    """
    unsure = next((table for table in tables if table.marks.unsure), None)
    comma = next((table for table in tables if table.marks.decimal == ","), None)
    if unsure is not None and comma is not None:
        raise DataError(
            f"{unsure.where} holds {unsure.marks.unsure}, whose point may be the decimal mark or "
            f"part thousands, and {comma.where} has a decimal comma: set [data.columns] decimal"
        )
    for style, count in Counter(table.told for table in tables).items():
        if style:
            some = f"{count} files are" if len(tables) > 1 else "it is"
            log.warning("note: %s: %s read with %s", where, some, style)


def files_of(root: Path, packed: Archives) -> list[Path]:
    """Return the file, or the directory's files by name, also those of archives.

    A query reads the files beside it: where there is one, these are no tables by themselves.

    Raises:
        DataError: there is none, or an archive cannot be unpacked.
    """
    if is_archive(root):
        return files_of(packed.unpacked(root), packed)
    if root.is_dir():
        below = files_below(root)
        if queries := [path for path in below if ending(path) == ".sql"]:
            return queries
        found = [
            file
            for path in below
            for file in (files_of(packed.unpacked(path), packed) if is_archive(path) else [path])
            if ending(file) in TABLE_ENDS
        ]
        if not found:
            ends = {path.suffix.lower() for path in files_below(root)}
            raise DataError(f"{root} holds no file {KNOWN}{_advice_for(ends)}")
        return found
    if not root.exists():
        raise DataError(f"{root} is not there: [data] root must name a file or a directory")
    if ending(root) not in TABLE_ENDS:
        advice = _advice_for({root.suffix.lower()})
        raise DataError(f"{root} is none of {KNOWN}{advice}")
    return [root]


def _advice_for(ends: Collection[str]) -> str:
    """Return what to do with files whose names end so, where it is known."""
    known = dict.fromkeys(OTHER_TABLES[end] for end in sorted(ends) if end in OTHER_TABLES)
    return "".join(f"; {advice}" for advice in known)


def read_tables(
    path: Path,
    columns: Columns,
    recipe: Recipe = EMPTY,
    keep: Collection[str] = (),
    since: Since = None,
) -> list[TableRows]:
    """Read the tables of one file; their columns get the names of the run, by the site's recipe.

    A CSV's labels, clients and parts are what stands in it: ``01`` is not ``1``, and ``NA`` is a
    name. So are columns to ``keep``, unless a model has their numbers. Of a site with a mark, only
    rows beyond ``since`` are read.

    Raises:
        DataError: a package is missing, the file is damaged, or two columns have one name.
    """
    numbers = {*(columns.features or ()), columns.time}
    numbers |= {own for n in numbers if n in recipe.columns for own in recipe.columns[n].names(n)}
    keep = [name for name in keep if name not in numbers]
    if ending(path) in BOOKS:
        books = importlib.import_module("fedcli.data.own.books")
        found = books.tables_of(path, columns, recipe, keep, since)
    else:
        own = recipe.resolved(_first_names(path, columns), path) if recipe.has_choices else recipe
        found = [(_read(path, own.in_files(columns), own, keep, since), own)]
    return [as_in_run(rows, own, since) for rows, own in found]


def read_table(
    path: Path, columns: Columns, recipe: Recipe = EMPTY, keep: Collection[str] = ()
) -> TableRows:
    """Read the one table of a file, as :func:`read_tables` does.

    Raises:
        DataError: it has several; or as there.
    """
    found = read_tables(path, columns, recipe, keep)
    if len(found) > 1:
        names = ", ".join(repr(printable(one.part)) for one in found)
        raise DataError(f"{path} holds several tables, {names}: [data.columns] sheet names one")
    return found[0]


def as_in_run(read: TableRows, recipe: Recipe, since: Since = None) -> TableRows:
    """Return a table whose columns have the names of the run."""
    if recipe.mark is not None:
        marks = importlib.import_module("fedcli.data.own.marks")
        read = marks.only_new(read, recipe.mark, since)
    names = {own: name for name in recipe.columns if (own := recipe.called(name)) != name}
    hidden = {*names.values()} - {*names}  # the file's own column of a name that another one gets
    frame = read.frame.drop(columns=[name for name in hidden if name in read.frame.columns])
    return replace(read, frame=frame.rename(columns=names), recipe=recipe)


def texts_in(columns: Columns, recipe: Recipe, keep: Collection[str]) -> set[str]:
    """Return the columns of a file that hold texts; ``columns`` have its own names."""
    named = {name for name in columns.named if name != columns.time}
    return {*named, *(columns.categories or {}), *map(recipe.called, keep)}


def _first_names(path: Path, columns: Columns) -> set[str]:
    """Return what the columns of a file may be called.

    Raises:
        DataError: it cannot be read.
    """
    try:
        if path.suffix.lower() == ".parquet":
            return {*importlib.import_module("pyarrow.parquet").read_schema(path).names}
        return first_cells(path, columns)
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}: {pip_line('tables')}") from None
    except (*DAMAGED, RuntimeError) as error:
        raise DataError(f"{path} cannot be read: {_why(error)}") from None


def _why(error: Exception) -> str:
    return (reason_of(error) or type(error).__name__).splitlines()[0]


def _read(
    path: Path, columns: Columns, recipe: Recipe, keep: Collection[str], since: Since
) -> TableRows:
    """Read one file as it is; ``columns`` have its own names."""
    is_parquet = path.suffix.lower() == ".parquet"
    try:
        pandas = importlib.import_module("pandas")
        if is_parquet:
            importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}: {pip_line('tables')}") from None
    try:
        if is_parquet:
            how = {}
            if recipe.mark is not None:
                marks = importlib.import_module("fedcli.data.own.marks")
                how = marks.beyond(path, recipe.mark, since)
            with open_regular(path) as file:
                frame = pandas.read_parquet(file, engine="pyarrow", **how)
                return TableRows.of_frame(frame, path, columns, recipe, keep)
        style = style_of(path, columns, recipe)
        texts = texts_in(columns, recipe, keep)
        frame = typed(_read_csv(pandas, path, texts, style, columns), texts)
    except pandas.errors.ParserWarning:
        raise DataError(
            f"{path}: rows have more fields than the first line has names; maybe a comma ends them"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in {error.encoding}: {error.reason}") from None
    except (*DAMAGED, RuntimeError) as error:  # pandas' and pyarrow's own are of these
        raise DataError(f"{path} cannot be read: {_why(error)}") from None
    return TableRows(frame, path, style, style.marks)


def _read_csv(pandas: Any, path: Path, texts: set[str], style: Style, columns: Columns) -> Any:
    """Read a CSV; the columns of these names hold texts. Only those asked for need a name each."""
    how: dict[str, Any] = {"sep": style.delimiter, "index_col": False}
    with style.opened(path) as file:
        first = pandas.read_csv(file, nrows=1, header=None, dtype=str, keep_default_na=False, **how)
    names = first.iloc[0].tolist()
    twice = check_twice(names, columns, path, {*texts})
    with style.opened(path) as file:
        header = pandas.read_csv(file, nrows=0, **how).columns
    with warnings.catch_warnings(), style.opened(path) as file:
        warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows beyond the header
        frame = pandas.read_csv(
            file, low_memory=False, keep_default_na=False, decimal=style.marks.decimal,
            dtype={name: str for name in header if name in texts},
            na_values={name: MISSING for name in header if name not in texts}, **how,
        )  # fmt: skip
    left = [own for own, name in zip(header, names, strict=False) if name in twice]
    return frame.drop(columns=left).iloc[style.units :].reset_index(drop=True)


def check_twice(
    names: Sequence[str], columns: Columns, where: object, texts: Collection[str] = ()
) -> set[str]:
    """Return the names that several columns have; a line says that these are left out.

    Any number may have none. Where the run lists its columns, nobody misses others.

    Raises:
        DataError: such a name is asked for.
    """
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    asked = {*texts, *columns.named, *(columns.features or ()), *(columns.categories or {})}
    for name in twice:
        if name in asked:
            raise DataError(
                f"{where} has {names.count(name)} columns called {name!r}: rename or remove all "
                "but one"
            )
    if twice and columns.features is None and columns.file is None:
        told = ", ".join(repr(printable(name, MAX_LETTERS)) for name in twice[:SHOWN])
        place = shown(where) if isinstance(where, Path) else where
        log.warning("note: %s: left out are columns of one name: %s", place, told)
    return {*twice}
