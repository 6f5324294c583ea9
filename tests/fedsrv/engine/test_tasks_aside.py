"""Tasks of an open run that are set aside: by people, and by the run where uploads fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data.store.dropping import drop_task
from fedcli.data.store.growing import add_task
from fedmodels.errors import DataError, PayloadError, TooFewClients
from fedpb.tables import client_json_of, description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.parts.open_plan import Growth, movers
from fedsrv.parts.stages import BY_HAND, BY_SITE, OpenRuns
from fedsrv.progress.events import EventLog
from fedsrv.state.decisions import SET_ASIDE, decide
from fedsrv.state.ledger import Ledger
from fedsrv.state.store import Store
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies, admission, arrays_in, described, opened, own
from tests.fedsrv.engine.test_who_learns import OPEN
from tests.runs import Killed, deciding

__all__ = ["own"]


def wild(place: Path) -> Path:
    """Write a task with values that no net bears."""
    arrays_in(place, [1, 2], 0)
    for part in ("train", "test"):
        x = np.load(place / f"{part}_x.npy").astype(np.float32)
        np.save(place / f"{part}_x.npy", x * np.float32(1e30))
    return place


def floats(data: Path) -> None:
    """Let the inputs of two clients be floats, so that wild ones may come."""
    for path in data.glob("*/task-*/*_x.npy"):
        np.save(path, np.load(path).astype(np.float32) / 255)
    for path in data.glob("*/client.json"):
        path.write_text(path.read_text().replace('"scale":255.0', '"scale":1.0'))


def aside_of(run: Path) -> list[Any]:
    return [g["set_aside"] for r in records_of(run) for g in r.get("growths", ()) if g["set_aside"]]


def trained(run: Path) -> list[tuple[list[int], dict[str, int]]]:
    """Return who trained in each round, and on which task."""
    return [
        (r["cohort"], {c: row["task"] for c, row in r["clients"].items() if "task" in row})
        for r in records_of(run)
    ]


@pytest.mark.parametrize("kills", [(), (0, 3)])
def test_a_bad_month_ends_no_run_and_its_client_goes_on_with_the_next_one(kills, own, tmp_path):
    """Values of 1e30 make the weights of client 0 infinite; in the next month it is well again."""
    floats(own)
    run = tmp_path / "run"
    opened(own, run)
    add_task(own, 0, wild(tmp_path / "march"))
    well = arrays_in(tmp_path / "april", [1, 2], 1)
    for part in ("train", "test"):
        path = well / f"{part}_x.npy"
        np.save(path, np.load(path).astype(np.float32) / 255)
    add_task(own, 0, well)
    for number in kills:
        with pytest.raises(Killed):
            opened(own, run, "close", before=Dies(number))
    summary = opened(own, run, "close")
    assert summary is not None
    records = records_of(run)
    assert [record["cohort"] for record in records] == [[0, 1], [1], [1], [1], [0, 1]]
    (((client, task, why),),) = aside_of(run)
    assert (client, task) == (0, 1)
    assert why.startswith("3 of its uploads failed; the last one: ")
    assert records[-1]["clients"]["0"]["task"] == 2
    assert records[-1]["clients"]["0"]["views"]["global"]["tasks"][1] is None
    if kills:
        other = tmp_path / "other"
        whole = opened(own, other, "close")
        assert aside_of(other) == aside_of(run)
        assert whole is not None
        assert whole["state_sha256"] == summary["state_sha256"]


def scaled(place: Path, times: float) -> Path:
    """Write a task whose values are so many times those of digits: its upload lies far out."""
    arrays_in(place, [1, 2], 0)
    for part in ("train", "test"):
        x = np.load(place / f"{part}_x.npy").astype(np.float32) / 255
        np.save(place / f"{part}_x.npy", x * np.float32(times))
    return place


def many(data: Path, clients: int) -> None:
    """Let there be more clients, with the data of the first one."""
    for client in range(2, clients):
        shutil.copytree(data / "0", data / str(client))


@pytest.mark.parametrize("beside", [2, 3, 4])
def test_an_odd_month_ends_no_run_whose_cohorts_are_smaller_than_min_clients(beside, own, tmp_path):
    """Ten clients, so five are needed of all; a cohort has three, four or five."""
    many(own, 10)
    floats(own)
    run = tmp_path / "run"
    schedule = {"clients": 10, "participants": f"new + {beside}"}
    opened(own, run, schedule=schedule)
    add_task(own, 0, scaled(tmp_path / "march", 1e4))
    summary = opened(own, run, "close", schedule=schedule)
    assert summary is not None
    records = records_of(run)
    assert [len(record["cohort"]) for record in records] == [10, beside, beside, beside]
    ((client, task, why),) = summary["growths"][-1]["set_aside"]
    assert (client, task) == (0, 1)
    assert why.startswith("3 of its uploads failed; the last one: its upload is far out")


def test_a_round_that_came_to_nothing_counts_and_its_task_goes(own, tmp_path):
    """All three clients are needed: the run ends, at each resume. After the third one the task of
    client 0 is set aside, as in a run whose rounds were committed."""
    many(own, 3)
    floats(own)
    run, needs = tmp_path / "run", {"server": {"min_clients": 3}, "schedule": {"clients": 3}}
    opened(own, run, **needs)
    add_task(own, 0, scaled(tmp_path / "march", 1e4))
    advice = r"failed 3 times; at the site, fedcli drop-task --client-id 0 1 does that now; "
    for _ in range(3):
        with pytest.raises(TooFewClients, match=advice):
            opened(own, run, "close", **needs)
    summary = opened(own, run, "close", **needs)
    assert summary is not None
    ((client, task, why),) = summary["growths"][-1]["set_aside"]
    assert (client, task) == (0, 1)
    assert why.startswith("3 of its uploads failed; the last one: its upload is far out")


def test_a_site_takes_back_the_task_whose_round_came_to_nothing(own, tmp_path):
    """The decision is read before that round is done again."""
    many(own, 3)
    floats(own)
    run, needs = tmp_path / "run", {"server": {"min_clients": 3}, "schedule": {"clients": 3}}
    opened(own, run, **needs)
    add_task(own, 0, scaled(tmp_path / "march", 1e4))
    with pytest.raises(TooFewClients):
        opened(own, run, "close", **needs)
    drop_task(own, 0, 1, "another unit")
    summary = opened(own, run, "close", **needs)
    assert summary is not None
    assert summary["growths"][-1]["set_aside"] == [(0, 1, "another unit")]


def test_a_task_is_set_aside_by_hand_before_it_begins_or_while_it_is_learned(own, tmp_path):
    """Task 1 of client 0 is under way, its task 2 has not begun; a crash loses no wish.

    It is read before the round is done that the crash came into.
    """
    run = tmp_path / "run"
    for seed in (1, 2, 3):
        add_task(own, 0, arrays_in(tmp_path / f"{seed}", [1, 2], seed))
    asked: list[int] = []

    def before(order: Any) -> None:
        if order.kind == rpc.ORDER_KIND_TRAIN and order.interaction == 2 and not asked:
            asked.append(order.interaction)
            store(SET_ASIDE, *({"client": 0, "task": task} for task in (1, 2)))
            raise Killed

    with deciding() as store, pytest.raises(Killed):
        opened(own, run, "close", rounds=2, before=before)
    opened(own, run, "close", rounds=2)
    found = [tasks.get("0") for _, tasks in trained(run)]
    assert found == [0, 0, 3, 3]
    assert aside_of(run) == [[[0, 1, BY_HAND], [0, 2, BY_HAND]]]
    assert records_of(run)[-1]["clients"]["0"]["views"]["global"]["tasks"][1:3] == [None, None]


def test_who_has_no_other_task_trains_no_more_until_one_comes(own, tmp_path):
    run = tmp_path / "run"
    opened(own, run)
    add_task(own, 1, arrays_in(tmp_path / "1", [1, 2], 1))
    decide(run, SET_ASIDE, {"client": 0, "task": 0})
    opened(own, run)
    add_task(own, 0, arrays_in(tmp_path / "2", [3, 4], 2))
    opened(own, run, "close")
    assert [cohort for cohort, _ in trained(run)] == [[0, 1], [1], [0, 1]]


def test_tasks_that_are_set_aside_are_passed_over():
    experiment = tiny_experiment(schedule=OPEN)
    known, present, gone = {0: 4, 1: 2, 2: 2}, {0: 1, 1: 1}, {(0, 1), (0, 2), (1, 1), (2, 0)}
    assert movers(experiment, known, present, {0, 1}, True, gone) == {0: 4, 2: 2}


def test_wishes_are_checked_and_lie_on_the_disk(tmp_path):
    run = tmp_path / "run"
    store = Store(run, tiny_experiment(), False)
    part: Any = OpenRuns(store, EventLog())
    known: Any = type("Known", (), {"num_tasks": 2})()
    part._stages = type("Stages", (), {"known": {0: known}, "growths": [Growth(0)]})()
    begun, part._stages = part._stages, None
    with pytest.raises(PayloadError, match="the run has not begun"):
        part.offers()["set_aside"]([(0, 1)])
    part._stages = begun
    for client, task in ((0, 2), (0, -1), (1, 0)):
        with pytest.raises(PayloadError, match=f"client {client} has no task {task}"):
            part.offers()["set_aside"]([(client, task)])
    part.offers()["set_aside"]([(0, 1)])
    store.close()
    ledger = Ledger(run / "run.db", strict=False, new=False)
    assert ledger.decided(SET_ASIDE) == [{"client": 0, "task": 1}]
    ledger.close()


def test_a_growth_is_read_as_it_was_written():
    growth = Growth(0, {0: 1}, ("a",), owed={0: 2}, set_aside={(0, 0): "why"})
    assert Growth.from_json(growth.to_json()) == growth


def test_an_open_run_waits_for_half_of_its_clients_unless_it_says_more():
    def server(**tables: Any) -> tuple[int | None, float | None]:
        found = tiny_experiment(**tables).server
        return found.min_clients, found.deadline_s

    assert server(schedule={**OPEN, "clients": 20, "begin_with": 5}) == (2, 3600)
    assert server(schedule={**OPEN, "clients": 20, "per_round": 3}) == (1, 3600)
    assert server(schedule={**OPEN, "clients": 2}, server={"min_clients": 2}) == (2, None)
    assert server(schedule={**OPEN, "clients": 9}, server={"reduce": "median"}) == (None, None)
    assert server() == (None, None)


def test_a_site_sets_tasks_aside_before_and_after_the_run_knows_of_them(own, tmp_path):
    """Task 0 of client 1 goes before the run begins; task 1 of client 0 once it was learned.

    Task 2 of client 0, with a class of its own, goes before it was announced: its class never
    comes. The data of tasks that are set aside may be deleted.
    """
    run = tmp_path / "run"
    add_task(own, 1, arrays_in(tmp_path / "1", [1, 2], 1))
    assert drop_task(own, 1, 0)
    assert not drop_task(own, 1, 0)
    add_task(own, 0, arrays_in(tmp_path / "2", [3, 4], 2))
    opened(own, run)
    assert drop_task(own, 0, 1, "a loose\nsensor")
    add_task(own, 0, arrays_in(tmp_path / "3", [5, 11], 3))
    assert drop_task(own, 0, 2)
    shutil.rmtree(own / "0" / "task-2")
    add_task(own, 0, arrays_in(tmp_path / "4", [5, 6], 4))
    with pytest.raises(Killed):
        opened(own, run, before=Dies(0))
    opened(own, run, "close")
    assert trained(run) == [
        ([0, 1], {"0": 0, "1": 1}),
        ([0, 1], {"0": 1, "1": 1}),
        ([0, 1], {"0": 3, "1": 1}),
    ]
    assert aside_of(run) == [
        [[1, 0, BY_SITE]], [[0, 1, "a loose\\nsensor"], [0, 2, BY_SITE]],
    ]  # fmt: skip
    records = records_of(run)
    assert "11" not in [name for r in records for g in r["growths"] for name in g["classes"]]
    assert records[-1]["clients"]["0"]["views"]["global"]["tasks"][1:3] == [None, None]
    with pytest.raises(DataError, match="has no task 4: it has 4, from 0 on"):
        drop_task(own, 0, 4)


def test_a_task_that_the_run_does_not_take_holds_up_no_later_one(own, tmp_path, caplog):
    """Task 1 brings a class beyond max_classes; task 2 is well; so it is after a restart."""
    run, most = tmp_path / "run", {"schedule": {"max_classes": 10}}
    opened(own, run, **most)
    add_task(own, 0, arrays_in(tmp_path / "1", [5, 11], 1))
    add_task(own, 0, arrays_in(tmp_path / "2", [5, 6], 2))
    opened(own, run, **most)
    add_task(own, 0, arrays_in(tmp_path / "3", [11, 12], 3))
    add_task(own, 0, arrays_in(tmp_path / "4", [7, 6], 4))
    opened(own, run, "close", **most)
    assert [tasks["0"] for _, tasks in trained(run)] == [0, 2, 4]
    ((first,), (second,)) = aside_of(run)
    assert first[:2] == [0, 1]
    assert first[2].startswith("the run does not take it: it brings ")
    assert second[:2] == [0, 3]


def test_only_open_runs_pass_tasks_over():
    gone = {"train": [1, 1], "test": [0, 0], "set_aside": True, "why": ""}
    text = described([3, 3], tasks=[gone, {"train": [1, 1], "test": [1, 1]}])
    closed = Admission({})
    with pytest.raises(PayloadError, match="client 0 has set its task 0 aside, which only runs"):
        closed.taken(0, text)
    assert closed.taken(0, described([3, 3])) == described([3, 3])
    assert json.loads(client_json_of(description_of(text)))["tasks"][0] == {
        "train": [1, 1], "test": [0, 0], "set_aside": True,
    }  # fmt: skip


def test_a_run_with_an_end_does_not_train_what_was_set_aside_in_one_process_either(own, tmp_path):
    drop_task(own, 1, 0)
    experiment = tiny_experiment(method="fedavg", schedule={"clients": 2})
    experiment = experiment.model_copy(update={"scenario": None, "data": None})
    with pytest.raises(PayloadError, match="client 1 has set its task 0 aside, which only runs"):
        run_in_process(experiment, own, tmp_path / "run")


def test_a_site_with_older_data_is_told_what_is_missing_also_where_the_lost_task_was_set_aside():
    taken = admission()
    aside = {"train": [1, 1], "test": [1, 1], "set_aside": True}
    text = described([3, 3], tasks=[{"train": [3, 3], "test": [3, 3]}, aside])
    taken.admit(0, taken.taken(0, text))
    with pytest.raises(PayloadError, match=r"has 1 tasks, and had 2: put back its client\.json"):
        taken.check(0, taken.taken(0, described([3, 3])))


def test_each_new_task_is_taken_or_refused_by_itself_and_no_mark_is_taken_back():
    taken = admission(max_classes=3)
    names = {"class_names": ["0", "1", "elk", "fox", "gnu"]}
    text = described([3, 3, 0, 0, 0], [0, 0, 4, 4, 0], [0, 0, 0, 4, 0], [1, 0, 0, 0, 2], **names)
    said = taken.taken(0, text)
    taken.check(0, said)
    taken.admit(0, said)
    assert [*taken.refused(0)] == [1, 3]
    assert "brings 2 new classes to 2" in taken.refused(0)[1]
    again = json.loads(taken.taken(0, text))["tasks"]
    assert [task.get("set_aside", False) for task in again] == [False, True, False, True]
    with pytest.raises(PayloadError, match="max_classes = 3"):  # nobody is known by this id
        taken.check(1, taken.taken(1, text))


def test_one_missing_directory_of_a_client_ends_no_run(own, tmp_path):
    """Client 1 is away as over the network: the run goes on with the others, and with it later."""
    many(own, 3)
    run, three = tmp_path / "run", {"schedule": {"clients": 3}}
    opened(own, run, **three)
    shutil.move(own / "1", tmp_path / "elsewhere")
    add_task(own, 0, arrays_in(tmp_path / "march", [1, 2], 0))
    opened(own, run, **three)
    assert trained(run)[-1][0] == [0, 2]
    shutil.move(tmp_path / "elsewhere", own / "1")
    add_task(own, 0, arrays_in(tmp_path / "april", [1, 2], 1))
    assert opened(own, run, "close", **three)
    assert trained(run)[-1][0] == [0, 1, 2]
