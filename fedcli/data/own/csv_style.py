"""How a CSV is written: its encoding, what separates its columns, and its decimal sign."""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from fedmodels.config.columns import Columns
from fedmodels.errors import DataError, pip_line
from fedmodels.files import open_regular

SAMPLE = 1 << 20
"""Bytes from which separator and decimal sign are found."""
RECORDS = 1000
"""Rows of the sample that are looked at."""
DELIMITERS = ",;\t|"
NAMES = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8-sig"}
WESTERN = "cp1252"
"""What Windows writes in western Europe and America."""
SIGNS = "°µ€£§²³½¼¾«»–—‘’“”„…·×±ºª"  # noqa: RUF001
"""What a text in it holds beside letters."""
FOREIGN = 0.5
"""Share of letters beyond ASCII, among words with one, up to which these are in Latin letters."""
_FRACTION = re.compile(r"\s*[+-]?(\d*),(\d+)([eE][+-]?\d+)?\s*")
"""A number with a decimal comma, or one with a comma between thousands."""
_POINT = re.compile(r"\s*[+-]?\d*\.\d+([eE][+-]?\d+)?\s*")


@dataclass(frozen=True)
class Style:
    """How a CSV is written."""

    encoding: str = "utf-8-sig"
    delimiter: str = ","
    decimal: str = "."

    def __str__(self) -> str:
        """Return what is unlike the usual, in words."""
        told = []
        if self.delimiter != ",":
            told.append(f"{NAMES.get(self.delimiter, self.delimiter)} between columns")
        if self.decimal != ".":
            told.append("a decimal comma")
        if not self.encoding.startswith("utf-8"):
            told.append(f"the encoding {self.encoding}")
        return ", ".join(told)


def style_of(path: Path, columns: Columns) -> Style:
    """Return how a CSV is written: what the config says of it, and what is found.

    Raises:
        DataError: the encoding is none, or cannot be found; or charset-normalizer is missing.
        OSError: the file cannot be read.
    """
    encoding = columns.encoding or encoding_of(path)
    try:
        " ".encode(encoding)  # of bytes to bytes, as zlib is, none is for text
        with open_regular(path) as file:
            text = codecs.getincrementaldecoder(encoding)().decode(file.read(SAMPLE))
    except LookupError:
        raise DataError(
            f"[data.columns] encoding = {encoding!r} is none that Python knows"
        ) from None
    except UnicodeError as error:
        why = getattr(error, "reason", str(error))
        raise DataError(f"{path} is not in {encoding}: {why}") from None
    if "\n" in text:  # the last line may be cut
        text = text[: text.rindex("\n") + 1]
    delimiter = columns.delimiter or _delimiter_of(text)
    decimal = columns.decimal or _decimal_of(_records(text, delimiter)[1:])
    return Style(encoding, delimiter, decimal)


def encoding_of(path: Path) -> str:
    """Return the encoding of a text file.

    Raises:
        DataError: none can be found; or charset-normalizer, which finds them, is missing.
        OSError: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_regular(path) as file:
        start = file.read(SAMPLE)
        for mark, name in MARKS.items():
            if start.startswith(mark):
                return name
        try:
            decoder.decode(start)
            while piece := file.read(SAMPLE):
                decoder.decode(piece)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            file.seek(0)
            return _legacy_encoding(file.read(), path)
    return "utf-8-sig"


def _legacy_encoding(content: bytes, path: Path) -> str:
    """Return the encoding of a text that is not in UTF-8."""
    words = b"\n".join({word for word in re.split(rb"[\s,;|\"]+", content) if not word.isascii()})
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


def _is_western(words: bytes) -> bool:
    """Tell whether words are in Latin letters, with a few of western Europe among them."""
    try:
        text = words.decode(WESTERN)
    except UnicodeDecodeError:
        return False
    foreign = [sign for sign in text if not sign.isascii()]
    letters = sum(sign.isalpha() for sign in text)
    return len(foreign) <= max(1, FOREIGN * letters) and all(
        unicodedata.category(sign)[0] == "L" or sign in SIGNS for sign in foreign
    )


def _records(text: str, delimiter: str) -> list[list[str]]:
    """Return the first rows of a text that hold anything."""
    found: list[list[str]] = []
    try:
        for cells in csv.reader(io.StringIO(text), delimiter=delimiter):
            if any(cell.strip() for cell in cells):
                found.append(cells)
            if len(found) == RECORDS:
                break
    except csv.Error:  # a field without end: no table is so separated
        return []
    return found


def _delimiter_of(text: str) -> str:
    """Return what separates columns: the sign by which all rows have as many, and most, columns.

    Where rows differ by each sign, the first row decides.
    """
    counts = {sign: [len(cells) for cells in _records(text, sign)] for sign in DELIMITERS}
    even = {sign: n[0] for sign, n in counts.items() if n and len({*n}) == 1 and n[0] > 1}
    first = even or {sign: n[0] for sign, n in counts.items() if n}
    return max(first, key=lambda sign: first[sign], default=",")


def _decimal_of(records: list[list[str]]) -> str:
    """Return the decimal sign: a comma where some number must have one, and none has a point.

    A comma before three digits may stand between thousands.
    """
    comma = False
    for cell in (cell for cells in records for cell in cells):
        if _POINT.fullmatch(cell):
            return "."
        found = _FRACTION.fullmatch(cell)
        comma = comma or (
            found is not None
            and not (
                len(found[2]) == 3
                and 1 <= len(found[1]) <= 3
                and found[1][0] != "0"
                and not found[3]
            )
        )
    return "," if comma else "."
