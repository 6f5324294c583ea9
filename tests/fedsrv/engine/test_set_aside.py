"""Clients fail right after an odd upload: the run names it, goes back, and may go on without."""

from __future__ import annotations

import re
import shutil
from contextlib import closing
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import fedtide
from fedmodels.errors import ConfigError, TooFewClients
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.cli import app
from fedsrv.coordinator import set_aside
from fedsrv.engine.schedule import steps
from fedsrv.state.store import Store
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.state.test_store import committed
from tests.liars import Stage
from tests.runs import dies, ends_as, killed

ROUNDS = {"rounds": 3}
"""Six interactions of three clients."""
LIAR, ODD = 2, 2
"""Who sends an odd upload, and in which interaction."""


class Poison:
    """The liar's upload is within the bounds, and others fail for its sake in the next one."""

    def __init__(self, honest: bool = False) -> None:
        self.honest = honest

    def __call__(self, client, order, answer):
        upload, report, failure = answer
        if order.kind != rpc.ORDER_KIND_TRAIN or self.honest:
            return answer
        if client == LIAR and order.interaction == ODD:
            weights = {k: 5 * t for k, t in upload.weights.items()}
            return replace(upload, weights=weights), report, failure
        if client != LIAR and order.interaction == ODD + 1:
            return Bundle(), rpc.Report(), "the loss is nan: lower lr"
        return answer


def poisoned(digits, out, **tables):
    """Begin such a run; return its stage, and the line it ends with."""
    lie = Poison()
    stage = Stage(tiny_experiment(schedule=ROUNDS, **tables), digits, out, lie, liars=range(3))
    with pytest.raises(TooFewClients) as failed:
        stage.run()
    lie.honest = True
    return stage, str(failed.value)


@pytest.mark.parametrize("min_clients", [None, 2, 1])
def test_the_run_says_whose_upload_was_odd_and_goes_back_before_it(
    min_clients, digits, tmp_path, whole_run
):
    """With ``min_clients = 1`` the liar alone would go on from what it made of the model."""
    tables = {"server": {"min_clients": min_clients}} if min_clients else {}
    stage, line = poisoned(digits, tmp_path / "run", **tables)
    assert line.startswith("client 2's upload in interaction 3 was odd: its weights moved ")
    assert re.search(r"the first so: client [01] failed in round 2 .*: the loss is nan", line)
    assert "--resume --without 2 continues without client 2" in line
    assert "\n" not in line
    assert [r["interaction"] for r in records_of(stage.out)] == [0, 1]
    again = stage.run(resume=True)  # as if the upload had been a mistake
    assert again["state_sha256"] == whole_run(stage.experiment, digits).summary["state_sha256"]


def test_the_run_goes_on_without_a_client_that_never_comes_again(digits, tmp_path):
    stage, _ = poisoned(digits, tmp_path / "run")
    summary = stage.run(resume=True, without=[LIAR])
    records = records_of(stage.out)
    assert [r["cohort"] for r in records] == [[0, 1, 2]] * 2 + [[0, 1]] * 4
    assert all("2" not in r["clients"] for r in records[ODD:])
    assert summary["clients_set_aside"] == [LIAR]
    assert "clients_missing" not in summary


def test_what_was_set_aside_stays_so_after_a_crash(digits, tmp_path):
    """A run that is killed after the option was given comes to the same bits without it."""
    experiment = tiny_experiment(method="fedper", schedule=ROUNDS)
    train = {"kind": rpc.ORDER_KIND_TRAIN}
    killed(experiment, digits, tmp_path / "run", before=dies(**train, interaction=ODD))
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    how = {"resume": True, "without": [LIAR]}
    expected = run_in_process(experiment, digits, tmp_path / "run", **how)
    at = dies(**train, interaction=4)
    killed(experiment, digits, tmp_path / "other", before=at, **how)
    again = ends_as(expected, experiment, digits, tmp_path / "other")
    assert again["clients_set_aside"] == [LIAR]


def test_an_asynchronous_run_gives_it_no_order_again(digits, tmp_path):
    """Its order was under way when the run broke off."""
    schedule = {"order": "asynchronous", "rounds": 3, "buffer": 1}
    experiment = tiny_experiment(schedule=schedule)

    def breaks(client, order, answer):
        if order.kind == rpc.ORDER_KIND_TRAIN and order.interaction:
            return Bundle(), rpc.Report(), "no"
        return answer

    stage = Stage(experiment, digits, tmp_path / "run", breaks, liars=range(3))
    with pytest.raises(TooFewClients):
        stage.run()
    counted = records_of(stage.out)[-1]["cohort"]
    aside = next(c for c in range(3) if c not in counted)
    stage.liars = ()
    summary = stage.run(resume=True, without=[aside])
    begun = len(records_of(stage.out))
    assert begun == 6
    assert summary["clients_set_aside"] == [aside]


def test_cohorts_are_drawn_from_the_others(digits):
    experiment = tiny_experiment(schedule={"rounds": 8, "clients": 5, "per_round": 2})
    tasks = dict.fromkeys(range(5), 2)
    before, after = (steps(experiment, range(5), tasks, None, aside) for aside in ({}, {3: 5}))
    assert len(after) == len(before)
    assert [s.cohort for s in after[:5]] == [s.cohort for s in before[:5]]
    assert any(3 in s.cohort for s in before[5:])
    assert all(3 not in s.cohort and len(s.cohort) == 2 for s in after[5:])
    with pytest.raises(ConfigError, match="none is left"):
        steps(experiment, range(2), tasks, None, {0: 1, 1: 1})


def test_who_is_set_aside_is_stored_from_the_first_time_on(tmp_path):
    experiment = tiny_experiment(server={"max_rollback": 9})
    with closing(committed(Store(tmp_path / "run", experiment, False), 0, 1, 2)) as store:
        set_aside(store, [2])
        assert store.aside() == {2: 3}
        store.roll_back(0)
        set_aside(store, [])
        assert store.aside() == {2: 3}
        set_aside(store, [2])
        assert store.aside() == {2: 1}
        for wrong, line in (([3], "the clients of this run are 0 to 2"), ([0, 1], "no client")):
            with pytest.raises(ConfigError, match=line):
                set_aside(store, wrong)
    with closing(Store(tmp_path / "run", experiment, True)) as store:
        assert store.aside() == {2: 1}


@pytest.mark.parametrize("command", ["serve", "launch"])
def test_a_new_run_is_without_nobody(command, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text("")
    found = CliRunner().invoke(app, [command, str(config), "--without", "1"])
    assert isinstance(found.exception, ConfigError)
    assert "--without needs --resume" in str(found.exception)


def test_from_python(digits, tmp_path, monkeypatch):
    run = fedtide.run(tiny_experiment(schedule=ROUNDS).to_dict(), backend="inprocess",
                      out=tmp_path / "run")  # fmt: skip
    longer = {"rounds": 4}
    monkeypatch.setattr(
        type(run), "experiment", property(lambda _: tiny_experiment(schedule=longer))
    )
    again = run.resume("inprocess", without=[1])
    assert again.summary["clients_set_aside"] == [1]
    assert [r["cohort"] for r in records_of(tmp_path / "run")][-2:] == [[0, 2]] * 2
