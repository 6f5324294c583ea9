"""Scores of a new task before it is trained on, against a run whose test part is that task."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.parts.prequential import Prequential
from fedsrv.report.comparison import headline
from fedsrv.report.frame import group_runs
from fedsrv.report.panels import over_rounds
from fedsrv.state.run_record import read_run
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.runs import dies, ends_as, killed

CLIENTS = ("0", "1", "2")


def experiment_with(on: bool = True, **more: Any) -> Experiment:
    schedule = {"order": "tasks_outer", "rounds": 1, "clients": 3, **more.pop("schedule", {})}
    return tiny_experiment(schedule=schedule, evaluate={"prequential": on}, **more)


def told(run: Path) -> list[dict[str, float]]:
    """Return what clients told in each record."""
    return [
        {c: row["prequential"] for c, row in record["clients"].items() if "prequential" in row}
        for record in records_of(run)
    ]


def data_tested_later(digits: Path, root: Path) -> Path:
    """Return a copy of the data whose first task is tested on all of the second one."""
    shutil.copytree(digits, root, ignore=shutil.ignore_patterns("global-test"))
    for client in CLIENTS:
        one, two = (root / client / f"task-{task}" for task in (0, 1))
        for name in "xy":
            parts = [np.load(two / f"{part}_{name}.npy") for part in ("train", "test")]
            np.save(one / f"test_{name}.npy", np.concatenate(parts))
        about = json.loads((root / client / "client.json").read_text("utf-8"))
        about.pop("tasks")
        (root / client / "client.json").write_text(json.dumps(about), "utf-8")
        shutil.rmtree(two)
    return root


@pytest.mark.parametrize("method", ["fedavg", "fedrep", "per-fedavg"])
def test_the_next_task_is_scored_before_anybody_trains_on_it(digits, tmp_path, method):
    """The model is that which the client holds; where it would fit one to the task, everybody's."""
    whole = run_in_process(experiment_with(method=method), digits, tmp_path / "run")
    found = told(tmp_path / "run")
    assert [sorted(row) for row in found] == [[], [*CLIENTS]]
    other = data_tested_later(digits, tmp_path / "other")
    run_in_process(experiment_with(on=False, method=method), other, tmp_path / "before")
    views = [records_of(tmp_path / "before")[0]["clients"][client]["views"] for client in CLIENTS]
    view = "after_downlink" if method == "fedrep" else "global"
    expected = [round(each[view]["accuracy"], 4) for each in views]
    assert [found[1][client] for client in CLIENTS] == expected
    assert whole["metrics"]["prequential"] == pytest.approx(np.mean(expected))
    assert records_of(tmp_path / "run")[1]["metrics"]["prequential"] == pytest.approx(
        np.mean(expected)
    )
    groups = group_runs([read_run(tmp_path / "run")])
    assert "prequential" in headline(groups, [*whole["metrics"]])
    assert any("before training" in chart.caption for chart in over_rounds(groups))


def test_a_run_that_was_killed_tells_the_same_and_no_task_twice(digits, tmp_path):
    """Nothing else of the run changes."""
    experiment = experiment_with(method="fedavg", schedule={"rounds": 2})
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    without = experiment_with(on=False, method="fedavg", schedule={"rounds": 2})
    plain = run_in_process(without, digits, tmp_path / "plain")
    assert whole["state_sha256"] == plain["state_sha256"]
    assert [sorted(row) for row in told(tmp_path / "whole")] == [[], [], [*CLIENTS], []]
    killed(experiment, digits, tmp_path / "run", before=dies(interaction=3))
    ends_as(whole, experiment, digits, tmp_path / "run")
    assert told(tmp_path / "run") == told(tmp_path / "whole")


def test_an_open_run_tells_of_each_task_as_it_comes(digits, tmp_path):
    schedule = {"open": True, "rounds": 1}
    run_in_process(
        experiment_with(schedule=schedule, trigger={"close_after_s": 0}, method="fedavg"),
        digits, tmp_path / "run",
    )  # fmt: skip
    assert [sorted(row) for row in told(tmp_path / "run")] == [[], [*CLIENTS]]


def test_what_cannot_be_is_refused(digits, tmp_path):
    with pytest.raises(PayloadError, match=r"'prequential' is 1\.2, not from 0 to 1"):
        Prequential().check_told({"prequential": 1.2}, 3)
    scenario = {"kind": "per_class_shards", "shards": 5, "training_data": "accumulated"}
    with pytest.raises(ConfigError, match=r"\[evaluate\] prequential scores a task that nobody"):
        run_in_process(experiment_with(scenario=scenario), digits, tmp_path / "run")
