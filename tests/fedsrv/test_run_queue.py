"""A queue of runs: which run is served next, what a restart goes on with, and what is refused."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.config_file import parse_experiment
from fedmodels.errors import ArchiveError, ConfigError, RunStopped
from fedsrv import run_queue
from fedsrv.run_queue import (
    QueuedRun,
    State,
    next_of,
    runs_of,
    serve_all,
    serve_one,
    submit,
    withdraw,
)
from fedsrv.state.run_directory import lock


@pytest.fixture
def experiment() -> Experiment:
    return parse_experiment('[data]\nname = "digits"\n[net]\nname = "digits-cnn"\n'
                            '[method]\nname = "fedavg"\n[schedule]\nrounds = 1\nclients = 2\n'
                            '[scenario]\nkind = "iid"\n')  # fmt: skip


def test_runs_are_served_as_they_came_and_the_one_that_has_begun_first(
    tmp_path: Path, experiment: Experiment
) -> None:
    first, second, third = (submit(experiment, tmp_path, name) for name in ("b", "a", "c"))
    assert [run.place.name for run in runs_of(tmp_path)] == ["0001-b", "0002-a", "0003-c"]
    assert next_of(tmp_path) == first
    (second.run / "server").mkdir(parents=True)  # a directory without files holds no run yet
    assert next_of(tmp_path) == first
    (second.run / ".lock").touch()
    assert next_of(tmp_path) == second
    second.ends_as("failed")
    withdraw(tmp_path, "0001-b")
    assert next_of(tmp_path) == third
    third.ends_as("over")
    assert next_of(tmp_path) is None
    assert [run.state for run in runs_of(tmp_path)] == ["withdrawn", "failed", "over"]


@pytest.mark.parametrize("name", ["a", "b"])
def test_a_number_is_never_given_twice(
    name: str, tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two submissions look at the same moment; the second one finds the number taken."""
    submit(experiment, tmp_path, "a")
    now = runs_of(tmp_path)
    seen = [[], now, now, now]  # the first look came before the other submission
    monkeypatch.setattr(run_queue, "runs_of", lambda queue: seen.pop(0))
    assert submit(experiment, tmp_path, name).place.name == f"0002-{name}"
    assert not seen
    (tmp_path / ".0003").mkdir()  # another one is about to have it, or was killed then
    monkeypatch.undo()
    assert submit(experiment, tmp_path, name).place.name == f"0004-{name}"


def test_a_queue_counts_beyond_four_digits(tmp_path: Path, experiment: Experiment) -> None:
    submit(experiment, tmp_path, "a").place.rename(tmp_path / "9999-z")
    assert submit(experiment, tmp_path, "a").place.name == "10000-a"
    assert [run.place.name for run in runs_of(tmp_path)] == ["9999-z", "10000-a"]


def serving(monkeypatch: pytest.MonkeyPatch, *ends: int | BaseException) -> list[Sequence[str]]:
    """Have each process that serves a run end so; return what they are called with."""
    said, left = list[Sequence[str]](), [*ends]

    def run_program(module: str, words: Sequence[str], is_wanted: object) -> int:
        said.append(words)
        end = left.pop(0)
        if isinstance(end, BaseException):
            raise end
        return end

    monkeypatch.setattr(run_queue, "run_program", run_program)
    return said


def test_where_the_first_run_cannot_begin_a_queue_ends_and_no_run_has_failed(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another process has the address: each run would end in the same way."""
    for name in ("a", "b"):
        submit(experiment, tmp_path, name)
    serving(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"0001-a could not begin, .*--withdraw 0001-a"):
        serve_all(tmp_path, [])
    assert [run.state for run in runs_of(tmp_path)] == ["waiting", "waiting"]
    serving(monkeypatch, 0, 2, KeyboardInterrupt())
    submit(experiment, tmp_path, "c")
    with pytest.raises(KeyboardInterrupt):
        serve_all(tmp_path, [])
    assert [run.state for run in runs_of(tmp_path)] == ["over", "failed", "waiting"]


def test_a_queue_whose_runs_all_fail_goes_on_to_the_next_and_begins_none_again(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they end with; one that is submitted later is served as ever."""
    for name in ("a", "b", "c"):
        submit(experiment, tmp_path, name)

    def sleep(seconds: float) -> None:
        if len(runs_of(tmp_path)) == 4:
            raise KeyboardInterrupt
        submit(experiment, tmp_path, "d")

    monkeypatch.setattr("time.sleep", sleep)
    said = serving(monkeypatch, 1, 2, -9, 0)
    with pytest.raises(KeyboardInterrupt):
        serve_all(tmp_path, [])
    assert [run.state for run in runs_of(tmp_path)] == ["failed", "failed", "failed", "over"]
    assert len(said) == 4


def test_a_run_whose_process_was_asked_to_stop_has_not_failed(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(experiment, tmp_path, "a")
    serving(monkeypatch, RunStopped.exit_code)
    with pytest.raises(RunStopped, match="0001-a was stopped"):
        serve_one(run, [])
    assert run.state == "waiting"


def test_a_queue_waits_for_the_process_that_a_killed_one_has_left(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(experiment, tmp_path, "a")
    run.run.mkdir()
    handle, waits = lock(run.run), list[float]()

    def sleep(seconds: float) -> None:
        assert not said
        waits.append(seconds)
        os.close(handle)

    said = serving(monkeypatch, 0)
    monkeypatch.setattr("time.sleep", sleep)
    serve_one(run, [])
    assert waits == [run_queue.QUEUE_LOOK_S]
    assert "--resume" in said[0]


def test_a_run_is_resumed_once_it_has_begun_and_ends_as_its_process_did(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = submit(experiment, tmp_path, "a"), list[Sequence[str]]()

    def run_program(module: str, words: Sequence[str], is_wanted: object) -> int:
        said.append([module, *words])
        return 7 if len(said) == 1 else 0

    monkeypatch.setattr(run_queue, "run_program", run_program)
    serve_one(run, ["--listen", "127.0.0.1:1"])
    assert said[0] == ["fedsrv", "serve", str(run.config), "--out", str(run.run),
                       "--listen", "127.0.0.1:1"]  # fmt: skip
    assert [run.state for run in runs_of(tmp_path)] == ["failed"]
    run.end.unlink()
    run.run.mkdir()
    (run.run / "run.db").touch()
    serve_one(run, [])
    assert "--resume" in said[1]
    assert run.state == "over"


def test_a_run_that_is_withdrawn_while_it_is_served_stays_so(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(experiment, tmp_path, "a")

    def run_program(module: str, words: Sequence[str], is_wanted: object) -> int:
        assert callable(is_wanted)
        assert is_wanted()
        withdraw(tmp_path, "0001-a")
        assert not is_wanted()
        return 143

    monkeypatch.setattr(run_queue, "run_program", run_program)
    serve_one(run, [])
    assert run.state == "withdrawn"


@pytest.mark.parametrize("status", [0, 1])
def test_a_run_that_is_withdrawn_as_its_process_ends_stays_so(
    status: int, tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the run and the word on how it ended."""
    run, ends_as = submit(experiment, tmp_path, "a"), QueuedRun.ends_as

    def ends_late(run: QueuedRun, state: State) -> bool:
        monkeypatch.setattr(QueuedRun, "ends_as", ends_as)
        withdraw(tmp_path, "0001-a")
        return run.ends_as(state)

    serving(monkeypatch, status)
    monkeypatch.setattr(QueuedRun, "ends_as", ends_late)
    serve_one(run, [])
    assert run.state == "withdrawn"


def test_a_run_that_ends_as_it_is_withdrawn_is_over(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ends_as = submit(experiment, tmp_path, "a"), QueuedRun.ends_as

    def ends_late(run: QueuedRun, state: State) -> bool:
        ends_as(run, "over")
        return ends_as(run, state)

    monkeypatch.setattr(QueuedRun, "ends_as", ends_late)
    with pytest.raises(ConfigError, match="0001-a has just ended, and is over"):
        withdraw(tmp_path, "0001-a")
    assert run.state == "over"


def test_paths_of_a_config_do_not_depend_on_where_the_queue_runs(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.pt").touch()
    net = experiment.net.model_copy(update={"weights": "here.pt"})
    schedule = experiment.schedule.model_copy(update={"availability": "days.csv"})
    run = submit(
        experiment.model_copy(update={"net": net, "schedule": schedule}), tmp_path / "q", "a"
    )
    tables = tomllib.loads(run.config.read_text("utf-8"))
    assert tables["net"]["weights"] == str(tmp_path / "here.pt")
    assert tables["schedule"]["availability"] == str(tmp_path / "days.csv")
    assert tables["method"]["name"] == "fedavg"


def test_what_is_no_run_and_no_queue_is_refused_in_one_line(
    tmp_path: Path, experiment: Experiment
) -> None:
    with pytest.raises(ConfigError, match="cannot name a run"):
        submit(experiment, tmp_path, "../a")
    with pytest.raises(ConfigError, match="is no queue: fedsrv submit"):
        runs_of(tmp_path / "none")
    run = submit(experiment, tmp_path, "a")
    with pytest.raises(ConfigError, match="has no run 'a'; it has 0001-a"):
        withdraw(tmp_path, "a")
    run.ends_as("over")
    with pytest.raises(ConfigError, match="is over: there is nothing"):
        withdraw(tmp_path, "0001-a")
    run.end.write_text("ov", "utf-8")
    with pytest.raises(ArchiveError, match="is damaged"):
        _ = QueuedRun(run.place).state
    run.end.write_bytes(b"over\xff")
    with pytest.raises(ArchiveError, match="is damaged"):
        _ = QueuedRun(run.place).state
