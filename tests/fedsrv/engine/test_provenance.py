"""What each upload was trained on: stated by clients, checked here, and read by the lineage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import EVALUATOR
from fedsrv.state.lineage import Origin, lineage_of, lines_of
from fedtide.inprocess import run_in_process
from tests.conftest import records_of
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.fedsrv.engine.test_report_validator import EVALUATE, order, report, terms_of

SCHEDULE = {"rounds": 2, "order": "tasks_outer"}
"""Two rounds on the first task, two on the second."""


def held_in(digits: Path) -> dict[tuple[int, int], int]:
    """Return how many training examples each client's tasks have, by the files themselves."""
    files = {c: json.loads((digits / str(c) / "client.json").read_text()) for c in range(3)}
    return {(c, t): sum(each["train"]) for c in files for t, each in enumerate(files[c]["tasks"])}


def origins(run: Path) -> list[Origin]:
    found = lineage_of(run)
    return found.at(found.versions[-1].interaction)


def run(path: Path, digits: Path, method: str, **tables: Any) -> Path:
    own = {"data": "own"} if method == "centralized" else {}
    experiment = experiment_for((method, own), **{"schedule": SCHEDULE, **tables})
    run_in_process(experiment, digits, path, facts=True)
    return path


@pytest.mark.parametrize("method", ["feddrift", "glfc", "centralized", "fedavg"])
def test_the_first_task_stays_in_versions_of_what_trains_on_the_history(method, digits, tmp_path):
    """FedAvg here has ``training_data = "accumulated"``."""
    tables = {"scenario": {"training_data": "accumulated"}} if method == "fedavg" else {}
    found = origins(run(tmp_path / "run", digits, method, **tables))
    held = held_in(digits)
    assert {(one.client, one.task): one.rows for one in found} == held
    for one in found:
        expected = (4, 0, 3) if one.task == 0 else (2, 2, 3)
        assert (one.times, one.first, one.last) == expected, one


def test_generated_examples_are_no_rows_of_a_task(digits, tmp_path):
    path = run(tmp_path / "run", digits, "fedavg-replay")
    rows = [each["clients"]["0"] for each in records_of(path)]
    assert max(row["num_examples"] for row in rows) > held_in(digits)[0, 1], "some were replayed"
    assert {(one.client, one.task): one.rows for one in origins(path)} == held_in(digits)


def test_an_ordinary_record_states_nothing_more(digits, tmp_path):
    for record in records_of(run(tmp_path / "run", digits, "fedavg")):
        assert not any({"trained", "models"} & row.keys() for row in record["clients"].values())


@pytest.mark.parametrize("privacy", [{"announce": "rounded"}, {"announce": "none"}])
def test_hidden_counts_stay_hidden(privacy, digits, tmp_path):
    """Which tasks were read follows from the method and the order; no rows of them are told."""
    path = run(tmp_path / "run", digits, "centralized", privacy=privacy)
    found = {(one.client, one.task): one for one in origins(path)}
    assert found.keys() == held_in(digits).keys()
    assert {one.times for one in found.values() if one.task == 0} == {4}
    assert {one.rows for one in found.values() if one.task == 0} == {None}


@pytest.mark.parametrize("method", ["ifca", "feddrift"])
def test_the_models_that_a_client_fed(method, digits, tmp_path):
    path = run(tmp_path / "run", digits, method)
    names = {"model0", "model1", "model2", "model3", "model4", "model5", "new"}
    for version in lineage_of(path).versions:
        assert all(share.models and {*share.models} <= names for share in version.shares)
    if method == "ifca":  # one of its models each time, as many as the record counts
        for record in records_of(path):
            fed = {row["models"][0] for row in record["clients"].values()}
            assert len(fed) / 2 == record["metrics"]["models_trained"]
    assert any(", into model0" in line for line in lines_of(lineage_of(path)))


LIES = [
    ("fedavg", 1, [(0, 5)], "at task 1"),
    ("fedavg", 0, [(1, 4)], "at task 0"),
    ("fedavg", 0, [(0, 9)], "the rows of task 0 is 9; at most 8"),
    ("feddrift", 1, [(0, 8), (1, 5)], "the rows of task 1 is 5; at most 4"),
    ("feddrift", 1, [(1, 4), (0, 8)], "at task 1"),
    ("feddrift", 1, [(0, 8), (0, 8)], "at task 1"),
    ("feddrift", 1, [(0, -1)], "the rows of task 0 is -1"),
    ("feddrift", 1, [(-1, 8)], "at task 1"),
    ("feddrift", 1, [(7, 8)], "at task 1"),
]


def stated(trained: list[tuple[int, int]]) -> list[dict[str, int]]:
    return [{"task": task, "rows": rows} for task, rows in trained]


@pytest.mark.parametrize(("method", "interaction", "trained", "why"), LIES)
def test_a_statement_that_cannot_be_is_refused(method, interaction, trained, why):
    terms = terms_of(method)
    assert terms.steps[interaction].task_of(0) == interaction
    with pytest.raises(PayloadError, match=why):
        terms.check_report(0, order(interaction=interaction), report(trained=stated(trained)))


def test_a_statement_that_may_be():
    true = report(trained=stated([(0, 8), (1, 4)]), num_examples=12)
    terms_of("feddrift").check_report(0, order(interaction=1), true)
    terms_of("fedavg").check_report(0, order(), report(trained=stated([(0, 8)]), num_examples=8))
    with pytest.raises(PayloadError, match="which was not requested"):
        terms_of("feddrift").check_report(EVALUATOR, EVALUATE, report(trained=stated([(0, 8)])))
