"""Compares ``run.db`` with ``rounds.jsonl``: what one of the two lacks, and where they differ.

The chain of hashes in ``run.db`` does not show that its newest records are gone, nor that a client
is. ``rounds.jsonl`` is written beside it and shows both, as long as nobody changes the two alike.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from fedmodels.printable import printable

MAX_NAMED = 5
Records = Mapping[int, Mapping[str, Any]]
"""What was recorded of each interaction."""


def differences(run: Path) -> list[str]:
    """Return a line for each thing that a run's two records do not have in common.

    Nothing where the run has no ``run.db``, or where it cannot be read: what opens it to write says
    why.
    """
    database = run / "run.db"
    if not database.is_file():
        return []
    told = _lines_of(run / "rounds.jsonl")  # first: a run under way commits, then writes the line
    try:
        uri = f"{database.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(uri, uri=True)) as db:
            rows = db.execute("SELECT interaction, record, scored FROM interactions ORDER BY 1")
            held = {int(n): (json.loads(record), bool(scored)) for n, record, scored in rows}
            undone = {int(n) for (n,) in db.execute("SELECT interaction FROM undone")}
            clients = {int(n) for (n,) in db.execute("SELECT id FROM clients")}
    except (sqlite3.Error, ValueError, TypeError, RecursionError):
        return []
    committed = {n: record for n, (record, _) in held.items()}
    scored = {n: record for n, (record, is_scored) in held.items() if is_scored}
    return [
        printable(f"{run}: {line}") for line in _compared(told, committed, scored, undone, clients)
    ]


def _compared(
    told: Records,
    committed: Records,
    scored: Records,
    undone: Collection[int],
    clients: Collection[int],
) -> Iterator[str]:
    if gone := told.keys() - committed.keys() - set(undone):
        yield (
            f"run.db has no record of {named('interaction', {n + 1 for n in gone})}, of which "
            "rounds.jsonl tells: a loss of power may take the newest records, else somebody "
            "deleted them; --resume computes them again"
        )
    newest = {max(committed)} if committed else set[int]()  # its line may be about to be written
    if unwritten := scored.keys() - told.keys() - newest:
        yield (
            f"rounds.jsonl has no line of {named('interaction', {n + 1 for n in unwritten})}, of "
            "which run.db has a record; --resume writes the lines anew"
        )
    if other := {n + 1 for n, record in told.items() if n in scored and record != scored[n]}:
        yield (
            f"rounds.jsonl and run.db differ in {named('interaction', other)}; --resume goes by "
            "run.db"
        )
    trained = {c for record in (*told.values(), *committed.values()) for c in _cohort(record)}
    if unknown := trained - set(clients):
        yield (
            f"run.db does not describe {named('client', unknown)}, who trained in this run, any "
            "more; whoever joins with that id is taken at its word"
        )


def _lines_of(path: Path) -> Records:
    """Return the records of ``rounds.jsonl``, as far as its lines can be read."""
    found: dict[int, Mapping[str, Any]] = {}
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("interaction"), int):
            found[record["interaction"]] = record
    return found


def _cohort(record: Mapping[str, Any]) -> list[int]:
    cohort = record.get("cohort")
    return [c for c in cohort if isinstance(c, int)] if isinstance(cohort, list) else []


def named(what: str, numbers: Collection[int]) -> str:
    """Return numbers in words: all of a few, of many the first ones and how many more."""
    shown = [str(number) for number in sorted(numbers)]
    if len(shown) == 1:
        return f"{what} {shown[0]}"
    last = shown[-1] if len(shown) <= MAX_NAMED else f"{len(shown) - MAX_NAMED + 1} more"
    return f"{what}s {', '.join(shown[: min(len(shown), MAX_NAMED) - 1])} and {last}"
