"""A run whose inputs and labels change: killed, taken up, of both layouts, with its figures."""

from __future__ import annotations

import io

import pytest
import tomli_w
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.data.store.partition_writer import Layout
from fedsrv.report.frame import group_runs
from fedsrv.report.panels import over_rounds, with_moments
from fedsrv.report.quantities import moments_of_change
from fedsrv.state.run_record import read_run
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.runs import assert_same, dies, ends_as, killed

CHANGING = {
    "kind": "iid",
    "tasks": 3,
    "blur": 0.1,
    "domains": {"show": ["plain", "rotate 180"], "order": [[0, 1, 0], [0, 1]]},
    "concepts": {"show": ["plain", "swap 0 1"], "every": 2, "clients": [0, 2]},
}
EXPERIMENT = tiny_experiment(
    scenario=CHANGING,
    schedule={"rounds": 2, "order": "tasks_outer"},
    evaluate={"drift": True, "prequential": True},
)


def dealt(place, layout):
    made = EXPERIMENT
    run_partition(
        made.data, made.scenario, 3, made.seed, place, Console(file=io.StringIO()), layout=layout
    )
    return place


def test_a_run_on_change_survives_a_kill_and_says_what_change_costs(tmp_path):
    data = dealt(tmp_path / "data", Layout.DIRECTORIES)
    whole = run_in_process(EXPERIMENT, data, tmp_path / "whole")
    metrics = whole["metrics"]
    # clients 0 and 2 follow the first list, and client 1 the second: 5 changes
    assert 0 <= metrics["recovered"] <= 1 <= metrics["recovery_rounds"] <= 4
    assert metrics["drift_missed"] * 5 == pytest.approx(round(metrics["drift_missed"] * 5))
    assert metrics["drift_false_alarms"] in (0, 1)  # of the one task that shows what one before did
    assert metrics["forgetting_domains"] == pytest.approx(
        -metrics["backward_transfer_domains"], abs=0.2
    )
    (tmp_path / "whole" / "config.toml").write_text(tomli_w.dumps(EXPERIMENT.to_dict()))
    run = read_run(tmp_path / "whole")
    assert moments_of_change(run) == {
        3: "round 3: domains and concepts change at 3 clients",
        5: "round 5: domains and concepts change at 2 clients",
    }
    charts = with_moments(over_rounds(groups := group_runs([run])), groups)
    assert {*map(len, (chart.moments for chart in charts))} == {2}
    killed(EXPERIMENT, data, tmp_path / "killed", before=dies(interaction=3))
    ends_as(whole, EXPERIMENT, data, tmp_path / "killed")
    store = dealt(tmp_path / "store", Layout.STORE)
    assert_same(run_in_process(EXPERIMENT, store, tmp_path / "stored"), whole)
