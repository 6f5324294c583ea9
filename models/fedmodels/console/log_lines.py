"""What a program says while it works: lines on standard error, or objects on standard output."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from enum import StrEnum
from typing import Any

from fedmodels.console.printable import event_of, json_text, without_passwords
from fedmodels.errors import ConfigError, suggestion

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogLevel(StrEnum):
    """How much is said."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @classmethod
    def named(cls, name: str) -> LogLevel:
        """Read ``--log-level``; ConfigError if no level has this name."""
        if name not in set(cls):
            near = suggestion(name, [level.value for level in cls])
            raise ConfigError(f"--log-level {name!r} is none of {', '.join(cls)}.{near}")
        return cls(name)

    @property
    def number(self) -> int:
        """Return the level's number in ``logging``."""
        return logging.getLevelNamesMapping()[self.value.upper()]


class PlainFormatter(logging.Formatter):
    """Every record as a line; passwords of URLs are left out, also those of other packages."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, and its traceback where it has one."""
        return without_passwords(super().format(record))


class JsonFormatter(logging.Formatter):
    """Every record as one JSON object with the fields of an event.

    A record that was given ``extra={"event": {…}}`` is that object. Any other is of the kind
    ``log``; its ``detail`` holds level, logger and line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of a record."""
        event = getattr(record, "event", None)
        if event is not None:
            return json_text(event)
        line = record.getMessage()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        detail = {"level": record.levelname.lower(), "logger": record.name}
        detail["line"] = without_passwords(line)
        return json_text(event_of("log", record.created, detail=detail))


class _Outlet(io.FileIO):
    """A file that becomes ``/dev/null`` when nobody can read it any more."""

    def write(self, data: Any) -> int:
        """Write; where that fails, say so once on standard error and count all as written."""
        try:
            return super().write(data)
        except OSError as error:
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            with suppress(OSError):  # standard error may have the same reader
                print(f"standard output is closed ({error.strerror}); continuing", file=sys.stderr)
            return memoryview(data).nbytes


def outlive_readers() -> None:
    """Go on when whoever reads standard output has gone, as after ``fedsrv launch … | head -1``.

    A run takes hours, and lines that nobody reads must not end it.
    """
    out = sys.__stdout__
    if out is None or sys.stdout is not out:  # a test or an embedding program reads it itself
        return
    out.flush()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(_Outlet(out.fileno(), "w", closefd=False)),
        out.encoding, out.errors, line_buffering=True,
    )  # fmt: skip


def set_up_logging(level: LogLevel, *, as_json: bool = False) -> None:
    """Write what is logged at this level and above, as plain lines or as JSON objects.

    gRPC's core writes no lines of its own unless ``GRPC_VERBOSITY`` asks for them: its errors come
    as exceptions too, and a user's mistake gets one line.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    outlive_readers()
    lines = logging.StreamHandler(sys.stdout if as_json else sys.stderr)
    lines.setFormatter(JsonFormatter() if as_json else PlainFormatter(PLAIN))
    logging.basicConfig(level=level.value.upper(), handlers=[lines])
    quiet = max(level.number, logging.WARNING)
    logging.getLogger("torch").setLevel(quiet)  # below, it logs its caches
