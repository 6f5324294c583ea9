"""``run.db``: the committed records of a run, chained by hashes.

Every record carries the sha256 of its content and of the record before it. So a check finds a
record that was changed or left out. Scores are added to the last record only, and its link is
computed anew with them. Undone records wait in a table of their own until the replay has passed
them. The facts of the run as a whole have one sha256 in common, their seal.

Records may be undone lawfully, so their chain may lose its end. A second chain only grows: it
states what was committed, scored, undone and done again, in the same transactions. Whoever keeps
its head, the number of statements and the last link, can tell later whether the run still has the
history that it had then. A link is the sha256 of the link before and of the digest of the
statement. So digests prove that a chain continues another one, and tell nothing of what it states.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from fedmodels.errors import ArchiveError, RunFailed
from fedmodels.position import NONE_YET, Interaction
from fedsrv.state.record import Record

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


def written_last(db: sqlite3.Connection, name: str) -> str:
    """Return the sha256 of a file as the history stated it last; an empty text before that."""
    query = "SELECT statement FROM chain WHERE statement LIKE '%\"writes\"%' ORDER BY number DESC"
    for (text,) in db.execute(query):
        if (said := json.loads(text)).get("writes") == name:
            return str(said["sha256"])
    return ""


class Chain:
    """The chain of one run: written by the engine's thread, and read by others."""

    def __init__(self, db: sqlite3.Connection, run_id: str) -> None:
        """Read the chain of a run; ValueError holds the number of the first changed statement."""
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
    """Read a head, ``NUMBER:LINK`` in hexadecimal digits; ArchiveError if it is none."""
    number, _, link = text.partition(":")
    try:
        found = Head(int(number), bytes.fromhex(link))
    except ValueError:
        found = Head(-1, b"")
    if found.number < 0 or len(found.link) != SIZE:
        raise ArchiveError(f"{text!r} is no head of a chain: it reads NUMBER:LINK, with 64 digits")
    return found


FORMAT = 2
SEAL = "seal"
"""Key of the hash over all other facts; runs of earlier versions begin without one."""
_ROW = """interaction INTEGER PRIMARY KEY, scored INTEGER NOT NULL, record TEXT NOT NULL,
    counts TEXT NOT NULL, link TEXT NOT NULL"""
_TABLES = {
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "clients": "id INTEGER PRIMARY KEY, client_json TEXT NOT NULL",
    "started_over": "client INTEGER PRIMARY KEY, after INTEGER NOT NULL",
    "interactions": _ROW,
    "undone": f"{_ROW}, before TEXT NOT NULL",
    "growths": "number INTEGER PRIMARY KEY, growth TEXT NOT NULL, link TEXT NOT NULL",
    "chain": "number INTEGER PRIMARY KEY, statement TEXT NOT NULL, link TEXT NOT NULL",
}
T = TypeVar("T")


class Ledger:
    """The database of one run; used by one thread at a time."""

    def __init__(self, path: Path, *, strict: bool, new: bool, run_id: str = "") -> None:
        """Open ``run.db``, or make it.

        Args:
            path: the file.
            strict: sync every commit.
            new: whether the run is new, so that an empty or missing file may be filled.
            run_id: the id of a new run; by default random.

        Raises:
            ArchiveError: the file is damaged, or has another format; says how to go on.
            RunFailed: the file cannot be used at this moment.
        """
        self.path = path
        if not new and (not path.is_file() or not path.stat().st_size):
            raise self.damaged("it is empty" if path.is_file() else "it is gone")
        _make_private(path)
        self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute(f"PRAGMA synchronous={'FULL' if strict else 'NORMAL'}")
            self._check_format()
            if new and not self._tables():
                self._create(run_id or uuid.uuid4().hex)
            self._check()
        except sqlite3.OperationalError as error:
            self.db.close()
            raise RunFailed(f"{path} cannot be used: {error}") from None
        except sqlite3.DatabaseError as error:
            self.db.close()
            raise self.damaged(str(error)) from None
        except BaseException:
            self.db.close()
            raise

    def damaged(self, reason: str) -> ArchiveError:
        """Return the error that says what is wrong with the file, and how to go on."""
        return ArchiveError(
            f"{self.path} is damaged ({reason}); nothing was changed. Put a copy of it back, or "
            f"make a new one of rounds.jsonl and the states: fedsrv recover {self.path.parent}"
        )

    # --- checks -----------------------------------------------------------------------------------

    def _tables(self) -> set[str]:
        rows = self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return {str(name) for (name,) in rows}

    def _create(self, run_id: str) -> None:
        with self.transaction():
            for name, columns in _TABLES.items():
                self.db.execute(f"CREATE TABLE {name} ({columns})")
            self._put_facts({"run_id": run_id})
            self.db.execute(f"PRAGMA user_version = {FORMAT}")

    def _check_format(self) -> None:
        found = int(self.db.execute("PRAGMA user_version").fetchone()[0])
        if found == FORMAT or not self._tables():
            return
        age = "an earlier" if found < FORMAT else "a later"
        raise ArchiveError(
            f"{self.path} was written by {age} version of fedtide; finish the run with that one, "
            "or make a new file of rounds.jsonl and the states: "
            f"fedsrv recover {self.path.parent}"
        )

    def _check(self) -> None:
        """Check that the file is whole and that every record is as written."""
        found = str(self.db.execute("PRAGMA integrity_check(1)").fetchone()[0])
        if found != "ok":
            raise self.damaged(" ".join(found.split()))
        missing = sorted(_TABLES.keys() - self._tables())
        if missing:
            raise self.damaged(f"it has no table {missing[0]!r}")
        facts = self.facts()
        self.run_id = facts.get("run_id", "")
        if not self.run_id:
            raise self.damaged("it names no run")
        if facts.get(SEAL, _seal_of(facts)) != _seal_of(facts):
            raise self.damaged("what it says of the run as a whole is not what was written")
        before = self.run_id
        query = "SELECT interaction, scored, record, counts, link FROM interactions ORDER BY 1"
        for number, *content, link in self.db.execute(query):
            if link != link_of(before, number, *content):
                raise self.damaged(
                    f"the record of interaction {number + 1} is not the one that was written, or "
                    "one before it is missing"
                )
            before = link
        before = self.run_id
        for number, growth, link in self.db.execute("SELECT * FROM growths ORDER BY 1"):
            if link != link_of(before, number, growth):
                raise self.damaged(f"growth {number + 1} is not the one that was written")
            before = link
        try:
            self.chain = Chain(self.db, self.run_id)
        except ValueError as error:
            why = f"statement {error} of its history is not the one that was written"
            raise self.damaged(why) from None
        if self.chain.head.number == 0 and self.committed >= 0:
            with self.stating(taken_up=self.committed, link=self._last_link()):
                pass  # a run that was recovered

    # --- facts ------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """Return the facts of the run as a whole, by name."""
        return {str(k): str(v) for k, v in self.db.execute("SELECT key, value FROM meta")}

    def fact(self, name: str, kind: type[T]) -> T | None:
        """Return a fact that is a JSON value of this kind; None if there is none.

        Raises:
            ArchiveError: it cannot be read as one.
        """
        text = self.facts().get(name)
        if text is None:
            return None
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, kind):
            raise self.damaged(f"its {name!r} cannot be read")
        return found

    def set_facts(self, **values: str) -> None:
        """Store facts by name, all of them or none."""
        with self.transaction():
            self._put_facts(values)

    def _put_facts(self, values: Mapping[str, str]) -> None:
        sealed = {**values, SEAL: _seal_of({**self.facts(), **values})}
        self.db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", sealed.items())

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Apply all changes of the block, or none."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    @contextlib.contextmanager
    def stating(self, **statement: Any) -> Iterator[None]:
        """Apply all changes of the block together with a statement of them, or none."""
        with self.transaction():
            yield
            said = self.chain.say(**statement)
        self.chain.said(said)

    # --- records ----------------------------------------------------------------------------------

    @property
    def committed(self) -> Interaction:
        """Return the last committed interaction; -1 before the first."""
        found = self.db.execute("SELECT MAX(interaction) FROM interactions").fetchone()[0]
        return NONE_YET if found is None else Interaction(int(found))

    def records(self) -> list[tuple[Record, bool]]:
        """Return every committed record and whether its scores are in."""
        rows = self.db.execute("SELECT record, scored FROM interactions ORDER BY interaction")
        return [(json.loads(record), bool(scored)) for record, scored in rows]

    def record(self, interaction: Interaction) -> Record | None:
        """Return the record of an interaction, committed or undone; None if there is none."""
        for table in ("interactions", "undone"):
            query = f"SELECT record FROM {table} WHERE interaction = ?"
            if row := self.db.execute(query, (interaction,)).fetchone():
                return cast(Record, json.loads(row[0]))
        return None

    def pending(self) -> tuple[Record, str] | None:
        """Return the record that waits for scores, and the counts its training trip brought."""
        rows = self.db.execute("SELECT record, counts FROM interactions WHERE scored = 0")
        found = rows.fetchone()
        return (json.loads(found[0]), found[1]) if found else None

    def append(
        self, record: Record, counts: str | None, named: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """Commit a record; with ``counts``, its scores are still to come.

        Args:
            record: of the interaction.
            counts: what its training trip brought.
            named: what the statement of it names besides.
        """
        number = record["interaction"]
        content = (int(counts is None), json.dumps(record), counts or "")
        link = link_of(self._last_link(), number, *content)
        with self.stating(committed=number, link=link, **named):
            row = (number, *content, link)
            self.db.execute("INSERT INTO interactions VALUES (?, ?, ?, ?, ?)", row)
            self.db.execute("DELETE FROM undone WHERE interaction = ?", (number,))

    def complete(self, record: Record) -> None:
        """Complete the last record with its scores."""
        number, content = record["interaction"], (1, json.dumps(record), "")
        link = link_of(self._last_link(below=number), number, *content)
        with self.stating(scored=number, link=link):
            self.db.execute(
                "UPDATE interactions SET scored = ?, record = ?, counts = ?, link = ? "
                "WHERE interaction = ?",
                (*content, link, number),
            )

    def _last_link(self, below: int = 2**62) -> str:
        query = "SELECT link FROM interactions WHERE interaction < ? ORDER BY interaction DESC"
        found = self.db.execute(f"{query} LIMIT 1", (below,)).fetchone()
        return str(found[0]) if found else self.run_id

    # --- roll-back --------------------------------------------------------------------------------

    def undone(self) -> dict[Interaction, Record]:
        """Return the undone records that the replay has not passed, by interaction."""
        rows = self.db.execute("SELECT interaction, record FROM undone ORDER BY interaction")
        return {Interaction(int(number)): json.loads(record) for number, record in rows}

    def undo(self, interaction: Interaction) -> None:
        """Undo every commit after an interaction; the records stay until the replay passes them."""
        later = "SELECT interaction, scored, record, counts, link FROM interactions WHERE "
        with self.stating(undone_after=interaction):
            before = self._last_link(below=interaction + 1)
            rows = self.db.execute(f"{later} interaction > ? ORDER BY 1", (interaction,)).fetchall()
            for row in rows:
                self.db.execute(
                    "INSERT OR REPLACE INTO undone VALUES (?, ?, ?, ?, ?, ?)", (*row, before)
                )
                before = row[-1]
            self.db.execute("DELETE FROM interactions WHERE interaction > ?", (interaction,))
            self.db.execute("UPDATE started_over SET after = MIN(after, ?)", (interaction,))

    def redo(self, interaction: Interaction) -> None:
        """Commit undone records again, up to an interaction; ArchiveError if one is another."""
        query = "SELECT * FROM undone WHERE interaction > ? AND interaction <= ? ORDER BY 1"
        links = list[tuple[int, str]]()
        with self.stating(done_again=links):
            link = self._last_link()
            rows = self.db.execute(query, (self.committed, interaction)).fetchall()
            for number, *content, old_link, before in rows:
                if old_link != link_of(before, number, *content):
                    raise self.damaged(f"the undone record of interaction {number + 1} was changed")
                link = link_of(link, number, *content)
                row = (number, *content, link)
                self.db.execute("INSERT INTO interactions VALUES (?, ?, ?, ?, ?)", row)
                links.append((number, link))
            self.db.execute("DELETE FROM undone WHERE interaction <= ?", (interaction,))

    def forget_undone(self, first: Interaction) -> None:
        """Delete the undone records from an interaction on: the replay computed other ones."""
        self.db.execute("DELETE FROM undone WHERE interaction >= ?", (first,))

    # --- open runs --------------------------------------------------------------------------------

    def growths(self) -> list[dict[str, Any]]:
        """Return how an open run grew, in order."""
        rows = self.db.execute("SELECT growth FROM growths ORDER BY number")
        return [json.loads(growth) for (growth,) in rows]

    def grow(self, growth: Mapping[str, Any]) -> None:
        """Add a growth behind those that are there."""
        with self.transaction():
            query = "SELECT number, link FROM growths ORDER BY number DESC LIMIT 1"
            last, before = self.db.execute(query).fetchone() or (-1, self.run_id)
            text = json.dumps(growth)
            row = (last + 1, text, link_of(before, last + 1, text))
            self.db.execute("INSERT INTO growths VALUES (?, ?, ?)", row)

    # --- clients ----------------------------------------------------------------------------------

    def profiles(self) -> dict[int, str]:
        """Return the description every client gave when it first joined."""
        rows = self.db.execute("SELECT id, client_json FROM clients ORDER BY id")
        return {int(client): text for client, text in rows}

    def add_profile(self, client: int, client_json: str) -> None:
        """Remember a client's description."""
        self.db.execute("INSERT OR REPLACE INTO clients VALUES (?, ?)", (client, client_json))

    def started_over(self) -> dict[int, Interaction]:
        """Return after which interaction clients began anew from their initial private state."""
        rows = self.db.execute("SELECT client, after FROM started_over")
        return {int(client): Interaction(int(after)) for client, after in rows}

    def start_over(self, client: int, after: int | None = None) -> None:
        """Remember that a client begins anew from its initial private state, by default now."""
        row = (client, self.committed if after is None else after)
        self.db.execute("INSERT OR REPLACE INTO started_over VALUES (?, ?)", row)

    def close(self) -> None:
        """Close the file."""
        self.db.close()


def _make_private(database: Path) -> None:
    """Let nobody but its owner read a database; SQLite gives its other files the same mode."""
    os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
    for path in (database, *database.parent.glob(f"{database.name}-*")):
        path.chmod(0o600)


def _seal_of(facts: Mapping[str, str]) -> str:
    """Return the hash over all facts but the seal itself."""
    text = json.dumps(sorted((key, value) for key, value in facts.items() if key != SEAL))
    return hashlib.sha256(text.encode()).hexdigest()


def link_of(before: str, number: object, *content: object) -> str:
    """Return the hash that ties a row to the one before it."""
    text = json.dumps([before, number, *content], default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
