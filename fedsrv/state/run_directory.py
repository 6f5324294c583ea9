"""The run directory as a folder: its lock, and whether it holds a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

from fedmodels.errors import ArchiveNotWritten, ConfigError, RunFailed, reason_of
from fedmodels.host.files import locked, no_locks
from fedmodels.host.shortages import lack_of, why_cut_off

LOCK = ".lock"
"""The file by which the process that writes a run locks its directory."""
LAUNCH_LOCK = "logs/.lock"
"""The file by which a launcher does; it begins before its coordinator and may outlive one."""


def lock(path: Path, name: str = LOCK) -> int:
    """Lock a run directory, by the file ``name`` in it, until the returned file is closed.

    Raises:
        OSError: the file cannot be opened.
        RunFailed: another process holds the lock, or the file system has none.
    """
    handle = os.open(path / name, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_free = locked(handle)
    except OSError as error:
        os.close(handle)
        if why := no_locks(error):
            raise RunFailed(f"{path} cannot be used: {why}") from None
        raise
    if not is_free:
        os.close(handle)
        raise RunFailed(f"{path} is in use by another process; wait until that has ended")
    return handle


def require_place(path: Path, handle: int) -> None:
    """Check that a run directory is still where it was when it was locked.

    Raises:
        RunFailed: it was renamed or deleted; another run may have its name by now.
    """
    try:
        there = os.path.samestat(os.stat(path / LOCK), os.fstat(handle))
    except (FileNotFoundError, NotADirectoryError):
        there = False
    if not there:
        raise RunFailed(
            f"{path} was renamed or deleted during the run: put it back, and continue with --resume"
        )


BESIDE = (
    "config.toml", "env.json", "data.json", "audit.jsonl", "rounds.jsonl", "privacy.jsonl",
    "excluded.json", "set-aside.json", "classes.json", "tracked.json",
)  # fmt: skip
"""The files beside the database that a run goes on from, or that say what it did so far."""
WRITTEN = {
    "run.db", "run.db-wal", "run.db-shm", "server", "mlflow.db", "mlartifacts", "wandb",
    "tensorboard", ".lock", "logs", "clients", "data", *BESIDE,
}  # fmt: skip
"""The files that a start writes into a run directory before clients can join."""
GO_ON = "commits are kept: free some space, and continue with --resume"


@contextlib.contextmanager
def using(out: Path) -> Iterator[None]:
    """Turn errors of the first steps in the directory of ``--out`` into one line: a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be used: {error.strerror}") from None


@contextlib.contextmanager
def launching(path: Path) -> Iterator[None]:
    """Keep other launchers out of a run directory, which has its ``logs`` already.

    Raises:
        ConfigError: the directory cannot be written to.
        RunFailed: another process uses it.
    """
    with using(path):
        handle = lock(path, LAUNCH_LOCK)
    try:
        yield
    finally:
        os.close(handle)


def refuse_in_use(path: Path) -> None:
    """Refuse a run directory that somebody has locked: RunFailed."""
    for name in (LOCK, LAUNCH_LOCK):
        if (path / name).is_file():
            with contextlib.suppress(OSError):  # of another user: locks say nothing there
                os.close(lock(path, name))


def reading(run: Path) -> contextlib.closing[sqlite3.Connection]:
    """Open a run's database to read it.

    Without a log beside it nobody writes; SQLite then needs no file of its own, as it would on a
    read-only medium.
    """
    alone = "" if (run / "run.db-wal").exists() else "&immutable=1"
    place = f"{(run / 'run.db').resolve().as_uri()}?mode=ro{alone}"
    return contextlib.closing(sqlite3.connect(place, uri=True))


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of writing in a run directory into one line.

    Raises:
        RunFailed: the disk is full, or fails.
    """
    try:
        yield
    except ArchiveNotWritten as error:
        raise RunFailed(f"{error}; {GO_ON}") from None
    except (OSError, sqlite3.OperationalError) as error:
        lack = lack_of(error) if isinstance(error, OSError) else ""
        why = lack or no_locks(error) or reason_of(error) or why_cut_off()
        if isinstance(error, sqlite3.OperationalError) and "ulimit" in why_cut_off():
            why = f"{why} ({why_cut_off()})"  # SQLite takes one for the other
        raise RunFailed(f"{path} cannot be written: {why}; {GO_ON}") from None


def state_numbers(states: Path) -> set[int]:
    """Return the interactions whose states lie in a directory."""
    names = (file.stem.partition("-")[2] for file in states.glob("state-*.safetensors"))
    return {int(name) for name in names if name.isascii() and name.isdigit()}


def holds_commits(path: Path) -> bool:
    """Tell whether a run directory holds a committed record or state."""
    lines = path / "rounds.jsonl"
    written = lines.is_file() and lines.stat().st_size > 0
    return written or bool(state_numbers(path / "server"))


def may_hold_a_run(path: Path) -> bool:
    """Tell a run directory from a stranger's; a start that was killed leaves at least the lock."""
    if holds_commits(path) or any((path / n).exists() for n in ("run.db", "logs", "clients")):
        return True
    names = {inner.name for inner in path.iterdir()} if path.is_dir() else set()
    return ".lock" in names and names <= WRITTEN


def is_vacant(path: Path) -> bool:
    """Tell whether a path is free, or a directory with no files in it, at any depth."""
    if not path.is_dir():
        return not path.exists()
    return all(
        not inner.is_symlink() and inner.is_dir() and is_vacant(inner) for inner in path.iterdir()
    )


@contextlib.contextmanager
def beginning(path: Path) -> Iterator[threading.Event]:
    """Take back what a start that failed has left in a directory that held no run before.

    Nothing is taken back of a directory that another process uses.

    Yields:
        An event; set it when clients can join, and nothing is taken back any more.
    """
    was_there = path.is_dir() and {file.name for file in path.iterdir()}
    held_a_run = path.is_dir() and (holds_commits(path) or (path / "run.db").exists())
    began = threading.Event()
    try:
        yield began
    finally:
        if not began.is_set() and not held_a_run and path.is_dir():
            with contextlib.suppress(RunFailed):
                refuse_in_use(path)
                take_back(path, was_there or set())


def take_back(path: Path, kept: set[str]) -> None:
    """Remove what a failed start has written into a run directory, and it, if nothing is left."""
    for file in path.iterdir():
        if file.name in kept or file.name not in WRITTEN:
            continue
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file, ignore_errors=True)
        else:
            file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds other things, or was there before
        path.rmdir()


def make_directory(path: Path, out: Path) -> None:
    """Make a directory at or under that of ``--out``, its owner's alone; or raise ConfigError."""
    with using(out):
        path.mkdir(mode=0o777 if path == out else 0o700, parents=True, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out} cannot be used: it is not writable")


def refuse_other_files(path: Path) -> None:
    """Refuse a place that holds something, and no run; ConfigError says what is there."""
    if is_vacant(path) or may_hold_a_run(path):
        return
    what = "holds files that are no run" if path.is_dir() else "is a file, not a directory"
    raise ConfigError(f"{path} {what}; give another --out")


def require_run(path: Path) -> None:
    """Raise ConfigError, which says how to go on, unless the path is the directory of a run."""
    refuse_other_files(path)
    if not may_hold_a_run(path):
        raise ConfigError(f"{path} holds no run to resume; leave --resume out, or name its --out")


def refuse_existing(path: Path) -> None:
    """Refuse an output directory that holds files.

    Raises:
        ConfigError: says how to go on.
        RunFailed: a run goes on in it.
    """
    refuse_other_files(path)
    if not is_vacant(path):
        refuse_in_use(path)
        what = "already holds a run" if (path / "run.db").exists() else "exists and is not empty"
        raise ConfigError(f"{path} {what}; add --resume to continue it, or choose another --out")
