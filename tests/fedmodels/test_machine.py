"""What a container leaves to a process, by files as Linux shows them."""

import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedmodels.host import machine

GIB = 1 << 30


@pytest.fixture
def put(tmp_path, monkeypatch):
    """Return what writes files of control groups; the machine has 64 GiB and 16 cores."""
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16), raising=False)
    memory = SimpleNamespace(available=64 * GIB)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)

    def write(own: str, files: dict[str, object]) -> None:
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            place = tmp_path / "cgroup" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f"{text}\n")
        machine._quota.cache_clear()

    yield write
    machine._quota.cache_clear()


def test_without_a_limit_all_is_free(put):
    assert (machine.free_bytes(), machine.cores()) == (64 * GIB, 16)
    put("0::/", {"memory.max": "max", "memory.current": 7, "cpu.max": "max 100000"})
    assert (machine.free_bytes(), machine.cores()) == (64 * GIB, 16)
    of_1 = {"memory/memory.limit_in_bytes": 2**63 - 4096, "memory/memory.usage_in_bytes": 7}
    put("4:memory:/\n3:cpu,cpuacct:/\n", of_1 | {"cpu/cpu.cfs_quota_us": -1})
    assert (machine.free_bytes(), machine.cores()) == (64 * GIB, 16)


def test_a_limit_of_the_container_counts(put):
    put("0::/", {"memory.max": 9, "memory.current": 7})
    assert machine.free_bytes() == 2
    put("0::/", {"memory.current": 12})
    assert machine.free_bytes() == 0
    put("0::/", {"memory.max": 20, "memory.high": 15})
    assert machine.free_bytes() == 3


@pytest.mark.parametrize(("under", "of"), [("", ("max", "current", "")), ("memory/", (
    "limit_in_bytes", "usage_in_bytes", "total_"
))])  # fmt: skip
def test_the_cache_of_files_is_free(put, under, of):
    """4 GiB less 3.9 used, of which 3 are read no more and 0.4 are read again: 0.1 + 3 + 0.2."""
    limit, used, prefix = of
    stat = {"anon": GIB // 2, f"{prefix}inactive_file": 3 * GIB, f"{prefix}active_file": 4 * 10**8}
    lines = "\n".join(f"{name} {size}" for name, size in stat.items())
    put("4:memory:/\n0::/", {
        f"{under}memory.{limit}": 4 * GIB, f"{under}memory.{used}": 4 * GIB - 10**8,
        f"{under}memory.stat": lines,
    })  # fmt: skip
    assert machine.free_bytes() == 10**8 + 3 * GIB + 2 * 10**8


@pytest.mark.parametrize("hybrid", ["", "unified/"])
def test_the_limit_of_any_group_above_counts(put, hybrid):
    """The group of the process has no limit, or a wide one; one that it lies in has less."""
    put("0::/a/b", {
        f"{hybrid}a/b/memory.max": "max", f"{hybrid}a/b/memory.current": 1 * GIB,
        f"{hybrid}a/memory.max": 8 * GIB, f"{hybrid}a/memory.current": 5 * GIB,
        f"{hybrid}a/b/cpu.max": "800000 100000", f"{hybrid}a/cpu.max": "250000 100000",
    })  # fmt: skip
    assert (machine.free_bytes(), machine.cores()) == (3 * GIB, 3)


def test_version_1_names_groups_by_controller(put):
    put("4:memory:/docker/1f\n3:cpu,cpuacct:/docker/1f\n", {
        "memory/docker/1f/memory.limit_in_bytes": 2 * GIB,
        "memory/docker/1f/memory.usage_in_bytes": GIB,
        "cpu,cpuacct/docker/1f/cpu.cfs_quota_us": 150000,
        "cpu,cpuacct/docker/1f/cpu.cfs_period_us": 100000,
    })  # fmt: skip
    assert (machine.free_bytes(), machine.cores()) == (GIB, 2)


@pytest.mark.parametrize("own", ["4:memory:/docker/1f\n3:cpu:/docker/1f\n0::/docker/1f", ""])
def test_a_container_sees_its_own_group_as_the_top(put, own):
    """Docker with version 1 tells the path of the machine, and shows the group alone."""
    put(own, {
        "memory/memory.limit_in_bytes": 2 * GIB, "memory/memory.usage_in_bytes": GIB,
        "cpu/cpu.cfs_quota_us": 50000, "cpu/cpu.cfs_period_us": 100000,
    })  # fmt: skip
    assert (machine.free_bytes(), machine.cores()) == (GIB, 1)


def test_this_machine_has_some_of_both():
    assert 1 <= machine.cores() <= (os.cpu_count() or math.inf)
    assert machine.free_bytes() > 0
    assert all(isinstance(group, Path) for group in machine._groups("cpu", machine.CGROUP))
