"""Detectors of one's own: on a client's errors, the same after a restart, and told as one bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.runtime.worker import Worker
from fedmodels.errors import ClientFailed, ConfigError, DataError, PayloadError
from fedmodels.facts.resolution import experiment_of, received_experiment
from fedplugins.detectors import client as module
from fedplugins.detectors import interface as detectors
from fedplugins.detectors.interface import detections, detector_of
from fedplugins.detectors.page_hinkley import PageHinkley
from fedplugins.detectors.shared import Detector
from fedtide.inprocess import run_in_process
from fedtide.testing import check_detector
from tests.conftest import records_of, tiny_experiment

ADWIN = '''
"""ADWIN0 of Bifet and Gavalda 2007, by the interface of river: each cut of the window is tried."""
import math

class Adwin:
    def __init__(self):
        self.values, self.drift_detected = [], False

    def update(self, x):
        self.values, self.drift_detected = [*self.values, x][-400:], False
        n, whole = len(self.values), sum(self.values)
        before = 0.0
        for cut in range(1, n):
            before += self.values[cut - 1]
            few = min(cut, n - cut)
            if few < 20:
                continue
            gap = abs(before / cut - (whole - before) / (n - cut))
            m = 1 / (1 / cut + 1 / (n - cut))
            if gap > math.sqrt(1 / (2 * m) * math.log(4 * n / 0.002)):
                self.values, self.drift_detected = self.values[cut:], True
                return
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "adwin.py").write_text(ADWIN)
    return f"{tmp_path / 'adwin.py'}:Adwin"


def with_detector(name: str, **more: Any) -> Any:
    schedule = {"order": "tasks_outer", "rounds": 2, "clients": 3}
    return tiny_experiment(schedule=schedule, evaluate={"detector": name}, **more)


@pytest.fixture
def turned(digits, tmp_path) -> Path:
    """Three clients: of client 0, the second task has the labels of the first in another order."""
    place = tmp_path / "turned"
    shutil.copytree(digits, place)
    for client in ("0", "1", "2"):
        folder = place / client
        about = json.loads((folder / "client.json").read_text())
        about["tasks"][1] = {**about["tasks"][0]}
        (folder / "client.json").write_text(json.dumps(about))
        shutil.rmtree(folder / "task-1")
        shutil.copytree(folder / "task-0", folder / "task-1")
        if client == "0":
            y = np.load(folder / "task-1" / "train_y.npy")
            there = np.unique(y)
            turn = dict(zip(there.tolist(), np.roll(there, 1).tolist(), strict=True))
            turned = np.array([turn[k] for k in y.tolist()], y.dtype)
            np.save(folder / "task-1" / "train_y.npy", turned)
            about["tasks"][1]["train"] = np.bincount(turned, minlength=10).tolist()
            (folder / "client.json").write_text(json.dumps(about))
    return place


class Few:
    """Finds a change where four of five errors in a row are wrong."""

    def __init__(self) -> None:
        self.last: list[float] = []

    @property
    def drift_detected(self) -> bool:
        return len(self.last) == 5 and sum(self.last) >= 4

    def update(self, x: float) -> None:
        self.last = [*self.last, x][-5:]


@pytest.fixture
def few(monkeypatch) -> str:
    monkeypatch.setattr(module, "detector_of", lambda name: Few)
    return "page-hinkley"


def told(run: Path) -> list[dict[str, float]]:
    return [
        {c: row["error_drift"] for c, row in record["clients"].items() if "error_drift" in row}
        for record in records_of(run)
    ]


def test_swapped_labels_are_told_by_the_models_own_errors(turned, tmp_path, few, caplog):
    """Inputs and shares of classes are what they were: nothing else shows it."""
    more = {"method": {"name": "fedavg"}, "training": {"local_epochs": 20}}
    found = run_in_process(with_detector(few, **more), turned, tmp_path / "run")
    assert told(tmp_path / "run")[:2] == [{}, {}], "a first task has no model from before"
    assert told(tmp_path / "run")[2]["0"] == 1
    assert told(tmp_path / "run")[3] == {}, "a task is looked at once, before it is trained on"
    rows = told(tmp_path / "run")[2]
    assert records_of(tmp_path / "run")[2]["metrics"]["error_drift"] == sum(rows.values()) / 3
    (line,) = (text for text in caplog.messages if text.startswith("client 0, task 1: the model"))
    assert "errors changed, as page-hinkley says at example" in line
    plain = tiny_experiment(
        schedule={"order": "tasks_outer", "rounds": 2, "clients": 3}, **more
    )  # fmt: skip
    same = run_in_process(plain, turned, tmp_path / "plain")
    assert found["state_sha256"] == same["state_sha256"], "it changes no model"


def test_a_client_that_restarts_before_each_order_says_the_same(turned, tmp_path, few, monkeypatch):
    run_in_process(with_detector(few), turned, tmp_path / "run")
    began = Worker.begin

    def restarted(worker: Worker, *args: Any) -> Any:
        worker.close()
        worker.stream.num_seen = 0
        return began(worker, *args)

    monkeypatch.setattr(Worker, "begin", restarted)
    run_in_process(with_detector(few), turned, tmp_path / "again")
    assert told(tmp_path / "again") == told(tmp_path / "run")


def test_what_is_kept_of_errors_does_not_grow(turned, tmp_path, few, monkeypatch):
    monkeypatch.setattr(module, "MOST", 7)
    run_in_process(with_detector(few), turned, tmp_path / "run")
    assert len(told(tmp_path / "run")[2]) == 3


def test_a_detector_of_a_file_runs_where_a_site_trusts_it(own, turned, tmp_path):
    experiment = experiment_of(with_detector(own).to_dict(), "here")
    digest = experiment.evaluate.detector_sha256
    assert digest
    assert experiment.evaluate.detector == own
    run_in_process(experiment, turned, tmp_path / "run")
    assert len(told(tmp_path / "run")[2]) == 3
    sent = experiment.to_dict()
    sent["evaluate"]["detector"] = "adwin.py:Adwin"
    for code, line in (([], "needs the code of adwin.py"), ([Path(own[:-6])], "")):
        if line:
            with pytest.raises(ConfigError, match=line):
                received_experiment(sent, "the server", code)
        else:
            taken = received_experiment(sent, "the server", code)
            assert detector_of(taken.evaluate.detector)().drift_detected is False
    Path(own[:-6]).write_text(ADWIN + "\n")
    with pytest.raises(ConfigError, match="has changed since this run started"):
        experiment_of(experiment.to_dict(), "here")


def test_a_detector_that_nobody_has_is_one_line(turned, tmp_path):
    line = "'page-hinkly' is no detector of the entry points fedtide.detectors: there are .*mean"
    with pytest.raises((ConfigError, ClientFailed), match=line):
        run_in_process(with_detector("page-hinkly"), turned, tmp_path / "run")


def test_a_detector_whose_code_fails_is_one_line(tmp_path):
    (tmp_path / "bad.py").write_text(
        "class Bad:\n    def update(self, x):\n        raise KeyError(x)\n"
    )
    with pytest.raises(DataError, match="the detector Bad failed: KeyError"):
        detections(detector_of(f"{tmp_path / 'bad.py'}:Bad"), [1.0])
    (tmp_path / "none.py").write_text("Bad = 3\n")
    with pytest.raises(ConfigError, match="is no class or function that makes a detector"):
        detector_of(f"{tmp_path / 'none.py'}:Bad")


def test_what_has_no_new_errors_is_refused():
    scenario = {"kind": "iid", "tasks": 2, "training_data": "accumulated"}
    with pytest.raises(ConfigError, match="leave one out"):
        with_detector("page-hinkley", scenario=scenario)


def test_a_report_tells_yes_or_no():
    Detector().check_told({"error_drift": 1.0}, 3)
    with pytest.raises(PayloadError, match="may be 0 or 1"):
        Detector().check_told({"error_drift": 0.5}, 3)


def test_a_detector_is_checked(own):
    check_detector(detector_of(own))
    assert detector_of("page-hinkley") is PageHinkley
    check_detector(PageHinkley)


class Deaf(Few):
    drift_detected = False  # type: ignore[assignment]


class Nervous(Few):
    @property
    def drift_detected(self) -> bool:
        return bool(self.last[-1:] == [1.0])


class Shared(Few):
    seen: list[float] = []  # noqa: RUF012

    @property
    def drift_detected(self) -> bool:
        return len(self.seen) % 400 == 399

    def update(self, x: float) -> None:
        self.seen.append(x)


@pytest.mark.parametrize(
    ("detector", "line"),
    [(Deaf, "finds no change"), (Nervous, "finds .* changes"), (Shared, "changes what it finds")],
)
def test_a_detector_that_is_none_fails_the_check(detector, line):
    with pytest.raises(AssertionError, match=line):
        check_detector(detector)


def test_rivers_adwin_is_one():
    drift = pytest.importorskip("river.drift")
    check_detector(drift.ADWIN)


def test_entry_points_of_others_are_found(monkeypatch):
    point = type("Point", (), {"name": "mine", "load": lambda self: Few})()
    monkeypatch.setattr(detectors, "offered", lambda group: [point])
    assert detector_of("mine") is Few
