"""A run whose inputs and labels change: killed, taken up, of both layouts, with its figures."""

from __future__ import annotations

import io
import json

import pytest
import tomli_w
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.data.store.partition_writer import Layout
from fedsrv.parts.changes import figures_of_change
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
    evaluate={"prequential": True},
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


def scored_record(at, task, cohort, tasks, **rows):
    """Return a record in which each client's model has these accuracies, by task."""
    clients = {
        client: {"views": {"global": {"tasks": accuracies}}} if accuracies else {"loss": 1.0}
        for client, accuracies in tasks.items()
    }
    for client, task_of in rows.items():
        clients[client[1:]]["task"] = task_of
    return {"round": at, "task": task, "cohort": cohort, "clients": clients, "metrics": {}}


def moments_in(tmp_path, experiment, records):
    (tmp_path / "config.toml").write_text(tomli_w.dumps(experiment.to_dict()))
    (tmp_path / "rounds.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    return moments_of_change(read_run(tmp_path))


def turning(tasks, **schedule):
    domains = {"show": ["plain", "rotate 180"], "when": "recurring"}
    return tiny_experiment(
        scenario={"kind": "iid", "tasks": tasks, "domains": domains},
        schedule={"order": "tasks_outer", **schedule},
    )


def test_a_client_whose_tasks_end_early_has_no_changes_after_them(tmp_path):
    """Client 0 has one task, and is scored on it while client 1 goes on; rounds 1, 3, 5 are."""
    experiment = turning([1, 3, 3], rounds=2)
    records = [
        scored_record(0, 0, [0, 1], {"0": [], "1": []}),
        scored_record(1, 0, [0, 1], {"0": [0.9], "1": [0.9]}),
        scored_record(2, 1, [1], {"1": []}),
        scored_record(3, 1, [1], {"0": [0.9], "1": [0.8, 0.9]}),
        scored_record(4, 2, [1], {"1": []}),
        scored_record(5, 2, [1], {"0": [0.9], "1": [0.8, 0.7, 0.6]}),
    ]
    metrics = figures_of_change(records, experiment)
    # client 1 alone: recovered in the second round of task 1, and not in the two of task 2
    assert (metrics["recovery_rounds"], metrics["recovered"]) == (2, 0.5)
    assert metrics["present"] == pytest.approx((0.9 + (0.9 + 0.9 + 0.6) / 3) / 2)
    assert metrics["forgetting_domains"] == pytest.approx(0.9 - 0.7)
    assert moments_in(tmp_path, experiment, records) == {
        3: "round 3: domains change at 1 client",
        5: "round 5: domains change at 1 client",
    }


def test_models_just_trained_are_scored_on_the_present_task_alone():
    """Client 0 misses its last round; client 1 is trained in every one."""
    experiment = turning(2, rounds=1)
    records = [
        scored_record(0, 0, [0, 1], {"0": [0.5], "1": [0.5]}),
        scored_record(1, 1, [1], {"0": [0.5, 0.4], "1": [0.5, 0.4]}),
    ]
    trained = [{"0": [0.9], "1": [0.7]}, {"1": [0.2, 0.6]}]
    for record, by_client in zip(records, trained, strict=True):
        for client, tasks in by_client.items():
            record["clients"][client]["views"]["after_local"] = {"tasks": tasks}
    metrics = figures_of_change(records, experiment)
    assert metrics["present"] == pytest.approx(0.45)
    assert metrics["present_trained"] == pytest.approx((0.9 + (0.7 + 0.6) / 2) / 2)


def test_clients_of_an_open_run_change_at_their_own_tasks(tmp_path):
    """Client 1 came when client 0 was in its last task."""
    experiment = turning(2, rounds=1, open=True)
    records = [
        scored_record(0, 0, [0], {"0": [0.9]}, c0=0),
        scored_record(1, 1, [0, 1], {"0": [0.9, 0.5], "1": [0.9]}, c0=1, c1=0),
        scored_record(2, 2, [1], {"1": [0.9, 0.9]}, c1=1),
    ]
    assert moments_in(tmp_path, experiment, records) == {
        2: "round 2: domains change at 1 client",
        3: "round 3: domains change at 1 client",
    }
    metrics = figures_of_change(records, experiment)
    assert (metrics["recovery_rounds"], metrics["recovered"]) == (1, 0.5)
