"""The tables of ``run.db``, and whether their rows are the ones that its history states."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError
from fedsrv.state.chain import row_digest

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
_LINK = ", link TEXT NOT NULL"
LINKED = {"interactions": _LINK, "undone": f"{_LINK}, before TEXT NOT NULL", "growths": _LINK}
"""More columns of the form :data:`EARLIER`."""
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


Rows = dict[str, str]
"""The digests of a table's rows, by key."""


def tables_of(db: sqlite3.Connection) -> set[str]:
    """Return the names of the tables of a file."""
    rows = db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {str(name) for (name,) in rows}


def check_format(database: Path, version: int) -> None:
    """Raise ArchiveError for a file of a form that this version does not read."""
    if version in (FORMAT, BEFORE, EARLIER):
        return
    age = "an earlier" if version < FORMAT else "a later"
    raise ArchiveError(
        f"{database} was written by {age} version of fedtide; finish the run with that one, or "
        f"make a new file of rounds.jsonl and the states: fedsrv recover {database.parent}"
    )


def rows_in(db: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table in the order of their keys, which come first."""
    return iter(db.execute(f"SELECT * FROM {table} ORDER BY 1"))


def remade(db: sqlite3.Connection, version: int) -> Iterator[str]:
    """Yield a line for damage of a file, and for what no run made in it: SQLite runs triggers.

    The indices that SQLite makes by itself have no text.
    """
    more = LINKED if version == EARLIER else {}
    found = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
    if found != "ok":
        yield " ".join(found.split())
    query = "SELECT type, name, sql FROM sqlite_master WHERE sql NOT NULL"
    for kind, name, sql in db.execute(query):
        if kind != "table" or name not in TABLES or (version < FORMAT and name in LATER):
            yield f"it has a {kind} {name!r} that the run did not make"
        elif sql != f"CREATE TABLE {name} ({TABLES[name]}{more.get(name, '')})":
            yield f"its table {name!r} is not the one that the run made"


def edited(db: sqlite3.Connection, said: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each row that is not the one that statements tell of."""
    stated, wrong = stated_rows(said)
    yield from wrong
    names = tables_of(db)
    for table in KEYS:
        rows = iter(()) if table in LATER and table not in names else rows_in(db, table)
        there = {str(key): row_digest(values) for key, *values in rows}
        expected = stated.get(table, {})
        for key in sorted({*there, *expected}, key=lambda one: (len(one), one)):
            if there.get(key) != expected.get(key):
                why = "is not the one that was written" if key in there else "is gone"
                why = why if key in expected else "was never written by the run"
                yield f"{named_row(table, key)} {why}"


def named_row(table: str, key: str) -> str:
    """Return what a row of a table is about, in words."""
    return _WHAT.get(table, f"{table} {{}}").format(int(key) + 1 if table in _FROM_ONE else key)


def stated_rows(said: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Rows], list[str]]:
    """Return the digest of each row that there has to be after statements, by table and key.

    Also a line for each row that a statement changes although the run never does: a chain that was
    continued after the run fits its rows, and heads that others keep.
    """
    found: dict[str, Rows] = defaultdict(dict)
    wrong = list[str]()
    for number, one in enumerate(said, 1):
        changes = _changes(one)
        if "taken_over" not in one or any(found.values()):
            wrong += [
                f"statement {number} changes {named_row(*row)}, as the run never does"
                for row, digest in changes.items()
                if not _may_change(one, row, digest, found)
            ]
        for (table, key), digest in changes.items():
            if digest is None:
                found[table].pop(key, None)
            else:
                found[table][key] = digest
    return found, wrong


def restated(said: Sequence[Mapping[str, Any]], known: int) -> list[str]:
    """Return of which rows of the first statements, so many, later ones tell otherwise."""
    before, _ = stated_rows(said[:known])
    later = {row for one in said[known:] for row in _changes(one) if row[1] in before[row[0]]}
    order = [*KEYS].index
    return [named_row(*row) for row in sorted(later, key=lambda row: (order(row[0]), row[1]))]


def _changes(one: Mapping[str, Any]) -> dict[tuple[str, str], str | None]:
    """Return the digests that a statement gives rows, by table and key."""
    rows = one.get("rows", {})
    return {(table, key): row for table in rows for key, row in rows[table].items()}


def _may_change(
    one: Mapping[str, Any], row: tuple[str, str], digest: str | None, found: Mapping[str, Rows]
) -> bool:
    """Tell whether a run changes a row when what a statement tells of happens."""
    (table, key), rows = row, found[row[0]]
    if table in ("growths", "decisions"):  # which are only ever added
        return key not in rows and digest is not None
    if table == "undone":  # as they were committed
        ends = {"committed", "done_again", "forgot_undone"} & {*one}
        return bool(ends) if digest is None else digest == found["interactions"].get(key)
    if table != "interactions":
        return table in KEYS
    if digest is None:
        return "undone_after" in one and int(key) > int(one["undone_after"])
    if str(int(key) + 1) in rows:  # only the newest one is written
        return False
    if "done_again" in one:
        return digest == found["undone"].get(key)
    return str(one.get("scored" if key in rows else "committed")) == key
