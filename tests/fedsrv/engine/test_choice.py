"""What chooses a round, or ends a run, sees validation parts alone; and comes to it again."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fedmodels.errors import ConfigError
from fedmodels.numerics.metric_tables import is_known, metric
from fedmodels.numerics.metrics import chosen
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.parts.stopping import Stopping, check_stopping
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.runs import dies, ends_as, killed

PART = {"name": "digits", "max_per_class": 20, "validation_share": 0.3}


def experiment(**schedule):
    training = {"lr": 0.5, "batch_size": 8}  # so large that scores go down as well
    return tiny_experiment(data=PART, schedule={"rounds": 8, **schedule}, training=training)


@pytest.fixture(scope="module")
def mixed_up(digits, tmp_path_factory) -> Path:
    """The same clients, whose test inputs lie in another order than their labels."""
    root = tmp_path_factory.mktemp("mixed") / "data"
    shutil.copytree(digits, root)
    for path in [*root.glob("*/task-*/test_x.npy"), root / "global-test" / "x.npy"]:
        np.save(path, np.load(path)[::-1])
    return root


@pytest.fixture(scope="module")
def patient(digits, tmp_path_factory):
    """A run that ends early, and its summary."""
    out = tmp_path_factory.mktemp("patient") / "run"
    return out, run_in_process(experiment(patience=1), digits, out)


def test_nothing_that_chooses_can_see_the_test_part(patient, mixed_up, tmp_path):
    """Other test data: the run ends in the same round, and the same round is chosen."""
    out, summary = patient
    other = run_in_process(experiment(patience=1), mixed_up, tmp_path / "run")
    assert other["metrics"]["a_glo"] != summary["metrics"]["a_glo"]
    assert other["rounds"] == summary["rounds"] < 8
    assert other["metrics"]["chosen_round"] == summary["metrics"]["chosen_round"]
    assert other["state_sha256"] == summary["state_sha256"]
    series, again = (
        [record["metrics"].get("validation_f1") for record in records_of(run)]
        for run in (out, tmp_path / "run")
    )
    assert series == again


def test_the_chosen_round_is_the_best_on_validation_parts(patient):
    out, summary = patient
    metrics = summary["metrics"]
    scored = [r["metrics"] for r in records_of(out) if "validation_f1" in r["metrics"]]
    best = max(scored, key=lambda each: each["validation_f1"])
    assert scored.index(best) + 1 == metrics["chosen_round"] == len(scored) - 1  # patience = 1
    assert metrics["chosen_a_glo"] == best["a_glo"]
    assert metrics["chosen_validation_f1"] == best["validation_f1"]
    assert metrics["chosen_iaa"] == best["iaa"] != scored[-1]["iaa"]
    assert all(map(is_known, metrics))


def test_a_run_that_was_killed_ends_in_the_same_round_and_bits(patient, digits, tmp_path):
    _, summary = patient
    made, out = experiment(patience=1), tmp_path / "cut"
    at = dies(round=summary["rounds"] - 1, kind=rpc.ORDER_KIND_EVALUATE)
    killed(made, digits, out, before=at)
    for _ in range(2):  # a run that has ended stays as it is
        assert ends_as(summary, made, digits, out)["rounds"] == summary["rounds"]


def test_a_target_ends_a_run(patient, digits, tmp_path):
    out, _ = patient
    first = records_of(out)[1]["metrics"]["validation_f1"]
    summary = run_in_process(experiment(target=first), digits, tmp_path / "run")
    assert summary["rounds"] == 1


def test_validation_parts_change_what_is_trained_and_nothing_else(digits, tmp_path):
    whole = tiny_experiment(schedule={"rounds": 1})
    without = run_in_process(whole, digits, tmp_path / "without")
    kept = run_in_process(
        tiny_experiment(data=PART, schedule={"rounds": 1}), digits, tmp_path / "kept"
    )
    assert not any("validation" in name or "chosen" in name for name in without["metrics"])
    trained = [
        sum(row["num_examples"] for row in records_of(tmp_path / run)[0]["clients"].values())
        for run in ("without", "kept")
    ]
    assert 0.6 < trained[1] / trained[0] < 0.8
    assert kept["bytes"]["up"] == without["bytes"]["up"]


def test_figures_of_probabilities_come_where_they_are_asked_for(digits, tmp_path):
    asked, plain = (
        run_in_process(
            tiny_experiment(schedule={"rounds": 1}, evaluate={"probabilities": asks}),
            digits, tmp_path / str(asks),
        )
        for asks in (True, False)
    )  # fmt: skip
    more = {f"{model}_{ending}" for model in ("a_glo", "a_loc") for ending in ("auroc", "ece")}
    assert asked["metrics"].keys() - plain["metrics"].keys() == more
    assert all(0 <= asked["metrics"][name] <= 1 for name in more)
    assert all(map(is_known, asked["metrics"]))
    assert asked["state_sha256"] == plain["state_sha256"]
    assert metric("a_loc_ece").better == metric("a_glo_std").better == -1


@pytest.mark.parametrize(
    ("scores", "patience", "target", "ends"),
    [
        ([], 1, 0.1, False),
        ([0.5, 0.6], 1, None, False),
        ([0.5, 0.5], 1, None, True),  # no better than before
        ([0.5, 0.4, 0.45], 2, None, True),
        ([0.5, 0.4, 0.6], 2, None, False),
        ([0.5, 0.7, 0.6], None, 0.7, True),
        ([0.5, 0.6], None, 0.7, False),
    ],
)
def test_when_a_run_has_enough(scores, patience, target, ends):
    stopping = Stopping(patience, target, "validation_f1")
    for score in scores:
        stopping.see({"validation_f1": score, "a_glo": 1.0})
        stopping.see({"a_glo": 0.0})  # an interaction without a score
    assert bool(stopping.why()) == ends
    assert stopping.seen == 2 * len(scores)


def test_of_equal_scores_the_earliest_is_chosen():
    assert chosen([None, 0.5, 0.7, None, 0.7]) == 2
    assert chosen([None]) is None


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"schedule": {"patience": 1}}, "patience looks at a validation part"),
        ({"data": PART, "schedule": {"target": 0.5}, "evaluate": {"every": 0}}, "let every be 1"),
        ({"data": PART, "schedule": {"patience": 1, "order": "asynchronous", "buffer": 1}},
         "no meaning with order"),
    ],
)  # fmt: skip
def test_what_cannot_end_a_run_is_refused(tables, said):
    with pytest.raises(ConfigError, match=said):
        tiny_experiment(**tables)


def test_a_run_that_would_leave_tasks_out_is_refused():
    one_by_one = experiment(patience=1, order="tasks_outer")
    check_stopping(one_by_one, [1, 1])
    with pytest.raises(ConfigError, match="would leave later tasks out"):
        check_stopping(one_by_one, [1, 2])
