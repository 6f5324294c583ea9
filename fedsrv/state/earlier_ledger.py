"""``run.db`` of the version before: rows linked by hashes, and statements that did not cover all.

A record had the sha256 of itself and of the record before it, so had a growth, and the facts of the
run had one sha256 in common. These are checked once more when a run of that version is taken up.
From then on statements cover every row.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedsrv.state.chain import read_statement
from fedsrv.state.rows import BEFORE, TABLES

SEAL = "seal"
UNSTATED = ("clients", "started_over")
"""The tables that nothing covered."""
RECOMPUTED = ("growths", "meta", "undone")
"""Those of which no statement told: who edits them can compute their hashes anew."""
_COLUMNS = "interaction, scored, record, counts"
_REBUILT = {"interactions": _COLUMNS, "undone": _COLUMNS, "growths": "number, growth"}


def edited(db: sqlite3.Connection, run_id: str) -> Iterator[str]:
    """Yield a line for each thing that is not as it was written, as far as that version told."""
    said = [
        read_statement(text)
        for (text,) in db.execute("SELECT statement FROM chain ORDER BY number")
    ]
    if any("rows" in one for one in said):
        yield "it was converted to the format of an earlier version"
        return
    facts = {str(key): str(value) for key, value in db.execute("SELECT key, value FROM meta")}
    if facts.get(SEAL, seal_of(facts)) != seal_of(facts):
        yield "its row about the whole run is not what was written"
    links, before = dict[int, str](), run_id
    query = f"SELECT {_COLUMNS}, link FROM interactions ORDER BY 1"
    for number, *content, link in db.execute(query):
        if link != link_of(before, number, *content):
            yield (
                f"the record of interaction {number + 1} is not the one that was written, or one "
                "before it is missing"
            )
        links[number] = before = link
    query = f"SELECT {_COLUMNS}, link, before FROM undone ORDER BY 1"
    for number, *content, link, previous in db.execute(query):
        if link != link_of(previous, number, *content):
            yield f"the undone record of interaction {number + 1} was changed"
    before = run_id
    for number, growth, link in db.execute("SELECT number, growth, link FROM growths ORDER BY 1"):
        if link != link_of(before, number, growth):
            yield f"growth {number + 1} is not the one that was written"
        before = link
    yield from _other_records(said, links)


def _other_records(said: Sequence[Mapping[str, Any]], links: Mapping[int, str]) -> Iterator[str]:
    """Yield a line for each record that statements do not tell of, or tell otherwise."""
    told = dict[int, str]()
    for one in said:
        for key in ("committed", "scored", "taken_up"):
            if key in one:
                told[one[key]] = one["link"]
        told |= dict(one.get("done_again", ()))
        if "undone_after" in one:
            told = {n: link for n, link in told.items() if n <= one["undone_after"]}
    first = min(told, default=0)
    for number in sorted({*told, *links}):
        if number not in links:
            yield f"the history has interaction {number + 1}, but no record has"
        elif number >= first and told.get(number) != links[number]:
            yield f"what is recorded of interaction {number + 1} is not what the history says"


def take_over(db: sqlite3.Connection) -> None:
    """Give the tables their present columns, in a transaction."""
    for table, columns in _REBUILT.items():
        db.execute(f"ALTER TABLE {table} RENAME TO earlier")
        db.execute(f"CREATE TABLE {table} ({TABLES[table]})")
        db.execute(f"INSERT INTO {table} SELECT {columns} FROM earlier")
        db.execute("DROP TABLE earlier")
    db.execute("DELETE FROM meta WHERE key = ?", (SEAL,))
    db.execute(f"PRAGMA user_version = {BEFORE}")


def seal_of(facts: Mapping[str, str]) -> str:
    """Return the hash over all facts but the seal itself."""
    text = json.dumps(sorted((key, value) for key, value in facts.items() if key != SEAL))
    return hashlib.sha256(text.encode()).hexdigest()


def link_of(before: str, number: object, *content: object) -> str:
    """Return the hash that ties a row to the one before it."""
    text = json.dumps([before, number, *content], default=repr)
    return hashlib.sha256(text.encode()).hexdigest()
