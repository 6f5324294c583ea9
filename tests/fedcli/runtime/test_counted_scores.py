"""A site that lets so many models be scored, whatever the coordinator orders."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch

from fedcli.gate.rules import Rules
from fedcli.parts.privacy.scores import ScoreLedger
from fedcli.runtime.released import ECHOED
from fedcli.runtime.worker import Worker
from fedcli.runtime.workers import Workers
from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment


def worker_of(digits: Path, states: Path, most: int, **tables: Any) -> Worker:
    brought = {"scores": ScoreLedger(most, states.parent / "site.db")}
    workers = Workers([0], digits, states, torch.device("cpu"), brought)
    workers.begin(tiny_experiment(**tables))
    return workers.of(0)


def order_of(**fields: Any) -> rpc.Order:
    given = {"interaction": 0, "base": -1, "committed": -1, "durable": -1, "tasks_seen": 1}
    given |= {"kind": rpc.ORDER_KIND_EVALUATE, "client_id": "0", "views": ["global"]}
    return rpc.Order(**{**given, **fields})


def worker_payload(worker: Worker, moved: float = 0.0) -> Bundle:
    weights = {k: w + moved for k, w in worker.run.initial_weights.items()}
    names = [k.removeprefix("weights/") for k in worker.set_up.payload_spec["common"].required]
    return Bundle({name: weights[name] for name in names})


def asked(worker: Worker, moved: float = 0.0, **fields: Any) -> rpc.Report:
    found = worker.execute(order_of(**fields), worker_payload(worker, moved))
    assert found is not None
    assert not found.failure
    return found.report


def counted(file: Path) -> int:
    if not file.exists():
        return 0
    with closing(sqlite3.connect(file)) as db:
        return int(db.execute("SELECT count(*) FROM scores").fetchone()[0])


def test_models_of_a_coordinator_s_own_are_counted(digits, tmp_path):
    """Each guess at a test example is another model: with 3 of them it learns no more."""
    states = tmp_path / "states"
    worker = worker_of(digits, states, 3)
    told = [len(asked(worker, n / 100).counts) for n in range(6)]
    assert [n > 0 for n in told] == [True] * 3 + [False] * 3
    again = worker_of(digits, states, 3)  # a process that was killed counts on
    assert asked(again, 0.0).counts, "the same model on the same examples is one"
    assert not asked(again, 0.1).counts
    assert counted(tmp_path / "site.db") == 3


def test_no_model_is_scored_where_a_site_allows_none(digits, tmp_path):
    worker = worker_of(
        digits, tmp_path / "states", 0,
        evaluate={"probabilities": True, "prequential": True, "drift": True},
    )  # fmt: skip
    report = asked(worker, confusion=True, views=["global", "after_local"])
    assert [len(f) for f in (report.counts, report.confusions, report.probabilities)] == [0] * 3
    train = {"kind": rpc.ORDER_KIND_TRAIN, "views": ["after_local"]}
    report = asked(worker, **train)
    assert not report.counts
    report = asked(worker, **{**train, "interaction": 1, "round": 1, "task": 1, "base": 0})
    assert not {*report.extra} & {"prequential", "prediction_drift", "prediction_drift_p"}
    assert counted(tmp_path / "site.db") == 0


def test_a_model_after_training_and_one_of_a_new_task_count_as_well(digits, tmp_path):
    worker = worker_of(digits, tmp_path / "states", 9, evaluate={"prequential": True})
    train = {"kind": rpc.ORDER_KIND_TRAIN, "views": ["after_local"]}
    assert asked(worker, **train).counts
    assert counted(tmp_path / "site.db") == 1
    report = asked(worker, **{**train, "interaction": 1, "round": 1, "task": 1, "base": 0})
    assert "prequential" in report.extra
    assert counted(tmp_path / "site.db") == 3


def test_a_score_on_no_example_costs_nothing(digits, tmp_path):
    worker = worker_of(digits, tmp_path / "states", 1)
    assert not asked(worker, tasks_seen=0).counts
    assert asked(worker).counts


OTHER: dict[str, Any] = {
    "tasks_seen": 2,
    "set_aside": [0],
    "confusion": True,
    "global_test": True,
    "task_began": 1,
}
"""What a coordinator may ask of one model, to take the difference of the answers."""


@pytest.mark.parametrize("name", [f.name for f in rpc.Order.DESCRIPTOR.fields])
def test_a_field_of_an_order_is_another_score_unless_it_says_nothing_of_it(digits, tmp_path, name):
    kind = rpc.Order.DESCRIPTOR.fields_by_name[name]
    if name in ECHOED or kind.message_type:
        return
    worker = worker_of(digits, tmp_path / "states", 1)
    assert asked(worker, task=0, round=1).counts
    report = asked(worker, **{"task": 0, "round": 1, name: OTHER.get(name, 2)})
    assert not report.counts


def test_other_examples_are_another_score(digits, tmp_path):
    worker = worker_of(digits, tmp_path / "states", 2)
    assert asked(worker).counts
    assert asked(worker, tasks_seen=2).counts
    assert not asked(worker, tasks_seen=2, first_task=1).counts


def test_a_run_goes_on_where_sites_let_no_more_models_be_scored(digits, tmp_path, monkeypatch):
    """Its metrics are those of who still says something; in the end nobody does."""
    site = ScoreLedger(4, tmp_path / "site.db")
    plain = Workers.__init__
    monkeypatch.setattr(Workers, "__init__", partialmethod(plain, brought={"scores": site}))
    experiment = tiny_experiment(schedule={"rounds": 2})
    run_in_process(experiment, digits, tmp_path / "run")
    records = records_of(tmp_path / "run")
    views = [row["views"] for one in records for row in one["clients"].values() if "views" in row]
    assert len(records) == 2 * experiment.most_tasks
    assert any(views)
    assert counted(tmp_path / "site.db") == 4


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ({}, r"\[evaluate\] views"),
        ({"evaluate": {"views": [], "prequential": True}}, r"\[evaluate\] prequential"),
        ({"evaluate": {"views": [], "drift": True}}, r"\[evaluate\] drift"),
        ({"evaluate": {"views": []}, "deploy": {}}, r"\[deploy\] guard"),
    ],
)
def test_a_run_that_scores_models_is_refused_where_a_site_allows_none(tables, why):
    rules, experiment = Rules.of(scores="none"), tiny_experiment(**tables)
    with pytest.raises(ConfigError, match=rf"{why}.*--scores N allows so many"):
        rules.joined(experiment, "run", [0])
    Rules.of(scores="3").joined(experiment, "run", [0])
    Rules.of(scores="none").joined(tiny_experiment(evaluate={"views": []}), "run", [0])


def test_a_count_that_was_deleted_does_not_begin_anew(digits, tmp_path):
    states = tmp_path / "states"
    assert asked(worker_of(digits, states, 3)).counts
    (tmp_path / "site.db").unlink()
    worker = worker_of(digits, states, 3)
    found = worker.execute(order_of(), worker_payload(worker))
    assert found is not None
    assert found.reason == rpc.FAILURE_REASON_STORAGE
    assert "holds 0 rows, and held 1 by" in found.failure
