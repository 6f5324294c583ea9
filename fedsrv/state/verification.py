"""Whether a run directory has the history that its files tell, and that somebody has kept.

``run.db`` is compared with its own chain of statements, which covers every row, with
``rounds.jsonl``, the audit log, the states, and the files that people read. A chain does not show
that its newest statements are gone: ``rounds.jsonl`` is written beside it and shows that, as long
as nobody changes the two alike, and a head that others have kept shows it even then.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.console.printable import printable
from fedmodels.errors import ArchiveError, ArchiveNotRead
from fedmodels.host.files import sha256_of
from fedsrv.state.audit import AUDIT, START, Broken, Mark, missing_end, read, warned
from fedsrv.state.chain import Head, stated_states
from fedsrv.state.rows import restated
from fedsrv.state.state_files import check_stated, state_path
from fedsrv.state.stated import History, Rows, opened, read_history
from fedsrv.state.stated_lines import other_lines

STATED = ("config.toml", "data.json", "lineage.json", "summary.json")
"""The files whose sha256 a run states."""
MAX_NAMED = 5
ANEW = "--resume writes the lines anew"
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
        with opened(database) as db:
            rows = db.execute("SELECT interaction, record, scored FROM interactions ORDER BY 1")
            held = {int(n): (json.loads(record), bool(scored)) for n, record, scored in rows}
            undone = {int(n) for (n,) in db.execute("SELECT interaction FROM undone")}
            clients = {int(n) for (n,) in db.execute("SELECT id FROM clients")}
    except (sqlite3.Error, ValueError, TypeError, RecursionError):
        return []
    committed = {n: record for n, (record, _) in held.items()}
    scored = {n: record for n, (record, is_scored) in held.items() if is_scored}
    return [
        printable(f"{run}: {line}") for line in _differing(told, committed, scored, undone, clients)
    ]


def _differing(
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
            f"run.db no longer describes {named('client', unknown)}, who trained in this run; "
            "the description of the next client with that id is accepted"
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


@dataclass(frozen=True)
class Verified:
    """What was found of a run directory."""

    head: Head
    """The head of its chain of statements."""
    lines: int
    """Whole lines of its audit log."""
    wrong: list[str]
    """What does not fit, a line each."""
    notes: Sequence[str] = ()
    """What was changed since a kept head, and what an earlier version did not state."""


def verified(run: Path, kept: Head | None = None) -> Verified:
    """Compare a run's records, statements and audit log with each other, and with a kept head.

    Raises:
        ArchiveError: there is no database that can be read.
    """
    once = _verified(run, kept)
    return _verified(run, kept) if once.wrong else once  # a run under way may have gone on


def _verified(run: Path, kept: Head | None) -> Verified:
    beside = _beside(run)
    found = read_history(run / "run.db")
    wrong, links = [*found.wrong], found.links
    head = Head(len(links) - 1, links[-1])
    notes = [found.untold] if found.untold else []
    if kept is None or (kept.number > head.number and not found.is_chained):
        pass
    elif kept.number > head.number:
        wrong.append(
            f"the history ends with statement {head.number}; it went on to {kept.number} when the "
            "head was kept"
        )
    elif links[kept.number] != kept.link:
        wrong.append(f"the history up to statement {kept.number} is not the one that was kept")
    else:
        notes += _since(found.said, kept.number)
    lines, more = _audited(run, found.said)
    wrong += [*more, *other_lines(run, found.said)]
    if found.is_chained:
        wrong += [*_misstated(run, found), *_misread(*beside, found)]
    return Verified(head, lines, wrong, notes)


def _since(said: list[dict[str, Any]], known: int) -> Iterator[str]:
    """Yield a line about what was stated anew since a head was kept."""
    if anew := restated(said, known):
        more = [f"{len(anew) - MAX_NAMED} more"] if len(anew) > MAX_NAMED else []
        yield (
            "stated anew since that head, besides new rows: "
            f"{', '.join([*anew[:MAX_NAMED], *more])}"
        )


def verified_log(place: Path, kept: Head | None = None) -> Verified:
    """Check an audit log that has no run beside it, against itself and a kept head.

    The head is its last line. An end that was cut off shows only by a head that was kept.

    Raises:
        ArchiveError: there is no such log.
    """
    if not (place / AUDIT).is_file():
        raise ArchiveError(f"{place} holds neither run.db nor {AUDIT}")
    links, wrong = {0: b""}, list[str]()
    try:
        for entry in read(place / AUDIT):
            links[entry.mark.lines] = bytes.fromhex(entry.mark.link)
            if entry.facts.get("what") == "broken":
                wrong.append(f"{AUDIT}: line {entry.mark.lines} says: {entry.facts.get('line')}")
    except Broken as error:
        wrong.append(f"{AUDIT}: {error}")
    last = max(links)
    if kept is not None and links.get(kept.number) != kept.link:
        what = "ends before the line" if kept.number > last else "is not the log"
        wrong.append(f"{AUDIT} {what} whose head was kept (line {kept.number})")
    return Verified(Head(last, links[last]), last, wrong)


def falsified(run: Path) -> list[str]:
    """Return a line for each file that people read and that is not what the run wrote.

    A crash between a statement and its file, or between a record and its line, is no falsification.

    Raises:
        ArchiveError: there is no database that can be read.
    """
    beside, found = _beside(run), read_history(run / "run.db")
    if not found.is_chained:
        return [f"run.db: {line}" for line in found.wrong]
    if _misread(*beside, found):  # a run under way may have gone on between two files
        beside, found = _beside(run), read_history(run / "run.db")
    return _misread(*beside, found)


def _beside(run: Path) -> tuple[list[str], dict[str, str]]:
    """Return the lines of ``rounds.jsonl`` and the sha256 of other files: read before the history.

    A run under way commits first, and then writes the line.
    """
    files = {name: _sha256_of(run / name) for name in STATED}
    return _whole_lines(run / "rounds.jsonl"), files


def _misread(told: list[str], files: Mapping[str, str], found: History) -> list[str]:
    others = (_other_than_stated(name, digest, found.said) for name, digest in files.items())
    return [*filter(None, others), *_other_lines(told, found.records, found.said)]


def _sha256_of(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError:
        return ""


def _other_than_stated(name: str, digest: str, said: list[dict[str, Any]]) -> str:
    """Return what is wrong with a file of which the history states the sha256; or nothing."""
    stated = [one["sha256"] for one in said if one.get("writes") == name]
    if not stated or digest == stated[-1]:
        return ""
    may_be_cut_short = said[-1].get("writes") == name
    if may_be_cut_short and digest in (*stated[-2:-1], ""):
        return ""
    what = f"is not what the run wrote (sha256 {stated[-1][:12]}…)" if digest else "is gone"
    return f"{name} {what}; --resume rewrites it"


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file; a last one without its end was cut short by a kill."""
    text = path.read_bytes().decode("utf-8", "replace") if path.is_file() else ""
    return text.split("\n")[:-1]


def _other_lines(told: list[str], records: Rows, said: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what is wrong with the lines of ``rounds.jsonl``."""
    expected = [(number + 1, record) for number, is_scored, record in records if is_scored]
    if other := [n for (n, record), line in zip(expected, told, strict=False) if line != record]:
        yield f"rounds.jsonl and run.db differ in {named('interaction', other)}; {ANEW}"
    if said and {"undone_after", "done_again"} & said[-1].keys():
        return  # its lines are about to be written anew
    steps = [one for one in said if "writes" in one or {*one} & {"committed", "scored"}]
    has_ended = bool(steps) and steps[-1].get("writes") == "summary.json"
    missing = expected[len(told) :]
    if len(missing) > (not has_ended):
        numbers = named("interaction", [n for n, _ in missing])
        yield (
            f"rounds.jsonl lacks the lines of {numbers}: a loss of power may take the newest ones, "
            f"else somebody removed them; {ANEW}"
        )
    if len(told) > len(expected):
        yield (
            f"rounds.jsonl has {len(told) - len(expected)} more lines than run.db has records: a "
            f"loss of power may take the newest records, else somebody added lines; {ANEW}"
        )


def _misstated(run: Path, found: History) -> Iterator[str]:
    """Yield a line for each state in the directory that is not the one that the run wrote.

    Also where the newest one is gone.
    """
    newest = -1 if found.committed is None else found.committed
    for number, stated in sorted(stated_states(found.said).items()):
        path = state_path(run / "server", number)
        if number == newest + 1:  # undone, and a replay writes it before its record
            continue
        with suppress(ArchiveNotRead):
            try:
                if number == newest or path.exists():  # the run deletes the older ones
                    check_stated(path, stated)
            except ArchiveError as error:
                yield str(error)


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


def doubts(run: Path) -> list[str]:
    """Return what is wrong with the files that a report reads, and what the log warns of."""
    found = differences(run)
    with suppress(ArchiveError):  # no run.db, or none that can be read
        lines = [line for line in falsified(run) if not (found and "rounds.jsonl" in line)]
        found += [f"{run}: {line}" for line in lines]
    return [*found, *warned(run / AUDIT)]
