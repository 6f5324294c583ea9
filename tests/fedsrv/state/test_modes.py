"""What a run leaves on the disk for other users of the machine to read: nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fedtide
from fedcli.data.store.partition_writer import written_whole
from fedsrv.report.tables import write_page
from fedsrv.state.run_directory import make_directory
from fedsrv.state.run_record import read_run
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
        write_page(read_run(tmp_path / "run"))
    finally:
        os.umask(before)
    assert readable(tmp_path / "run") == {".lock"}


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_nobody_else_reads_dealt_data_or_the_logs_of_a_launched_run(tmp_path, mask):
    """``partition`` and ``launch`` write data by the one, and ``launch`` its logs by the other."""
    out, before = tmp_path / "run", os.umask(mask)
    try:
        make_directory(out, out)
        make_directory(out / "logs", out)
        with written_whole(out / "data") as place:
            (place / "0").mkdir()
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (out / "logs", out / "data")}
    assert modes == {"logs": 0o700, "data": 0o700}
