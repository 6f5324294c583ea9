"""A loss of power: what is on the disk afterwards.

The model is that of POSIX, with one concession. What an fsync of a file made safe stays; so do the
names that an fsync of their directory made safe. Of everything later each single thing happened or
did not, as a seed says: a new name, a removed name, a rename, and of a file its old bytes, its new
bytes or half of the new ones. Without mercy none of it did. Directories that were made stay, which
journaling file systems give and POSIX does not promise.

SQLite's database is safe as it stands (see ``fault_disk``), its shared memory is gone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.faults.inside.fault_disk import kept


class Disk:
    """What a vault says is safe, when those who wrote are dead."""

    def __init__(self, vault: Path) -> None:
        self.vault = vault
        self.copies: dict[int, str] = {}
        self.names: dict[str, dict[str, int]] = {}
        log = vault / "disk.jsonl"
        for line in log.read_text().splitlines() if log.exists() else ():
            fact: dict[str, Any] = json.loads(line)
            if "inode" in fact:
                self.copies[fact["inode"]] = fact["copy"]
            else:
                self.names[fact["directory"]] = fact["names"]

    def lose(self, directory: Path, rng: random.Random | None) -> None:
        """Put one directory into a state that a loss of power may leave it in.

        Args:
            directory: its files alone.
            rng: says what survived; by default nothing that was not synced did.
        """
        safe = self.names.get(str(directory), {})
        files = [path for path in directory.iterdir() if path.is_file() and not path.is_symlink()]
        there = {path.name: kept(path, self.vault) for path in files}
        for name in sorted({*safe, *there}):
            if name.endswith("-shm"):
                (directory / name).unlink(missing_ok=True)
                continue
            inode = rng.choice([safe.get(name), there.get(name)]) if rng else safe.get(name)
            if name == "run.db":
                inode = there.get(name, inode)
            (directory / name).unlink(missing_ok=True)
            if inode is not None:
                content = self._content(inode, rng, is_safe=name == "run.db")
                (directory / name).write_bytes(content)

    def _content(self, inode: int, rng: random.Random | None, *, is_safe: bool) -> bytes:
        """Return what a file holds: one of the things it may hold."""
        now = (self.vault / f"inode-{inode}").read_bytes()
        if is_safe:
            return now
        copy = self.copies.get(inode)
        before = b"" if copy is None else (self.vault / copy).read_bytes()
        if before == now or rng is None:
            return before
        return rng.choice([before, now[: (len(before) + len(now)) // 2], now])


def lose_power(vault: Path, directories: Iterable[Path], rng: random.Random | None) -> None:
    """Put directories into a state that a loss of power may leave them in."""
    disk = Disk(vault)
    for directory in sorted(directories):
        if directory.is_dir():
            disk.lose(directory, rng)
            mark_safe(vault, directory)


def mark_safe(vault: Path, directory: Path) -> None:
    """Note that what a directory holds is on the disk: it was read from there."""
    names = {path.name: kept(path, vault) for path in directory.iterdir() if path.is_file()}
    with (vault / "disk.jsonl").open("a") as log:
        for name, inode in names.items():
            copy = f"found-{inode}"
            (vault / copy).write_bytes((directory / name).read_bytes())
            log.write(json.dumps({"inode": inode, "copy": copy}) + "\n")
        log.write(json.dumps({"directory": str(directory), "names": names}) + "\n")
