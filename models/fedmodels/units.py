"""Numbers as a reader sees them: shares, bytes, seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

Unit = Literal["percent", "bytes", "seconds", ""]


def text_of(value: float, unit: Unit = "") -> str:
    """Return a number in a few digits, with its unit."""
    if unit == "percent":
        return f"{100 * value:.1f} %"
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
