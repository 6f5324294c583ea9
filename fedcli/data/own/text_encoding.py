"""The encoding of a text file that says nothing of it."""

from __future__ import annotations

import codecs
import importlib
import re
import unicodedata
from itertools import pairwise
from pathlib import Path

from fedmodels.errors import DataError, pip_line
from fedmodels.files import open_regular

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
    with open_regular(path) as file:
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
    """Return the encoding of a text that is not in UTF-8."""
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
