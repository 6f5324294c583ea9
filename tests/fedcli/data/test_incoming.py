"""A folder of what comes: what is complete becomes a task, and what is being written does not."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedcli.data import settled
from fedcli.data.store import growing
from fedcli.data.store.commands import run_partition
from fedcli.data.store.growing import Incoming
from fedcli.data.store.opened_data import open_data
from fedmodels.errors import DataError
from tests.conftest import tiny_experiment


class Clock:
    """Stands for the clock of watchers."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def rows(begin: int, end: int) -> str:
    return "".join(f"{n},{n % 7},{'ab'[n % 2]}\n" for n in range(begin, end))


@pytest.fixture
def of_rows(tmp_path: Path) -> Path:
    """Return the directory above the data of client 0, which a table was cut to."""
    (tmp_path / "first.csv").write_text("u,v,label\n" + rows(0, 50))
    table = {"name": "table", "root": str(tmp_path / "first.csv"), "columns": {"label": "label"}}
    clients = {"data": table, "scenario": {"kind": "iid"}, "schedule": {"clients": 1}}
    experiment = tiny_experiment(**clients)
    run_partition(
        experiment.data, experiment.scenario, 1, 0, tmp_path / "rows", Console(quiet=True)
    )
    return tmp_path / "rows"


def test_a_file_that_is_being_copied_is_no_task_yet(of_rows, tmp_path, monkeypatch, caplog):
    """Of 1,000 rows that came over 5 s, 300 became the task, and the file was moved away."""
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(settled, "time", clock)
    incoming = Incoming(tmp_path / "in", of_rows, 0, lambda: None)
    incoming.take()
    file = tmp_path / "in/new.csv"
    file.write_text("u,v,label\n")
    for begin in range(100, 1100, 200):  # the writer pauses for almost as long as a rest takes
        with file.open("a") as opened:
            opened.write(rows(begin, begin + 200))
        for _ in range(3):
            assert not incoming.take()
            clock.now += settled.SETTLE_S / 3 - 0.01
    clock.now += 1
    (added,) = incoming.take()
    assert sum(added.examples) == 1000
    # what goes on to be written there is told once, and its rows are added from a second copy
    taken = tmp_path / "in/taken/new.csv"
    incoming.take()
    assert "has changed since" not in caplog.text
    with taken.open("a") as opened:
        opened.write(rows(1100, 1200))
    incoming.take()
    incoming.take()
    assert caplog.text.count(f"{taken} has changed since it was taken") == 1
    shutil.copy(taken, file)
    for _ in range(2):
        found = incoming.take()
        clock.now += settled.SETTLE_S
    assert [sum(one.examples) for one in found] == [100]


@pytest.mark.parametrize("fails", [False, True])
def test_what_changes_while_it_is_read_is_read_again(
    of_rows, tmp_path, monkeypatch, fails
):  # fmt: skip
    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    incoming, original = Incoming(tmp_path / "in", of_rows, 0, lambda: None), growing._read
    incoming.take()
    file = tmp_path / "in/new.csv"
    file.write_text("u,v,label\n" + rows(100, 200))

    def written(*args: Any) -> Any:
        found = original(*args)
        with file.open("a") as opened:
            opened.write(rows(200, 300))
        if fails:
            raise DataError("half a row")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(growing, "_read", written)
        assert not incoming.take()
        assert not incoming.take()
    assert file.exists()
    assert open_data(of_rows, 0).num_tasks == 1
    assert not [*(of_rows / "0").glob("task-1*")]
    found = [one for _ in range(2) for one in incoming.take()]
    assert [sum(one.examples) for one in found] == [200]


def test_each_run_of_a_site_that_stays_takes_what_comes(of_rows, tmp_path, monkeypatch, caplog):
    """Two runs that are served side by side; each would have had only what it took first."""
    clock = Clock()
    monkeypatch.setattr(settled, "time", clock)
    other = shutil.copytree(of_rows, tmp_path / "other")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/may.csv").write_text("u,v,label\n" + rows(100, 120))
    (tmp_path / "in/odd.csv").write_text("u,label\n1,a\n")
    runs = [
        Incoming(tmp_path / "in", root, 0, lambda: None, stays=True) for root in (of_rows, other)
    ]

    def taken() -> list[list[int]]:
        found = [run.take() for run in runs]
        clock.now += settled.SETTLE_S
        return [[sum(added.examples) for added in some] for some in found]

    assert [taken(), taken(), taken()] == [[[], []], [[20], [20]], [[], []]]
    assert caplog.text.count("odd.csv is no task") == 2
    assert "u,label" in (tmp_path / "in/odd.csv").read_text()
    assert "column" in (tmp_path / "in/refused/odd.csv.txt").read_text()
    again = Incoming(tmp_path / "in", of_rows, 0, lambda: None, stays=True)
    assert not again.take()
    clock.now += settled.SETTLE_S
    assert [added.was_there for added in again.take()] == [True]
    (tmp_path / "in/may.csv").write_text("u,v,label\n" + rows(100, 130))
    assert [taken(), taken(), taken()] == [[[], []], [[10], [10]], [[], []]]
