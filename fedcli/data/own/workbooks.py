"""Workbooks ``*.xlsx``: their sheets as tables, by openpyxl. No formula is computed."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
from numpy.typing import NDArray

from fedcli.data.archives import PIECE, check_growth
from fedcli.data.own.books import Part, frame_of
from fedcli.data.own.csv_style import LEADING, head_row, units_of
from fedcli.data.own.typed_columns import text_of
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import Recipe
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.host.files import open_regular

MAX_ROWS, MAX_CELLS = 1 << 20, 1 << 26
"""Rows of a sheet, as office programs have them, and its cells with the empty ones among them."""
TAG = re.compile(rb"<(?:\w+:)?(?:(?:v|is)\b|row(?P<row>\s[^>]*|(?=[>/])))")
"""What begins a value, or a row."""
HIDDEN = re.compile(rb"\shidden\s*=\s*[\"'](1|true)[\"']")
"""What says that a row is not shown."""
NUMBER = re.compile(rb"\sr\s*=\s*[\"'](\d+)")
log = logging.getLogger(__name__)
Row = tuple[int, list[Any]]
"""The place of a row in its sheet, from 0 on, and its cells."""


@contextmanager
def opened(path: Path, columns: Columns, recipe: Recipe, since: Any) -> Iterator[list[Part]]:
    """Yield the sheets of a workbook that are shown, or the one that is asked for.

    Raises:
        DataError: it would take far more memory than its file is large.
    """
    openpyxl = importlib.import_module("openpyxl")
    importlib.import_module("defusedxml")  # with it, openpyxl takes no entities
    with open_regular(path) as file:
        with ZipFile(file) as archive:
            check_growth(archive, path)
        with closing(openpyxl.load_workbook(file, read_only=True, data_only=True,
                                            keep_links=False)) as book:  # fmt: skip
            sheets = [s for s in book.worksheets
                      if s.sheet_state == "visible" or s.title == columns.sheet]  # fmt: skip
            parts = [_part(path, sheet, columns, recipe) for sheet in sheets]
            yield [part for part in parts if part is not None]


def _part(path: Path, sheet: Any, columns: Columns, recipe: Recipe) -> Part | None:
    """Return a sheet as a table; None where it is empty."""
    sheet.reset_dimensions()  # what a file says of its size may be wrong
    last, hidden = _last_row(sheet)
    shown: dict[int, list[int]] = {}
    filled = _filled(sheet, last, shown)
    head = list(islice(filled, LEADING))
    if not head:
        return None
    texts = [(place, ["" if v is None else text_of(v) for v in cells]) for place, cells in head]
    own = recipe.resolved({cell for _, cells in texts for cell in cells}, path)
    of_file = own.in_files(columns)
    at = head_row(texts, {*(of_file.features or of_file.named)})
    place, names = texts[at]
    units = units_of([own.all_bare(names, cells) for _, cells in texts[at + 1 :]])

    def read() -> tuple[Any, NDArray[np.int64]]:
        rows = [*head[at + 1 + units :], *filled]
        _check_formulas(path, sheet.title, place, rows, names)
        _tell_shown(f"{path} [{sheet.title}]", of_file, names, rows, hidden, shown)
        frame = frame_of(names, [cells for _, cells in rows])
        return frame, np.array([place for place, _ in rows], dtype=np.int64)

    return Part(sheet.title, names, read)


def _tell_shown(
    where: str, columns: Columns, names: Sequence[str], rows: Sequence[Row],
    hidden: Collection[int], shown: Mapping[int, Sequence[int]],
) -> None:  # fmt: skip
    """Say what a sheet shows otherwise than it is read: hidden rows, and numbers as per cent.

    ``shown`` has the places of the cells that are shown as per cent, by their rows.
    """
    if count := sum(place + 1 in hidden for place, _ in rows):
        log.warning("note: %s: %d of its %d rows are hidden, as by a filter, and are read like the "
                    "others", where, count, len(rows))  # fmt: skip
    for at, name in enumerate(names):
        if not name or (columns.features and name not in (*columns.features, *columns.targets)):
            continue
        numbers = [(place, cells[at]) for place, cells in rows
                   if at < len(cells) and type(cells[at]) in (int, float)]  # fmt: skip
        of_them = [number for place, number in numbers if at in shown.get(place, ())]
        if 0 < len(of_them) < len(numbers):
            log.warning(
                "note: %s: column %s has %d numbers, of which %d are shown as per cent: %s is read "
                "for %.6g %%; write all of them alike", where, repr(printable(name, 60)),
                len(numbers), len(of_them), of_them[0], 100 * of_them[0],
            )  # fmt: skip


def _last_row(sheet: Any) -> tuple[int | None, set[int]]:
    """Return the number of the last row that holds a value, from 1 on; None if it is not told.

    Rows below it that have a style alone may be a million, and are not looked at. Return also the
    numbers of the rows that are hidden.
    """
    last, before, rest, hidden = None, None, b"", set[int]()
    with sheet.parent._archive.open(sheet._worksheet_path) as file:
        while piece := file.read(PIECE):
            text = rest + piece
            end = text.rfind(b"<")  # the tag that the piece may have cut
            text, rest = text[:end], text[end:]
            for found in TAG.finditer(text):
                if found["row"] is None:
                    last = before
                else:
                    number = NUMBER.search(found["row"])
                    before = int(number[1]) if number else None
                    if before is not None and HIDDEN.search(found["row"]):
                        hidden.add(before)
    return last, hidden


def _percents(book: Any) -> set[int]:
    """Return the styles of cells that show a number as per cent."""
    known = importlib.import_module("openpyxl.styles.numbers")
    own = dict(enumerate(book._number_formats, known.BUILTIN_FORMATS_MAX_SIZE))
    forms = (style.numFmtId for style in book._cell_styles)
    named = (known.BUILTIN_FORMATS.get(form) or own.get(form) or "" for form in forms)
    return {style for style, form in enumerate(named) if "%" in form}


def _filled(sheet: Any, last: int | None, shown: dict[int, list[int]]) -> Iterator[Row]:
    """Yield the rows of a sheet that hold anything, up to a last one.

    The places of the cells of each that are shown as per cent go to ``shown``.

    Raises:
        DataError: a row or a cell says that it is so far off that the sheet has no end.
    """
    size, percents = 0, _percents(sheet.parent)
    for place, row in enumerate(sheet.iter_rows(max_row=last, values_only=not percents)):
        size += len(row)
        if percents:
            found = [at for at, c in enumerate(row) if getattr(c, "_style_id", None) in percents]
            shown.update({place: found} if found else {})
            row = [cell.value for cell in row]
        if place >= MAX_ROWS or size > MAX_CELLS:
            raise DataError(
                f"sheet {printable(sheet.title, 60)!r} has more than {MAX_ROWS} rows, or more than "
                f"{MAX_CELLS} cells with the empty ones: remove what lies far from the table, or "
                "save it as CSV"
            )
        cells = [v if not isinstance(v, str) or v.strip() else None for v in row]
        if any(v is not None for v in cells):
            yield place, cells


def _check_formulas(
    path: Path, title: str, head: int, rows: Sequence[Row], names: Sequence[str]
) -> None:
    """Raise DataError if a cell has a formula, and nobody has stored what it comes to."""
    empty = {
        (place, at) for place, cells in rows for at in range(len(names))
        if names[at] and (at >= len(cells) or cells[at] is None)
    }  # fmt: skip
    if not empty:
        return
    openpyxl = importlib.import_module("openpyxl")
    with open_regular(path) as file, closing(
        openpyxl.load_workbook(file, read_only=True, keep_links=False)
    ) as book:  # fmt: skip
        sheet = book[title]
        sheet.reset_dimensions()
        found = [
            cell.coordinate
            for place, row in enumerate(sheet.iter_rows(max_row=rows[-1][0] + 1))
            if place > head
            for at, cell in enumerate(row)
            if (place, at) in empty and cell.data_type == "f"
        ]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise DataError(
            f"{path} [{title}]: cell {found[0]}{more} holds a formula, and not what it comes to; "
            "nothing is computed here: open the file in an office program and save it, or save it "
            "as CSV"
        )
