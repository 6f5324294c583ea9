"""What a program says while it works: lines on standard error, or objects on standard output."""

from __future__ import annotations

import json
import logging
import sys
from enum import StrEnum
from typing import Any

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogLevel(StrEnum):
    """How much is said."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def number(self) -> int:
        """Return the level's number in ``logging``."""
        return logging.getLevelNamesMapping()[self.value.upper()]


class JsonLines(logging.Formatter):
    """Every record as one JSON object with the fields of an event.

    A record that was given ``extra={"event": {…}}`` is that object. Any other is of the kind
    ``log``; its ``detail`` holds level, logger and line.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the object of a record."""
        event = getattr(record, "event", None)
        if event is not None:
            return json.dumps(event)
        line = record.getMessage()
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        detail = {"level": record.levelname.lower(), "logger": record.name, "line": line}
        return json.dumps(event_of("log", record.created, detail=detail))


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


def set_up_logging(level: LogLevel, *, as_json: bool = False) -> None:
    """Say what is logged at this level and above, as plain lines or as objects."""
    how: dict[str, Any] = {"format": PLAIN}
    if as_json:
        objects = logging.StreamHandler(sys.stdout)
        objects.setFormatter(JsonLines())
        how = {"handlers": [objects]}
    logging.basicConfig(level=level.value.upper(), **how)
