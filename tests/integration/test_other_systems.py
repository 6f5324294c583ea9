"""Clients on macOS and Windows, as far as Linux can show: what these systems lack is hidden."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmodels.errors import ConfigError
from fedmodels.host import files, machine
from tests.integration.conftest import tables
from tests.integration.harness import join_arguments

ROOT = Path(__file__).parents[2]


@pytest.mark.loopback
def test_a_client_needs_nothing_of_linux(loopback, tmp_path):
    """It runs in one process, predicts and joins, and ends in the bits of any other client."""
    run = loopback(tables("fedper", schedule={"rounds": 1, "clients": 3}, net={"name": "mlp"}))
    coordinator = run.serve()
    np.save(tmp_path / "sample.npy", np.zeros((1, 1, 8, 8), dtype=np.float32))
    words = join_arguments("0", f"127.0.0.1:{run.port}", run.partition, tmp_path / "states")
    script = [sys.executable, "-m", "tests.integration.foreign_system"]
    paths = [run.config, tmp_path / "alone", tmp_path / "sample.npy"]
    found = subprocess.Popen(
        [*script, *map(str, paths), *words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
    )  # fmt: skip
    others = [run.join("1"), run.join("2")]
    said, _ = found.communicate(timeout=120)
    assert found.returncode == 0, said
    assert "joined run" in said
    digest = run.finish(coordinator, *others)["state_sha256"]
    assert f"inprocess {digest}" in said
    assert "processes: a coordinator, and processes that fedtide starts, need Linux" in said
    assert "sample.npy" in said


def test_what_needs_linux_says_so(monkeypatch):
    machine.require_linux()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="need Linux; elsewhere run fedcli join"):
        machine.require_linux()
    monkeypatch.setattr(
        machine.resource, "getrusage", lambda who: type("Usage", (), {"ru_maxrss": 7})
    )
    assert machine.peak_rss_bytes() == 7, "macOS counts bytes"


def test_a_byte_is_locked_without_fcntl(tmp_path, monkeypatch):
    from tests.integration.foreign_system import Locks

    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", Locks())
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        assert files.locked(first.fileno(), 3)
        assert not files.locked(second.fileno(), 3)
        assert files.locked(second.fileno(), 4)
