"""``run.db``: the committed records of a run, and a chain of statements that covers every row.

One thread owns the file: it opens it, and every change is one transaction on it, in the order in
which changes were asked for. A transaction ends with a statement of all rows that it wrote and
deleted (:mod:`fedsrv.state.chain`), so that an edit of any table shows. What the engine and callers
ask for all the time, they read from memory: one value that each transaction replaces as a whole,
and two mappings that grow with the run, to which it adds.

Scores are added to the last record only. Undone records wait in a table of their own until the
replay has passed them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

from fedmodels.errors import ArchiveError, RunFailed
from fedmodels.facts.position import NONE_YET, Interaction
from fedmodels.host.files import no_locks
from fedsrv.state.chain import (
    Chain,
    Key,
    read_statement,
    row_digest,
    stated_file,
    stated_states,
    statement_of,
)
from fedsrv.state.owner import Owner, owned
from fedsrv.state.record import Record
from fedsrv.state.rows import (
    EARLIER,
    FORMAT,
    KEYS,
    LATER,
    TABLES,
    check_format,
    edited,
    remade,
    rows_in,
    tables_of,
)

T = TypeVar("T")
Row = tuple[Any, ...]
IN_MEMORY = ("meta", "started_over", "undone", "growths", "decisions", "roster")
"""The tables that stay small, or of which a row is seldom written."""


@dataclass(frozen=True)
class _Known:
    """What is in the file after a transaction, as far as it is asked for all the time."""

    committed: Interaction = NONE_YET
    rows: Mapping[str, Mapping[Key, Row]] = field(default_factory=dict)
    """The rows of the small tables, by key."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The sha256 of files for people, as they were stated last."""


class Transaction:
    """What one transaction writes and deletes."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self.changes: dict[str, dict[Key, Row | None]] = {}

    def put(self, table: str, key: Key, *values: object) -> None:
        """Write a row, over one of the same key."""
        marks = ", ".join("?" * (1 + len(values)))
        self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (key, *values))
        self.changes.setdefault(table, {})[key] = values

    def drop(self, table: str, keys: Collection[Key]) -> None:
        """Delete rows that are there."""
        query = f"DELETE FROM {table} WHERE {KEYS[table]} = ?"
        self._db.executemany(query, ((key,) for key in keys))
        self.changes.setdefault(table, {}).update(dict.fromkeys(keys))

    def digests(self) -> dict[str, dict[Key, str | None]]:
        """Return the digest of each row by table and key; None for one that is deleted."""
        return {
            table: {key: None if row is None else row_digest(row) for key, row in rows.items()}
            for table, rows in self.changes.items()
        }


class Ledger:
    """The database of one run; safe between threads, since one thread alone has it open."""

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
        self.owner = Owner("ledger")
        """The thread of the database, and of all that is written along with it."""
        try:
            self._open(strict, run_id or uuid.uuid4().hex if new else "")
        except BaseException:
            self.owner.close()
            raise

    @owned
    def _open(self, strict: bool, run_id: str) -> None:
        """Open the file; with a ``run_id`` one without a table is filled."""
        self.db = sqlite3.connect(self.path, isolation_level=None)  # refuses any other thread
        try:
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.execute(f"PRAGMA synchronous={'FULL' if strict else 'NORMAL'}")
            if tables_of(self.db):
                check_format(self.path, self._version())
            elif run_id:
                self._create(run_id)
            self._check()
        except (sqlite3.DatabaseError, ValueError) as error:
            self.db.close()
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
            if isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_ERROR:
                raise RunFailed(f"{self.path} cannot be used: {no_locks(error) or error}") from None
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

    def _create(self, run_id: str) -> None:
        """Make the tables of a new run, whose first statement names it."""
        with self.transaction():
            for name, columns in TABLES.items():
                self.db.execute(f"CREATE TABLE {name} ({columns})")
            self.db.execute(f"PRAGMA user_version = {FORMAT}")
            made = Transaction(self.db)
            made.put("meta", "run_id", run_id)
            Chain(self.db, run_id).say(statement_of({"began": run_id}, made.digests()))

    def _version(self) -> int:
        return int(self.db.execute("PRAGMA user_version").fetchone()[0])

    def _check(self) -> None:
        """Check that the file is whole and that every row is as written."""
        missing, version = TABLES.keys() - tables_of(self.db), self._version()
        if wrong := next(remade(self.db, version), ""):
            raise self.damaged(wrong)
        if needed := missing - {*LATER}:
            raise self.damaged(f"it has no table {min(needed)!r}")
        run_id = self.db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        if not run_id or not run_id[0]:
            raise self.damaged("it names no run")
        self.run_id = str(run_id[0])
        try:
            self.chain = Chain(self.db, self.run_id)
        except ValueError as error:
            why = f"statement {error} of its history is not the one that was written"
            raise self.damaged(why) from None
        if version == EARLIER:
            self._take_over()
        said = self._statements()
        if wrong := next(edited(self.db, said), ""):
            raise self.damaged(wrong)
        if missing or version < FORMAT:
            self._add_tables(missing)
        rows = {t: {key: tuple(row) for key, *row in rows_in(self.db, t)} for t in IN_MEMORY}
        names = {one["writes"] for one in said if "writes" in one}
        files = {name: stated_file(said, name) for name in names}
        self._known = _Known(self._newest(), rows, files)
        self._clients = {int(key): str(text) for key, text in rows_in(self.db, "clients")}
        """What each client described. The owner's thread adds; others copy or look one up."""
        self._states = stated_states(said)
        """The sha256 of the state's file after each interaction, where it is stated; likewise."""

    def _statements(self) -> list[dict[str, Any]]:
        query = "SELECT statement FROM chain ORDER BY number"
        return [read_statement(text) for (text,) in self.db.execute(query)]

    def said_of(self, key: str) -> list[dict[str, Any]]:
        """Return the statements that name something; called by the owner."""
        return [one for one in self._statements() if key in one]

    def _take_over(self) -> None:
        """Take up a file of the version before, whose rows no statement covers yet."""
        from fedsrv.state import earlier_ledger

        if wrong := next(earlier_ledger.edited(self.db, self.run_id), ""):
            raise self.damaged(wrong)
        with self.transaction():
            earlier_ledger.take_over(self.db)
            there = KEYS.keys() & tables_of(self.db)
            digests = {t: {k: row_digest(row) for k, *row in rows_in(self.db, t)} for t in there}
            said = statement_of({"taken_over": EARLIER}, digests)
            self.chain.say(said)
        self.chain.said(said)

    def _add_tables(self, missing: Collection[str]) -> None:
        """Make the tables, still empty, that a file of a version before has not."""
        with self.transaction():
            for name in missing:
                self.db.execute(f"CREATE TABLE {name} ({TABLES[name]})")
            self.db.execute(f"PRAGMA user_version = {FORMAT}")

    def _newest(self) -> Interaction:
        found = self.db.execute("SELECT MAX(interaction) FROM interactions").fetchone()[0]
        return NONE_YET if found is None else Interaction(int(found))

    # --- transactions -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Apply all changes of the block, or none."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:  # a disk that is full may have ended it
                self.db.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def stating(self, **what: Any) -> Iterator[Transaction]:
        """Apply all changes of the block together with a statement of them, or none.

        The block runs on the owner's thread.
        """
        with self.transaction():
            made = Transaction(self.db)
            yield made
            said = statement_of(what, made.digests())
            self.chain.say(said)
        self.chain.said(said)
        self._known = self._after(made.changes, what)

    def _after(
        self, changes: Mapping[str, Mapping[Key, Row | None]], what: Mapping[str, Any]
    ) -> _Known:
        """Take in what a transaction changed; return what is known after it."""
        before, files = self._known, self._known.files
        if "state" in what:
            self._states[what["committed"]] = what["state"]
        self._clients |= {
            int(key): row[0] for key, row in changes.get("clients", {}).items() if row
        }
        if "writes" in what:
            files = {**files, what["writes"]: what["sha256"]}
        rows = dict(before.rows)
        for table in changes.keys() & rows.keys():
            new = {**rows[table], **changes[table]}
            rows[table] = {key: row for key, row in new.items() if row is not None}
        newest = self._newest() if "interactions" in changes else before.committed
        return _Known(newest, rows, files)

    @owned
    def say(self, **what: Any) -> None:
        """State what changes no row."""
        with self.stating(**what):
            pass

    # --- facts ------------------------------------------------------------------------------------

    def facts(self) -> dict[str, str]:
        """Return the facts of the run as a whole, by name."""
        return {str(key): row[0] for key, row in self._known.rows["meta"].items()}

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

    @owned
    def set_facts(self, **values: str) -> None:
        """Store facts by name, all of them or none."""
        known = self.facts()
        if new := {key: value for key, value in values.items() if known.get(key) != value}:
            with self.stating() as rows:
                for key, value in new.items():
                    rows.put("meta", key, value)

    def file(self, name: str) -> str:
        """Return the sha256 of a file as it was stated last; an empty text before that."""
        return self._known.files.get(name, "")

    # --- records ----------------------------------------------------------------------------------

    @property
    def committed(self) -> Interaction:
        """Return the last committed interaction; -1 before the first."""
        return self._known.committed

    def stated_state(self, interaction: int) -> str:
        """Return the sha256 of the state's file after an interaction; empty if none is stated."""
        return self._states.get(interaction, "")

    @owned
    def records(self) -> list[tuple[Record, bool]]:
        """Return every committed record and whether its scores are in."""
        rows = self.db.execute("SELECT record, scored FROM interactions ORDER BY interaction")
        return [(json.loads(record), bool(scored)) for record, scored in rows]

    def record(self, interaction: Interaction) -> Record | None:
        """Return the record of an interaction, committed or undone; None if there is none."""
        known = self._known
        if interaction <= known.committed:
            return self._committed_record(interaction)
        undone = known.rows["undone"].get(interaction)
        return None if undone is None else cast(Record, json.loads(undone[1]))

    @owned
    def _committed_record(self, interaction: Interaction) -> Record | None:
        query = "SELECT record FROM interactions WHERE interaction = ?"
        row = self.db.execute(query, (interaction,)).fetchone()
        return None if row is None else cast(Record, json.loads(row[0]))

    @owned
    def pending(self) -> tuple[Record, str] | None:
        """Return the record that waits for scores, and the counts its training trip brought."""
        rows = self.db.execute("SELECT record, counts FROM interactions WHERE scored = 0")
        found = rows.fetchone()
        return (json.loads(found[0]), found[1]) if found else None

    @owned
    def append(
        self,
        record: Record,
        counts: str | None,
        named: Mapping[str, Any] = MappingProxyType({}),
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Commit a record; with ``counts``, its scores are still to come.

        Args:
            record: of the interaction.
            counts: what its training trip brought.
            named: what the statement of it names besides.
            facts: of the run as a whole, which hold from this commit on.
        """
        number = record["interaction"]
        if number <= self.committed:
            raise ValueError(f"interaction {number} is committed already")
        with self.stating(committed=number, **named) as rows:
            rows.put("interactions", number, int(counts is None), json.dumps(record), counts or "")
            if number in self._known.rows["undone"]:
                rows.drop("undone", [number])
            for key, value in facts.items():
                rows.put("meta", key, value)

    @owned
    def complete(self, record: Record) -> None:
        """Complete the last record with its scores."""
        number = record["interaction"]
        with self.stating(scored=number) as rows:
            rows.put("interactions", number, 1, json.dumps(record), "")

    # --- roll-back --------------------------------------------------------------------------------

    def undone(self) -> dict[Interaction, Record]:
        """Return the undone records that the replay has not passed, by interaction."""
        rows = sorted(self._known.rows["undone"].items())
        return {Interaction(int(number)): json.loads(row[1]) for number, row in rows}

    @owned
    def undo(self, interaction: Interaction, **facts: str) -> None:
        """Undo every commit after an interaction; the records stay until the replay passes them.

        ``facts`` of the run as a whole hold from then on.
        """
        query = "SELECT * FROM interactions WHERE interaction > ? ORDER BY 1"
        with self.stating(undone_after=interaction) as rows:
            later = self.db.execute(query, (interaction,)).fetchall()
            for row in later:
                rows.put("undone", *row)
            rows.drop("interactions", [row[0] for row in later])
            for client, (after,) in self._known.rows["started_over"].items():
                if after > interaction:
                    rows.put("started_over", client, interaction)
            for key, value in facts.items():
                rows.put("meta", key, value)

    @owned
    def redo(self, interaction: Interaction) -> None:
        """Commit undone records again, up to an interaction."""
        undone = self._known.rows["undone"]
        again = [n for n in sorted(undone) if self.committed < int(n) <= interaction]
        with self.stating(done_again=again) as rows:
            for number in again:
                rows.put("interactions", number, *undone[number])
            rows.drop("undone", [n for n in undone if int(n) <= interaction])

    @owned
    def forget_undone(self, first: Interaction) -> None:
        """Delete the undone records from an interaction on: the replay computed other ones."""
        if gone := [n for n in self._known.rows["undone"] if int(n) >= first]:
            with self.stating(forgot_undone=first) as rows:
                rows.drop("undone", gone)

    # --- open runs --------------------------------------------------------------------------------

    def growths(self) -> list[dict[str, Any]]:
        """Return how an open run grew, in order."""
        return [json.loads(row[0]) for _, row in sorted(self._known.rows["growths"].items())]

    @owned
    def grow(self, growth: Mapping[str, Any]) -> None:
        """Add a growth behind those that are there."""
        number = len(self._known.rows["growths"])
        with self.stating(grown=number) as rows:
            rows.put("growths", number, json.dumps(growth))

    # --- decisions --------------------------------------------------------------------------------

    def decided(self, what: str) -> list[dict[str, Any]]:
        """Return the facts of each decision of a kind, in order."""
        rows = (json.loads(row[0]) for _, row in sorted(self._known.rows["decisions"].items()))
        return [facts for kind, facts in rows if kind == what]

    @owned
    def decide(self, what: str, *facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Add decisions of a kind, all of them or none; return those that are new."""
        known, number = self.decided(what), len(self._known.rows["decisions"])
        new = [one for one in facts if one not in known]
        if new:
            with self.stating(decided=what) as rows:
                for each, one in enumerate(new, number):
                    rows.put("decisions", each, json.dumps([what, one], sort_keys=True))
        return new

    # --- clients ----------------------------------------------------------------------------------

    def standings(self) -> dict[int, dict[str, Any]]:
        """Return how each client stands that was ever there."""
        return {int(c): json.loads(row[0]) for c, row in sorted(self._known.rows["roster"].items())}

    @owned
    def keep_standings(self, standings: Mapping[int, Mapping[str, Any]]) -> None:
        """Store how clients stand, as far as it has changed."""
        known = self.standings()
        if new := {c: one for c, one in standings.items() if known.get(c) != one}:
            with self.stating() as rows:
                for client, one in new.items():
                    rows.put("roster", client, json.dumps(one, sort_keys=True))

    def profiles(self) -> dict[int, str]:
        """Return the description every client gave when it first joined."""
        return dict(sorted(self._clients.copy().items()))

    @owned
    def add_profiles(self, described: Mapping[int, str]) -> None:
        """Remember what clients describe, all of it or nothing; what is known already stays."""
        known = self._clients
        if new := {c: text for c, text in described.items() if known.get(c) != text}:
            with self.stating() as rows:
                for client, text in new.items():
                    rows.put("clients", client, text)

    def started_over(self) -> dict[int, Interaction]:
        """Return after which interaction clients began anew from their initial private state."""
        rows = self._known.rows["started_over"]
        return {int(client): Interaction(int(after)) for client, (after,) in rows.items()}

    @owned
    def start_over(self, client: int, after: int | None = None) -> None:
        """Remember that a client begins anew from its initial private state, by default now."""
        with self.stating() as rows:
            rows.put("started_over", client, self.committed if after is None else after)

    # --- the file ---------------------------------------------------------------------------------

    @owned
    def in_one_file(self) -> None:
        """Write everything into the one file, which may then be moved or copied."""
        self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.db.execute("PRAGMA journal_mode=DELETE")

    def close(self) -> None:
        """Close the file."""
        self.owner.run(self.db.close)
        self.owner.close()


def _make_private(database: Path) -> None:
    """Let nobody but its owner read a database; SQLite gives its other files the same mode."""
    os.close(os.open(database, os.O_RDWR | os.O_CREAT, 0o600))
    for path in (database, *database.parent.glob(f"{database.name}-*")):
        path.chmod(0o600)
