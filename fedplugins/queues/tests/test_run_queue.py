"""A queue of runs: which run is served next, what a restart goes on with, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedplugins.queues import run_queue
from fedplugins.queues.run_queue import (
    QueuedRun,
    State,
    next_runs,
    runs_of,
    submit,
    withdraw,
)


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
    assert next_runs(tmp_path)[0] == first
    (second.run / "server").mkdir(parents=True)  # a directory without files holds no run yet
    assert next_runs(tmp_path)[0] == first
    (second.run / ".lock").touch()
    assert next_runs(tmp_path)[0] == second
    second.ends_as("failed")
    withdraw(tmp_path, "0001-b")
    assert next_runs(tmp_path) == [third]
    third.ends_as("over")
    assert next_runs(tmp_path) == []
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


def test_a_run_that_lets_others_go_first_comes_last_until_it_is_served(
    tmp_path: Path, experiment: Experiment
) -> None:
    first, second, third = (submit(experiment, tmp_path, name) for name in "abc")
    (first.run).mkdir()
    (first.run / ".lock").touch()
    first.skip(1)
    second.skip(2)
    assert [run.state for run in runs_of(tmp_path)] == ["skipped", "skipped", "waiting"]
    assert next_runs(tmp_path) == [third, first, second]
    (second.place / "skipped").write_text("damaged", "utf-8")
    assert next_runs(tmp_path) == [second, third, first]
    withdraw(tmp_path, "0001-a")
    assert first.state == "withdrawn"
