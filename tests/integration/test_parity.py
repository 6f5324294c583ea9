"""The same run, whatever carries it: in process, one process per client, two clients per process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.inprocess import run_in_process
from tests.integration.conftest import Sites, tables

pytestmark = pytest.mark.loopback

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox", "mu": 0.1},
    "local": {"name": "local"},
    "centralized": {"name": "centralized", "data": "own"},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_layout_ends_in_the_same_state(
    method: str, loopback: Sites, partition: Path, tmp_path: Path
) -> None:
    experiment = tables(method, method=METHODS[method])
    alone = run_in_process(experiment, partition, tmp_path / "in-process")
    single = loopback(experiment, "single").run("0", "1", "2")
    paired = loopback(experiment, "paired").run("0-1", "2")
    assert single["state_sha256"] == alone["state_sha256"] == paired["state_sha256"]
    assert single["metrics"] == alone["metrics"] == paired["metrics"]
    for key in ("down", "up"):
        assert single["bytes"][key] == alone["bytes"][key] == paired["bytes"][key]


def test_a_host_fetches_the_common_part_once(loopback: Sites) -> None:
    experiment = tables("fedavg", evaluate={"every": 0})
    single = loopback(experiment, "single").run("0", "1", "2")
    hosted = loopback(experiment, "hosted").run("0-2")
    assert hosted["bytes"]["down"] == single["bytes"]["down"]
    assert hosted["bytes"]["wire_down"] < 0.5 * single["bytes"]["wire_down"]
