"""Keeps what a disk is bound to hold after a loss of power; ``tests/faults/power.py`` uses it.

An fsync of a file makes safe what the file held when it began, an fsync of a directory makes safe
the names in it. Each is written to ``disk.jsonl`` when it has returned. Files are known by their
inode, which a hard link in the vault keeps from being used again.

SQLite syncs without asking Python. It syncs the log before it copies it into the database, and the
database behind that, so that the database is safe as it stands; the log that a closing connection
copies is noted here.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

_root: Path | None = None
_vault = Path()
_numbers = count()


def record(root: Path, folder: Path) -> None:
    """Note what is synced below a directory from now on."""
    global _root, _vault
    _root, _vault = root, folder / "vault"
    _vault.mkdir(exist_ok=True)


def about_to_sync(descriptor: int) -> Callable[[], None]:
    """Look at what an fsync will make safe; the function returned notes it as safe."""
    if _root is None:
        return lambda: None
    path = Path(os.readlink(f"/proc/self/fd/{int(descriptor)}"))
    if not path.is_relative_to(_root):
        return lambda: None
    facts = _listing(path) if path.is_dir() else _content(path)
    return lambda: _note(facts)


def database_closes(connection: sqlite3.Connection) -> None:
    """Note the log of a connection that is about to close, and is the last of its database."""
    if _root is None:
        return
    for _, _, name in sqlite3.Connection.execute(connection, "PRAGMA database_list").fetchall():
        log = Path(f"{name}-wal")
        if name and log.is_relative_to(_root) and log.exists():
            _note(_content(log))


def _content(path: Path) -> dict[str, object]:
    try:
        inode = kept(path, _vault)
        copy = _vault / f"copy-{os.getpid()}-{next(_numbers)}"
        shutil.copyfile(_vault / f"inode-{inode}", copy)
    except FileNotFoundError:
        return {}
    return {"inode": inode, "copy": copy.name}


def _listing(path: Path) -> dict[str, object]:
    names = {}
    for entry in os.scandir(path):
        try:
            if stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                names[entry.name] = kept(Path(entry.path), _vault)
        except FileNotFoundError:
            continue
    return {"directory": str(path), "names": names}


def kept(path: Path, vault: Path) -> int:
    """Return a file's inode, which the vault holds from now on."""
    mine = vault / f"link-{os.getpid()}-{next(_numbers)}"
    os.link(path, mine)
    inode = mine.stat().st_ino
    with suppress(FileExistsError):
        os.link(mine, vault / f"inode-{inode}")
    mine.unlink()
    return inode


def _note(facts: dict[str, object]) -> None:
    if not facts:
        return
    line = json.dumps(facts).encode() + b"\n"
    handle = os.open(_vault / "disk.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(handle, line)
    finally:
        os.close(handle)
