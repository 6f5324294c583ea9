"""The tables of ``run.db``, and whether their rows are the ones that its history states."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsrv.state.chain import row_digest, stated_rows

FORMAT, BEFORE, EARLIER = 4, 3, 2
"""The form of a file, and those of the versions before, which are taken up."""
_ROW = """interaction INTEGER PRIMARY KEY, scored INTEGER NOT NULL, record TEXT NOT NULL,
    counts TEXT NOT NULL"""
TABLES = {
    "meta": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
    "clients": "id INTEGER PRIMARY KEY, client_json TEXT NOT NULL",
    "started_over": "client INTEGER PRIMARY KEY, after INTEGER NOT NULL",
    "interactions": _ROW,
    "undone": _ROW,
    "growths": "number INTEGER PRIMARY KEY, growth TEXT NOT NULL",
    "decisions": "number INTEGER PRIMARY KEY, decision TEXT NOT NULL",
    "roster": "client INTEGER PRIMARY KEY, standing TEXT NOT NULL",
    "chain": "number INTEGER PRIMARY KEY, statement TEXT NOT NULL, link TEXT NOT NULL",
}
LATER = ("decisions", "roster")
"""Tables that files of the versions before have not."""
KEYS = {table: text.split()[0] for table, text in TABLES.items() if table != "chain"}
"""The column of the key of each table that statements cover; the chain covers itself."""
_WHAT = {
    "meta": "its row about the whole run ({})",
    "clients": "the description of client {}",
    "started_over": "after which interaction client {} started over",
    "interactions": "the record of interaction {}",
    "undone": "the undone record of interaction {}",
    "growths": "growth {}",
    "decisions": "decision {}",
    "roster": "how client {} stands",
}
_FROM_ONE = ("interactions", "undone", "growths", "decisions")


def tables_of(db: sqlite3.Connection) -> set[str]:
    """Return the names of the tables of a file."""
    rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(name) for (name,) in rows}


def rows_in(db: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table in the order of their keys, which come first."""
    return iter(db.execute(f"SELECT * FROM {table} ORDER BY 1"))


def edited(db: sqlite3.Connection, said: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each row that is not the one that statements tell of.

    Also for what else is in the file: SQLite would run a trigger, and nobody states one.
    """
    stated, names = stated_rows(said), tables_of(db)
    for table in KEYS:
        rows = iter(()) if table in LATER and table not in names else rows_in(db, table)
        there = {str(key): row_digest(values) for key, *values in rows}
        expected = stated.get(table, {})
        for key in sorted({*there, *expected}, key=lambda one: (len(one), one)):
            if there.get(key) != expected.get(key):
                what = _WHAT[table].format(int(key) + 1 if table in _FROM_ONE else key)
                why = "is not the one that was written" if key in there else "is gone"
                why = why if key in expected else "was never written by the run"
                yield f"{what} {why}"
    query = "SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_autoindex%'"
    for kind, name in db.execute(query):
        if kind != "table" or name not in TABLES:
            yield f"it has a {kind} {name!r} that the run did not make"
