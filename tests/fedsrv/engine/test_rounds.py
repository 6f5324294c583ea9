"""The engine over a whole run: clients at different tasks, schedules, growth of a finished run."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.runtime import workers
from fedcli.runtime.workers import Workers
from fedmodels.errors import ArchiveError
from fedmodels.facts.resolution import experiment_of
from fedmodels.tensors.bundle import EVALUATOR, Bundle, Problem
from fedmodels.training.run import RunFacts
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine import round_parts
from fedsrv.engine.cohort import Answer, Answers
from fedsrv.engine.commits import record_of
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.rounds import Engine
from fedsrv.engine.schedule import Step, scorers
from fedsrv.parts import parts_of
from fedsrv.progress.event_lines import EventFormatter
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Durations, Record, Traffic
from fedsrv.state.store import Store
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for

UNEQUAL = {"kind": "per_class_shards", "shards": 5, "tasks": [1, 3, 2]}


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """A partition in which the three clients have one, three and two tasks."""
    root = tmp_path_factory.mktemp("unequal") / "data"
    made = tiny_experiment(scenario=UNEQUAL)
    run_partition(made.data, made.scenario, 3, made.seed, root, Console(quiet=True))
    return root


@pytest.mark.parametrize("method", ["fedavg", "local", "gldp", "fedmlp", "pfedgraph"])
def test_clients_have_different_numbers_of_tasks_rounds_outer(method, unequal, tmp_path):
    experiment = experiment_for((method, {}), scenario=UNEQUAL)
    summary = run_in_process(experiment, unequal, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert [r["task"] for r in records] == [0, 1, 2] * 2
    assert [r["cohort"] for r in records] == [[0, 1, 2], [1, 2], [1]] * 2
    assert summary["metrics"]["a_loc"] > 0


@pytest.mark.parametrize("method", ["fedavg", "gldp", "fedmlp"])
def test_clients_have_different_numbers_of_tasks_tasks_outer(method, unequal, tmp_path):
    experiment = experiment_for(
        (method, {}), scenario=UNEQUAL, schedule={"order": "tasks_outer", "rounds": 2}
    )
    run_in_process(experiment, unequal, tmp_path / "run")
    records = records_of(tmp_path / "run")
    assert [r["task"] for r in records] == [0, 0, 1, 1, 2, 2]
    assert [r["round"] for r in records] == list(range(6))
    assert [r["cohort"] for r in records] == [[0, 1, 2]] * 2 + [[1, 2]] * 2 + [[1]] * 2
    if method == "fedavg":
        views = {c: row["views"]["global"] for c, row in records[-1]["clients"].items()}
        assert {c: len(v["tasks"]) for c, v in views.items()} == {"0": 1, "1": 3, "2": 2}


@pytest.mark.parametrize(("method", "notes"), [("fedavg", 1), ("centralized", 0)])
def test_a_run_says_who_has_no_training_example(method, notes, tmp_path):
    """Centralized wants it so: client 0 holds what all train on."""
    for client, size in enumerate((6, 0)):
        place = tmp_path / str(client) / "task-0"
        place.mkdir(parents=True)
        for part, n in (("train", size), ("test", 2)):
            np.save(place / f"{part}_x.npy", np.ones((n, 4), np.float32))
            np.save(place / f"{part}_y.npy", np.arange(n) % 2)
        (place.parent / "client.json").write_text('{"input_shape": [4], "num_classes": 2}')
    tables = {
        "net": {"name": "mlp"},
        "method": {"name": method},
        "schedule": {"clients": 2, "rounds": 1},
    }
    experiment, events = experiment_of(tables), EventLog()
    cohort = InProcessCohort(experiment, tmp_path, tmp_path / "clients")
    store = Store(tmp_path / "run", experiment, False)
    Engine(experiment, cohort, store, events, parts_of(store, events)).run()
    store.close()
    events.close()
    told = [EventFormatter().line(event) for event in events.listen(from_start=True)]
    found = [line for line in told if "no training example" in line]
    line = "note: no training example at client 1: if that is not meant, look with fedcli check DIR"
    assert found == [line] * notes


def test_a_cohort_stays_for_its_round(digits, tmp_path):
    experiment = tiny_experiment(schedule={"rounds": 4, "per_round": 2})
    run_in_process(experiment, digits, tmp_path / "run")
    cohorts = [r["cohort"] for r in records_of(tmp_path / "run")]
    assert all(len(c) == 2 for c in cohorts)
    assert cohorts[::2] == cohorts[1::2]
    assert len({tuple(c) for c in cohorts}) > 1


def test_the_last_record_has_the_confusion_matrix(digits, tmp_path):
    experiment = tiny_experiment(method="fedproto", schedule={"rounds": 2})
    run_in_process(experiment, digits, tmp_path / "run")
    *earlier, last = records_of(tmp_path / "run")
    assert all("confusions" not in record for record in earlier)
    assert set(last["confusions"]) == {"after_local", "after_downlink"}
    tested = sum(
        np.array(task["test"])
        for client in range(3)
        for task in json.loads((digits / str(client) / "client.json").read_text())["tasks"]
    )
    for view, counts in last["confusions"].items():
        assert np.array(counts).sum(1).tolist() == tested.tolist()
        by_class = [row["views"][view]["classes"] for row in last["clients"].values()]
        right = [any(row[label] for row in by_class) for label in range(len(counts))]
        assert [bool(counts[label][label]) for label in range(len(counts))] == right


def test_a_confusion_matrix_of_too_many_classes_is_not_counted(digits, tmp_path, monkeypatch):
    monkeypatch.setattr("fedsrv.engine.round_parts.MAX_CONFUSED", 9)
    run_in_process(tiny_experiment(schedule={"rounds": 1}), digits, tmp_path / "run")
    assert all("confusions" not in record for record in records_of(tmp_path / "run"))


def test_a_record_has_the_fields_of_its_type(digits, tmp_path):
    experiment = tiny_experiment(method="pfedgraph", schedule={"rounds": 1})
    run_in_process(experiment, digits, tmp_path / "run")
    known = Record.__required_keys__ | Record.__optional_keys__
    *_, last = found = records_of(tmp_path / "run")
    for record in found:
        assert Record.__required_keys__ <= record.keys() <= known
        at_the_end = {"confusions"} if record is last else set()
        assert record.keys() & Record.__optional_keys__ == {"series", "definitions", *at_the_end}
        assert record["bytes"].keys() == Traffic.__annotations__.keys()
        assert record["seconds"].keys() == Durations.__annotations__.keys()


def test_a_finished_run_may_grow(digits, tmp_path):
    run_in_process(tiny_experiment(), digits, tmp_path / "run")
    longer = tiny_experiment(schedule={"rounds": 3})
    grown = run_in_process(longer, digits, tmp_path / "run", resume=True)
    fresh = run_in_process(longer, digits, tmp_path / "fresh")
    assert grown["state_sha256"] == fresh["state_sha256"]
    assert grown["metrics"] == fresh["metrics"]


def test_scores_come_when_they_are_due(digits, tmp_path):
    experiment = tiny_experiment(schedule={"rounds": 5}, evaluate={"every": 2})
    run_in_process(experiment, digits, tmp_path / "run")
    scored = [r["round"] for r in records_of(tmp_path / "run") if "a_glo" in r["metrics"]]
    assert scored == [1, 3, 4]


def test_a_client_that_lost_everything_makes_the_run_begin_anew_where_that_is_wanted(
    tmp_path, digits
):
    """Older server states are pruned, so there is no way back but to the beginning."""
    experiment = tiny_experiment(method="local", server={"max_rollback": 4})
    run_in_process(experiment, digits, tmp_path / "run")
    for state in (tmp_path / "run" / "clients" / "1").glob("state-*"):
        state.unlink()
    again = run_in_process(experiment, digits, tmp_path / "run", resume=True)
    fresh = run_in_process(experiment, digits, tmp_path / "fresh")
    assert again["state_sha256"] == fresh["state_sha256"]
    assert len(records_of(tmp_path / "run")) == 4


def test_clients_go_on_while_an_interaction_is_committed(tmp_path, digits, monkeypatch):
    went_on, commit, exchange = threading.Event(), Store.commit, InProcessCohort.send_and_receive

    def waiting(store, record, *rest):
        assert record["interaction"] or went_on.wait(10), "nobody went on"
        commit(store, record, *rest)

    def telling(cohort, trip):
        if trip.sample.interaction == 1:
            went_on.set()
        return exchange(cohort, trip)

    monkeypatch.setattr(Store, "commit", waiting)
    monkeypatch.setattr(InProcessCohort, "send_and_receive", telling)
    run_in_process(tiny_experiment(evaluate={"every": 0}), digits, tmp_path / "run")
    assert [r["interaction"] for r in records_of(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_commit_that_fails_ends_the_run(tmp_path, digits, monkeypatch):
    commit = Store.commit

    def failing(store, record, *rest):
        if record["interaction"] == 1:
            raise ArchiveError("cannot write it: no space left on device")
        commit(store, record, *rest)

    with monkeypatch.context() as broken:
        broken.setattr(Store, "commit", failing)
        with pytest.raises(ArchiveError, match="no space left"):
            run_in_process(tiny_experiment(), digits, tmp_path / "run")
    assert [r["interaction"] for r in records_of(tmp_path / "run")] == [0]
    resumed = run_in_process(tiny_experiment(), digits, tmp_path / "run", resume=True)
    fresh = run_in_process(tiny_experiment(), digits, tmp_path / "fresh")
    assert resumed["state_sha256"] == fresh["state_sha256"]


def test_initial_weights_that_were_forgotten_are_built_again():
    run = RunFacts(tiny_experiment(), Problem((1, 8, 8), 10))
    before = run.initial_weights
    run.forget_initial_weights()
    assert "initial_weights" not in vars(run)
    assert all(torch.equal(run.initial_weights[key], before[key]) for key in before)
    assert {k: (t.shape, t.dtype) for k, t in run.forms.items()} == {
        k: (t.shape, t.dtype) for k, t in before.items()
    }


def test_clients_of_this_process_are_opened_when_they_are_selected(digits, tmp_path, monkeypatch):
    experiment = tiny_experiment(method="local", schedule={"per_round": 1})
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    opened, of = [], Workers._opened
    monkeypatch.setattr(workers, "room_for_idle", lambda: 0)
    monkeypatch.setattr(
        Workers, "_opened", lambda self, c, *more: opened.append(c) or of(self, c, *more)
    )
    few = run_in_process(experiment, digits, tmp_path / "few")
    assert few["state_sha256"] == whole["state_sha256"]
    assert len(opened) > 3, "clients were closed, and opened again"


def test_few_clients_score_the_same_ones_in_every_round(digits, tmp_path):
    """One of three scores, the same one in every round, and beside it whoever trained."""
    experiment = tiny_experiment(
        schedule={"rounds": 6, "per_round": 1}, evaluate={"clients": 1, "every": 1}
    )
    run_in_process(experiment, digits, tmp_path / "run")
    records = [r for r in records_of(tmp_path / "run") if r["task"] == 1]  # a round's last ones
    scored = [{int(c) for c, row in r["clients"].items() if "views" in row} for r in records]
    (fixed,) = set.intersection(*scored)
    assert [s == {fixed, *r["cohort"]} for s, r in zip(scored, records, strict=True)] == [True] * 6
    assert scorers(experiment, [0, 1, 2], [0, 1]) == sorted({fixed, 0, 1})
    assert scorers(experiment, [1 - fixed % 2], [1 - fixed % 2]) == [1 - fixed % 2]
    assert scorers(tiny_experiment(), [2, 0], []) == [0, 2]


def test_the_loss_of_a_record_is_that_of_an_example():
    """Losses 1 of ten and 4 of five examples: 30 / 15. Who did no step has no loss, as NaN."""

    def answer(loss: float, examples: int, **extra: float) -> Answer:
        report = rpc.Report(loss=loss, num_examples=examples, seconds=loss, extra=extra)
        return Answer(Bundle(), report, logical_up=7, logical_down=examples)

    step, nan = Step(5, 2, 1, (0, 1, 2, 3), True, False), float("nan")
    found = Answers({0: answer(1, 10), 1: answer(4, 5, own=nan), 2: answer(nan, 3)}, {3: "gone"})
    found.by_client[EVALUATOR] = answer(9, 99)
    record = record_of(step, found, Reduced(None, {"mine": 0.5, "none": nan}, {}))
    assert record["metrics"] == {"loss": 2, "mine": 0.5}
    assert (record["cohort"], record["failed"]) == ([0, 1, 2], {"3": "gone"})
    assert (record["bytes"]["down"], record["bytes"]["up"]) == (18, 21)
    assert [row.get("loss") for row in record["clients"].values()] == [1, 4, None]
    assert "own" not in record["clients"]["1"]
    none = record_of(step, Answers({2: answer(nan, 3)}, {}), Reduced(None, {}, {}))
    assert none["metrics"] == {}
    assert "failed" not in none


@pytest.mark.parametrize(
    "tables",
    [{"method": "scaffold"}, {"server_optimizer": {"name": "fedadam", "lr": 0.01}}],
    ids=["scaffold", "fedadam"],
)
def test_a_large_state_on_the_pages_of_its_file_changes_no_bit(
    tables, digits, tmp_path, monkeypatch
):
    experiment = tiny_experiment(**tables)
    digests, moved, mapped = [], [], Store.mapped

    def seen(store, state):
        found = mapped(store, state)
        moved.append(found is not state)
        return found

    for size in (round_parts.LARGE_STATE, 0):
        monkeypatch.setattr(round_parts, "LARGE_STATE", size)
        monkeypatch.setattr(Store, "mapped", seen if not size else mapped)
        summary = run_in_process(experiment, digits, tmp_path / f"run-{size}")
        digests.append(summary["state_sha256"])
    assert digests[0] == digests[1]
    assert all(moved)
    assert len(moved) > 2
