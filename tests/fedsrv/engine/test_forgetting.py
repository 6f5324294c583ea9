"""Clients that are forgotten: the run is computed again without them, also after a crash."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.predicting.live_model import LiveModel, NoModelYet
from fedcli.predicting.prediction import personal_file
from fedmodels.errors import ConfigError, DataError
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.state.forgetting import WHY, forget
from fedsrv.state.ledger import Ledger
from fedsrv.state.lineage import lineage_of
from fedsrv.state.recovery import recover
from fedsrv.state.state_files import StateFiles
from fedsrv.state.store import Store
from fedsrv.trained.trained_models import personal_model
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
    assert "client 1 is forgotten: 4 interactions are computed again" in caplog.text
    assert "of what is forgotten there remain" in caplog.text
    again = run_in_process(experiment, digits, run, resume=True, forgotten=[1])
    assert_same(again, never)
    assert {origin.client for origin in lineage_of(run).at(3)} == {0, 2}
    caplog.clear()
    assert_same(run_in_process(experiment, digits, run, resume=True), never)
    assert "computed again" not in caplog.text


def test_nothing_answers_with_the_model_of_who_is_forgotten(digits, tmp_path):
    """Neither at once, while it is computed again, nor in the end; others keep theirs."""
    experiment = tiny_experiment(method="fedrep", deploy={})
    run_in_process(experiment, digits, tmp_path, facts=True)
    kept = {client: personal_file(tmp_path, client) for client in range(3)}
    assert all(LiveModel.of(tmp_path, client).now().model for client in kept)
    killed(experiment, digits, tmp_path, resume=True, forgotten=[1], before=Dies(0), facts=True)
    for _ in range(2):
        for refused in (personal_file, personal_model):
            with pytest.raises(DataError, match="model"):
                refused(tmp_path, 1)
        with pytest.raises(NoModelYet):
            LiveModel.of(tmp_path, 1).now()
        assert personal_file(tmp_path, 2) == kept[2]
        run_in_process(experiment, digits, tmp_path, resume=True, facts=True)


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
        ("--forget 7: the clients of this run are 0 to 2", [(7, 0)], {}),
        ("--forget 1:0: the run has not begun", [(1, 0)], {}),
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


def test_secure_sums_that_could_not_be_made_again_refuse_before_anything_is_undone(
    digits, tmp_path
):
    """Each refused wish undid the whole run, which could not be computed again."""
    sums: dict[str, Any] = {"trust": "coordinator", "groups": 2}
    for name, more, gone, line in [
        ("one", {"groups": 1}, [1], "a fixed group .* comes to nothing, and none would be left"),
        ("changing", {"groups": 1, "fixed": False}, [1], "the difference of two sums is what"),
        ("task", {"groups": 1, "fixed": False}, [(1, 0)], "the difference of two sums is what"),
        ("two", {}, [0, 1], "a fixed group .* comes to nothing, and none would be left"),
        ("left", {}, [1], ""),
    ]:
        experiment = tiny_experiment(
            schedule={"clients": 6}, privacy={"secure_sum": {**sums, **more}}
        )
        data, run = sixfold(digits, tmp_path / f"data-{name}"), tmp_path / name
        whole = run_in_process(experiment, data, run)
        if not line:
            run_in_process(experiment, data, run, resume=True, forgotten=gone)
            assert {origin.client for origin in lineage_of(run).at(3)} == {0, 2, 4}
            continue
        with pytest.raises(ConfigError, match=line):
            run_in_process(experiment, data, run, resume=True, forgotten=gone)
        assert_same(run_in_process(experiment, data, run, resume=True), whole)


def sixfold(data: Path, place: Path) -> Path:
    """Return data of six clients: those of three, each twice."""
    for client in range(6):
        shutil.copytree(data / str(client % 3), place / str(client))
    return place


def otherwise(data: Path, place: Path, client: int, task: int) -> Path:
    """Return a copy of clients' data in which one task of a client has other examples, and fewer.

    Its description says so.
    """
    shutil.copytree(data, place)
    at = place / str(client)
    about = json.loads((at / "client.json").read_text())
    for part in ("train", "test"):
        y = np.zeros(3, dtype=np.int64)
        np.save(at / f"task-{task}/{part}_y.npy", y)
        x = np.random.default_rng(1).integers(0, 256, (3, 1, 8, 8), dtype=np.uint8)
        np.save(at / f"task-{task}/{part}_x.npy", x)
        counts = about["tasks"][task][part]
        about["tasks"][task][part] = [3, *(0 for _ in counts[1:])]
    (at / "client.json").write_text(json.dumps(about))
    return place


TASKS_OUTER = {"schedule": {"order": "tasks_outer", "rounds": 1}}
ACCUMULATED = {**TASKS_OUTER, "scenario": {"training_data": "accumulated"}}


@pytest.mark.parametrize(
    ("method", "tables", "last"),
    [("fedrep", {"schedule": {"rounds": 1}}, 1), ("fedavg", ACCUMULATED, 1)],
)
def test_nothing_of_a_forgotten_task_is_left_in_models_or_scores(
    method, tables, last, digits, tmp_path, caplog
):
    """Two runs whose clients differ in that task alone come to the same bits and the same scores.

    One is killed while it is computed again.
    """
    experiment, found = tiny_experiment(method=method, **tables), []
    for name, data in (("a", digits), ("b", otherwise(digits, tmp_path / "data", 1, 0))):
        whole = run_in_process(experiment, data, tmp_path / name)
        if name == "a":
            how: dict[str, Any] = {"resume": True, "forgotten": [(1, 0)], "before": Dies(3)}
            killed(experiment, data, tmp_path / name, **how)
        again = run_in_process(
            experiment, data, tmp_path / name, resume=True, forgotten=[(1, 0)] * (name == "b")
        )
        assert again["state_sha256"] != whole["state_sha256"]
        found.append(again)
    assert "task 0 of client 1 is forgotten: 2 interactions are computed again" in caplog.text
    assert_same(*found)
    trained = {(one.client, one.task) for one in lineage_of(tmp_path / "a").at(last)}
    assert trained == {(0, 0), (2, 0), (0, 1), (1, 1), (2, 1)}


def test_a_database_made_anew_knows_which_tasks_are_forgotten(digits, tmp_path):
    experiment, run, said = tiny_experiment(schedule={"rounds": 1}), tmp_path / "run", list[str]()
    run_in_process(experiment, digits, run, facts=True)
    again = run_in_process(experiment, digits, run, resume=True, forgotten=[(1, 0)], facts=True)
    for file in run.glob("run.db*"):
        file.unlink()
    recover(run, said.append)
    assert "forgotten, as audit.jsonl tells: task 0 of client 1" in said
    trained = list[int]()
    note = {"before": lambda o: o.kind == rpc.ORDER_KIND_TRAIN and trained.append(o.interaction)}
    assert_same(run_in_process(experiment, digits, run, resume=True, **note), again)
    assert trained == [], "it was computed without the task before"
    for line, tasks in [
        ("--forget 1:2: the tasks of client 1 are 0 to 1", [(1, 2)]),
        ("--forget 1:1: no task of client 1 would be left", [(1, 1)]),
    ]:
        with pytest.raises(ConfigError, match=line):
            run_in_process(experiment, digits, run, resume=True, forgotten=tasks)


def test_a_task_is_not_forgotten_where_its_examples_decide_who_is_drawn(digits, tmp_path):
    schedule = {"rounds": 1, "sampling": "weighted", "per_round": 2}
    experiment = tiny_experiment(schedule=schedule)
    run_in_process(experiment, digits, tmp_path)
    with pytest.raises(ConfigError, match="draws by the examples of all tasks: begin a new run"):
        run_in_process(experiment, digits, tmp_path, resume=True, forgotten=[(1, 0)])
