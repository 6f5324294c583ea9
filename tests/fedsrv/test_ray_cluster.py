"""A Ray cluster as it is when it does not answer; processes stand for the one that talks to Ray."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedmodels.errors import ConfigError, RunFailed
from fedmodels.host import processes
from fedmodels.host.processes import Box, ProcessLine
from fedsrv.ray import ray_cluster
from fedsrv.ray.ray_cluster import RayCluster, lacking
from fedsrv.ray.ray_driver import no_room

FACTS = {"nodes": [{"CPU": 2.0}], "here": "10.0.0.1"}
ANSWERS = f"import sys; sys.stdin.readline(); print({json.dumps(FACTS)!r}); "


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield the place of a head that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"ray://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return what has a program take the place of the process that talks to Ray."""
    made: list[processes.Popen] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)

    def use(program: str) -> list[processes.Popen]:
        def started(command: list[str], log: Path) -> processes.Popen:
            made.append(processes.started(["-c", program], log))
            return made[-1]

        monkeypatch.setattr(ray_cluster, "started", started)
        return made

    yield use
    for one in made:
        one.kill()
        one.wait()


def connect(place: str, tmp_path: Path) -> RayCluster:
    return RayCluster(place, tmp_path / "ray.log", "hosts", Box())


def test_a_dead_head_is_one_line_at_once(driver, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = driver("")
    line = rf"^cannot use the Ray cluster at 127\.0\.0\.1:{port}: Connection refused; give the addr"
    with pytest.raises(RunFailed, match=line):
        connect(f"ray://127.0.0.1:{port}", tmp_path)
    assert not started


def test_a_head_that_does_not_answer_has_limited_time(silent, driver, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "CONNECTED_S", 0.05)
    (started,) = [driver("import time; time.sleep(600)")]
    with pytest.raises(RunFailed, match=r": it did not answer as Ray does in 0\.05 s; give the ad"):
        connect(silent, tmp_path)
    (process,) = started
    assert process.returncode == -9


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ('print(\'{"error": "other versions"}\')', ": other versions; give the address"),
        ("import sys; sys.exit('Check failed')", ": the process that talks to it has ended; give"),
    ],
)
def test_why_ray_cannot_be_used_is_one_line(program, line, silent, driver, tmp_path, capfd):
    driver(program)
    with pytest.raises(RunFailed, match=line):
        connect(silent, tmp_path)
    assert capfd.readouterr() == ("", "")


def test_what_happens_on_the_cluster_is_heard(driver, silent, tmp_path):
    driver(ANSWERS + "sys.stdout.flush(); print(sys.stdin.readline()); sys.exit(3)")
    box = Box()
    cluster = RayCluster(silent, tmp_path / "ray.log", "hosts", box)
    assert (cluster.nodes, cluster.here) == ([{"CPU": 2.0}], "10.0.0.1")
    cluster.start("0-1", no_room, {"a": 1}, {"num_cpus": 1}, tmp_path / "log")  # type: ignore[arg-type]
    said = box.get(timeout=30)
    assert json.loads(said.line) == {
        "id": "0-1", "function": "fedsrv.ray.ray_driver:no_room", "given": {"a": 1},
        "takes": {"num_cpus": 1}, "log": str(tmp_path / "log"),
    }  # fmt: skip
    assert [box.get(timeout=30), box.get(timeout=30)][1] == ProcessLine("hosts", "", 3)
    cluster.end()


def test_a_cluster_that_hangs_at_the_end_is_left(driver, silent, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "RAY_LEAVING_S", 0.05)
    started = driver(ANSWERS + "sys.stdout.flush(); import time; time.sleep(600)")
    connect(silent, tmp_path).end()
    assert started[0].returncode == -9


def test_a_missing_extra_is_told_before_the_head(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install 'ray>="):
        connect("ray://127.0.0.1:1", tmp_path)


NODES = [{"CPU": 4.0, "GPU": 0.0}, {"CPU": 1.0, "GPU": 2.0}]


@pytest.mark.parametrize(
    ("takes", "lack"),
    [
        ({"num_cpus": 4}, ""),
        ({"num_cpus": 1, "num_gpus": 0.5}, ""),
        ({"num_cpus": 8}, "8 CPU"),
        ({"num_cpus": 4, "num_gpus": 1}, "4 CPU, 1 GPU"),
        ({"num_cpus": 1, "memory": 1e9}, "1 CPU, 1e+09 memory"),
        ({"num_cpus": 0, "max_concurrency": 3}, ""),
    ],
)
def test_what_no_node_has(takes, lack):
    assert lacking(takes, NODES) == lack


def test_no_room_says_what_is_taken_and_what_is_free():
    takes = {"num_cpus": 1, "num_gpus": 0.5}
    assert no_room(takes, {"CPU": 3.0, "GPU": 0.25}) == (
        "no room on the Ray cluster: it takes 1 CPU, 0.5 GPU, and 3 CPU, 0.25 GPU is free on all "
        "nodes"
    )
    assert no_room({"num_cpus": 1}, {"CPU": 3.0}).startswith("Ray has not placed it yet: it takes")
    assert no_room({"num_cpus": 1}, {}).endswith("0 CPU is free on all nodes")
