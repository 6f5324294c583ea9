"""Numbers that are written as texts: which mark is the decimal one, and what parts thousands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedmodels.config.columns import Decimal
from fedmodels.console.printable import printable
from fedmodels.errors import DataError

OTHER: dict[Decimal, Decimal] = {".": ",", ",": "."}
"""Each mark that may be the decimal one, and the other one, which may part thousands then."""
CALLED = {".": "point", ",": "comma", "'": "apostrophe", "\u2019": "apostrophe"}
APART = " \u00a0\u2009\u202f'\u2019"
"""Spaces and apostrophes: between digits they can only part thousands."""
MINUS = "\u2212"
"""The sign that typesetters write; a keyboard has the hyphen."""
MAX_LETTERS = 40
"""Letters of a number that a line quotes, at most."""


def _expression(decimal: Decimal) -> str:
    """Return what a number with this decimal mark looks like."""
    parting = [re.escape(sign) for sign in (OTHER[decimal], *APART)]
    grouped = "|".join(rf"[1-9][0-9]{{0,2}}(?:{sign}[0-9]{{3}})+" for sign in parting)
    mark = re.escape(decimal)
    # each part begins as no other one does, so that a long text takes no longer than its length
    scaled = rf"(?:[0-9]+(?:{mark}[0-9]+)?|{mark}[0-9]+)[eE][+-]?[0-9]+"
    return rf"\s*[+{MINUS}-]?(?:{scaled}|(?:[0-9]+|{grouped})(?:{mark}[0-9]*)?|{mark}[0-9]+)\s*"


EXPRESSIONS = {decimal: _expression(decimal) for decimal in OTHER}
_NUMBERS = {decimal: re.compile(text) for decimal, text in EXPRESSIONS.items()}
_LONG = re.compile(rf"\s*[+{MINUS}-]?[0-9]{{4,}}\s*")
_SHORT = re.compile(rf"\s*[+{MINUS}-]?[0-9]{{1,3}}\s*")


@dataclass(frozen=True)
class Marks:
    """The marks in a file's numbers."""

    decimal: Decimal = "."
    thousands: str = ""
    """The marks between thousands."""
    unsure: str = ""
    """A number whose point may be between thousands, where no number of the file tells."""

    def words(self) -> list[str]:
        """Return in words how these marks differ from the usual ones."""
        told = ["a decimal comma"] if self.decimal == "," else []
        signs = dict.fromkeys(CALLED.get(sign, "space") for sign in self.thousands)
        told += [f"{sign}s between thousands" for sign in signs]
        if self.unsure:
            thousands = self.unsure.replace(".", "")
            told.append(
                f"a decimal point in {self.unsure} (if {thousands} is meant, set [data.columns] "
                "decimal = ',')"
            )
        return told


@dataclass
class _Evidence:
    """What the numbers of a table tell of the decimal mark."""

    sure: dict[Decimal, str] = field(default_factory=dict)
    """By decimal mark: a number that can have no other one, and its column."""
    open: dict[Decimal, str] = field(default_factory=dict)
    """By mark: a number such as 1.198, in which it may be either."""
    unclear: str = ""
    """A number of ``open`` with a comma, or beside whole numbers below 1000, and its column."""
    cells: list[str] = field(default_factory=list)
    """Numbers with a mark."""

    def add(self, name: str, cells: Sequence[str]) -> None:
        """Look at the filled cells of a column."""
        readings = [[mark for mark in OTHER if is_number(cell, mark)] for cell in cells]
        if 2 * sum(map(bool, readings)) <= len(cells):
            return  # most are texts
        is_long, is_short = (any(map(like.fullmatch, cells)) for like in (_LONG, _SHORT))
        for cell, marks in zip(cells, readings, strict=True):
            self.cells += [cell.strip()] if marks else []
            if len(marks) == 1:
                self.sure.setdefault(marks[0], _placed(cell, name))
            elif marks and (found := [mark for mark in OTHER if mark in cell]):
                (mark,) = found
                if is_long:  # beside 2450, the mark of 1.198 parts no thousands
                    self.sure.setdefault(mark, _placed(cell, name))
                    continue
                self.open.setdefault(mark, cell.strip())
                self.unclear = self.unclear or (
                    _placed(cell, name) if is_short or mark == "," else ""
                )


def _placed(cell: str, name: str) -> str:
    shown = printable(cell.strip(), MAX_LETTERS)
    return f"'{shown}' in column '{printable(name, MAX_LETTERS)}'"


def is_number(text: str, decimal: Decimal) -> bool:
    """Tell whether a text is a number with this decimal mark."""
    return _NUMBERS[decimal].fullmatch(text) is not None


def marks_of(columns: Mapping[str, Sequence[str]], given: Decimal | None, where: object) -> Marks:
    """Return the marks in the numbers of a table, which has its filled cells by column.

    A config may have given the decimal mark.

    Raises:
        DataError: numbers contradict each other, or no number tells which mark is the decimal one.
    """
    seen = _Evidence()
    for name, cells in columns.items():
        seen.add(name, cells)
    decimal = given or _decimal_of(seen, where)
    marks = {sign for cell in seen.cells if is_number(cell, decimal) for sign in cell}
    thousands = "".join(sorted(marks & {OTHER[decimal], *APART}))
    unsure = "" if given or seen.sure else seen.open.get(".", "")
    return Marks(decimal, thousands, printable(unsure, MAX_LETTERS))


def _decimal_of(seen: _Evidence, where: object) -> Decimal:
    """Return the decimal mark that numbers tell; raise DataError if they tell two, or none."""
    if len(seen.sure) > 1:
        point, comma = (seen.sure[mark] for mark in OTHER)
        raise DataError(
            f"{where} has numbers with a decimal point, {point}, and others with a decimal comma, "
            f"{comma}: write all alike, or say with [data.columns] decimal which are numbers"
        )
    if seen.sure:
        return next(iter(seen.sure))
    if seen.unclear:
        raise DataError(
            f"{where} holds {seen.unclear}, and no number tells whether its mark is the decimal "
            "one or parts thousands: set [data.columns] decimal = '.' or ','"
        )
    return "."


def plain(column: Any, decimal: Decimal) -> Any:
    """Return a column of pandas whose texts are written as pandas reads numbers.

    A text that is a number with the other decimal mark becomes an empty cell. What is no text, and
    a text that is no number, stays.
    """
    fits = column.str.fullmatch(EXPRESSIONS[decimal])
    others = column.str.fullmatch(EXPRESSIONS[OTHER[decimal]])
    parting = "[" + re.escape(OTHER[decimal] + APART) + "]"
    written = column.str.replace(parting, "", regex=True)
    written = written.str.replace(decimal, ".").str.replace(MINUS, "-")
    fits, others = (found.fillna(False).astype(bool) for found in (fits, others))
    return column.where(~fits, written).where(fits | ~others, None)
