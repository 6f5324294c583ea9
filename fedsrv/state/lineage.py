"""Which data made which model: by version, who trained on which tasks with how many examples.

A version is the state after a committed interaction. What was undone, did not count, or is still to
be counted made no version. So the table has what records say was added to the state, and nothing of
what was set aside before it counted.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError
from fedmodels.facts.position import Task
from fedsrv.state.chain import commit_links
from fedsrv.state.record import Record, of_parts, trained_in
from fedsrv.state.run_directory import reading

FILE = "lineage.json"
Moves = dict[int, tuple[list[int], list[Task]]]
"""Of an open run, by client: the interactions in which it went on to a task, and these tasks."""


@dataclass(frozen=True)
class Share:
    """What one client added to a version."""

    client: int
    tasks: tuple[Task, ...]
    """The tasks whose data it trained on, ascending."""
    rows: int | None
    """Its training examples; None where they are not told."""
    ordered: int
    """The interaction of the order that it answered: an earlier one where rounds do not wait."""
    rows_of: tuple[int | None, ...] = ()
    """Its training examples of each of the tasks; None where they are not told."""
    models: tuple[str, ...] = ()
    """Which of the method's models it trained; none where there is one alone."""


@dataclass(frozen=True)
class Version:
    """The state after a committed interaction."""

    interaction: int
    round: int
    commit: str
    """The link of the last statement of it in ``run.db``, which depends on all before it."""
    shares: Sequence[Share]
    failed: Sequence[str] = ()
    """Who was asked and did not count."""


@dataclass(frozen=True)
class Origin:
    """What one client gave to a version and to all before it, by task."""

    client: int
    task: Task
    times: int = 0
    """How often an upload of it counted."""
    rows: int | None = 0
    """Most training examples of one such upload; None where they are not told."""
    first: int = -1
    last: int = -1
    """The first and the last interaction that counted one."""
    models: tuple[str, ...] = ()
    """Which of the method's models these uploads trained."""


@dataclass(frozen=True)
class Lineage:
    """All versions of a run."""

    run: str
    method: str
    versions: Sequence[Version]
    began_from: Mapping[str, Any] = field(default_factory=dict)
    """The run whose models this one began with, if it did."""
    descriptions: Mapping[int, str] = field(default_factory=dict)
    """SHA-256 of what each client last announced of its data: counts by task and class."""

    def at(self, interaction: int) -> list[Origin]:
        """Return what the state after an interaction was made of; ArchiveError without one."""
        if not any(version.interaction == interaction for version in self.versions):
            last = self.versions[-1].interaction + 1 if self.versions else 0
            raise ArchiveError(f"there is no version {interaction + 1}: the run has 1 to {last}")
        found: dict[tuple[int, Task], Origin] = {}
        for version in self.versions[: interaction + 1]:
            for share in version.shares:
                for task, rows in zip(share.tasks, share.rows_of, strict=True):
                    place = share.client, task
                    found[place] = _with(found.get(place) or Origin(*place), rows, share, version)
        return [found[place] for place in sorted(found)]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values, with what the last version was made of."""
        last = self.at(self.versions[-1].interaction) if self.versions else []
        return {**asdict(self), "last": [asdict(origin) for origin in last]}


def _with(origin: Origin, rows: int | None, share: Share, version: Version) -> Origin:
    most = None if None in (rows, origin.rows) else max(rows or 0, origin.rows or 0)
    first = origin.first if origin.times else version.interaction
    return replace(
        origin, times=origin.times + 1, rows=most, first=first, last=version.interaction,
        models=tuple(sorted({*origin.models, *share.models})),
    )  # fmt: skip


def lineage_of(run: Path) -> Lineage:
    """Read the versions of a run from its database, also while it goes on.

    Raises:
        ArchiveError: there is none, or it cannot be read.
    """
    path = run / "run.db"
    if not path.is_file():
        raise ArchiveError(f"{run} holds no run.db: it is no run, or fedsrv recover makes one")
    try:
        with reading(run) as db:
            db.execute("BEGIN")  # all of one moment
            meta = dict(db.execute("SELECT key, value FROM meta"))
            links = commit_links(db.execute("SELECT number, statement, link FROM chain ORDER BY 1"))
            query = "SELECT record FROM interactions ORDER BY interaction"
            records = [json.loads(record) for (record,) in db.execute(query)]
            query = "SELECT growth FROM growths ORDER BY number"
            growths = [json.loads(growth) for (growth,) in db.execute(query)]
            described = {int(c): str(text) for c, text in db.execute("SELECT * FROM clients")}
        config = json.loads(meta["experiment"])
        moves = _moves(growths)
        gone = {(int(c), int(t)) for c, t in json.loads(meta.get("forgotten", "[]"))}
        accumulates = (config.get("scenario") or {}).get("training_data") == "accumulated"
        versions = [
            Version(
                record["interaction"],
                record["round"],
                links.get(record["interaction"], ""),
                tuple(_shares(record, records, moves, accumulates, gone)),
                tuple(record.get("failed", ())),
            )
            for record in records
        ]
        began = of_parts(records[0]).get("began_from", {}) if records else {}
        digests = {c: hashlib.sha256(t.encode()).hexdigest() for c, t in described.items()}
        return Lineage(meta["run_id"], config["method"]["name"], versions, began, digests)
    except (sqlite3.Error, ValueError, KeyError, TypeError, IndexError) as error:
        raise ArchiveError(f"{path} cannot be read as a run: {error}") from None


def _shares(
    record: Record,
    records: Sequence[Record],
    moves: Moves,
    accumulates: bool,
    gone: Collection[tuple[int, int]],
) -> Iterator[Share]:
    """Yield what each client added that counts in a record; nothing of forgotten tasks."""
    for client, ordered in sorted(trained_in(record).items()):
        if moves:
            interactions, tasks = moves[client]
            task = tasks[bisect_right(interactions, ordered) - 1]
        else:
            task = Task(int(records[ordered]["task"]))
        row = record["clients"].get(str(client), {})
        rows, stated = row.get("num_examples"), row.get("trained")
        known = None if rows is None else int(rows)
        if stated is None:  # of the order's task alone, or of a version whose records lack it
            earlier = [
                one for one in range(task if accumulates else 0) if (client, one) not in gone
            ]
            stated = [(one, None) for one in earlier] + [(task, None if earlier else known)]
        trained = tuple(Task(int(one)) for one, _ in stated)
        each = tuple(None if number is None else int(number) for _, number in stated)
        yield Share(client, trained, known, ordered, each, tuple(row.get("models", ())))


def _moves(growths: Sequence[Mapping[str, Any]]) -> Moves:
    """Return when each client of an open run went on to which of its tasks; empty for others."""
    found: Moves = {}
    for growth in growths:
        for client, number in growth["tasks"]:
            interactions, tasks = found.setdefault(int(client), ([], []))
            interactions.append(int(growth["interaction"]))
            tasks.append(Task(int(number) - 1))
    return found


# --- as text --------------------------------------------------------------------------------------


def lines_of(found: Lineage) -> Iterator[str]:
    """Yield a line for each version: who added what."""
    yield f"run {found.run[:8]}, {found.method}"
    if began := found.began_from:
        yield (
            f"it began with the weights {str(began['sha256'])[:12]} of run {str(began['run'])[:8]}"
            f" after interaction {began['interaction'] + 1}"
        )
    for version in found.versions:
        shares = "; ".join(map(_text_of, version.shares)) or "nobody counted"
        yield f"version {version.interaction + 1}  {version.commit[:12]}  {shares}"


def _text_of(share: Share) -> str:
    first, *more = share.tasks
    is_whole = share.tasks == (*range(first, share.tasks[-1] + 1),)
    tasks = f"{first} to {more[-1]}" if more and is_whole else ", ".join(map(str, share.tasks))
    total = None if None in share.rows_of else sum(map(int, filter(None, share.rows_of)))
    rows = "" if total is None else f", {total} rows"
    return f"client {share.client} task {tasks}{rows}{_fed(share.models)}"


def _fed(models: Sequence[str]) -> str:
    return f", into {' and '.join(models)}" if models else ""


def origin_lines(found: Lineage, interaction: int) -> Iterator[str]:
    """Yield a line for each client and task that a version was made of."""
    version = next((v for v in found.versions if v.interaction == interaction), None)
    origins = found.at(interaction)
    assert version is not None, "at() has looked"
    yield f"version {interaction + 1} of run {found.run[:8]} ({version.commit}) was made of:"
    for one in origins:
        rows = "" if one.rows is None else f" {one.rows} rows,"
        yield (
            f"client {one.client} task {one.task}:{rows} {one.times} times, in versions "
            f"{one.first + 1} to {one.last + 1}{_fed(one.models)}"
        )
