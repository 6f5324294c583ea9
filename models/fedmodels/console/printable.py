"""What is printed: text of others as one bounded line, numbers, and objects of JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal

MAX_CHARACTERS = 1000
MAX_SHOWN = 100
"""Letters of a value that a line about a config shows."""
_DIRECTORIES = re.compile(r"""(?<![\w.)\]}/\\-])(?:[A-Za-z]:)?[/\\](?:[^\s/\\:;,'"()]+[/\\])+""")
"""What comes before the last name of an absolute path."""
_OWNER = re.compile(r"(?<=://)(?:[^\s/?#'\"<>]*|[^\s/?#'\"<>:]*:(?!\d{1,5}\s)[^/?#'\"<>]*)@")
"""User and password in a URL; blanks of a password may not be escaped."""
_KEYS = re.compile(
    r"(?i)(?<=[?&;#])(\s*(?:[\w-]*(?:pass|passwd|password|token|secret|credential|api[_-]?key|"
    r"access[_-]?key|signature)|pwd|sig|auth|key)\s*=)[^&;'\"<>\n]*?(?=$|[&;'\"<>\n]|: |, |\)| \()"
)
"""A secret among the parameters of a URL, up to where the parameter or the phrase ends."""


def printable(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return a text whose control characters are escaped, cut to ``most`` characters.

    Whatever a peer or a file says goes through here before a log, a terminal or a page shows it:
    an escape sequence would clear a terminal or forge a line. Passwords of URLs are left out.
    """
    text = without_passwords(text)
    if len(text) <= most and text.isprintable():  # most texts, many in each round
        return text
    cut = text[: most + 1]  # escapes make a text longer, never shorter
    escaped = "".join(c if c.isprintable() else _escape(c) for c in cut)
    return escaped if len(escaped) <= most else escaped[: most - 1] + "…"


def shown(value: object) -> str:
    """Return a value of a config as a line about it shows it: the first letters of a long one."""
    return printable(repr(value), MAX_SHOWN)


def without_passwords(text: str) -> str:
    """Return a text whose URLs have ``***`` in place of user and password, and of keys."""
    if "://" not in text and "=" not in text:  # most texts
        return text
    return _KEYS.sub(r"\1***", _OWNER.sub("***@", text))


def without_places(text: str, places: Iterable[object] = ()) -> str:
    """Return a text in which absolute paths have lost their directories.

    Args:
        text: a line that leaves this machine.
        places: further directories, which may be relative or hold spaces.
    """
    for place in sorted(map(str, places), key=len, reverse=True):
        if len(place) > 1:
            text = text.replace(f"{place}/", "").replace(place, "…")
    return _DIRECTORIES.sub("", text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


Unit = Literal["percent", "points", "bytes", "seconds", ""]
"""``percent`` of a whole, drawn from 0 to 100; ``points`` are differences of such."""


def text_of(value: float, unit: Unit = "") -> str:
    """Return a number in a few digits, with its unit."""
    if unit == "percent":
        return f"{100 * value:.1f} %"
    if unit == "points":
        return f"{100 * value:.1f} points"
    if unit == "bytes":
        return bytes_text(value)
    return f"{value:.4g} s" if unit else f"{value:.4g}"


def bytes_text(value: float) -> str:
    """Return bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def moment_text(unix_time: float) -> str:
    """Return a time by this machine's clock, to the minute."""
    try:
        return f"{datetime.fromtimestamp(unix_time):%Y-%m-%d %H:%M}"
    except (OverflowError, OSError, ValueError):  # a server may say anything
        return "at an unknown time"


def duration(seconds: float) -> str:
    """Return a duration in its largest two units."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def json_text(value: object) -> str:
    """Return a value as one line of JSON, in which null stands for NaN and infinities.

    JSON has no such numbers, and a loss may be one.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    """Return a value without numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def event_of(
    kind: str,
    unix_time: float,
    *,
    client: object = "",
    interaction: int = -1,
    round: int = -1,
    detail: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the fields of one thing that happened, as ``--json`` prints them."""
    place = {"interaction": interaction, "round": round}
    facts = {"detail": detail or {}, "unix_time": unix_time}
    return {"kind": kind, "client": str(client), **place, **facts}
