"""A search: its trials are the same after a crash, and validation parts alone choose."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
import tomli_w

from fedmodels.errors import ConfigError, RunFailed, RunStopped
from fedplugins.studies import execution, search
from fedplugins.studies.plan import Sweep, plan
from fedplugins.studies.search import run_search, scores_of
from fedplugins.studies.sweeping import check_chooses, choices
from fedsrv.cli import main
from tests.conftest import TABLES

ROOT = Path(__file__).parents[3]
ROUNDS, TRIALS = 4, 12
SEARCH = {
    "trials": TRIALS,
    "ranges": {
        "training.lr": {"low": 0.001, "high": 10.0, "log": True},
        "training.local_epochs": {"low": 1, "high": 3},
        "training.optimizer": {"choices": ["sgd", "adam"]},
    },
}
KEPT = {**TABLES, "data": {**TABLES["data"], "validation_share": 0.2}}


class Killed(BaseException):
    """As if the machine had gone."""


class Runs:
    """Takes the place of processes: scores are best at lr = 0.1, and grow with the rounds."""

    def __init__(self, killed_at: int | None = None, test_score: float = 0.5) -> None:
        self.rounds, self.killed_at, self.test_score = 0, killed_at, test_score

    def __call__(self, command: list[str], log: Path, directory: str, until: Any = None) -> int:
        if "launch" not in command:
            return 0
        out = Path(command[command.index("--out") + 1])
        config = tomllib.loads(Path(command[4]).read_text())["training"]
        if config["lr"] > 5:
            log.write_text("error: it diverged\n")
            return 1
        out.mkdir(exist_ok=True)
        best = 0.9 - abs(math.log10(config["lr"]) + 1) / 10 - (config["optimizer"] == "adam") / 20
        done = len(scores_of(out, "validation_f1"))
        for t in range(done, ROUNDS):
            self.rounds += 1
            if self.rounds == self.killed_at:
                raise Killed
            score = best - 0.1 / (1 + t)
            with (out / "rounds.jsonl").open("a") as file:
                metrics = {"validation_f1": score, "a_loc": self.test_score / score}
                file.write(json.dumps({"round": t, "metrics": metrics}) + "\n")
            if until():
                return RunStopped.exit_code
        (out / "summary.json").write_text(json.dumps({"metrics": {"chosen_validation_f1": best}}))
        return 0


@pytest.fixture
def sweep(tmp_path: Path) -> Any:
    def make(tables: Any = KEPT, **more: Any) -> Sweep:
        (tmp_path / "preset.toml").write_text(tomli_w.dumps(tables))
        file = {"preset": "preset.toml", "methods": {"FedAvg": "fedavg"}, **more}
        (tmp_path / "sweep.toml").write_text(tomli_w.dumps(file))
        return Sweep.read(tmp_path / "sweep.toml")

    return make


def searched(monkeypatch: Any, sweep: Sweep, out: Path, runs: Runs, at_once: int = 1) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(execution, "_run", runs)
    run_search(sweep, out, ["FedAvg"], 0, [], said.append, at_once)
    return said


def trials_in(out: Path) -> Any:
    return json.loads((out / "search.json").read_text())["FedAvg"]


def test_a_search_that_was_killed_goes_on_with_the_same_trials(sweep, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    whole, cut = Runs(), Runs(killed_at=17)
    said = searched(monkeypatch, sweep(search=SEARCH), tmp_path / "whole", whole)
    trials = trials_in(tmp_path / "whole")
    states = [trial["state"] for trial in trials]
    assert len(trials) == TRIALS
    assert {"finished", "pruned"} <= {*states}
    assert whole.rounds < ROUNDS * TRIALS, "poor trials end early"
    best = max((t for t in trials if t["state"] == "finished"), key=lambda t: max(t["scores"]))
    config = tomllib.loads((tmp_path / "whole" / "best-fedavg.toml").read_text())
    assert config["training"]["lr"] == best["settings"]["training.lr"]
    assert f"trial {best['number']} is the best of {TRIALS} on validation parts" in said[-1]

    with pytest.raises(Killed):
        searched(monkeypatch, sweep(search=SEARCH), tmp_path / "cut", cut)
    other = Runs(test_score=0.9)  # other test data
    searched(monkeypatch, sweep(search=SEARCH), tmp_path / "cut", other)
    assert trials_in(tmp_path / "cut") == trials
    assert cut.rounds - 1 + other.rounds == whole.rounds, "what was done is not done again"


def test_trials_side_by_side_are_the_same_whichever_ends_first(sweep, tmp_path, monkeypatch):
    optuna = pytest.importorskip("optuna")
    together = Barrier(3)

    class Both(Runs):
        """Three run at a time, of which the last that began, or the first, ends last."""

        def __init__(self, order: int) -> None:
            super().__init__()
            self.order, self.ended = order, dict[int, Event]()

        def __call__(self, command: list[str], *given: Any, **more: Any) -> int:
            if "launch" not in command:
                return 0
            number = int(command[command.index("--out") + 1].rpartition("trial")[2])
            for each in range(TRIALS):
                self.ended.setdefault(each, Event())
            together.wait(20)
            before = number + self.order
            if before // 3 == number // 3:
                self.ended[before].wait(20)
            status = super().__call__(command, *given, **more)
            self.ended[number].set()
            return status

    def tell(*given: Any) -> None:
        assert sum(event.is_set() for event in runs.ended.values()) % 3 == 0, "all have ended"
        untold(*given)

    untold, found = search._tell, []
    monkeypatch.setattr(search, "_tell", tell)
    for order in (-1, 1):
        out, runs = tmp_path / str(order), Both(order)
        searched(monkeypatch, sweep(search=SEARCH), out, runs, 3)
        found.append(trials_in(out))
    assert found[0] == found[1]
    assert len(found[0]) == TRIALS
    storage = optuna.storages.journal.JournalFileBackend(str(out / "optuna.log"))
    study = optuna.load_study(study_name="FedAvg", storage=optuna.storages.JournalStorage(storage))
    told = [(trial.params, trial.state.name) for trial in study.trials]
    names = {"finished": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    assert told == [(trial["settings"], names[trial["state"]]) for trial in found[0]]


def test_a_search_that_was_killed_at_its_journal_goes_on(sweep, tmp_path, monkeypatch):
    """The lock is a link to a path from the current directory, so that optuna finds no file."""
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    Path("out/optuna.log.lock").symlink_to("out/optuna.log")
    monkeypatch.setattr("os.stat", refusing(os.stat))
    searched(monkeypatch, sweep(search={**SEARCH, "trials": 1}), Path("out"), Runs())
    assert len(trials_in(Path("out"))) == 1


def refusing(stat: Any) -> Any:
    """Return a ``stat`` that ends the test where it is asked for the lock, as optuna does."""

    def found(path: Any, *given: Any, **more: Any) -> Any:
        if str(path).endswith("optuna.log.lock") and more.get("follow_symlinks", True):
            pytest.fail("it waits for the lock")
        return stat(path, *given, **more)

    return found


def test_other_ranges_are_another_search(sweep, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    few = {**SEARCH, "trials": 2}
    searched(monkeypatch, sweep(search=few), tmp_path / "out", Runs())
    other = {**few, "ranges": {"training.lr": {"low": 0.5, "high": 1.0}}}
    with pytest.raises(ConfigError, match=r"was run with another config; it differs in training"):
        searched(monkeypatch, sweep(search=other), tmp_path / "out", Runs())


def test_a_search_of_which_nothing_comes_says_so(sweep, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    diverges = {"trials": 2, "ranges": {"training.lr": {"low": 6.0, "high": 7.0}}}
    with pytest.raises(RunFailed, match="no trial of FedAvg finished"):
        searched(monkeypatch, sweep(search=diverges), tmp_path / "out", Runs())


def test_what_cannot_be_searched_is_refused(sweep, tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    with pytest.raises(ConfigError, match=r"needs the table \[search.ranges\]"):
        searched(monkeypatch, sweep(), tmp_path / "out", Runs())
    with pytest.raises(ConfigError, match="leave settings and lengths out"):
        searched(monkeypatch, sweep(search=SEARCH, lengths=[2]), tmp_path / "out", Runs())
    with pytest.raises(ConfigError, match="never on test data"):
        searched(monkeypatch, sweep(TABLES, search=SEARCH), tmp_path / "out", Runs())
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedtide\[optuna\]'"):
        searched(monkeypatch, sweep(search=SEARCH), tmp_path / "out", Runs())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resource", "num_gpus=1"], "no --resource"),
        (["--choose", "validation"], "no --choose"),
        (["--seed", "1", "--seed", "2"], "give one --seed"),
    ],
)
def test_an_option_that_no_search_has_is_refused(words, said, sweep, tmp_path, capsys, monkeypatch):
    sweep(search=SEARCH)
    monkeypatch.setattr(search, "run_search", lambda *given: None)
    file, out = str(tmp_path / "sweep.toml"), str(tmp_path / "out")
    with pytest.raises(SystemExit) as ended:
        main(["sweep", file, "--out", out, "--search", "optuna", *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ranges", "said"),
    [
        ({"seed": {"choices": [1]}}, "'seed' cannot be searched"),
        ({"data.validation_share": {"low": 0.1, "high": 0.2}}, "cannot be searched"),
        ({"training.lr": {"low": 1.0}}, "give low and high, or choices"),
        ({"training.lr": {"low": 2.0, "high": 1.0}}, "low is at most high"),
        ({"training.lr": {"low": 0.0, "high": 1.0, "log": True}}, "above 0 with log"),
        ({}, "search"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges, said, sweep):
    with pytest.raises(ConfigError, match=said):
        sweep(search={"ranges": ranges})


def test_the_best_setting_of_a_sweep_is_chosen_by_validation_scores(sweep, tmp_path):
    """Test scores are the other way round."""
    settings = {"slow": ["training.lr=0.01"], "fast": ["training.lr=0.5"]}
    runs = plan(sweep(settings=settings, seeds=[0, 1]), tmp_path / "out", ["FedAvg"], [0, 1])
    check_chooses(runs)
    for run in runs:
        run.directory.mkdir(parents=True)
        score = 0.8 if run.cell.setting == "fast" else 0.6
        metrics = {"chosen_validation_f1": score + run.seed / 10, "chosen_a_loc": 1 - score}
        (run.directory / "summary.json").write_text(json.dumps({"metrics": metrics}))
    (line,) = choices(runs)
    assert line == "FedAvg: fast is the best of 2 on validation parts (validation_f1 = 0.8500)"
    with pytest.raises(ConfigError, match="no validation part to choose by"):
        check_chooses(plan(sweep(TABLES), tmp_path / "out", ["FedAvg"], [0]))


def end_in_time(place: Path) -> None:
    begun, looks = place / "begun", list[bool]()
    code = f"import time; open({str(begun)!r}, 'w'); time.sleep(60)"

    def until() -> bool:
        looks.append(begun.exists())
        return looks[-1]

    command = [sys.executable, "-c", code]
    assert execution._run(command, place / "log", str(place), until) < 0  # by a signal
    assert looks[-1]
    ended = [sys.executable, "-c", "raise SystemExit(7)"]
    assert execution._run(ended, place / "log", str(place), lambda: False) == 7


def test_a_run_ends_as_soon_as_it_has_run_long_enough(tmp_path):
    """In a process of its own: that of pytest may have used gRPC, and must not fork then."""
    code = f"from pathlib import Path; from {__name__} import end_in_time as end; "
    code += f"end(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
