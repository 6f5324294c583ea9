"""Reading the files of tables, CSV and parquet, as frames of pandas."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from fedmodels.config.data import Columns
from fedmodels.errors import DataError
from fedmodels.printable import printable

SUFFIXES = (".csv", ".parquet")
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""What says in a column of numbers that one is missing, as pandas has it."""
UNNAMED = "Unnamed: "
"""How pandas begins the name of a column without one, such as the row numbers that it writes."""
EXTRA = "install the extra: pip install 'fedtide[tables]'"


def files_of(root: Path) -> list[Path]:
    """Return the file, or the directory's files by name.

    Raises:
        DataError: there is none.
    """
    if root.is_dir():
        found = sorted(path for path in root.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"{root} holds no file *.csv or *.parquet")
        return found
    if not root.exists():
        raise DataError(f"{root} is not there: [data] root must name a file or a directory")
    if root.suffix.lower() not in SUFFIXES:
        raise DataError(f"{root} is neither *.csv nor *.parquet")
    return [root]


def read_frame(path: Path, columns: Columns) -> Any:
    """Read one file as a frame of pandas.

    A CSV's labels, clients and parts are what stands in it: ``01`` is not ``1``, and ``NA`` is a
    name.

    Raises:
        DataError: pandas or pyarrow is missing, the file is damaged, two columns have one name, or
            a text stands among numbers in a column that may be a feature.
    """
    try:
        pandas = importlib.import_module("pandas")
        if path.suffix.lower() == ".parquet":
            importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{path} needs {error.name}; {EXTRA}") from None
    texts = {columns.label, columns.client, columns.split}
    try:
        if path.suffix.lower() == ".parquet":
            return pandas.read_parquet(path, engine="pyarrow")
        frame = _read_csv(pandas, path, texts)
    except pandas.errors.ParserWarning:
        raise DataError(
            f"{path}: rows have more fields than the first line has names; maybe a comma ends them"
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} cannot be read: {error}; save it as UTF-8") from None
    except (OSError, ValueError) as error:  # pandas' and pyarrow's own are of these
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from None
    if not columns.features:
        _check_others(pandas, frame, texts, path)
    return frame


def _read_csv(pandas: Any, path: Path, texts: set[str | None]) -> Any:
    """Read a CSV; the columns of these names hold texts."""
    first = pandas.read_csv(
        path, nrows=1, header=None, index_col=False, dtype=str, keep_default_na=False
    )
    names = first.iloc[0].tolist()
    _check_separator(names, path)
    _check_names(names, path)
    header = pandas.read_csv(path, nrows=0, index_col=False).columns
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)  # rows beyond the header
        return pandas.read_csv(
            path, low_memory=False, index_col=False, keep_default_na=False,
            dtype={name: str for name in header if name in texts},
            na_values={name: MISSING for name in header if name not in texts},
        )  # fmt: skip


def _check_separator(names: list[str], path: Path) -> None:
    """Check that the first line has several names, or one that no other separator divides.

    Raises:
        DataError: it has one, which a semicolon or a tab divides.
    """
    found = [mark for mark in ";\t" if len(names) == 1 and mark in names[0]]
    if found:
        name = printable(names[0], 60)
        raise DataError(
            f"{path} has one column, '{name}': is the separator {found[0]!r}? Write commas"
        )


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


def _check_others(pandas: Any, frame: Any, texts: set[str | None], path: Path) -> None:
    """Check that no text stands in another column whose values are numbers for the most part.

    A single text makes pandas take all of a column for texts, and it would be no feature.

    Raises:
        DataError: names the column and the row, counted from 1.
    """
    for name in frame.columns:
        if name in texts or name.startswith(UNNAMED) or frame[name].dtype.kind in "iufb":
            continue
        filled = frame[name].notna()
        wrong = filled & pandas.to_numeric(frame[name], errors="coerce").isna()
        if 0 < 2 * wrong.sum() < filled.sum():
            row = int(wrong.to_numpy().argmax())
            more = f" and other texts in {wrong.sum() - 1} more" if wrong.sum() > 1 else ""
            raise DataError(
                f"{path}: column {name!r} holds '{printable(frame[name].iloc[row], 60)}' in row "
                f"{row + 1}{more}, and numbers elsewhere: mend or drop these rows, or name the "
                "columns of numbers in [data.columns] features"
            )
