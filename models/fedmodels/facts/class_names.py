"""Names of classes: what they may be, and which two of them may be one class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated
from unicodedata import category, normalize

from pydantic import AfterValidator

MAX_LETTERS = 100
"""Limit of the name of a class."""


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
