"""A disk that is full: one line, and nothing is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from fedcli.cli import main
from tests.conftest import tiny_experiment

SMALL = ("unshare", "--map-root-user", "--mount", "sh", "-c")
"""Runs a shell that may mount what it alone sees."""


def may_mount(place: Path) -> bool:
    """Tell whether the system lets this user mount a small disk."""
    command = [*SMALL, f"mount -t tmpfs -o size=4k tmpfs '{place}'"]
    try:
        return not subprocess.run(command, capture_output=True).returncode
    except OSError:
        return False


def test_a_store_that_does_not_fit_is_one_line(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if not may_mount(disk):
        pytest.skip("this user may mount nothing")
    config = tmp_path / "config.toml"
    config.write_text(tomli_w.dumps(tiny_experiment(data={"name": "digits"}).to_dict()))
    words = f"-m fedcli partition {config} --out {disk / 'data'} --layout store --no-picture"
    ended = subprocess.run(
        [
            *SMALL,
            f"mount -t tmpfs -o size=100k tmpfs {disk} && {sys.executable} {words}; "
            f"status=$?; ls -A {disk}; exit $status",
        ],
        capture_output=True,
        text=True,
    )
    assert ended.stdout == ""
    assert "data cannot be written: the disk is full, or fails" in ended.stderr
    assert ended.returncode == 1


def test_a_picture_that_does_not_fit_leaves_the_data(tmp_path, monkeypatch, capsys):
    def full(path: Path, *_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fedcli.data.store.commands.write_atomically", full)
    config, out = tmp_path / "config.toml", tmp_path / "data"
    config.write_text(tomli_w.dumps(tiny_experiment().to_dict()))
    with pytest.raises(SystemExit) as ended:
        main(["partition", str(config), "--out", str(out)])
    line = "error: the data are dealt out, but their picture "
    assert capsys.readouterr().err == (
        f"{line}{out / 'partition.svg'} cannot be written: No space left on device\n"
    )
    assert ended.value.code == 1
    assert sorted(path.name for path in out.iterdir()) == [
        "0", "1", "2", "global-test", "partition.json",
    ]  # fmt: skip
