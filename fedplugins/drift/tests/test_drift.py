"""Drift of a client: in records, report and live page, warned of, and the same after a restart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.runtime.state import StateDirectory
from fedcli.runtime.worker import Worker
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed, ConfigError, PayloadError
from fedmodels.methods.fedrep import FedRep
from fedmodels.numerics.alarm_levels import Alarms, Levels
from fedmodels.numerics.data_drift import DRIFT_PARTS, NAMES, Summary, Watched, moved
from fedmodels.tensors.bundle import Bundle
from fedplugins.drift import client as drift
from fedplugins.drift.client import DriftMeter
from fedplugins.drift.panels import of_drift, what_moved
from fedplugins.drift.server import Drift, figures_of_alarms
from fedplugins.drift.shared import Drift as WireDrift
from fedplugins.drift.shared import places_of
from fedsrv.dashboard.live import charts_of
from fedsrv.engine.rounds import Engine
from fedsrv.engine.schedule import Step
from fedsrv.parts import parts_of
from fedsrv.progress.events import EventLog
from fedsrv.report.frame import group_runs
from fedsrv.report.page import page
from fedsrv.report.tables import report_command
from fedsrv.state.run_record import read_run
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.report.test_report import at, hand_written
from tests.fedtide.test_changing_scenarios import EXPERIMENT, dealt, scored_record, turning

CAPTION = "how far inputs moved from earlier tasks"


CPU = torch.device("cpu")
ALL_PLACES = [name for part in DRIFT_PARTS for name in places_of(part)]


def experiment_with(on: bool = True, **more: Any) -> Experiment:
    schedule = {"order": "tasks_outer", "rounds": 2, "clients": 3}
    return tiny_experiment(schedule=schedule, evaluate={"drift": on}, **more)


def figures_of(run: Path) -> list[dict[str, dict[str, float]]]:
    """Return the figures of drift of each record, by client."""
    return [
        {
            c: {k: v for k, v in row.items() if k in (*NAMES, *ALL_PLACES)}
            for c, row in record["clients"].items()
        }
        for record in records_of(run)
    ]


@pytest.mark.parametrize(
    "more",
    [
        {"method": "fedrep"},
        {"method": "fedavg", "compression": {"up": "int8"}},
    ],
)
def test_drift_is_measured_from_the_second_task_on(digits, tmp_path, more):
    """It changes no state, and no upload."""
    summary = run_in_process(experiment_with(**more), digits, tmp_path / "run")
    plain = run_in_process(experiment_with(on=False, **more), digits, tmp_path / "plain")
    assert summary["state_sha256"] == plain["state_sha256"]
    assert summary["bytes"]["up"] == plain["bytes"]["up"]
    found = figures_of(tmp_path / "run")
    assert all(not row for record in found[:2] for row in record.values())
    for record, row in zip(records_of(tmp_path / "run")[2:], found[2:], strict=True):
        for client in ("0", "1", "2"):
            assert set(NAMES) <= row[client].keys() <= {*NAMES, *ALL_PLACES}
            assert all(0 <= row[client][name] <= 1 for name in NAMES)
            assert all(round(row[client][name], 2) == row[client][name] for name in NAMES[::2])
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
    run_in_process(experiment_with(on=False, method="fedrep"), digits, tmp_path / "plain")


def test_a_shift_is_a_warning_once_and_shown(digits, tmp_path, caplog):
    """At the client by its own levels, in the record, and on both pages."""
    experiment, events = experiment_with(method="fedavg"), EventLog()
    shutil.copytree(digits, tmp_path / "data")
    for client in ("0", "1", "2"):
        place = tmp_path / "data" / client
        about = json.loads((place / "client.json").read_text())
        about["tasks"][1] = about["tasks"][0]
        (place / "client.json").write_text(json.dumps(about))
        shutil.rmtree(place / "task-1")
        shutil.copytree(place / "task-0", place / "task-1")
        x = np.load(place / "task-1" / "train_x.npy")
        if client != "1":
            x[:, :, 3, 4] = 240 + x[:, :, 3, 4] % 3
        np.save(place / "task-1" / "train_x.npy", x)
    store = Store(tmp_path / "run", experiment, resume=False)
    cohort = InProcessCohort(experiment, tmp_path / "data", tmp_path / "run" / "clients")
    Engine(experiment, cohort, store, events, parts_of(store, events)).run()
    store.close()
    lines = [event.detail["line"] for event in events._kept if event.kind == "note"]
    (line,) = (line for line in lines if "moved from those of earlier tasks" in line)
    assert line.startswith(
        "training data of task 1 moved from those of earlier tasks at clients 0, 2;"
    )
    assert "; docs/drift.md" in line
    assert "; the most: the spread of channel 0 within an example, by more than 4.6 " in line
    own = [text for text in caplog.messages if "moved since task 0" in text]
    assert len(own) == 2, "each client says it once, in the first of two rounds"
    assert all("; so did channel 0 at row 3 of 8, column 4 of 8, " in text for text in own)
    assert own[0].startswith("client 0, task 1: inputs moved since task 0: the spread of channel 0")
    (told,) = (record["drift"] for record in records_of(tmp_path / "run") if "drift" in record)
    assert [alarm["client"] for alarm in told] == [0, 2]
    run = read_run(tmp_path / "run")
    assert CAPTION in {chart.caption for chart in charts_of(run) if chart.is_telling}
    shown = page(group_runs([run]))
    assert CAPTION in shown
    told_at = shown.index("data moved: ")
    assert "client 2, task 1: the spread of channel 0" in shown[told_at : told_at + 300]
    assert what_moved(run)[1].startswith("round 3, client 0, task 1: the spread of channel 0")


def rows_of(moved: float, *clients: int) -> dict[str, dict[str, float]]:
    row = {"input_drift": moved, "input_drift_p": 1e-7, "input_drift_number": 2.0}
    still = {"9": {"input_drift": 0.1, "input_drift_p": 0.5}}
    return {**{str(client): dict(row) for client in clients}, **still}


def told_by(steps: Sequence[tuple[dict[str, Any], Mapping[int, int]]]) -> list[str]:
    """Return what the coordinator says of interactions: rows of clients, and tasks of all."""
    events = EventLog()
    told = Drift(SimpleNamespace(experiment=SimpleNamespace(data=None), ledger=None), events)
    facts = SimpleNamespace(problem=SimpleNamespace(input_shape=(8,), num_classes=3))
    at = SimpleNamespace(ctx=SimpleNamespace(run=facts), plan=SimpleNamespace(profiles={}))
    for number, (rows, tasks) in enumerate(steps):
        record: Any = {"interaction": number, "task": number, "clients": rows, "metrics": {}}
        at.step = Step(number, number, number, (), True, False, tasks={9: 0, **tasks})
        told.records(at, None, record)
        told.committed(record)
    return [event.detail["line"] for event in events._kept]


def test_an_open_run_warns_of_the_clients_own_tasks():
    """Client 1 has its first new data, its second task, in stage 3; client 0 stays on its third."""
    steps = [
        (rows_of(0.3), {0: 0, 1: 0}),
        (rows_of(0.3, 0), {0: 2, 1: 0}),
        (rows_of(0.3, 0, 1), {0: 2, 1: 1}),
        (rows_of(0.3, 0, 1), {0: 3, 1: 1}),
        (rows_of(0.7, 0, 1), {0: 4, 1: 2}),
    ]
    said = told_by(steps)
    assert [line.partition("; docs")[0] for line in said] == [
        "training data of task 2 moved from those of earlier tasks at client 0: the mean of number "
        "2, by 0.77 standard deviations (p = 1e-07)",
        "training data of task 1 moved from those of earlier tasks at client 1: the mean of number "
        "2, by 0.77 standard deviations (p = 1e-07)",
        "training data of task 4 moved from those of earlier tasks at client 0: the mean of number "
        "2, by 2.1 standard deviations (p = 1e-07)",
        "training data of task 2 moved from those of earlier tasks at client 1: the mean of number "
        "2, by 2.1 standard deviations (p = 1e-07)",
    ], "what lasts is told again where it doubled"


def test_an_alarm_names_the_columns_that_moved():
    """In the line, and in the record by itself; the second alarm of a run is as the first."""
    row = rows_of(0.5, 0)
    row["0"] |= {"input_drift_number_2": 8 + 5.0, "input_drift_number_3": 16 + 1.0}
    (line,) = told_by([(row, {0: 1})])
    assert line.endswith(
        "the mean of number 2, by 1.3 standard deviations (p = 1e-07); so did how much number 5 "
        "varies from example to example, the share of class 1; docs/drift.md"
    )
    (alarm,) = alarms_by(row, {0: 1})
    assert alarm["columns"] == ["number 2", "number 5", "the share of class 1"]
    assert alarm["line"] in line


def alarms_by(rows: dict[str, Any], tasks: Mapping[int, int]) -> list[dict[str, Any]]:
    record: Any = {"interaction": 0, "task": 0, "clients": rows, "metrics": {}}
    told = Drift(SimpleNamespace(experiment=SimpleNamespace(data=None), ledger=None), EventLog())
    facts = SimpleNamespace(problem=SimpleNamespace(input_shape=(8,), num_classes=3))
    at: Any = SimpleNamespace(ctx=SimpleNamespace(run=facts), plan=SimpleNamespace(profiles={}))
    at.step = Step(0, 0, 0, (), True, False, tasks={9: 0, **tasks})
    told.records(at, None, record)
    return list(record["drift"])


def test_a_report_as_json_has_what_moved(tmp_path, capsys):
    alarm = {"client": 7, "task": 1, "line": "the mean of 'age', by 2 standard deviations"}
    run = hand_written(tmp_path / "run", at(0, 0, task=0), {**at(1, 1, task=1), "drift": [alarm]})
    report_command([run.path], None, as_json=True)
    (told,) = json.loads(capsys.readouterr().out)
    assert told["moved"] == [
        "round 2, client 7, task 1: the mean of 'age', by 2 standard deviations"
    ]


def test_places_are_told_in_their_order():
    part = WireDrift(SimpleNamespace(input_shape=(8,), num_classes=3))
    told = {"input_drift": 0.5, "input_drift_p": 1e-7, "input_drift_number": 2.0}
    part.check_told({**told, "input_drift_number_2": 66.0}, 9)
    for more, line in (
        ({"input_drift_number_3": 1.0}, "'input_drift_number_3' without 'input_drift_number_2'"),
        ({"input_drift_number_2": 67.0}, "is 67, no place in a list of 67"),
    ):
        with pytest.raises(PayloadError, match=line):
            part.check_told(told | more, 9)


def test_clients_with_one_reason_share_a_line():
    (line,) = told_by([(rows_of(0.5, *range(8)), dict.fromkeys(range(8), 1))])
    assert "at clients 0, 1, 2" in line
    assert "; the most: the mean of number 2" in line


def test_a_restart_knows_what_was_told(tmp_path):
    """Alarms follow from committed records: the second part reads those of the first."""
    records: list[Any] = []
    ledger = SimpleNamespace(record=lambda n: records[n])
    store = SimpleNamespace(experiment=SimpleNamespace(data=None), ledger=ledger)
    facts = SimpleNamespace(problem=SimpleNamespace(input_shape=(8,), num_classes=3))
    at = SimpleNamespace(ctx=SimpleNamespace(run=facts), plan=SimpleNamespace(profiles={}))

    def told_with(part: Drift, number: int) -> Any:
        rows = rows_of(0.3, 0) if number else rows_of(0.3)
        record: Any = {"interaction": number, "task": 9, "clients": rows, "metrics": {}}
        at.step = Step(number, number, 9, (), True, False, tasks={0: number, 9: number})
        part.records(at, None, record)
        return record

    first = Drift(store, EventLog())
    records += [told_with(first, number) for number in range(4)]
    assert ["drift" in record for record in records] == [False, True, False, False]
    again = Drift(store, EventLog())
    assert "drift" not in told_with(again, 4)
    assert vars(again._seen) == vars(first._seen) | {
        "interactions": 5, "_alarms": again._seen._alarms, "_tasks": {"0": 4, "9": 4}
    }  # fmt: skip
    assert "drift" in told_with(again, 1), "after a roll-back it is told anew"


def test_what_a_client_keeps_does_not_grow(digits, tmp_path):
    """Of 40 tasks it keeps the first three, the last and the one before."""
    worker = Worker(0, ClientData(digits / "0"), StateDirectory(tmp_path), experiment_with(), CPU)
    meter = next(part for part in worker.parts if isinstance(part, DriftMeter))
    x, y = torch.randn(60, 9), torch.arange(60) % 6
    kept: dict[str, torch.Tensor] = {}
    for task in range(40):
        now = Summary.of(task, Watched(x, 9, y, y, 6))
        kept = meter._kept([*drift._summaries(kept), now])
        if task == 5:
            size = sum(t.nbytes for t in kept.values())
    assert [int(one.task) for one in drift._summaries(kept)] == [0, 1, 2, 38, 39]
    assert sum(t.nbytes for t in kept.values()) == size < 20_000
    meter._slides = True
    for task in range(40):
        now = Summary.of(task, Watched(x, 9, y, y, 6))
        kept = meter._kept([*drift._summaries(kept), now])
    assert [int(one.task) for one in drift._summaries(kept)] == [36, 37, 38, 39]
    again, last = drift._read(
        drift._written(Alarms(Levels(10, 7, (2, 5)), {"prediction": 0.25}), 6)
    )
    assert (again, last) == (Alarms(Levels(10, 7, (2, 5)), {"prediction": 0.25}), 6)


def year_of(month: int, seed: int, jump: float = 0.0) -> Summary:
    """Return a month of 90 rows, whose first number goes up and down by one deviation a year."""
    rng = torch.Generator().manual_seed(1000 * seed + month)
    x, y = torch.randn(90, 3, generator=rng), torch.arange(90) % 2
    x[:, 0] += np.sin(2 * np.pi * month / 12) + jump
    return Summary.of(month, Watched(x, 3, y, y, 2))


def alarms_of(meter: DriftMeter, seed: int, months: int, jump_at: int = 10**6) -> list[int]:
    """Return in which months of a site inputs moved at the level of the coordinator's alarms."""
    kept: dict[str, torch.Tensor] = {}
    told = []
    for month in range(months):
        now = year_of(month, seed, 3.0 * (month >= jump_at))
        before = drift._summaries(kept)
        found = moved(*meter._compared(before, month), now)
        if found is not None and found.p < 0.00025:
            told.append(month)
        kept = meter._kept([*before, now])
    return told


def test_a_season_is_compared_with_itself(digits, tmp_path):
    """A yearly wave of one deviation raised alarms each autumn; what is new still does."""
    worker = Worker(0, ClientData(digits / "0"), StateDirectory(tmp_path), experiment_with(), CPU)
    meter = next(part for part in worker.parts if isinstance(part, DriftMeter))
    assert all(alarms_of(meter, seed, 36) for seed in range(5)), "with the first tasks it is drift"
    meter._season = 12
    assert not any(alarms_of(meter, seed, 36) for seed in range(40))
    assert alarms_of(meter, 0, 30, jump_at=27)[:1] == [27]
    kept: dict[str, torch.Tensor] = {}
    for month in range(80):
        kept = meter._kept([*drift._summaries(kept), year_of(month, 0)])
    assert [int(one.task) for one in drift._summaries(kept)] == [*range(36), 79]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"drift_season": 52}, 'drift_season is for drift_reference = "season"'),
        (
            {"drift_reference": "season", "drift_season": 52, "drift_window": 4},
            "more than the 160 tasks",
        ),
    ],
)
def test_a_season_that_cannot_be_is_refused(more, line):
    with pytest.raises(ConfigError, match=line):
        tiny_experiment(evaluate={"drift": True, **more})
    tiny_experiment(evaluate={"drift": True, "drift_reference": "season", "drift_season": 52})


def test_keys_of_drift_need_drift():
    with pytest.raises(
        ConfigError, match="drift_window says how drift is measured: set drift = tr"
    ):
        tiny_experiment(evaluate={"drift_window": 4})


def test_the_figures_are_those_of_the_page_of_metrics():
    from fedmodels.numerics.metric_tables import METRICS

    assert {*NAMES, *ALL_PLACES} <= METRICS.keys()


def test_a_run_on_change_says_how_soon_changes_were_told(tmp_path):
    """Clients 0 and 2 follow the first list of concepts, and client 1 the second: 5 changes."""
    tables = EXPERIMENT.to_dict()
    drifts = tiny_experiment(**{**tables, "evaluate": {**tables["evaluate"], "drift": True}})
    dealt(tmp_path / "data", "npy")
    metrics = run_in_process(drifts, tmp_path / "data", tmp_path / "run")["metrics"]
    assert metrics["drift_missed"] * 5 == pytest.approx(round(metrics["drift_missed"] * 5))
    assert metrics["drift_false_alarms"] in (0, 1)  # of the one task that shows what one before did


def test_an_alarm_that_is_missed_counts_once_and_only_while_a_client_goes_on():
    """Client 0 has one task; what client 1 shows turns between its tasks 0 and 1 alone."""
    experiment = turning([1, 3, 3], rounds=2)
    records = [
        scored_record(0, 0, [0, 1], {"0": [], "1": []}),
        scored_record(1, 0, [0, 1], {"0": [0.9], "1": [0.9]}),
        scored_record(2, 1, [1], {"1": []}),
        scored_record(3, 1, [1], {"0": [0.9], "1": [0.8, 0.9]}),
        scored_record(4, 2, [1], {"1": []}),
        scored_record(5, 2, [1], {"0": [0.9], "1": [0.8, 0.7, 0.6]}),
    ]
    assert figures_of_alarms(records, experiment) == {}, "nobody measured drift"
    records[3]["clients"]["1"]["input_drift_p"] = 0.5
    found = figures_of_alarms(records, experiment)
    assert found["drift_missed"] == 1
    assert "drift_false_alarms" not in found
    records[3]["drift"] = [{"client": 1, "task": 1}]
    assert figures_of_alarms(records, experiment)["drift_delay"] == 0


def test_a_row_of_a_chart_of_drift_is_a_client(tmp_path):
    rows = [{**at(i, i, task=0), "clients": {"7": {"input_drift": 0.1 + i}}} for i in range(3)]
    run = hand_written(tmp_path / "run", *rows)
    drawn = next(of_drift(run))
    assert drawn.values[""].keys() == {(7, 1), (7, 2), (7, 3)}
