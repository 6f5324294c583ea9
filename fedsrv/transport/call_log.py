"""Lines about bad calls: one a minute of each kind in the program's log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from fedmodels.printable import printable

log = logging.getLogger(__name__)


EVERY_S = 60.0
_GRPC = ("grpc._common", "grpc._server")
"""Loggers of gRPC that write a traceback for each call that goes wrong."""


@dataclass
class _Kind:
    """Complaints of one kind since the last line about it."""

    logged_at: float
    unlogged: int = 0


class RejectionLog(logging.Filter):
    """Logs the first complaint of a kind and counts the others, a line a minute for each kind.

    It is also a filter of gRPC's loggers. A request that cannot be parsed is its sender's fault,
    so its line has no traceback. An exception of our own keeps its traceback, the first time in a
    minute.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._log, self._clock = log, clock
        self._kinds: dict[str, _Kind] = {}
        self._lock = threading.Lock()

    def tell(self, kind: str, line: str) -> None:
        """Complain about one call; ``kind`` is one of a few words, such as a status code."""
        unlogged = self._due(kind)
        if unlogged is not None:
            more = f" (and {unlogged} more such calls since the last line)" if unlogged else ""
            self._log.warning("%s: %s%s", kind, printable(line), more)

    def _due(self, kind: str) -> int | None:
        """Return the number of unlogged complaints of this kind, if it is time for a line.

        ``None`` means that the last line is less than a minute old; the complaint is counted.
        """
        now = self._clock()
        with self._lock:
            known = self._kinds.get(kind)
            if known is not None and now - known.logged_at < EVERY_S:
                known.unlogged += 1
                return None
            self._kinds[kind] = _Kind(now)
            return known.unlogged if known else 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Handle a record of gRPC's loggers; tell whether it may pass unchanged."""
        if not record.exc_info:
            return True
        error = record.exc_info[1]
        if record.name == "grpc._common":
            self.tell("UNPARSABLE", f"a message cannot be parsed: {error}")
            return False
        return self._due(f"{record.name} {type(error).__name__}") is not None

    def open(self) -> None:
        """Start filtering gRPC's loggers."""
        for name in _GRPC:
            logging.getLogger(name).addFilter(self)

    def close(self) -> None:
        """Stop filtering gRPC's loggers, and log the complaints counted since the last line."""
        for name in _GRPC:
            logging.getLogger(name).removeFilter(self)
        with self._lock:
            unlogged = {
                kind: found.unlogged for kind, found in self._kinds.items() if found.unlogged
            }
            self._kinds.clear()
        for kind, count in unlogged.items():
            self._log.warning("%s: %d more such calls", kind, count)
