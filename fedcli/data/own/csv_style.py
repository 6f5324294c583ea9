"""How a CSV is written: its encoding, where its table begins, what separates columns, its marks."""

from __future__ import annotations

import codecs
import csv
import gzip
import importlib
import io
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, TextIO
from zipfile import ZipFile

from fedcli.data.folders import ending, is_foreign
from fedcli.data.own.number_marks import OTHER, Marks, is_number, marks_of
from fedmodels.config.columns import Columns
from fedmodels.config.recipe import EMPTY, Recipe
from fedmodels.errors import DataError, pip_line
from fedmodels.host.files import open_regular

SAMPLE = 1 << 20
"""Bytes from which separator and marks are found."""
RECORDS = 1000
"""Rows of the sample that are looked at."""
LEADING = 50
"""Rows at the beginning of a file among which the names of its columns are looked for."""
FULL = 0.8
"""Part of the cells of the fullest row that a row with the names of columns has filled."""
MAX_UNITS = 3
"""Rows below the names of columns that may say units and the like."""
DELIMITERS = ",;\t|"
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
MISSING = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN",
    "<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip
"""What says in a column of numbers that one is missing, as pandas has it."""
_UNIT = re.compile(r"[^\W\d_]|[°%]")
"""What a unit has: a letter or such a sign."""
Record = tuple[int, list[str]]
"""The line at which a row of a file begins, from 1 on, and its cells."""


@dataclass(frozen=True)
class Style:
    """How a CSV is written."""

    encoding: str = "utf-8-sig"
    delimiter: str = ","
    marks: Marks = field(default_factory=Marks)
    begin: int = 1
    """The line with the names of columns."""
    units: int = 0
    """Rows below it that say units."""

    def words(self) -> list[str]:
        """Return in words how the file differs from a usual CSV."""
        told = []
        if self.delimiter != ",":
            told.append(f"{NAMES.get(self.delimiter, self.delimiter)} between columns")
        told += self.marks.words()
        if not self.encoding.startswith("utf-8"):
            told.append(f"the encoding {self.encoding}")
        if self.begin > 1:
            told.append(f"the names of columns in line {self.begin}")
        if self.units:
            told.append("a row of units below these" if self.units == 1 else "rows of units")
        return told

    def opened(self, path: Path) -> TextIO:
        """Open the file at the names of its columns; raise OSError if it cannot be opened."""
        file = io.TextIOWrapper(opened(path), self.encoding, newline="")
        for _ in islice(file, self.begin - 1):
            pass
        return file


def opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a table of text as it is when it is unpacked.

    Raises:
        DataError: an archive holds no table, or several.
        OSError: the file cannot be opened.
    """
    file, end = open_regular(path), ending(path)
    if not end.endswith((".gz", ".zip")):
        return file
    file.close()
    if end.endswith(".gz"):
        return gzip.open(path)
    archive = ZipFile(path)
    inner = [Path(name) for name in archive.namelist()]
    found = [
        n for n in inner if ending(n) in (".csv", ".tsv") and not any(map(is_foreign, n.parts))
    ]
    if len(found) != 1:
        raise DataError(f"{path} holds {len(found)} tables *.csv and *.tsv; it must hold one")
    return archive.open(found[0].as_posix())


def style_of(path: Path, columns: Columns, recipe: Recipe = EMPTY) -> Style:
    """Return how a CSV is written: what config and recipe say of it, and what is found.

    Raises:
        DataError: there is no such encoding, or none can be found; charset-normalizer is missing;
            or the decimal mark cannot be found.
        OSError: the file cannot be read.
    """
    encoding = columns.encoding or encoding_of(path)
    text = _start_of(path, encoding)
    wanted = {*(columns.features or columns.named)}
    delimiter = columns.delimiter or _delimiter_of(text, wanted)
    records = _records(text, delimiter)
    if not records:
        return Style(encoding, delimiter)
    head = head_row(records, wanted)
    (begin, names), rows = records[head], [cells for _, cells in records[head + 1 :]]
    units = units_of([recipe.all_bare(names, row) for row in rows])
    style = Style(encoding, delimiter, Marks(), begin, units)
    cells = _cells_of(names, rows[units:], columns, recipe)
    if len(records) == RECORDS and not any(map(_has_mark, chain.from_iterable(cells.values()))):
        rows += _marked_rows(path, style, [at for at, name in enumerate(names) if name in cells])
        cells = _cells_of(names, rows[units:], columns, recipe)
    return replace(style, marks=marks_of(cells, columns.decimal, path))


def first_cells(path: Path, columns: Columns) -> set[str]:
    """Return the cells of the first rows of a CSV, however these are parted.

    Raises:
        DataError: it is not in the encoding that is given.
    """
    text = _start_of(path, columns.encoding or encoding_of(path))
    signs = columns.delimiter or DELIMITERS
    rows = (row for sign in signs for _, row in _records(text, sign)[:LEADING])
    return {*chain.from_iterable(rows)}


def _has_mark(cell: str) -> bool:
    return "." in cell or "," in cell


def _marked_rows(path: Path, style: Style, places: Sequence[int]) -> list[list[str]]:
    """Return the first rows of a file, of any number, with a mark in one of these places.

    Whole numbers that fill the sample tell no decimal mark; ``1.198`` may stand far below.
    """
    with style.opened(path) as file, suppress(csv.Error):
        lines = islice(csv.reader(file, delimiter=style.delimiter), 1 + style.units, None)
        marked = (row for row in lines if any(_has_mark(row[at]) for at in places if at < len(row)))
        return list(islice(marked, RECORDS))
    return []


def lines_of(path: Path, style: Style) -> list[int]:
    """Return the line in a CSV at which each of its rows begins.

    A cell in quotes may hold ends of lines, and lines without content are no rows.

    Raises:
        DataError: a cell is longer than Python's reader takes.
    """
    starts, line = list[int](), style.begin
    with style.opened(path) as file:
        lines = csv.reader(file, delimiter=style.delimiter)
        try:
            for cells in lines:
                if any(cell.strip() for cell in cells) or len(cells) > 1:
                    starts.append(line)
                line = style.begin + lines.line_num
        except csv.Error:
            raise DataError(
                f"{path}: a cell in the row that starts in line {line} has more than "
                f"{csv.field_size_limit()} characters: shorten it, or leave its column out"
            ) from None
    return starts[1 + style.units :]


def _start_of(path: Path, encoding: str) -> str:
    """Return the first lines of a file; raise DataError if they are not in this encoding."""
    try:
        " ".encode(encoding)  # refuses a codec of bytes to bytes, such as zlib
        with opened(path) as file:
            text = codecs.getincrementaldecoder(encoding)().decode(file.read(SAMPLE))
    except LookupError:
        raise DataError(
            f"[data.columns] encoding = {encoding!r} is none that Python knows"
        ) from None
    except UnicodeError as error:
        why = getattr(error, "reason", str(error))
        raise DataError(f"{path} is not in {encoding}: {why}") from None
    last = max(text.rfind("\n"), text.rfind("\r"))
    return text[: last + 1] if last > 0 else text  # the last line may be cut


def _records(text: str, delimiter: str) -> list[Record]:
    """Return the first rows of a text that hold anything."""
    found, line = list[Record](), 1
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        for cells in lines:
            if any(cell.strip() for cell in cells):
                found.append((line, cells))
            if len(found) == RECORDS:
                break
            line = 1 + lines.line_num
    except csv.Error:  # a field without end: no table is so separated
        return []
    return found


def _delimiter_of(text: str, wanted: set[str]) -> str:
    """Return what separates columns: the sign by which all rows have as many, and most, columns.

    Where rows differ by each sign, a row with the wanted names of columns decides, then the first.
    """
    records = {sign: _records(text, sign) for sign in DELIMITERS}
    counts = {sign: [len(cells) for _, cells in found] for sign, found in records.items() if found}
    even = {sign: n[0] for sign, n in counts.items() if len({*n}) == 1 and n[0] > 1}
    named = {
        sign: counts[sign][head]
        for sign in counts
        if (head := named_row(records[sign], wanted)) is not None and counts[sign][head] > 1
    }
    first = even or named or {sign: n[0] for sign, n in counts.items()}
    return max(first, key=lambda sign: first[sign], default=",")


def named_row(records: Sequence[Record], wanted: set[str]) -> int | None:
    """Return which of the first rows has the wanted names of columns, if one does."""
    rows = enumerate(cells for _, cells in records[:LEADING])
    return next((number for number, cells in rows if wanted <= {*cells}), None)


def head_row(records: Sequence[Record], wanted: set[str]) -> int:
    """Return which row names the columns: the one with the wanted names, else the first full one.

    A title above a table has few cells that are filled.
    """
    if (found := named_row(records, wanted)) is not None:
        return found
    filled = [sum(map(bool, cells)) for _, cells in records[:LEADING]]
    return next(at for at, count in enumerate(filled) if count >= FULL * max(filled))


def units_of(rows: Sequence[Sequence[str]]) -> int:
    """Return how many of the first rows say units: texts, in all columns that hold numbers below.

    A row of other texts, such as question marks, does not count.
    """
    found = 0
    while (
        found < MAX_UNITS and len(rows) > found + 2 and _says_units(rows[found], rows[found + 1 :])
    ):
        found += 1
    return found


def _says_units(cells: Sequence[str], below: Sequence[Sequence[str]]) -> bool:
    numbers = [
        cell
        for place, cell in enumerate(cells)
        if _holds_numbers([row[place] for row in below[:LEADING] if place < len(row)])
    ]
    return any(_UNIT.search(cell) and cell not in MISSING for cell in numbers) and not any(
        is_number(cell, mark) for cell in numbers for mark in OTHER
    )


def _holds_numbers(cells: Sequence[str]) -> bool:
    filled = [cell for cell in cells if cell not in MISSING]
    found = [cell for cell in filled if any(is_number(cell, mark) for mark in OTHER)]
    return 2 * len(found) > len(filled)


def _cells_of(
    names: Sequence[str], rows: Sequence[Sequence[str]], columns: Columns, recipe: Recipe
) -> dict[str, list[str]]:
    """Return the filled cells of each column that may hold numbers."""
    empty = {*MISSING, *columns.missing_texts}
    return {
        name: [
            recipe.bare(name, row[place])
            for row in rows
            if place < len(row) and row[place] not in empty
        ]
        for place, name in enumerate(names)
        if may_hold_numbers(name, columns)
    }


def may_hold_numbers(name: str, columns: Columns) -> bool:
    """Tell whether a column may be one of numbers that a net sees, or one of times."""
    if name in (columns.categories or {}):
        return False
    if name == columns.time or name in (columns.features or ()):
        return True
    return columns.features is None and name not in columns.named


# --- the encoding ---------------------------------------------------------------------------------


PIECE = 1 << 20
"""Bytes that are read together."""
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
WESTERN = "cp1252"
"""What Windows writes in western Europe and America."""
MACINTOSH = "mac_roman"
"""What older programs of a Mac write there."""
USUAL = frozenset("àâäæçèéêëìîïñòôöùûüœßáíóúåøÀÂÄÆÇÈÉÊËÎÏÑÔÖÙÛÜÁÍÓÚÅØ°µ²³§±€")
"""The signs beside ASCII that words of western Europe have most."""
SIGNS = "°µ€£§²³½¼¾«»–—‘’“”„…·×±ºª"  # noqa: RUF001
"""Signs that a text of western Europe holds beside letters."""
FOREIGN = 0.5
"""Share of letters beyond ASCII, among words with one, up to which these are in Latin letters."""


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file.

    Raises:
        DataError: none can be found; or charset-normalizer, which finds them, is missing.
        OSError: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with opened(path) as file:
        start = file.read(PIECE)
        for mark, name in MARKS.items():
            if start.startswith(mark):
                return name
        try:
            decoder.decode(start)
            while piece := file.read(PIECE):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            file.seek(0)
            return _legacy_encoding(file.read(), path)
    return "utf-8-sig"


def _legacy_encoding(content: bytes, path: Path) -> str:
    """Return the encoding of a text that is not in UTF-8.

    Words of western Europe are told by hand: charset-normalizer takes a file with ``Straße`` for
    cp1250, in mac_roman as in cp1252, and one with ``grün Höhe`` for
    big5hkscs.
    """
    words = b"\n".join({word for word in re.split(rb"[\s,;|\"]+", content) if not word.isascii()})
    if not _is_usual(words, WESTERN) and _is_usual(words, MACINTOSH):
        return MACINTOSH
    if _is_western(words):
        return WESTERN
    try:
        library = importlib.import_module("charset_normalizer")
    except ImportError:
        raise DataError(
            f"{path} is not in UTF-8, and to find its encoding takes a package more: "
            f"{pip_line('tables')}"
        ) from None
    found = library.from_bytes(words).best()
    if found is None:
        raise DataError(
            f"{path} is not in UTF-8, and its encoding cannot be found: set [data.columns] encoding"
        )
    return str(found.encoding)


def _decoded(words: bytes, encoding: str) -> str:
    """Return words as text if they are Latin letters with a few beyond ASCII; else nothing."""
    try:
        text = words.decode(encoding)
    except UnicodeDecodeError:
        return ""
    foreign = sum(not sign.isascii() for sign in text)
    return text if foreign <= max(1, FOREIGN * sum(map(str.isalpha, text))) else ""


def _is_usual(words: bytes, encoding: str) -> bool:
    """Tell whether words, so decoded, look as words of western Europe mostly do."""
    text = _decoded(words, encoding)
    return (
        bool(text)
        and all(sign.isascii() or sign in USUAL for sign in text)
        and not any(_is_odd(before, sign) for before, sign in pairwise(text))
    )


def _is_odd(before: str, sign: str) -> bool:
    """Tell whether two signs hardly follow each other in a word."""
    if before in "§€" or sign in "§€":
        return before.isalpha() or sign.isalpha()
    is_foreign = sign.isalpha() and not sign.isascii() and sign not in SIGNS
    return is_foreign and (before.isdigit() or (before.islower() and sign.isupper()))


def _is_western(words: bytes) -> bool:
    """Tell whether words are in Latin letters, with a few of western Europe among them."""
    text = _decoded(words, WESTERN)
    return bool(text) and all(
        sign.isascii() or unicodedata.category(sign)[0] == "L" or sign in SIGNS for sign in text
    )
