"""Whether a run directory has the history that its chains tell, and that somebody has kept."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError
from fedsrv.state.audit import AUDIT, START, Broken, Mark, missing_end, read
from fedsrv.state.chain import Head, beginning_of, continued, digest_of
from fedsrv.state.cross_check import named
from fedsrv.state.ledger import link_of

Rows = list[tuple[Any, ...]]


def last_audited(db: sqlite3.Connection) -> Mark | None:
    """Return the last line of the audit log at the last commit; None before one."""
    query = "SELECT statement FROM chain WHERE statement LIKE '%\"audit\"%' ORDER BY number DESC"
    found = db.execute(f"{query} LIMIT 1").fetchone()
    return Mark(*json.loads(found[0])["audit"]) if found else None


@dataclass(frozen=True)
class Verified:
    """What was found of a run directory."""

    head: Head
    """The head of its chain of statements."""
    lines: int
    """Whole lines of its audit log."""
    wrong: list[str]
    """What does not fit, a line each."""


def verified(run: Path, kept: Head | None = None) -> Verified:
    """Compare a run's records, statements and audit log with each other, and with a kept head.

    Raises:
        ArchiveError: there is no database that can be read.
    """
    run_id, records, statements = _rows_of(run / "run.db")
    wrong: list[str] = []
    links = [beginning_of(run_id)]
    for number, text, link in statements:
        links.append(continued(links[-1], digest_of(text)))
        if (number, link) != (len(links) - 1, links[-1].hex()):
            wrong.append(
                f"statement {len(links) - 1} is not the one that was written, or one before it is "
                "missing"
            )
            break
    head = Head(len(links) - 1, links[-1])
    if kept is not None and kept.number > head.number:
        wrong.append(
            f"the history ends with statement {head.number}; it went on to {kept.number} when the "
            "head was kept"
        )
    elif kept is not None and links[kept.number] != kept.link:
        wrong.append(f"the history up to statement {kept.number} is not the one that was kept")
    wrong += _compared(run_id, records, [json.loads(text) for _, text, _ in statements])
    lines, more = _audited(run, [json.loads(text) for _, text, _ in statements])
    return Verified(head, lines, [*wrong, *more])


def _rows_of(database: Path) -> tuple[str, Rows, Rows]:
    """Return the id, the records and the statements of a run."""
    if not database.is_file():
        raise ArchiveError(f"{database.parent} holds no run.db: it is no run directory")
    try:
        uri = f"{database.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            db.execute("BEGIN")  # a run under way commits meanwhile
            (run_id,) = db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
            columns = "interaction, scored, record, counts, link"
            records = db.execute(f"SELECT {columns} FROM interactions ORDER BY 1").fetchall()
            statements = db.execute("SELECT number, statement, link FROM chain ORDER BY 1")
            return str(run_id), records, statements.fetchall()
    except (sqlite3.Error, TypeError) as error:
        raise ArchiveError(f"{database} cannot be verified: {error}") from None


def _compared(run_id: str, records: Rows, said: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each kind of difference between the records and their statements."""
    told: dict[int, str] = {}
    for one in said:
        for key in ("committed", "scored", "taken_up"):
            if key in one:
                told[one[key]] = one["link"]
        for number, link in one.get("done_again", ()):
            told[number] = link
        if "undone_after" in one:
            told = {n: link for n, link in told.items() if n <= one["undone_after"]}
    before, first, broken, others = run_id, min(told, default=0), list[int](), list[int]()
    for number, *content, link in records:
        if link != link_of(before, number, *content):
            broken.append(number + 1)
        elif number >= first and told.get(number) != link:
            others.append(number + 1)
        before = link
    if broken:
        yield (
            f"what is recorded of {named('interaction', broken)} is not what was written, or a "
            "record before it is missing"
        )
    if others:
        yield f"what is recorded of {named('interaction', others)} is not what the history says"
    if missing := {number + 1 for number in told.keys() - {row[0] for row in records}}:
        yield f"the history tells of {named('interaction', missing)}, and no record does"


def _audited(run: Path, said: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Return the lines of a run's audit log, and what is wrong with them."""
    marks = [Mark(*one["audit"]) for one in said if "audit" in one]
    links, at, wrong = {0: ""}, START, list[str]()
    try:
        for entry in read(run / AUDIT):
            at = entry.mark
            links[at.lines] = at.link
            if entry.facts.get("what") == "broken":
                wrong.append(f"{AUDIT}: line {at.lines} says: {entry.facts.get('line')}")
    except Broken as error:
        return at.lines, [f"{AUDIT}: {error}"]
    for mark in marks:
        if links.get(mark.lines) != mark.link:
            line = missing_end(mark, at)
            return at.lines, [*wrong, f"{AUDIT}: {line}"]
    return at.lines, wrong
