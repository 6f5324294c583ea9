"""A run's chain of statements: what was committed, scored, undone and done again, in order.

Records of ``run.db`` may be undone lawfully, so their own chain may lose its end. This one only
grows: a roll-back is a statement as well. Whoever keeps its head, the number of statements and the
last link, can tell later whether the run still has the history that it had then. A link is the
sha256 of the link before and of the digest of the statement. So digests prove that a chain
continues another one, and tell nothing of what it states.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from typing import Any, NamedTuple

from fedmodels.errors import ArchiveError

COLUMNS = "number INTEGER PRIMARY KEY, statement TEXT NOT NULL, link TEXT NOT NULL"
SIZE = 32
"""Bytes of a digest and of a link."""
MAX_PROVEN = 1 << 14
"""Statements whose digests one answer holds, half a MiB."""


class Head(NamedTuple):
    """A place in the chain: the number of statements up to it, and the last link."""

    number: int
    link: bytes


def beginning_of(run_id: str) -> bytes:
    """Return the link before the first statement of a run."""
    return hashlib.sha256(run_id.encode()).digest()


def digest_of(statement: str) -> bytes:
    """Return the digest of a statement."""
    return hashlib.sha256(statement.encode()).digest()


def continued(link: bytes, digests: bytes) -> bytes:
    """Return the link after more statements; ``digests`` holds one of 32 bytes for each."""
    for at in range(0, len(digests), SIZE):
        link = hashlib.sha256(link + digests[at : at + SIZE]).digest()
    return link


class Chain:
    """The chain of one run: written by the engine's thread, and read by others."""

    def __init__(self, db: sqlite3.Connection, run_id: str) -> None:
        """Read the chain of a run, whose table is there.

        Raises:
            ValueError: holds the number of the first statement that was changed.
        """
        self._db = db
        self._digests, self._links = bytearray(), bytearray(beginning_of(run_id))
        self._statement = "{}"
        query = "SELECT number, statement, link FROM chain ORDER BY number"
        for number, self._statement, link in db.execute(query):
            self._add(self._statement)
            if number != self.head.number or link != self.head.link.hex():
                raise ValueError(number)
        self.safe = self.head
        """The newest head that is safe on the disk: what others are told."""

    @property
    def head(self) -> Head:
        """Return the newest head."""
        return Head(len(self._digests) // SIZE, bytes(self._links[-SIZE:]))

    @property
    def last(self) -> dict[str, Any]:
        """Return the last statement."""
        return dict(json.loads(self._statement))

    def _add(self, statement: str) -> None:
        digest = digest_of(statement)
        link = continued(self.head.link, digest)
        self._links += link
        self._digests += digest

    def say(self, **statement: Any) -> str:
        """Write a statement, in a transaction; :meth:`said` follows when that is committed."""
        text = json.dumps(statement, sort_keys=True)
        number, before = self.head
        link = continued(before, digest_of(text))
        self._db.execute("INSERT INTO chain VALUES (?, ?, ?)", (number + 1, text, link.hex()))
        return text

    def said(self, statement: str) -> None:
        """Take in a statement that is committed."""
        self._add(statement)
        self._statement = statement

    def since(self, number: int) -> tuple[Head, bytes]:
        """Return the newest safe head, or one on the way to it, and the digests up to it.

        Args:
            number: the statements that whoever asks knows already; 0 for none.
        """
        safe = self.safe.number
        if not 0 < number <= safe:
            return self.safe, b""
        end = min(safe, number + MAX_PROVEN)
        head = Head(end, bytes(self._links[end * SIZE : (end + 1) * SIZE]))
        return head, bytes(self._digests[number * SIZE : end * SIZE])


def read_head(text: str) -> Head:
    """Read a head as people keep it, ``NUMBER:LINK`` in hexadecimal digits.

    Raises:
        ArchiveError: it is none.
    """
    number, _, link = text.partition(":")
    try:
        found = Head(int(number), bytes.fromhex(link))
    except ValueError:
        found = Head(-1, b"")
    if found.number < 0 or len(found.link) != SIZE:
        raise ArchiveError(f"{text!r} is no head of a chain: it reads NUMBER:LINK, with 64 digits")
    return found
