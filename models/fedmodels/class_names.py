"""Names of classes: what they may be, and which two of them may be one class."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Annotated
from unicodedata import category, normalize

from pydantic import AfterValidator

from fedmodels.printable import printable

MAX_LETTERS = 100
"""Limit of the name of a class."""
SHOWN = 60


def composed(name: str) -> str:
    """Return the name of a class as everybody writes it: composed, and without spaces at its ends.

    A Mac writes ``ü`` as ``u`` and an accent, which looks the same and is the same name.
    """
    return normalize("NFC", name).strip()


def named(name: str) -> str:
    """Return the name of a class as everybody writes it; ValueError if it cannot be one."""
    found = composed(name)
    if not found:
        raise ValueError("the name of a class must not be empty")
    if len(found) > MAX_LETTERS:
        raise ValueError(
            f"the name of a class has {MAX_LETTERS} letters at most; {found[:20]!a}… has "
            f"{len(found)}"
        )
    if strange := [letter for letter in found if category(letter)[0] == "C" or is_break(letter)]:
        raise ValueError(f"the name of a class must not hold {strange[0]!a}, as in {found!a}")
    return found


def is_break(letter: str) -> bool:
    """Tell whether a letter breaks a line."""
    return category(letter) in ("Zl", "Zp")


ClassName = Annotated[str, AfterValidator(named)]


def alike(name: str) -> str:
    """Return what names have in common that differ in case or in spaces alone."""
    return " ".join(name.casefold().split())


def near(name: str, known: Iterable[str]) -> str | None:
    """Return a known name that differs from this one in case or spaces alone; None if none does."""
    like = alike(name)
    return next((other for other in known if other != name and alike(other) == like), None)


def spelt(new: Iterable[str], known: Collection[str], own: Collection[str]) -> str:
    """Return why a new class may be one that is known under another name; empty if none may be.

    Names that differ in case or spaces alone may be one class, unless a client has both. So may a
    number and a name, where each is unknown to who has the other one: who states no names calls
    classes by their numbers.

    Args:
        new: the names that a client brings.
        known: those that the run has.
        own: all names of the client.
    """
    by_likeness = {alike(name): name for name in known if name not in own}
    numbers = [name for name in known if name.isdecimal() and name not in own]
    names = [name for name in known if not name.isdecimal() and name not in own]
    for name in new:
        shown = printable(name, SHOWN)
        if (other := by_likeness.get(alike(name), name)) != name:
            return (
                f"has the class {shown!r}, and the run has {printable(other, SHOWN)!r}: write it "
                "like that in the client's data"
            )
        if beside := names if name.isdecimal() else numbers:
            what = "a number without a name" if name.isdecimal() else "a name"
            return (
                f"has the class {shown!r}, {what}, and the run has "
                f"{printable(beside[0], SHOWN)!r}, which may be the same: give the classes names "
                'everywhere, with "class_names" in client.json'
            )
    return ""
