"""What a run leaves on the disk for other users of the machine to read: its report alone."""

from __future__ import annotations

import os
from pathlib import Path

import fedtide
from tests.fedsrv.state.test_falsified import CONFIG


def readable(place: Path) -> set[str]:
    """Return the files below a directory that others can reach and read, and the directories."""
    found = set()
    for path in place.iterdir():
        if path.stat().st_mode & 0o077:
            found |= {path.name} | (readable(path) if path.is_dir() else set())
    return found


def test_nobody_else_reads_what_tells_of_clients(tmp_path):
    before = os.umask(0o022)
    try:
        fedtide.run(CONFIG, out=tmp_path / "run", backend="inprocess")
    finally:
        os.umask(before)
    assert readable(tmp_path / "run") <= {".lock", "report.html"}
