"""What others write into a watched folder: it is complete once it has not changed for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from fedmodels.host.files import Stamp, stamp_of
from fedmodels.times import SETTLE_S

Stamps = tuple[tuple[str, Stamp], ...]
"""The files of a path, by name, each with what changes when it is written."""


class Settled:
    """Which of the paths that a watcher sees have come to rest; of one thread."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[Stamps, float]] = {}
        """By path, its files at the last look, and since when they are so."""

    def among(self, paths: Iterable[Path]) -> list[Path]:
        """Look at paths; return those that are as they were at looks ``SETTLE_S`` ago, by name."""
        now, seen = time.monotonic(), self._seen
        self._seen = {}
        found = list[Path]()
        for path in paths:
            if not (stamps := stamps_in(path)):
                continue
            before, since = seen.get(path, ((), now))
            self._seen[path] = stamps, since if stamps == before else now
            if stamps == before and now - since >= SETTLE_S:
                found.append(path)
        return sorted(found)


def stamps_in(path: Path) -> Stamps:
    """Return the stamps of a file, or of the files below a folder; empty where nothing is there."""
    if not path.is_dir():
        found = stamp_of(path)
        return ((path.name, found),) if found else ()
    places = [os.path.join(place, name) for place, _, names in os.walk(path) for name in names]
    stamps = ((place, stamp_of(Path(place))) for place in sorted(places))
    files = tuple((os.path.relpath(place, path), stamp) for place, stamp in stamps if stamp)
    return files or (("", (0, 0, 0)),)
