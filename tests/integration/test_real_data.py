"""Real data sets through the launcher; they lie where FEDTIDE_DATA says, or the tests skip."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from fedmodels.facts.resolution import experiment_of
from tests.conftest import records_of
from tests.integration.conftest import tables
from tests.integration.harness import summary_of, write_config

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.data,
    pytest.mark.skipif(
        not os.environ.get("FEDTIDE_DATA"), reason="FEDTIDE_DATA names no folder of data sets"
    ),
]

RUNS: dict[str, dict[str, Any]] = {
    "fashion-mnist": {
        "data": {"name": "fashion-mnist", "max_per_class": 60},
        "scenario": {"kind": "dirichlet", "alpha": 0.5},
    },
    "cifar10": {
        "data": {"name": "cifar10", "max_per_class": 30},
        "scenario": {"kind": "per_class_shards", "shards": 5, "tasks": 2},
    },
    "motionsense": {
        "data": {"name": "motionsense"},
        "scenario": {"kind": "natural"},
        "evaluate": {"generalization": True},
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_fedavg_learns_from_the_files_on_disk(name, tmp_path, fork_server):
    schedule = {"rounds": 2, "clients": 4}
    made = tables("fedavg", net={"name": "mlp", "hidden": [32]}, schedule=schedule, **RUNS[name])
    config = write_config(tmp_path / "config.toml", experiment_of(made))
    out = tmp_path / "run"
    launched = fork_server.start_fedsrv(["launch", str(config), "--out", str(out)])
    output, _ = launched.communicate(timeout=100)
    launched.close()
    assert launched.returncode == 0, output
    metrics = summary_of(out)["metrics"]
    assert metrics["a_glo"] > 0.1
    assert metrics["a_glo_balanced"] > 0.1
    if name == "motionsense":
        assert {"personalization", "personalization_std", "generalization", "global_f1"} <= set(
            metrics
        )
    records = records_of(out)
    assert records[-1]["metrics"]["loss"] < records[0]["metrics"]["loss"]


OPEN = """
import resource, sys
from pathlib import Path
import psutil
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream

def open_one(client):
    stream = TaskStream(ClientData(Path(sys.argv[1]) / client))
    stream.open(0)
    return stream, sum(t.nbytes for t in stream.train(0))

open_one("1")  # imports and allocator are warm
before = psutil.Process().memory_info().rss
stream, held = open_one("0")
print(held, psutil.Process().memory_info().rss - before)
"""


def test_a_client_holds_its_own_hundredth_only(tmp_path):
    """Of 60,000 images of 28 x 28 in float32, 188 MB in all, one of a hundred clients holds 1.9."""
    from rich.console import Console

    from fedcli.data.store.commands import run_partition

    made = experiment_of(
        tables(
            "fedavg",
            data={"name": "fashion-mnist"},
            scenario={"kind": "iid"},
            schedule={"clients": 100},
        )
    )
    root = tmp_path / "data"
    run_partition(made.data, made.scenario, 100, made.seed, root, Console(quiet=True))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(root)], capture_output=True, text=True, check=True
    )
    held, grown = map(int, done.stdout.split())
    whole = 60_000 * (28 * 28 * 4 + 8)
    assert held == pytest.approx(whole / 100, rel=0.01)
    assert grown < 3 * whole / 100
