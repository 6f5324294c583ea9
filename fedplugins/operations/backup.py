"""A copy of a run directory of one moment, also while the run goes on; and the way back.

The database is copied by SQLite's own backup. What the coordinator writes beside it comes after
that: the states that the copied database needs, and files that only grow. If a state was deleted
meanwhile, the copy of the database is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fedmodels.errors import ArchiveError, ConfigError, RunFailed, reason_of
from fedmodels.host.files import sha256_of, sync_path
from fedmodels.tensors.archive import load_named
from fedsrv.state.ledger import Ledger
from fedsrv.state.run_directory import BESIDE, is_vacant, refuse_existing, writing
from fedsrv.state.state_files import check_stated, state_path

GIVEN = "begin-*.safetensors"
"""The weights that the run gave to others, which need them whenever they are resumed."""
AT_END = ("summary.json", "lineage.json")
"""The files that a run writes once it has ended."""
TAKEN = "backup.json"
"""Of a backup: when it was made, and after which interaction."""
TRIES = 5
"""Copies of a database after which a run is too fast to be copied."""


def backup(run: Path, to: Path) -> int:
    """Copy what a coordinator needs to go on; return the last interaction that the copy holds.

    Args:
        run: the run directory; the run may go on meanwhile.
        to: a directory that is made whole, or not at all.

    Raises:
        ArchiveError: there is no run, or no whole copy of it can be made.
        ConfigError: there is something at ``to``.
        RunFailed: ``to`` cannot be written.
    """
    if not (run / "run.db").is_file():
        raise ArchiveError(f"{run} holds no run.db: there is no run to copy")
    if not is_vacant(to):
        raise ConfigError(f"{to} exists and is not empty; name another directory")
    fresh = to.absolute().with_name(f".{to.name}.part")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        (fresh / "server").mkdir(mode=0o700, parents=True)
        committed = _copied(run, fresh)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = {"taken_at": now, "committed": committed}
        (fresh / TAKEN).write_text(json.dumps(facts) + "\n", "utf-8")
        for path in (*fresh.rglob("*"), fresh):
            sync_path(path)
        if to.is_dir():
            shutil.rmtree(to)  # it holds no file
        fresh.rename(to)
        sync_path(to.absolute().parent)
    except ArchiveError as error:  # what is wrong with the copy is wrong with the run
        raise ArchiveError(str(error).replace(str(fresh), str(run))) from None
    except (OSError, sqlite3.OperationalError) as error:
        raise RunFailed(f"{to} cannot be written: {reason_of(error)}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return committed


def restore(copy: Path, run: Path) -> dict[str, Any]:
    """Make a run directory of a backup, which stays; return when it was made, and after what.

    Raises:
        ArchiveError: it is no backup.
        ConfigError: there is something at ``run``.
        RunFailed: ``run`` cannot be written.
    """
    try:
        taken = dict(json.loads((copy / TAKEN).read_text("utf-8")))
        int(taken["committed"]), str(taken["taken_at"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = reason_of(error) if isinstance(error, OSError) else error
        raise ArchiveError(f"{copy} is no backup: {TAKEN} cannot be read ({why})") from None
    refuse_existing(run)
    committed = backup(copy, run)
    with writing(run):
        shutil.copyfile(copy / TAKEN, run / TAKEN)
    return {**taken, "committed": committed}


def _copied(run: Path, fresh: Path) -> int:
    """Copy a run's files into an empty directory; return its last interaction."""
    missing = ""
    for _ in range(TRIES):
        for path in fresh.glob("run.db*"):
            path.unlink()
        _copy_database(run / "run.db", fresh / "run.db")
        with closing(Ledger(fresh / "run.db", strict=True, new=False)) as ledger:
            committed = ledger.committed
            record = ledger.record(committed)
            lines = sum(scored for _, scored in ledger.records())
            has_ended = ledger.fact("end", dict) is not None
            begun = {n - 1 for _, n in record.get("under_way", ())} if record else set()
            numbers = sorted(n for n in {committed, *begun} if n >= 0)
            stated = {n: digest for n in numbers if (digest := ledger.stated_state(n))}
            files = {name: ledger.file(name) for name in ("data.json", *AT_END)}
            ledger.in_one_file()
        try:
            for number in numbers:
                _copy_state(run / "server", fresh / "server", number)
                if number in stated:
                    check_stated(state_path(fresh / "server", number), stated[number])
        except (FileNotFoundError, ArchiveError) as error:
            missing = str(error)
            continue
        at_end = [name for name in AT_END if has_ended or files[name]]
        for name in (*BESIDE, *at_end):
            (fresh / name).unlink(missing_ok=True)  # of a copy before this one
            with suppress(FileNotFoundError):
                _copy(run / name, fresh / name)
        if other := [n for n, said in files.items() if said and _sha256_of(fresh / n) != said]:
            missing = f"{run / other[0]} is not what the run wrote"  # or it is written right now
            continue
        for given in run.glob(GIVEN):
            _copy(given, fresh / given.name)
        _cut(fresh / "rounds.jsonl", lines)
        return committed
    raise ArchiveError(f"{run}: no whole copy can be made: {missing}")


def _sha256_of(path: Path) -> str:
    """Return the sha256 of a file that was copied; an empty text where there was none."""
    return sha256_of(path) if path.exists() else ""


def _copy_database(source: Path, target: Path) -> None:
    os.close(os.open(target, os.O_RDWR | os.O_CREAT, 0o600))
    try:
        with (
            closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as live,
            closing(sqlite3.connect(target)) as copy,
        ):
            live.backup(copy)
    except sqlite3.Error as error:
        raise ArchiveError(f"{source} cannot be copied: {error}") from None


def _copy_state(source: Path, target: Path, number: int) -> None:
    """Copy the state after an interaction, and the parts that it names."""
    path = state_path(target, number)
    _copy(state_path(source, number), path)
    _, header = load_named(path)
    for part in dict(header.get("parts", {})).values():
        if Path(part).name == part and not (target / part).exists():
            _copy(source / part, target / part)


def _cut(path: Path, lines: int) -> None:
    """Drop the lines of a file beyond so many: of commits after the copy of the database."""
    if path.is_file():
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


def _copy(source: Path, target: Path) -> None:
    """Copy a file that nobody but its owner reads."""
    try:
        held = source.open("rb")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ArchiveError(f"{source} cannot be read: {reason_of(error)}") from None
    with held:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as fresh:
            shutil.copyfileobj(held, fresh)
