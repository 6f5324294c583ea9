"""Clients that are forgotten: the run is computed again without them, also after a crash."""

from __future__ import annotations

from contextlib import closing

import pytest

from fedmodels.errors import ConfigError
from fedsrv.state.forgetting import WHY, forget
from fedsrv.state.ledger import Ledger
from fedsrv.state.lineage import lineage_of
from fedsrv.state.recovery import recover
from fedsrv.state.state_files import StateFiles
from fedsrv.state.store import Store
from fedtide.inprocess import run_in_process
from tests.conftest import tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies
from tests.runs import Killed, assert_same, killed


@pytest.mark.parametrize("method", ["fedrep"])
def test_who_is_forgotten_was_never_there(method, digits, tmp_path, caplog):
    """A kill while it is computed again changes nothing, with or without the option afterwards."""
    experiment = tiny_experiment(method=method)
    never = run_in_process(experiment, digits, tmp_path / "never", without=[1])
    run = tmp_path / "run"
    run_in_process(experiment, digits, run)
    killed(experiment, digits, run, resume=True, forgotten=[1], before=Dies(3))
    assert "clients 1 are forgotten: 4 interactions are computed again" in caplog.text
    assert "of forgotten clients there remain" in caplog.text
    again = run_in_process(experiment, digits, run, resume=True, forgotten=[1])
    assert_same(again, never)
    assert {origin.client for origin in lineage_of(run).at(3)} == {0, 2}
    caplog.clear()
    assert_same(run_in_process(experiment, digits, run, resume=True), never)
    assert "computed again" not in caplog.text


def test_a_kill_right_after_the_wish_loses_it_not(digits, tmp_path):
    experiment, run = tiny_experiment(), tmp_path / "run"
    run_in_process(experiment, digits, run)
    store = Store(run, experiment, resume=True)
    store.set_aside({1: WHY}, first=0)
    store.close()
    run_in_process(experiment, digits, run, resume=True)
    assert {origin.client for origin in lineage_of(run).at(3)} == {0, 2}


@pytest.mark.parametrize(("owner", "step"), [(Ledger, "forget_undone"), (StateFiles, "drop")])
def test_a_kill_while_commits_are_undone_brings_none_of_them_back(
    owner, step, digits, tmp_path, monkeypatch
):
    """All clients still have the states of what was undone, and early ones are pruned by now."""
    experiment, run = tiny_experiment(method="fedrep"), tmp_path / "run"
    run_in_process(experiment, digits, run)
    with closing(Store(run, experiment, resume=True)) as store, monkeypatch.context() as patch:
        patch.setattr(owner, step, lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            forget(store, [1])
    run_in_process(experiment, digits, run, resume=True)
    assert {share.client for v in lineage_of(run).versions for share in v.shares} == {0, 2}


def test_a_database_made_anew_knows_who_is_forgotten(digits, tmp_path):
    experiment, run, said = tiny_experiment(), tmp_path / "run", list[str]()
    run_in_process(experiment, digits, run, facts=True)
    killed(experiment, digits, run, resume=True, forgotten=[1], before=Dies(3), facts=True)
    for file in run.glob("run.db*"):
        file.unlink()
    recover(run, said.append)
    assert "set aside, as audit.jsonl tells: clients 1" in said
    run_in_process(experiment, digits, run, resume=True)
    assert {share.client for v in lineage_of(run).versions for share in v.shares} == {0, 2}


def test_what_cannot_be_computed_again_is_refused_in_a_line(digits, tmp_path):
    schedule = {"open": True, "order": "tasks_outer", "rounds": 1}
    hides = {"level": "example", "noise_multiplier": 1.0, "delta": 1e-3, "clip": 0.5}
    for number, (line, forgets, tables) in enumerate([
        ("--forget 7: the clients of this run are 0 to 2", [7], {}),
        ("--forget: no client would be left", [0, 1, 2], {}),
        ("data of earlier tasks of an open run may be gone", [1], {"schedule": schedule}),
        ("trains all others once more", [1], {"privacy": hides}),
    ]):  # fmt: skip
        store = Store(tmp_path / str(number), tiny_experiment(**tables), resume=False)
        store.close()
        with pytest.raises(ConfigError, match=line):
            run_in_process(
                tiny_experiment(**tables), digits, tmp_path / str(number), resume=True,
                forgotten=forgets,
            )  # fmt: skip
