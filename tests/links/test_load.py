"""A small version of benchmarks/load.py: a crowd with a liar, a stopped and a slow client in it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import light
from benchmarks.light import Light
from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.bundle import Problem
from fedmodels.training.run import RunFacts
from tests.integration.conftest import Loopback, tables

pytestmark = pytest.mark.loopback

CLIENTS, SLOW, LIAR, STOPPED = 12, 9, 10, 11
EXPERIMENT = tables(
    "fedavg",
    scenario={"kind": "iid"},
    net={"name": "mlp", "hidden": [16]},
    schedule={"rounds": 4, "clients": CLIENTS},
    evaluate={"every": 0, "views": ["global"]},
    server={"min_clients": 10, "deadline_s": 3.0},
)


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a partition for all of them."""
    from rich.console import Console

    from fedcli.data.store.commands import run_partition

    root, e = tmp_path_factory.mktemp("crowd") / "data", experiment_of(EXPERIMENT)
    run_partition(e.data, e.scenario, CLIENTS, e.seed, root, Console(quiet=True))
    return root


def light_clients(run: Loopback) -> threading.Thread:
    """Start an honest, the slow and the lying light client in this process."""
    weights = dict(RunFacts(run.experiment, Problem((1, 8, 8), 10)).initial_weights)
    kinds = {8: "honest", SLOW: "slow", LIAR: "liar"}
    made = [
        Light(c, (run.partition / str(c) / "client.json").read_text(), weights, kind)
        for c, kind in kinds.items()
    ]
    address = f"127.0.0.1:{run.port}"
    thread = threading.Thread(target=lambda: asyncio.run(light._live_all(made, address)))
    thread.start()
    return thread


def test_a_crowd_with_a_liar_a_stopped_and_a_slow_client(loopback, crowd, monkeypatch):
    monkeypatch.setattr(light, "SLOW_S", 0.3)
    run = loopback(EXPERIMENT, partition=crowd)
    server = run.serve()
    real = [run.join("0-3"), run.join("4-7")]
    stopped = run.join(str(STOPPED))
    server.wait_kind("joined", client=str(STOPPED))
    os.kill(stopped.pid, signal.SIGSTOP)  # nothing has begun: the light clients are needed
    lights = light_clients(run)
    server.wait_kind("commit", interaction=1)
    used = psutil.Process(server.process.pid)
    files, threads, grown = used.num_fds(), used.num_threads(), used.memory_info().rss
    os.kill(stopped.pid, signal.SIGCONT)
    summary = run.finish(server, *real, stopped)
    lights.join(30)
    assert not lights.is_alive()
    assert summary["rounds"] == 4
    assert files < 60
    assert threads < 2 * CLIENTS + 40
    assert grown < 1 << 30
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (run.out / "rounds.jsonl").read_text().splitlines()
    ]
    honest = set(range(10))
    assert set(records[0]["cohort"]) <= honest, "who joins after the deadline is in the next round"
    assert set(records[1]["cohort"]) == honest
    assert all(honest <= set(r["cohort"]) <= honest | {STOPPED} for r in records[2:])
    assert sum(str(LIAR) in r.get("failed", {}) for r in records) >= 2
    assert "Traceback" not in server.log.read_text()
