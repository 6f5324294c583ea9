"""Hosts as actors of a real Ray cluster of three nodes, which lie on this machine."""

from __future__ import annotations

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
import tomli_w

from fedmodels.facts.resolution import experiment_of
from fedmodels.host.processes import Box
from fedsrv.ray.ray_cluster import RayCluster
from fedtide.inprocess import run_in_process
from tests.integration.conftest import tables
from tests.integration.harness import ROOT, environment, reached, summary_of, until, write_config
from tests.integration.test_launch import Launched, gone

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


def driver_of(run: Launched) -> psutil.Process:
    """Return the process of a launch that talks to Ray."""
    (found,) = (p for p in run.family() if "fedsrv.ray.ray_driver" in p.cmdline())
    return found


def hog(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Hold what it takes of a node until it is killed."""
    yield {"holds": True}
    threading.Event().wait()


def test_a_host_without_room_is_shown_so_and_sigterm_ends_the_wait(launch, nodes, tmp_path):
    box = Box()
    cluster = RayCluster(nodes.place, tmp_path / "ray.log", "hog", box)
    for name in ("a", "b"):
        cluster.start(name, hog, {}, {"num_cpus": 3}, tmp_path / "log")
    held = set[str]()
    while len(held) < 2:
        fact = json.loads(box.get(timeout=PATIENCE_S).line)
        held |= {fact["id"]} if "holds" in fact else set()
    run = launch()
    said = list[str]()
    for line in run.process.stdout:
        said.append(line.strip())
        if "no room for client-0, client-1-2, client-evaluator" in line:
            break
    waits = "client-0 waits: no room on the Ray cluster: it takes 1 CPU, and 0 CPU is free on all"
    assert any(line.startswith(waits) for line in said), said
    family = run.family()
    run.process.send_signal(signal.SIGTERM)
    status, output = run.end(PATIENCE_S)
    assert status == 128 + signal.SIGTERM, said
    assert not [line for line in (*said, *output.splitlines()) if "ray/" in line or "rpc" in line]
    assert gone(family)
    cluster.end()


def test_a_head_that_says_nothing_is_left_at_once(launch, tmp_path):
    """Ray itself would hold a signal for as long as it waits for the head."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        run = launch("--on", f"ray://127.0.0.1:{server.getsockname()[1]}")
        until(
            lambda: any("fedsrv.ray.ray_driver" in p.cmdline() for p in run.family()), "it begins"
        )
        until(lambda: "rpc_client" in run.log("ray"), "Ray has not tried to reach it")
        family = run.family()
        run.process.send_signal(signal.SIGTERM)
        assert run.end(PATIENCE_S) == (-signal.SIGTERM, "")
        assert gone(family)


def test_more_hosts_than_there_is_room_for_are_refused(launch):
    status, output = launch("--host-cpus", "2").end(PATIENCE_S)
    assert status == 2
    assert "has room for 2 hosts of 2 CPU and 0 GPU, and 3 are to run, one of them for" in output
    assert "Traceback" not in output


def test_data_are_dealt_out_on_the_nodes(launch, tmp_path, steer):
    """The run also outlives the process that talks to Ray, which ends all that is on the nodes."""
    (steer / "train-0-3").touch()
    run = launch("--node-dir", str(tmp_path / "disk"))
    reached(steer / "train-0-3.reached", PATIENCE_S)
    driver_of(run).kill()
    status, output = run.end(PATIENCE_S)
    assert status == 0, output
    died = "the process that talks to Ray died (killed by signal 9; see "
    assert died in output.replace("\n", " ")
    (own,) = (tmp_path / "disk").glob("run-*")
    assert {p.name for p in own.iterdir()} == {"clients", "data", ".data.lock"}
    assert not (run.out / "clients").exists()
    alone = run_in_process(HELD, run.out / "data", tmp_path / "alone", evaluator=True)
    assert summary_of(run.out)["state_sha256"] == alone["state_sha256"]


def test_a_sweep_whose_runs_are_tasks_runs_each_once(nodes, tmp_path):
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
        said = [line.split()[0] for line in done.stdout.splitlines() if " runs on " in line]
        assert sorted(said) == tasks, done.stdout + done.stderr
        assert "wrong-seed0 failed: error: " in done.stdout
        assert done.returncode == 1
        assert "1 of 2 runs failed and are left out: wrong-seed0" in done.stderr
    assert summary_of(tmp_path / "out" / "fine-seed0")


def test_a_node_that_dies_costs_nothing(launch, nodes, tmp_path, steer):
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
