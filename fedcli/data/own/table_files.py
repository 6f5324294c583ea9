"""Reading the files of tables, CSV and parquet, as frames of pandas."""

from __future__ import annotations

import csv
import importlib
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.folders import files_below
from fedcli.data.own.csv_style import Style, style_of
from fedmodels.config.data import Columns
from fedmodels.errors import DataError, pip_line, reason_of
from fedmodels.files import open_regular

SUFFIXES = (".csv", ".tsv", ".parquet")
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""What says in a column of numbers that one is missing, as pandas has it."""


@dataclass(frozen=True)
class Table:
    """The rows of one file."""

    frame: Any
    """Of pandas."""
    where: object
    """The file, for error lines."""
    style: Style | None = None
    """How a CSV is written; None where the file has no lines."""

    @property
    def unit(self) -> str:
        """What people count in the file: its lines, or its rows where it has no lines."""
        return "row" if self.style is None else "line"

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """The line of each row in the file, or its number from 1 on, (n,)."""
        if self.style is None or not isinstance(self.where, Path):
            return np.arange(1, len(self.frame) + 1)
        return np.array(lines_of(self.where, self.style)[1:], dtype=np.int64)

    def at(self, row: int) -> str:
        """Return what error lines call a row, by its number from 0 on."""
        return f"{self.unit} {self.numbers[row]}"


def files_of(root: Path) -> list[Path]:
    """Return the file, or the directory's files by name.

    Raises:
        DataError: there is none.
    """
    if root.is_dir():
        found = [path for path in files_below(root) if path.suffix.lower() in SUFFIXES]
        if not found:
            raise DataError(f"{root} holds no file *.csv, *.tsv or *.parquet")
        return found
    if not root.exists():
        raise DataError(f"{root} is not there: [data] root must name a file or a directory")
    if root.suffix.lower() not in SUFFIXES:
        raise DataError(f"{root} is none of *.csv, *.tsv and *.parquet")
    return [root]


def read_table(path: Path, columns: Columns) -> Table:
    """Read one file.

    A CSV's labels, clients and parts are what stands in it: ``01`` is not ``1``, and ``NA`` is a
    name.

    Raises:
        DataError: pandas or pyarrow is missing, the file is damaged, or two columns have one name.
    """
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
                return Table(pandas.read_parquet(file, engine="pyarrow"), path)
        style = style_of(path, columns)
        texts = {name for name in columns.named if name != columns.time}
        frame = _read_csv(pandas, path, texts, style)
    except pandas.errors.ParserWarning:
        raise DataError(
            f"{path}: rows have more fields than the first line has names; maybe a comma ends them"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not in {error.encoding}: {error.reason}") from None
    except (OSError, ValueError) as error:  # pandas' and pyarrow's own are of these
        reason = (reason_of(error) or type(error).__name__).splitlines()[0]
        raise DataError(f"{path} cannot be read: {reason}") from None
    return Table(frame, path, style)


def lines_of(path: Path, style: Style) -> list[int]:
    """Return the line in a CSV at which each of its rows begins, the names of columns first.

    A cell in quotes may hold ends of lines, and lines without content are no rows.
    """
    starts, line = list[int](), 1
    with path.open(encoding=style.encoding, errors="replace", newline="") as file:
        lines = csv.reader(file, delimiter=style.delimiter)
        for cells in lines:
            if any(cell.strip() for cell in cells) or len(cells) > 1:
                starts.append(line)
            line = lines.line_num + 1
    return starts


def _read_csv(pandas: Any, path: Path, texts: set[str], style: Style) -> Any:
    """Read a CSV; the columns of these names hold texts."""
    how: dict[str, Any] = {"sep": style.delimiter, "encoding": style.encoding, "index_col": False}
    first = pandas.read_csv(path, nrows=1, header=None, dtype=str, keep_default_na=False, **how)
    _check_names(first.iloc[0].tolist(), path)
    header = pandas.read_csv(path, nrows=0, **how).columns
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows beyond the header
        return pandas.read_csv(
            path, low_memory=False, keep_default_na=False, decimal=style.decimal,
            dtype={name: str for name in header if name in texts},
            na_values={name: MISSING for name in header if name not in texts}, **how,
        )  # fmt: skip


def _check_names(names: list[str], path: Path) -> None:
    """Check that no two columns have one name; any number may have none.

    Raises:
        DataError: names the column and the file.
    """
    twice = [name for name, count in Counter(names).items() if count > 1 and name]
    if twice:
        raise DataError(
            f"{path} has {names.count(twice[0])} columns called {twice[0]!r}: rename or remove all "
            "but one"
        )
