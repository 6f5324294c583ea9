"""Files that only grow, and what the history says of them: so many lines, and their sha256.

A line is safe on the disk before a commit states it. So a file may have more lines than the last
statement says, and never fewer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsrv.state.chain import LINES

Said = tuple[int, str]
"""A number of lines, and the sha256 of their bytes."""


class StatedLines:
    """How far one file has come; used by the owner of the run's files."""

    def __init__(self, path: Path) -> None:
        """Read nothing yet."""
        self.path = path
        self._size = self._lines = 0
        self._digest = hashlib.sha256()

    def now(self) -> Said:
        """Return what there is to say of the whole lines of the file; OSError if it is gone."""
        with self.path.open("rb") as file:
            file.seek(self._size)
            new = file.read()
        new = new[: new.rfind(b"\n") + 1]
        self._size += len(new)
        self._lines += new.count(b"\n")
        self._digest.update(new)
        return self._lines, self._digest.hexdigest()


def other_lines(run: Path, said: Collection[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each file of a run that lacks lines which its history states."""
    stated: dict[str, dict[int, str]] = {}
    for one in said:
        for name, (lines, digest) in one.get(LINES, {}).items():
            stated.setdefault(name, {})[lines] = digest
    for name, marks in stated.items():
        if wrong := _first_wrong(run / name, marks):
            yield f"{name} {wrong}; put a copy of it back"


def _first_wrong(path: Path, marks: Mapping[int, str]) -> str:
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        return "is gone"
    digest, before = hashlib.sha256(), 0
    for number in range(max(marks) + 1):
        if number:
            if number > len(lines):
                return f"lacks line {number} and what followed"
            digest.update(lines[number - 1])
        if number in marks:
            if digest.hexdigest() != marks[number]:
                return f"is not what the run wrote: one of its lines {before + 1} to {number}"
            before = number
    return ""
