"""Hosts as actors of a real Ray cluster of three nodes, which lie on this machine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import tomli_w

from fedmodels.resolution import experiment_of
from fedtide.inprocess import run_in_process
from tests.integration.conftest import tables
from tests.integration.harness import ROOT, environment, reached, summary_of, write_config
from tests.integration.test_launch import Launched

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'fedtide[ray]'"
    ),
]
PATIENCE_S = 240.0
HELD = tables("held", schedule={"rounds": 3, "clients": 3})


class Nodes:
    """The cluster, in a process of its own."""

    def __init__(self, log: IO[bytes], **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ray_nodes"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
            env=environment(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", **env),
        )  # fmt: skip
        self.place = f"ray://{self.said()}"

    def said(self) -> str:
        """Return the next line it says."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill_with(self, process: str) -> None:
        """Kill the node on which a process of this name runs."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{process}\n")
        self.process.stdin.flush()
        assert self.said() == "killed"

    def kill(self, process: str) -> None:
        """Kill a process of this name on whichever node it is."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = (one for one in family if one.name() == process)
        found.kill()

    def close(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, steer: Path) -> Iterator[Nodes]:
    with (tmp_path_factory.mktemp("ray") / "nodes.log").open("wb") as log:
        found = Nodes(log, HELD_DIR=str(steer))
        yield found
        found.close()


@pytest.fixture
def launch(tmp_path: Path, nodes: Nodes, steer: Path) -> Iterator[Any]:
    """Return a maker of launches with two hosts on the cluster, beside the evaluator's."""
    made: list[Launched] = []

    def start(*more: str) -> Launched:
        config = write_config(tmp_path / "config.toml", experiment_of(HELD))
        options = ["--on", nodes.place, "--hosts", "2", *more]
        made.append(Launched(config, tmp_path / "run", *options, HELD_DIR=str(steer)))
        return made[-1]

    for leftover in steer.iterdir():
        leftover.unlink()
    yield start
    for one in made:
        one.close()


def test_more_hosts_than_there_is_room_for_are_refused(launch: Any) -> None:
    status, output = launch("--host-cpus", "2").end(PATIENCE_S)
    assert status == 2
    assert "has room for 2 hosts of 2 CPU and 0 GPU, and 3 are to run, one of them for" in output
    assert "Traceback" not in output


def test_data_are_dealt_out_on_the_nodes(launch: Any, tmp_path: Path) -> None:
    run = launch("--node-dir", str(tmp_path / "disk"))
    status, output = run.end(PATIENCE_S)
    assert status == 0, output
    (own,) = (tmp_path / "disk").glob("run-*")
    assert {p.name for p in own.iterdir()} == {"clients", "data", ".data.lock"}
    assert not (run.out / "clients").exists()
    alone = run_in_process(HELD, run.out / "data", tmp_path / "alone", evaluator=True)
    assert summary_of(run.out)["state_sha256"] == alone["state_sha256"]


def test_a_sweep_whose_runs_are_tasks_runs_each_once(nodes: Nodes, tmp_path: Path) -> None:
    """What is finished is not run again; a run that cannot be is named with its reason."""
    write_config(tmp_path / "preset.toml", experiment_of(tables("fedavg", evaluate={"every": 0})))
    rows = {"fine": "fedavg", "wrong": "fedprox mu=0.5 net.weights='none.safetensors'"}
    file = {"preset": "preset.toml", "methods": rows, "seeds": [0]}
    (tmp_path / "sweep.toml").write_text(tomli_w.dumps(file))
    for tasks in (["fine-seed0", "wrong-seed0"], ["wrong-seed0"]):
        done = subprocess.run(
            [sys.executable, "-m", "fedsrv", "sweep", str(tmp_path / "sweep.toml"),
             "--out", str(tmp_path / "out"), "--on", nodes.place, "--resource", "num_cpus=2"],
            capture_output=True, text=True, timeout=PATIENCE_S, env=environment(),
        )  # fmt: skip
        said = [line.split()[0] for line in done.stdout.splitlines() if " is a task of " in line]
        assert said == tasks, done.stdout + done.stderr
        assert "wrong-seed0 failed: error: " in done.stdout
        assert done.returncode == 1
        assert "1 of 2 runs failed and are left out: wrong-seed0" in done.stderr
    assert summary_of(tmp_path / "out" / "fine-seed0")


def test_a_node_that_dies_costs_nothing(
    launch: Any, nodes: Nodes, tmp_path: Path, steer: Path
) -> None:
    """Its hosts are placed elsewhere, and the run ends in the same bits as in one process.

    So it does after the death of a host alone.
    """
    (steer / "train-0-3").touch()
    run = launch()
    reached(steer / "train-0-3.reached", PATIENCE_S)
    nodes.kill("fedcli-1-2")
    nodes.kill_with("fedcli-0")
    status, output = run.end(PATIENCE_S)
    assert status == 0, output
    assert "client-0 died (its node or its process there is gone); starting it again" in output
    assert "client-1-2 died (" in output
    assert "client 0, round 2" in run.log("client-0")
    alone = run_in_process(HELD, run.out / "data", tmp_path / "alone", evaluator=True)
    assert summary_of(run.out)["state_sha256"] == alone["state_sha256"]
    assert summary_of(run.out)["metrics"] == alone["metrics"]
