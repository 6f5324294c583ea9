"""``audit.jsonl``: who joined, sent, was refused, was set aside or steered; a chain of lines.

Each line ends with the sha256 of all before it and of itself. So a line that was changed, removed
or moved breaks the chain. Every commit in ``run.db`` names the last line that was safe on the disk
by then. So it shows if the end of the log was cut off, and a loss of power takes no line that a
commit names. Lines are written with the next commit, or within a second.

:class:`Evidence` has the log and the chain of statements of a run that is written; ``fedsrv audit``
and ``fedsrv verify`` read both (:mod:`fedsrv.state.verification`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError
from fedmodels.host.guarded import Guarded
from fedmodels.host.line_file import LineFile
from fedmodels.times import LINES_WITHIN_S
from fedsrv.state.ledger import Ledger
from fedsrv.state.record import Record

AUDIT = "audit.jsonl"
AT_WILL = frozenset({"refused", "joined", "left"})
"""Kinds of lines that a caller can cause as often as it likes."""
MAX_AT_WILL = 300
"""Limit of lines of each such kind in so many seconds; one line counts those beyond it."""
MAX_WARNED = 5
"""Warnings that a report shows."""
_LINE = re.compile(rb'(\{.*), "link": "([0-9a-f]{64})"\}')
log = logging.getLogger(__name__)


class Mark(NamedTuple):
    """A place in the chain: the number of lines up to it, and the last one's link."""

    lines: int
    link: str


START = Mark(0, "")


@dataclass(frozen=True)
class Entry:
    """One line that is as it was written."""

    mark: Mark
    facts: Mapping[str, Any]


class Broken(Exception):
    """A line is not the one that was written, or one before it is missing; says which."""


def read(path: Path) -> Iterator[Entry]:
    """Yield the lines of an audit log; raise Broken at one that does not continue the chain."""
    if not path.is_file():
        return
    at = START
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return  # a crash cut it short; it was never committed
            found = _LINE.fullmatch(line.rstrip(b"\n"))
            if found is None or _link(at.link, found[1]) != found[2].decode():
                raise Broken(
                    f"line {at.lines + 1} is not the one that was written, or one before it is "
                    "missing"
                )
            at = Mark(at.lines + 1, found[2].decode())
            yield Entry(at, json.loads(found[1] + b"}"))


def _link(before: str, body: bytes) -> str:
    """Return the hash that ties a line to those before it."""
    return hashlib.sha256(before.encode() + body).hexdigest()


def last_audited(db: sqlite3.Connection) -> Mark | None:
    """Return the last line of the audit log at the last commit; None before one."""
    query = "SELECT statement FROM chain WHERE statement LIKE '%\"audit\"%' ORDER BY number DESC"
    found = db.execute(f"{query} LIMIT 1").fetchone()
    return Mark(*json.loads(found[0])["audit"]) if found else None


class Audit:
    """The log of a run under way; safe between threads, by one lock around all of it."""

    _lines: Guarded[list[bytes]] = Guarded("_lock")
    _at_will: Guarded[Counter[str]] = Guarded("_lock")
    _until: Guarded[float] = Guarded("_lock")
    _at: Guarded[Mark] = Guarded("_lock")
    _written: Guarded[Mark] = Guarded("_lock")
    _safe: Guarded[Mark] = Guarded("_lock")

    def __init__(self, path: Path, committed: Mark | None) -> None:
        """Go on with a log, or begin one.

        Args:
            path: the file.
            committed: the last line at the last commit, as ``run.db`` has it; None before one.

        Raises:
            ArchiveError: the file cannot be used.
        """
        self.path = path
        self._lock = threading.RLock()
        self._lines, self._at_will, self._until = [], Counter(), 0.0
        self.differences: list[str] = []
        """What was found wrong with the log when it was opened."""
        at, wrong = self._looked_through(committed)
        self._at = self._written = at
        self._safe = committed or START
        try:
            self._file = LineFile(path)
        except OSError as error:
            raise ArchiveError(f"{path} cannot be used: {error.strerror}") from None
        if wrong:
            self.differences.append(f"{path}: {wrong}; fedsrv audit {path.parent} says more")
            self.tell("broken", line=wrong)

    def _looked_through(self, committed: Mark | None) -> tuple[Mark, str]:
        """Return the last whole line, and what is wrong with the lines up to it."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        data = data[: data.rfind(b"\n") + 1]
        at, wrong, links = START, "", {0: ""}
        try:
            for entry in read(self.path):
                at = entry.mark
                links[at.lines] = at.link
        except Broken as error:
            wrong = str(error)
            found = _LINE.fullmatch(data.splitlines()[-1])
            at = Mark(data.count(b"\n"), found[2].decode() if found else "")
        if not wrong and committed and links.get(committed.lines) != committed.link:
            wrong = missing_end(committed, at)
        return at, wrong

    def tell(self, what: str, **facts: Any) -> None:
        """Add a line; it is written with the next commit, or by :meth:`write`."""
        with self._lock:
            if what in AT_WILL and self._is_flood(what):
                return
            self._add(what, facts)

    def _add(self, what: str, facts: Mapping[str, Any]) -> None:
        time_text = datetime.now(UTC).isoformat(timespec="milliseconds")
        told = {"n": self._at.lines + 1, "time": time_text, "what": what, **facts}
        body = json.dumps(told, default=str)[:-1].encode()
        self._at = Mark(self._at.lines + 1, _link(self._at.link, body))
        self._lines.append(body + f', "link": "{self._at.link}"}}\n'.encode())

    def _is_flood(self, what: str) -> bool:
        """Tell whether there were too many lines of a kind in this minute."""
        now = time.monotonic()
        if now > self._until:
            for kind, count in self._at_will.items():
                if count > MAX_AT_WILL:
                    self._add(kind, {"more": count - MAX_AT_WILL})
            self._at_will.clear()
            self._until = now + LINES_WITHIN_S
        self._at_will[what] += 1
        return self._at_will[what] > MAX_AT_WILL

    def write(self) -> Mark:
        """Write what was told; return the last line in the file, or raise OSError."""
        with self._lock:
            if self._lines:
                self._file.append(b"".join(self._lines))
                self._lines.clear()
                self._written = self._at
            return self._written

    @property
    def safe(self) -> Mark:
        """Return the last line that is known to be safe on the disk."""
        with self._lock:
            return self._safe

    def sync(self) -> None:
        """Make what is written safe on the disk; lines are told and written meanwhile."""
        with self._lock:
            written = self._written
        self._file.sync()
        with self._lock:  # another thread may have synced later lines
            self._safe = max(self._safe, written, key=lambda it: it.lines)

    def close(self) -> None:
        """Write what is left, and close the file."""
        try:
            self.write()
        except OSError as error:
            log.error("%s lacks its last lines: %s", self.path, error.strerror)
        self._file.close()


def warned(path: Path) -> list[str]:
    """Return the last warnings in a log, each once; nothing where there is no log."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError, ValueError, TypeError), path.open("rb") as file:
        for line in file:
            if b'"what": "warned"' in line:
                text = printable(str(json.loads(line).get("line", "")))
                found.pop(text, None)
                found[text] = None
    return [*found][-MAX_WARNED:]


def missing_end(committed: Mark, at: Mark) -> str:
    """Return what is wrong with a log that does not hold the line that a commit names."""
    if at.lines < committed.lines:
        return (
            f"it ends with line {at.lines}, and line {committed.lines} was there at the last "
            "commit: a loss of power may take the newest lines, else somebody removed them"
        )
    return f"line {committed.lines} is not the one that was there at the last commit"


def text_of(facts: Mapping[str, Any]) -> str:
    """Return a line of the log as people read it."""
    rest = {k: v for k, v in facts.items() if k not in ("n", "time", "what", "client", "by", "at")}
    who = f" client {facts['client']}" if facts.get("client", "") != "" else ""
    by = f", by {facts['by']}" if facts.get("by") else ""
    place = f" from {facts['at']}" if facts.get("at") else ""
    more = "".join(f", {key} {value}" for key, value in rest.items())
    return printable(f"{facts['n']} {facts['time']} {facts['what']}{who}{by}{place}{more}")


class Evidence:
    """The evidence of a run that is written: told from any thread, else used by its owner's."""

    def __init__(self, run: Path, ledger: Ledger, wrong: Sequence[str] | None) -> None:
        """Go on with what is there; raise ArchiveError if the log of calls cannot be used.

        ``wrong`` says what does not fit in the records of a run that goes on; None of a new run.
        """
        self._ledger, self.chain = ledger, ledger.chain
        self.audit = Audit(run / AUDIT, ledger.owner.run(last_audited, ledger.db))
        self.differences = [] if wrong is None else [*wrong, *self.audit.differences]
        """What did not fit in ``run.db``, ``rounds.jsonl`` and ``audit.jsonl``, a line each."""

    def tell(self, what: str, **facts: Any) -> None:
        """Put down that something happened; it is written with the next commit."""
        self.audit.tell(what, **facts)

    def committing(self, record: Record) -> Mapping[str, Any]:
        """Write down that an interaction is committed; return what its statement names besides."""
        for client, reason in record.get("failed", {}).items():
            self.audit.tell("failed", client=client, reason=reason)
        self.audit.tell("committed", interaction=record["interaction"])
        self.audit.write()
        safe = self.audit.safe
        return {"audit": safe} if safe.lines else {}

    def name_last_line(self) -> None:
        """State which line of the log is the last one, once it is safe."""
        before = self.audit.safe
        self.audit.write()
        self.audit.sync()
        if (safe := self.audit.safe) != before:
            self._ledger.say(paused_after=self._ledger.committed, audit=safe)

    def close(self) -> None:
        """Write what is left of the log, and close it."""
        self.audit.close()
