"""The statements of a run: a chain that only grows, and whose head others may keep.

Each transaction of ``run.db`` ends with a statement of what it changed: what happened, the digest
of each row that it wrote, and the rows that it deleted. A link is the sha256 of the link before and
of the digest of the statement. So digests prove that a chain continues another one. They tell
nothing of what it states, since each statement holds a random salt. Whoever keeps the head, the
number of statements and the last link, can tell later whether the run still has the history that it
had then.

The chain holds digests and never contents: what is forgotten on request leaves it whole.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from fedmodels.errors import ArchiveError
from fedmodels.host.guarded import Guarded

SIZE = 32
"""Bytes of a digest and of a link."""
MAX_PROVEN = 1 << 14
"""Statements whose digests one answer holds, half a MiB."""
SALT_BYTES = 16
LINES = "lines"
"""What a commit names under it: how far files had come that only grow, by name."""
Key = int | str


class Head(NamedTuple):
    """A place in the chain: the number of statements up to it, and the last link."""

    number: int
    link: bytes


def beginning_of(run_id: str) -> bytes:
    """Return the link before the first statement of a run."""
    return hashlib.sha256(run_id.encode()).digest()


def digest_of(statement: object) -> bytes:
    """Return the digest of a statement; an edited file may hold anything in its place."""
    return hashlib.sha256(str(statement).encode()).digest()


def continued(link: bytes, digests: bytes) -> bytes:
    """Return the link after more statements; ``digests`` holds one of 32 bytes for each."""
    for at in range(0, len(digests), SIZE):
        link = hashlib.sha256(link + digests[at : at + SIZE]).digest()
    return link


def row_digest(values: Iterable[object]) -> str:
    """Return the sha256 of a row's values without its key, in hexadecimal digits."""
    return hashlib.sha256(json.dumps([*values], default=repr).encode()).hexdigest()


def statement_of(what: Mapping[str, Any], digests: Mapping[str, Mapping[Key, str | None]]) -> str:
    """Return the statement of a transaction as it is stored.

    Args:
        what: what happened.
        digests: of each row that was written, by table and key; None for one that was deleted.
    """
    salt = secrets.token_hex(SALT_BYTES)
    rows = {"rows": digests} if digests else {}
    return json.dumps({**what, **rows, "salt": salt}, sort_keys=True)


class _Statement(BaseModel, strict=True):
    """What statements say to those who read them."""

    committed: int = 0
    scored: int = 0
    taken_up: int = 0
    undone_after: int = 0
    done_again: list[int | tuple[int, str]] = []
    state: str = ""
    writes: str = ""
    sha256: str = ""
    audit: tuple[int, str] = (0, "")
    lines: dict[str, tuple[int, str]] = {}
    rows: dict[str, dict[str, str | None]] = {}


def read_statement(text: str) -> dict[str, Any]:
    """Return what a statement says; ValueError for a text that no run wrote."""
    try:
        _Statement.model_validate_json(text)
    except ValueError:
        raise ValueError("its history says what no run states") from None
    return dict(json.loads(text))


def stated_states(said: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Return the sha256 of the state's file after each interaction, as it was stated last."""
    return {one["committed"]: one["state"] for one in said if "state" in one}


def stated_file(said: Iterable[Mapping[str, Any]], name: str) -> str:
    """Return the sha256 of a file as it was stated last; an empty text before that."""
    return next((str(one["sha256"]) for one in reversed([*said]) if one.get("writes") == name), "")


def commit_links(statements: Iterable[tuple[int, str, str]]) -> dict[int, str]:
    """Return the link of the last statement that says what an interaction is, by interaction."""
    found = dict[int, str]()
    for _, text, link in statements:
        one = read_statement(text)
        numbers = [one[key] for key in ("committed", "scored") if key in one]
        again = one.get("done_again", ())
        numbers += [n[0] if isinstance(n, list) else n for n in again]  # a link was beside it
        if "taken_up" in one:  # a run that was recovered, of which no statement was left
            numbers += range(one["taken_up"] + 1)
        found |= dict.fromkeys(numbers, link)
    return found


class Chain:
    """The chain of one run: its ledger's owner adds to it, and others read heads, under a lock."""

    _digests: Guarded[bytearray] = Guarded("_lock")
    _links: Guarded[bytearray] = Guarded("_lock")
    _head: Guarded[Head] = Guarded("_lock")
    _safe: Guarded[Head] = Guarded("_lock")

    def __init__(self, db: sqlite3.Connection, run_id: str) -> None:
        """Read the chain of a run; ValueError holds the number of the first changed statement."""
        self._db, self._lock = db, threading.RLock()
        first = beginning_of(run_id)
        self._digests, self._links = bytearray(), bytearray(first)
        self._head = Head(0, bytes(first))
        query = "SELECT number, statement, link FROM chain ORDER BY number"
        for number, statement, link in db.execute(query):
            self.said(statement)
            if (number, link) != (self.head.number, self.head.link.hex()):
                raise ValueError(number)
        self._safe = self.head

    @property
    def head(self) -> Head:
        """Return the newest head."""
        with self._lock:
            return self._head

    @property
    def safe(self) -> Head:
        """Return the newest head that is safe on the disk: what others are told."""
        with self._lock:
            return self._safe

    def is_safe(self, head: Head) -> None:
        """Take a head that is safe on the disk now; an earlier one than before changes nothing."""
        with self._lock:
            self._safe = max(self._safe, head, key=lambda it: it.number)

    def say(self, text: str) -> None:
        """Write a statement, in a transaction; :meth:`said` follows when that is committed."""
        number, before = self.head
        link = continued(before, digest_of(text))
        self._db.execute("INSERT INTO chain VALUES (?, ?, ?)", (number + 1, text, link.hex()))

    def said(self, text: str) -> None:
        """Take in a statement that is committed."""
        digest = digest_of(text)
        with self._lock:
            link = continued(self._head.link, digest)
            self._links += link
            self._digests += digest
            self._head = Head(self._head.number + 1, link)

    def since(self, number: int) -> tuple[Head, bytes]:
        """Return the newest safe head, or one on the way to it, and the digests up to it.

        Args:
            number: the statements that whoever asks knows already; 0 for none.
        """
        with self._lock:
            safe = self._safe.number
            if not 0 < number <= safe:
                return self._safe, b""
            end = min(safe, number + MAX_PROVEN)
            head = Head(end, bytes(self._links[end * SIZE : (end + 1) * SIZE]))
            return head, bytes(self._digests[number * SIZE : end * SIZE])


def read_head(text: str) -> Head:
    """Read a head, ``NUMBER:LINK`` in hexadecimal digits; ArchiveError if it is none."""
    number, _, link = text.partition(":")
    try:
        found = Head(int(number), bytes.fromhex(link))
    except ValueError:
        found = Head(-1, b"")
    if found.number < 0 or len(found.link) != SIZE:
        raise ArchiveError(f"{text!r} is no head of a chain: it reads NUMBER:LINK, with 64 digits")
    return found
