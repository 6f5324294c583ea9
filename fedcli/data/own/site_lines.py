"""Lines for a site's recipe, ready to paste, where its files do not say what a run asks for."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from unicodedata import normalize

from fedcli.data.own.number_marks import OTHER, is_number
from fedmodels.config.recipe import NAME
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.facts.class_names import alike

HEAD = f"to paste into {NAME}:"
SHOWN = 12
"""Names that a comment lists, and lines that are suggested."""
MAX_LETTERS = 60
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SIGNS = re.compile(r"\(.*?\)|\[.*?\]|[\W_]+")
_UNIT = re.compile(r"\s*[<>\u2264\u2265]?=?\s*[+-]?[\d.,]*\d\s*(?P<unit>[^\d\s][^\d]*?)\s*")
_LIMIT = re.compile(r"\s*(?P<sign>[<>\u2264\u2265])")
FAR = 0.6
"""Likeness below which two names are not suggested for each other."""


def with_lines(error: DataError, lines: Sequence[str]) -> DataError:
    """Return an error that also says which lines of a recipe may mend it."""
    if lines:
        error.add_note("\n".join([HEAD, *lines]))
    return error


def key(name: str) -> str:
    """Return a name as a key of TOML."""
    return name if _BARE.fullmatch(name) else text(name)


def text(value: str) -> str:
    """Return a text as TOML has it."""
    return json.dumps(value, ensure_ascii=not value.isprintable())


def lines_for_columns(missing: Sequence[str], free: Sequence[str]) -> list[str]:
    """Return a line for each column that a file lacks: the name that is nearest, of those left."""
    left, found = list(free), dict[str, str | None]()
    for name in missing[:SHOWN]:
        found[name] = near = nearest(name, left)
        left = [other for other in left if other != near]
    some = ", ".join(text(printable(other, MAX_LETTERS)) for other in left[:SHOWN])
    return [
        f"# columns.{key(name)}.from = one of {some}"
        if near is None
        else f"columns.{key(name)}.from = {text(near)}"
        for name, near in found.items()
        if near is not None or left
    ]


def lines_for_texts(place: str, found: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return a line for each text that the run does not know: the one of its own that is nearest.

    ``place`` is the table of the recipe, such as ``classes``.
    """
    lines = list[str]()
    for each in found[:SHOWN]:
        near = nearest(each, known)
        some = ", ".join(text(printable(other, MAX_LETTERS)) for other in known[:SHOWN])
        line = f"{place}.{key(each)} = "
        lines.append(f"# {line}one of {some}" if near is None else f"{line}{text(near)}")
    return lines


def lines_for_number(column: str, cell: object) -> list[str]:
    """Return what reads a cell such as ``97 %`` or ``<0.5``; nothing where that is not known."""
    return [] if not isinstance(cell, str) else [
        f"columns.{key(column)}.{line}" for line in _lines_for(cell)
    ]  # fmt: skip


def _lines_for(cell: str) -> Iterator[str]:
    """Yield what a recipe says of a column with a cell that is a number and more."""
    if (limit := _LIMIT.match(cell)) is not None:
        rest = cell[limit.end() :].removeprefix("=")
        if (unit := unit_of(rest)) or any(is_number(rest, mark) for mark in OTHER):
            is_low = limit["sign"] in "<\u2264"
            yield (
                'below = "limit"  # or "half", or a number'
                if is_low
                else 'above = "limit"  # or a number'
            )
            cell = rest
    if unit := unit_of(cell):
        yield f"unit = {text(unit)}"


def unit_of(cell: str) -> str:
    """Return what stands behind a number; an empty text where a cell is no number with a unit."""
    found = _UNIT.fullmatch(cell)
    if found is None:
        return ""
    number = cell[: found.start("unit")]
    return found["unit"] if any(is_number(number, mark) for mark in OTHER) else ""


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that is nearest to another one, without a look at case and signs."""
    by_letters = dict[str, str]()
    for other in known:
        by_letters.setdefault(_letters(other), other)
    near = difflib.get_close_matches(_letters(name)[:MAX_LETTERS], by_letters, n=1, cutoff=FAR)
    return by_letters[near[0]] if near else None


def _letters(name: str) -> str:
    """Return a name without case, brackets and signs, unless nothing is left."""
    plain = alike(normalize("NFKC", name))
    return _SIGNS.sub("", plain) or plain
