"""SIGTERM: the end of a process where nothing swallows it."""

from __future__ import annotations

import signal

_signals: list[int] = []
"""The signal that asked this process to end, once it has come."""


def end_on_sigterm() -> None:
    """Let SIGTERM end the process with its own exit status, 143; a second one changes nothing.

    A loop that reads files or trains calls :func:`end_if_signalled` each time round, and so does
    whoever takes an error for one of its own.
    """
    signal.signal(signal.SIGTERM, _end_by_signal)


def end_if_signalled() -> None:
    """Raise SystemExit if SIGTERM has come already, and a library dropped what it raised.

    torch does so where it asks an object for its shape: the error becomes a ValueError, and a file
    that is being read looks damaged.
    """
    if _signals:
        raise SystemExit(128 + _signals[0])


def _end_by_signal(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    _signals.append(number)
    raise SystemExit(128 + number)
