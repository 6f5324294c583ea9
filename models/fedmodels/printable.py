"""Text of others, fit to be printed: one line without control characters, of bounded length."""

from __future__ import annotations

MAX_CHARACTERS = 1000


def printable(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text whose control characters are escaped, cut to ``most`` characters.

    Whatever a peer or a file says goes through here before a log, a terminal or a page shows it:
    an escape sequence would clear a terminal or forge a line.
    """
    cut = text[: most + 1]  # escapes make a text longer, never shorter
    escaped = "".join(c if c.isprintable() else _escape(c) for c in cut)
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
