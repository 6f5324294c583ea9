"""``fedsrv recover``: a new ``run.db`` for a run whose database is damaged or gone.

The config comes from ``config.toml``, the records from ``rounds.jsonl``, the run's id from its
states; from ``audit.jsonl`` who was set aside or started over, what was decided, and the config of
an open run's beginning. Files that cannot be used are moved, never deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from fedmodels.config.bounds import canonical
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, reason_of
from fedmodels.facts.config_file import parse_experiment
from fedmodels.host.files import sha256_of, sync_path
from fedmodels.tensors.archive import load_named
from fedsrv.state.audit import AUDIT, Broken, read
from fedsrv.state.ledger import Ledger
from fedsrv.state.record import Record
from fedsrv.state.run_directory import lock, state_numbers, writing
from fedsrv.state.state_files import ClientParts, state_path

ASIDE = "set-aside"
_DATABASE = ("run.db", "run.db-wal", "run.db-shm")


def recover(run: Path, say: Callable[[str], None]) -> int:
    """Make a new ``run.db``; return the last interaction it holds.

    Replaced files go to the directory's ``set-aside``; each line about it goes to ``say``.

    Raises:
        ArchiveError: too little is left to recover, or nothing is damaged.
        RunFailed: the directory is in use, or cannot be written.
    """
    if not run.is_dir():
        raise ArchiveError(f"{run} is no run directory")
    if not (run / "run.db").exists():
        _experiment(run)  # a directory of something else is left as it is
    held = lock(run)
    try:
        with writing(run):
            if _is_whole(run):
                raise ArchiveError(
                    f"{run / 'run.db'} is intact: nothing to recover, and nothing was changed; "
                    f"continue with --resume --out {run}"
                )
            return _recover(run, say)
    finally:
        os.close(held)


def _is_whole(run: Path) -> bool:
    """Tell whether the run can go on from its database, and recovery could give it no more records.

    A state without any record is what a crash in the middle of a commit leaves.
    """
    try:
        with closing(Ledger(run / "run.db", strict=False, new=False)) as ledger:
            newest = max((ledger.committed, *ledger.undone()))
    except ArchiveError:
        return False
    states = state_numbers(run / "server")
    if min(states, default=0) > max(0, newest):  # records are missing: the run is not taken up
        return False
    return newest >= min(max(states, default=-1), len(_records(run / "rounds.jsonl")) - 1)


def _recover(run: Path, say: Callable[[str], None]) -> int:
    experiment = _experiment(run)
    records = _records(run / "rounds.jsonl")
    last, run_id, reasons = _newest(run / "server", len(records) - 1)
    for reason in reasons:
        say(f"not usable: {reason}")
    fresh = run / "run.db.new"
    fresh.unlink(missing_ok=True)
    oldest = min(state_numbers(run / "server"))  # clients keep theirs as long
    lines = _audited(run, say)
    facts = {"watermark": str(oldest), "highest": str(last), **_gone(lines, say)}
    facts |= _began(experiment, records[: last + 1], lines)
    anew = _anew(lines, last)
    _write(fresh, run / "server", experiment, run_id, records[: last + 1], facts, anew, lines)
    aside = _set_aside(run, last)
    fresh.replace(run / "run.db")
    sync_path(run)
    say(
        f"run {run_id[:8]}: interactions 1 to {last + 1} are recovered, their records from "
        f"rounds.jsonl and the last state from server/; what follows is computed again"
    )
    say("clients describe their data again when they join")
    if aside:
        say(f"set aside in {run / ASIDE}: {', '.join(aside)}")
    say(f"continue with --resume --out {run}")
    return last


def _experiment(run: Path) -> Experiment:
    path = run / "config.toml"
    try:
        return parse_experiment(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{path} is needed, and cannot be read: {reason_of(error)}") from None


def _records(path: Path) -> list[Record]:
    """Return the records from the first on, up to the first line that is not the next one."""
    found: list[Record] = []
    if not path.is_file():
        return found
    for line in path.read_text("utf-8", "replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or record.get("interaction") != len(found):
            break
        cohort = record.get("cohort")
        if not isinstance(cohort, list) or not all(isinstance(c, int) for c in cohort):
            break
        found.append(cast(Record, record))
    return found


def _newest(states: Path, last: int) -> tuple[int, str, list[str]]:
    """Return the newest whole interaction, its run, and newer errors; ArchiveError if none is."""
    reasons: list[str] = []
    for number in sorted(state_numbers(states), reverse=True):
        if number > last:
            continue
        try:
            _, header = load_named(states / f"state-{number:08d}.safetensors")
            ClientParts(states).load(dict(header.get("parts", {})))
            return number, str(header["run"]), reasons
        except (ArchiveError, KeyError, TypeError, ValueError) as error:
            reasons.append(str(error))
    why = f": {reasons[0]}" if reasons else ""
    raise ArchiveError(
        f"{states.parent} cannot be recovered: no state that can be read has its record in "
        f"rounds.jsonl, which holds interactions up to {last}{why}"
    )


def _write(
    path: Path,
    states: Path,
    experiment: Experiment,
    run_id: str,
    records: list[Record],
    facts: dict[str, str],
    anew: Mapping[int, int],
    lines: Sequence[Mapping[str, Any]],
) -> None:
    ledger = Ledger(path, strict=True, new=True, run_id=run_id)
    try:
        text = canonical(experiment.to_dict())
        ledger.set_facts(experiment=text, **facts)
        for record in records:
            for growth in record.get("growths", ()):
                ledger.grow(growth)
            file = state_path(states, record["interaction"])
            ledger.append(record, None, {"state": sha256_of(file)} if file.exists() else {})
        for line in lines:
            if line["what"] == "decided":
                ledger.decide(str(line["decision"]), line["facts"])
        for client, after in anew.items():
            ledger.start_over(client, after)
        ledger.in_one_file()
    finally:
        ledger.close()


def _audited(run: Path, say: Callable[[str], None]) -> list[Mapping[str, Any]]:
    """Return the lines of the run's log; none where it cannot be used."""
    try:
        return [entry.facts for entry in read(run / AUDIT)]
    except (Broken, OSError, ValueError) as error:
        say(
            f"{AUDIT} cannot be used ({error}): name excluded clients with --without or "
            "--forget; whether a client had started over is lost"
        )
        return []


def _began(
    experiment: Experiment, records: list[Record], lines: list[Mapping[str, Any]]
) -> dict[str, str]:
    """Return the fact that says what an open run began with, before all that was changed since.

    A change that no record has is one that the run was last started with, and does not hold yet.
    """
    growths = [growth for record in records for growth in record.get("growths", ())]
    held = [growth.get("changes", {}) for growth in growths]
    changes = [{key: before for key, (before, _) in one.items()} for one in held]
    changes += [{one["key"]: one["before"]} for one in lines if one["what"] == "wished"]
    if not any(changes):
        return {}
    from fedmodels.config.open_changes import settings_of

    settings = settings_of(experiment)
    for wished in reversed(changes):  # the first value of a key is what it was before everything
        settings |= wished
    known = {key: value for key, value in settings.items() if value is not None}
    return {"began": json.dumps(known, sort_keys=True)}


def _anew(lines: list[Mapping[str, Any]], last: int) -> dict[int, int]:
    """Return after which interaction clients began anew from their initial private state."""
    found = dict[int, int]()
    for line in lines:
        if line["what"] == "started over":
            found[int(line["client"])] = min(int(line["after"]), last)
        elif line["what"] == "rolled back":
            found = {client: min(after, int(line["after"])) for client, after in found.items()}
    return found


def _gone(lines: list[Mapping[str, Any]], say: Callable[[str], None]) -> dict[str, str]:
    """Return the facts that say which clients take no part, from when on and why, by the log."""
    first, reasons = dict[int, int](), dict[str, str]()
    tasks, is_done = list[tuple[int, int]](), False
    for line in lines:
        if line["what"] == "forgotten":
            tasks.append((int(line["client"]), int(line["task"])))
            is_done = False
        if line["what"] == "rolled back" and int(line["after"]) < 0:  # no earlier record is left
            is_done = True
        if line["what"] == "set aside" and "task" not in line:
            client, number = int(line["client"]), int(line["interaction"])
            first[client] = min(number, first.get(client, number))
            reasons[str(client)] = str(line["reason"])
    found = dict[str, str]()
    if tasks:
        named = ", ".join(f"task {task} of client {client}" for client, task in sorted(tasks))
        say(f"forgotten, as {AUDIT} tells: {named}")
        found["forgotten"] = json.dumps(sorted(tasks))
        if is_done:
            found["forgotten_done"] = found["forgotten"]
    if first:
        say(f"set aside, as {AUDIT} tells: clients {', '.join(map(str, sorted(first)))}")
        aside = json.dumps(sorted(first.items()))
        found |= {"aside": aside, "aside_why": json.dumps(reasons, sort_keys=True)}
    return found


def _set_aside(run: Path, last: int) -> list[str]:
    """Move the old database, and states without a record, aside; return their names."""
    late = [n for n in state_numbers(run / "server") if n > last]
    old = [run / name for name in _DATABASE]
    old += [run / "server" / f"state-{number:08d}.safetensors" for number in sorted(late)]
    moved = [path for path in old if path.exists()]
    if moved:
        (run / ASIDE).mkdir(exist_ok=True)
    for path in moved:
        place = run / ASIDE / path.name
        copies = 1
        while place.exists():
            copies += 1
            place = run / ASIDE / f"{path.name}.{copies}"
        path.replace(place)
    return [path.name for path in moved]
