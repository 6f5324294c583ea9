"""Drift of a client: in records, report and live page, warned of, and the same after a restart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedcli.runtime.worker import Worker
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed
from fedmodels.methods.fedrep import FedRep
from fedmodels.numerics.data_drift import NAMES
from fedmodels.tensors.bundle import Bundle
from fedsrv.dashboard.live import charts_of
from fedsrv.engine.rounds import Engine
from fedsrv.engine.schedule import Step
from fedsrv.events import EventLog
from fedsrv.parts import parts_of
from fedsrv.parts.drift import Drift
from fedsrv.report.page import page
from fedsrv.report.run_record import group_runs, read_run
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import records_of, tiny_experiment

CAPTIONS = {f"how far {part}s moved from the task before" for part in ("input", "prediction")}


def experiment_with(drift: bool = True, **more: Any) -> Experiment:
    schedule = {"order": "tasks_outer", "rounds": 2, "clients": 3}
    return tiny_experiment(schedule=schedule, evaluate={"drift": drift}, **more)


def figures_of(run: Path) -> list[dict[str, dict[str, float]]]:
    """Return the figures of drift of each record, by client."""
    return [
        {c: {k: v for k, v in row.items() if k in NAMES} for c, row in record["clients"].items()}
        for record in records_of(run)
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"method": "fedrep"},
        {"method": "fedavg", "compression": {"up": "int8"}},
        {"method": "fedavg", "training": {"together": 3}},
    ],
)
def test_drift_is_measured_from_the_second_task_on(digits, tmp_path, more):
    """It changes no state, and no upload."""
    summary = run_in_process(experiment_with(**more), digits, tmp_path / "run")
    plain = run_in_process(experiment_with(drift=False, **more), digits, tmp_path / "plain")
    assert summary["state_sha256"] == plain["state_sha256"]
    assert summary["bytes"]["up"] == plain["bytes"]["up"]
    found = figures_of(tmp_path / "run")
    assert all(not row for record in found[:2] for row in record.values())
    for record, row in zip(records_of(tmp_path / "run")[2:], found[2:], strict=True):
        for client in ("0", "1", "2"):
            assert row[client].keys() == set(NAMES)
            assert all(0 <= value <= 1 for value in row[client].values())
        mean = sum(row[client]["input_drift"] for client in ("0", "1", "2")) / 3
        assert record["metrics"]["input_drift"] == pytest.approx(mean)
    inputs = [[row[c]["input_drift"] for c in ("0", "1", "2")] for row in found[2:]]
    assert inputs[0] == inputs[1], "the inputs of a task stay"
    assert not any(set(NAMES) & row.keys() for row in figures_of(tmp_path / "plain")[3].values())


def test_a_client_that_restarts_before_each_order_says_the_same(digits, tmp_path, monkeypatch):
    run_in_process(experiment_with(), digits, tmp_path / "run")
    began = Worker.begin

    def restarted(worker: Worker, *args: Any) -> Any:
        worker.close()
        worker.stream.num_seen = 0
        return began(worker, *args)

    monkeypatch.setattr(Worker, "begin", restarted)
    run_in_process(experiment_with(), digits, tmp_path / "again")
    assert figures_of(tmp_path / "again") == figures_of(tmp_path / "run")


def test_a_method_may_not_keep_something_by_the_name_of_a_part(digits, tmp_path, monkeypatch):
    """It was taken for a summary, and the method began without it."""
    after = FedRep.after_local

    def kept(self: FedRep, ctx: Any, state: Bundle, refs: Any) -> Bundle:
        found = after(self, ctx, state, refs)
        return Bundle({**found.weights, "drift/mine": torch.ones(2)})

    monkeypatch.setattr(FedRep, "after_local", kept)
    experiment = experiment_with(method="fedrep")
    with pytest.raises(ClientFailed, match="after_local of FedRep keeps 'drift/mine', and the run"):
        run_in_process(experiment, digits, tmp_path / "run")
    run_in_process(experiment_with(drift=False, method="fedrep"), digits, tmp_path / "plain")


def test_a_shift_is_a_warning_once_and_shown(digits, tmp_path):
    """A line for each part of a task, which names its clients."""
    experiment, events = experiment_with(), EventLog()
    store = Store(tmp_path / "run", experiment, resume=False)
    cohort = InProcessCohort(experiment, digits, tmp_path / "run" / "clients")
    Engine(experiment, cohort, store, events, parts_of(store, events)).run()
    store.close()
    lines = [event.detail["line"] for event in events._kept if event.kind == "note"]
    moved = [line for line in lines if "moved from those of the task before" in line]
    assert len(moved) == len({*moved}) > 0
    rows = figures_of(tmp_path / "run")[2]
    clients = [c for c in ("0", "1", "2") if rows[c]["input_drift_p"] < 0.01]
    (inputs,) = (line for line in moved if line.startswith("inputs of task 1"))
    assert f"at client{'s' if len(clients) > 1 else ''} {', '.join(clients)}: by up to" in inputs
    run = read_run(tmp_path / "run")
    assert {chart.caption for chart in charts_of(run) if chart.is_telling} >= CAPTIONS
    assert all(caption in page(group_runs([run])) for caption in CAPTIONS)


def test_each_client_and_task_is_warned_of_once():
    """With rounds_outer, tasks come again in each round."""
    events = EventLog()
    told = Drift(SimpleNamespace(experiment=None), events)

    def record(task: int, *clients: str) -> Any:
        rows = {c: {"input_drift": 0.5, "input_drift_p": 0.001} for c in clients}
        still = {"9": {"input_drift": 0.1, "input_drift_p": 0.5}}
        return {"interaction": 0, "task": task, "clients": {**rows, **still}, "metrics": {}}

    for each in (record(1, "0"), record(2, "0"), record(1, "0"), record(2, "0", "4"), record(3)):
        step = Step(0, 0, each["task"], (), True, False)
        told.records(SimpleNamespace(step=step), None, each)
        told.committed(each)
    said = [event.detail["line"].partition(":")[0] for event in events._kept]
    before = "moved from those of the task before at client"
    assert said == [f"inputs of task {t} {before} {c}" for t, c in ((1, 0), (2, 0), (2, 4))]


def test_an_open_run_warns_of_the_clients_own_tasks():
    """Client 1 has its first new data, its second task, in stage 3; client 0 stays on its third."""
    events = EventLog()
    told = Drift(SimpleNamespace(experiment=None), events)
    for stage, tasks in ((2, {0: 2, 1: 0}), (3, {0: 2, 1: 1}), (4, {0: 2, 1: 1})):
        moved = {"input_drift": 0.5, "input_drift_p": 0.001}
        rows = {str(client): dict(moved) if task else {} for client, task in tasks.items()}
        record: Any = {"interaction": stage, "task": stage, "clients": rows, "metrics": {}}
        step = Step(stage, stage, stage, (0, 1), True, False, tasks=tasks)
        told.records(SimpleNamespace(step=step), None, record)
        told.committed(record)
    said = [event.detail["line"].partition(" moved")[0] for event in events._kept]
    assert said == ["inputs of task 2", "inputs of task 1"]


def test_the_figures_are_those_of_the_page_of_metrics():
    from fedmodels.numerics.metric_names import METRICS

    assert set(NAMES) <= METRICS.keys()
