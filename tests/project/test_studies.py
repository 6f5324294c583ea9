"""What the studies of benchmarks/ have to compare; ``fedsrv sweep`` itself has tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.config_file import parse_experiment
from fedsrv.sweep.plan import Sweep, plan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return a function from a study to the experiments of its rows."""
    monkeypatch.chdir(ROOT)

    def experiments(study: str) -> dict[str, Experiment]:
        found = Sweep.read(ROOT / "benchmarks" / "studies" / f"{study}.toml")
        runs = plan(found, tmp_path, list(found.methods), [0])
        return {run.cell.row: parse_experiment(run.config, run.cell.row) for run in runs}

    return experiments


def test_fedali_is_compared_on_nets_that_pool_by_the_mean(rows_of):
    """The class token sees an image through attention alone, which tokens of norm 1 weaken."""
    rows = rows_of("fedali-cifar")
    assert [row for row, found in rows.items() if found.net.options()["pool"] == "cls"] == [
        "the head reads the class token: FedAli",
        "the head reads the class token: FedAvg",
    ]


def test_fedali_is_compared_on_clients_as_the_paper_defines_them(rows_of):
    assert {found.schedule.clients for found in rows_of("fedali-wisdm").values()} == {58}


def test_gldp_is_compared_among_the_same_classes(rows_of):
    assert all(found.evaluate.class_masks for found in rows_of("gldp").values())
