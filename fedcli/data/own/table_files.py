"""Reading the files of tables, CSV and parquet, as frames of pandas."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import DAMAGED
from fedcli.data.folders import TABLE_ENDS, ending, files_below
from fedcli.data.own.csv_style import MISSING, RECORDS, Style, lines_of, may_hold_numbers, style_of
from fedcli.data.own.number_marks import Marks, marks_of
from fedmodels.config.data import Columns
from fedmodels.config.recipe import EMPTY, Recipe
from fedmodels.errors import DataError, pip_line, reason_of
from fedmodels.files import open_regular

OTHER_TABLES = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "spreadsheets are not read: save them as CSV"),
    **dict.fromkeys(
        (".txt", ".dat", ".asc", ".log", ".data"),
        "tables of text are read under the names *.csv and *.tsv: rename these if they are some",
    ),
    **dict.fromkeys(
        (".json", ".jsonl", ".h5", ".hdf5", ".mat", ".feather", ".sqlite", ".db"),
        "tables of these kinds are not read: save them as CSV or parquet",
    ),
    **dict.fromkeys(
        (".gz", ".zip"), "a packed table is read where its name ends in .csv.gz or .csv.zip"
    ),
}
"""How the names of files end that hold tables and are not read, and what to do with them."""
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
    recipe: Recipe = EMPTY
    """What the site's files call columns, which have the run's names in the frame, and how they
    write what is in them."""
    places: NDArray[np.int64] | None = None
    """Which rows of the file these are (n,), where some were set aside."""

    @classmethod
    def of_frame(
        cls, frame: Any, where: object, columns: Columns, recipe: Recipe = EMPTY
    ) -> TableRows:
        """Return the rows of a file without lines, whose cells may be numbers or texts.

        Raises:
            DataError: the decimal mark of its texts cannot be found.
        """
        empty = {*MISSING, *columns.missing_texts}
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
        if self.style is None or not isinstance(self.where, Path):
            return places + 1
        return np.array(lines_of(self.where, self.style), dtype=np.int64)[places]

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


def files_of(root: Path) -> list[Path]:
    """Return the file, or the directory's files by name; raise DataError if there is none."""
    if root.is_dir():
        found = [path for path in files_below(root) if ending(path) in TABLE_ENDS]
        if not found:
            ends = {path.suffix.lower() for path in files_below(root)}
            raise DataError(f"{root} holds no file *.csv, *.tsv or *.parquet{_advice_for(ends)}")
        return found
    if not root.exists():
        raise DataError(f"{root} is not there: [data] root must name a file or a directory")
    if ending(root) not in TABLE_ENDS:
        advice = _advice_for({root.suffix.lower()})
        raise DataError(f"{root} is none of *.csv, *.tsv and *.parquet{advice}")
    return [root]


def _advice_for(ends: Collection[str]) -> str:
    """Return what to do with files whose names end so, where it is known."""
    known = dict.fromkeys(OTHER_TABLES[end] for end in sorted(ends) if end in OTHER_TABLES)
    return "".join(f"; {advice}" for advice in known)


def read_table(
    path: Path, columns: Columns, recipe: Recipe = EMPTY, keep: Collection[str] = ()
) -> TableRows:
    """Read one file; its columns get the names of the run, by the site's recipe.

    A CSV's labels, clients and parts are what stands in it: ``01`` is not ``1``, and ``NA`` is a
    name. So are columns to ``keep``, unless a model has their numbers.

    Raises:
        DataError: pandas or pyarrow is missing, the file is damaged, or two columns have one name.
    """
    numbers = {*(columns.features or ()), columns.time}
    texts = {recipe.called(name) for name in keep if name not in numbers}
    read = _read(path, recipe.in_files(columns), recipe, texts)
    names = {own: name for name in recipe.columns if (own := recipe.called(name)) != name}
    hidden = {*names.values()} - {*names}  # the file's own column of a name that another one gets
    frame = read.frame.drop(columns=[name for name in hidden if name in read.frame.columns])
    return replace(read, frame=frame.rename(columns=names), recipe=recipe)


def _read(path: Path, columns: Columns, recipe: Recipe, texts: set[str]) -> TableRows:
    """Read one file as it is; ``columns`` and ``texts`` have its own names."""
    is_parquet = path.suffix.lower() == ".parquet"
    try:
        pandas = importlib.import_module("pandas")
        if is_parquet:
            importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}: {pip_line('tables')}") from None
    try:
        if is_parquet:
            with open_regular(path) as file:
                return TableRows.of_frame(
                    pandas.read_parquet(file, engine="pyarrow"), path, columns, recipe
                )
        style = style_of(path, columns, recipe)
        texts |= {name for name in columns.named if name != columns.time}
        texts |= {*(columns.categories or {})}
        is_known = columns.features is not None or columns.file is not None
        asked = {*texts, *columns.named, *(columns.features or ())} if is_known else None
        frame = _read_csv(pandas, path, texts, style, asked)
    except pandas.errors.ParserWarning:
        raise DataError(
            f"{path}: rows have more fields than the first line has names; maybe a comma ends them"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in {error.encoding}: {error.reason}") from None
    except (*DAMAGED, RuntimeError) as error:  # pandas' and pyarrow's own are of these
        reason = (reason_of(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} cannot be read: {reason}") from None
    return TableRows(frame, path, style, style.marks)


def _read_csv(
    pandas: Any, path: Path, texts: set[str], style: Style, asked: set[str] | None
) -> Any:
    """Read a CSV; the columns of these names hold texts. Only those asked for need a name each."""
    how: dict[str, Any] = {"sep": style.delimiter, "index_col": False}
    with style.opened(path) as file:
        first = pandas.read_csv(file, nrows=1, header=None, dtype=str, keep_default_na=False, **how)
    if asked is None:
        _check_names(first.iloc[0].tolist(), path)
    else:
        _check_names([name for name in first.iloc[0].tolist() if name in asked], path)
    with style.opened(path) as file:
        header = pandas.read_csv(file, nrows=0, **how).columns
    with warnings.catch_warnings(), style.opened(path) as file:
        warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows beyond the header
        frame = pandas.read_csv(
            file, low_memory=False, keep_default_na=False, decimal=style.marks.decimal,
            dtype={name: str for name in header if name in texts},
            na_values={name: MISSING for name in header if name not in texts}, **how,
        )  # fmt: skip
    return frame.iloc[style.units :].reset_index(drop=True)


def _check_names(names: list[str], path: Path) -> None:
    """Raise DataError if two columns have one name; any number may have none."""
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise DataError(
            f"{path} has {names.count(twice[0])} columns called {twice[0]!r}: rename or remove all "
            "but one"
        )
