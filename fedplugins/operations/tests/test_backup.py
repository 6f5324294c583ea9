"""Backups of a run that goes on, and coordinators that are older than their clients."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedmodels.errors import ArchiveError, ConfigError, RunFailed
from fedplugins.operations import backup as copies
from fedplugins.operations.backup import backup, restore
from fedsrv.state.history import History, LossTooLarge
from fedsrv.state.verification import verified
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies
from tests.runs import assert_same, killed


def test_a_copy_that_is_made_while_a_run_goes_on_ends_in_the_same_bits(digits, tmp_path):
    """Clients of FedRep have gone on, and hold states after interactions 3 and 4 alone.

    The beginning, which a run may go back to here, is what both have in common.
    """
    experiment, run, made = tiny_experiment(method="fedrep"), tmp_path / "run", tmp_path / "copy"

    def before(order: Any) -> None:
        if order.interaction == 2 and not made.exists():
            assert backup(run, made) in (0, 1)

    whole = run_in_process(experiment, digits, run, before=before, facts=True)
    assert verified(made).wrong == []
    old = tmp_path / "old"
    restore(made, old)
    shutil.copytree(run / "clients", old / "clients")
    for path in old.glob("clients/*/state-0000000[01].safetensors"):
        path.unlink()
    assert_same(run_in_process(experiment, digits, old, resume=True), whole)


def test_who_holds_later_states_alone_has_lost_nothing():
    """The coordinator was committed up to interaction 5, and goes back to 4 at most."""
    history = History({n: {0: n, 1: n} for n in range(5)}, highest=4, floor=3)
    history.check(0, [3, 8, 9])
    with pytest.raises(
        LossTooLarge, match=r"^client 0 lost nothing: .* after interactions 9, 10 a"
    ):
        history.check(0, [8, 9])
    with pytest.raises(LossTooLarge, match=r"^client 0 lost its private state"):
        history.check(0, [2, 9])


def test_a_state_that_goes_meanwhile_has_the_copy_made_anew(digits, tmp_path, monkeypatch):
    run, real, tries = tmp_path / "run", copies._copy_state, list[int]()
    run_in_process(tiny_experiment(), digits, run)

    def gone_once(source: Path, target: Path, number: int) -> None:
        tries.append(number)
        if len(tries) == 1:
            raise FileNotFoundError
        real(source, target, number)

    monkeypatch.setattr(copies, "_copy_state", gone_once)
    assert backup(run, tmp_path / "copy") == 3
    monkeypatch.setattr(copies, "_copy_state", lambda *_: real(run, run, 99))
    with pytest.raises(ArchiveError, match="no whole copy can be made"):
        backup(run, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "run"]


def test_a_round_that_ends_while_files_are_copied_is_not_in_the_copy(digits, tmp_path, monkeypatch):
    """The run goes on to its end after its database was copied."""
    run, made, real = tmp_path / "run", tmp_path / "copy", copies._copy_state
    killed(tiny_experiment(), digits, run, before=Dies(3), facts=True)

    def later(source: Path, target: Path, number: int) -> None:
        real(source, target, number)
        run_in_process(tiny_experiment(), digits, run, resume=True, facts=True)

    monkeypatch.setattr(copies, "_copy_state", later)
    assert backup(run, made) < 3
    assert verified(made).wrong == []
    assert not [*made.glob("summary.json"), *made.glob("lineage.json")]
    assert restore(run_as_backup(run, made), tmp_path / "again")["committed"] == 3


def run_as_backup(run: Path, made: Path) -> Path:
    """Return a restored run that has gone on: it holds more than its ``backup.json`` says."""
    shutil.copy(made / "backup.json", run)
    return run


def test_a_file_that_cannot_be_read_is_named_by_the_line(digits, tmp_path):
    run = tmp_path / "run"
    run_in_process(tiny_experiment(), digits, run)
    (run / "env.json").mkdir()
    with pytest.raises(ArchiveError, match=r"env\.json cannot be read: Is a directory"):
        backup(run, tmp_path / "copy")
    with pytest.raises(RunFailed, match=r"^/proc/x cannot be written: [^;]*$"):
        backup(run, Path("/proc/x"))


def test_a_damaged_run_is_named_and_not_its_copy(digits, tmp_path):
    """The copy is gone when people read the line."""
    run = tmp_path / "run"
    run_in_process(tiny_experiment(schedule={"rounds": 1}), digits, run)
    with closing(sqlite3.connect(run / "run.db")) as db:
        db.execute("DROP TABLE chain")
        db.commit()
    with pytest.raises(ArchiveError) as told:
        backup(run, tmp_path / "copy")
    assert str(told.value).startswith(f"{run}/run.db is damaged (it has no table 'chain')")
    assert str(told.value).endswith(f"fedsrv recover {run}")


def test_what_is_no_run_or_no_backup_is_refused_in_a_line(tmp_path):
    with pytest.raises(ArchiveError, match="there is no run to copy"):
        backup(tmp_path / "none", tmp_path / "copy")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run.db").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        backup(tmp_path / "full", tmp_path / "full")
    with pytest.raises(ArchiveError, match=r"cannot be copied|is damaged"):
        backup(tmp_path / "full", tmp_path / "copy")
    with pytest.raises(ArchiveError, match="is no backup"):
        restore(tmp_path / "full", tmp_path / "copy")
