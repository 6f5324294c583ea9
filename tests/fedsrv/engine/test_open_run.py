"""Open runs: tasks and clients that come while a run goes on, and what a crash leaves of them."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import fedtide
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.growing import add_task
from fedcli.data.store.recovering import recover_tasks
from fedcli.data.store.stream import TaskStream
from fedcli.data.store.validation import Validation
from fedmodels.config.data import Data
from fedmodels.config.experiment import Trigger
from fedmodels.config.open_changes import waits_for_most
from fedmodels.config.training import LrSchedule
from fedmodels.errors import ConfigError, PayloadError, RunFailed
from fedmodels.facts.data_description import ClientFile
from fedmodels.facts.position import Interaction
from fedmodels.facts.run_classes import RunClasses
from fedmodels.training.optimizer import factor_at
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.summary import forgetting_of_streams
from fedsrv.parts.exclusions import Exclusions
from fedsrv.parts.open_admission import OpenAdmission
from fedsrv.parts.open_plan import Growth, movers
from fedsrv.parts.stages import OpenRuns, RunPaused, Stages
from fedsrv.progress.events import EventLog
from fedsrv.state.decisions import CLOSE, EXCLUDE, RETIRE, SET_ASIDE, decide
from fedsrv.state.recovery import recover
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.runs import Killed, deciding

TWICE = {"order": "tasks_outer", "rounds": 2}
"""Four interactions on the two tasks of each of three clients."""
OPEN = {**TWICE, "open": True}


def growths_of(run: Path) -> list[tuple[int, list[list[int]]]]:
    """Return the first interaction of each stage, and who went on to which number of tasks."""
    found = [g for record in records_of(run) for g in record.get("growths", ())]
    return [(growth["interaction"], growth["tasks"]) for growth in found]


# --- what it learns -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "gldp", "scaffold"])
def test_streams_of_one_length_are_learned_as_by_a_run_that_knows_them(method, digits, tmp_path):
    closed = run_in_process(experiment_for((method, {}), schedule=TWICE), digits, tmp_path / "a")
    opened = run_in_process(experiment_for((method, {}), schedule=OPEN), digits, tmp_path / "b")
    assert opened["state_sha256"] == closed["state_sha256"]
    assert growths_of(tmp_path / "b") == [
        (0, [[0, 1], [1, 1], [2, 1]]),
        (2, [[0, 2], [1, 2], [2, 2]]),
    ]


def test_late_clients_join_at_the_end_of_a_stage_and_begin_with_their_first_task(digits, tmp_path):
    schedule = {**OPEN, "begin_with": 1, "newcomers": 1, "rounds": 1}
    run_in_process(tiny_experiment(schedule=schedule), digits, tmp_path)
    assert growths_of(tmp_path) == [
        (0, [[0, 1]]), (1, [[0, 2], [1, 1]]), (2, [[1, 2], [2, 1]]), (3, [[2, 2]]),
    ]  # fmt: skip
    records = records_of(tmp_path)
    assert [record["cohort"] for record in records] == [[0], [0, 1], [0, 1, 2], [0, 1, 2]]
    present = [
        {c: row["task"] for c, row in r["clients"].items() if "task" in row} for r in records
    ]
    assert present[2] == {"0": 1, "1": 1, "2": 0}
    assert [len(records[2]["clients"][c]["views"]["global"]["tasks"]) for c in "012"] == [2, 2, 1]


def test_who_goes_on_has_had_all_rounds_of_the_present_task():
    experiment = tiny_experiment(schedule=OPEN)
    known, present = {0: 3, 1: 2, 2: 1, 3: 4}, {0: 1, 1: 1, 2: 1}
    assert movers(experiment, known, present, {0, 2}, False) == {0: 2, 3: 1}
    few = tiny_experiment(schedule={**OPEN, "newcomers": 1})
    assert movers(few, {**known, 4: 1}, present, {0, 1}, False) == {0: 2, 1: 2}
    assert movers(few, {**known, 4: 1}, present, {0, 1}, True) == {0: 2, 1: 2, 3: 1}


def test_a_run_whose_database_is_gone_goes_on_from_its_records(digits, tmp_path):
    experiment = tiny_experiment(schedule=OPEN)
    whole = run_in_process(experiment, digits, tmp_path / "whole", facts=True)
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run_in_process(experiment, digits, out, before=Dies(17), facts=True)
    for file in out.glob("run.db*"):
        file.unlink()
    recover(out, lambda line: None)
    again = run_in_process(experiment, digits, out, resume=True)
    assert again["state_sha256"] == whole["state_sha256"]


def test_a_trigger_waits_until_enough_clients_have_new_data(digits, tmp_path):
    """Client 0 has one task less, so the second stage has but two movers."""
    trigger = {"new_data": 3}
    experiment = tiny_experiment(schedule={**OPEN, "rounds": 1}, trigger=trigger)
    data = tmp_path / "data"
    shutil.copytree(digits, data)
    forget_last_task(data / "0")
    run_in_process(experiment, data, tmp_path / "run")
    assert growths_of(tmp_path / "run") == [(0, [[0, 1], [1, 1], [2, 1]])]


def due(trigger: dict[str, Any], accuracy: float | None = None) -> tuple[Any, list[Any]]:
    """Return what tells whether one client may go on, and the plans whose scores were asked for.

    The last scored round had an accuracy of 0.75.
    """
    stages: Any = Stages.__new__(Stages)
    records = {4: {"metrics": {"a_loc_received": 0.75, "a_glo": 0.1}}}
    stages.store = SimpleNamespace(
        experiment=SimpleNamespace(begins=Trigger(new_data=2, **trigger)), committed=4,
        ledger=SimpleNamespace(record=records.get),
    )  # fmt: skip
    stages._looked_at, stages.known, looked = {}, {}, list[Any]()
    plan: Any = SimpleNamespace(grown=lambda growth, _: growth)

    def ahead(grown: Any, clients: Any) -> float | None:
        looked.append((grown, clients))
        return accuracy

    def is_due(tasks: dict[int, int], waited: float = 0.0, is_idle: bool = True) -> bool:
        return bool(stages._is_due(plan, Growth(5, tasks), waited, is_idle, ahead))

    return is_due, looked


def test_one_client_with_new_data_waits_for_another_one_or_for_its_time():
    is_due, looked = due({"every_s": 10})
    assert [is_due({0: 2}, waited) for waited in (0, 9.9, 10, 11)] == [False, False, True, True]
    assert is_due({0: 2, 1: 2})
    assert not is_due({}, 11)
    assert looked == []


@pytest.mark.parametrize(("accuracy", "goes_on"), [(0.5, True), (0.51, False), (None, False)])
def test_a_drop_of_as_much_as_the_trigger_says_is_enough_and_looked_at_once(accuracy, goes_on):
    """0.75 - 0.5 is the drop of 0.25."""
    is_due, looked = due({"score_drop": 0.25}, accuracy)
    assert not is_due({0: 2}, is_idle=False), "rounds are under way"
    assert [is_due({0: 2}), is_due({0: 2}), is_due({0: 3})] == [goes_on, False, goes_on]
    assert [clients for _, clients in looked] == [[0], [0]]


@pytest.mark.parametrize(("drop", "goes_on"), [(0.05, True), (0.9, False)])
def test_models_that_fail_on_new_data_are_a_reason_to_go_on(drop, goes_on, own, tmp_path):
    """Client 0 alone has a new task, of noise; two are needed unless models fail on it."""
    trigger = {"new_data": 2, "score_drop": drop}
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    opened(own, tmp_path / "run", "close", trigger=trigger, rounds=8)
    stages = growths_of(tmp_path / "run")
    assert [tasks for _, tasks in stages[1:]] == ([[[0, 2]]] if goes_on else [])


@pytest.mark.parametrize("drifted", ["", "the mean of column 0"])
def test_a_task_that_its_site_says_came_after_drift_is_a_reason_to_go_on(drifted, own, tmp_path):
    """Client 0 alone has a new task; two are needed unless what its model is asked has moved."""
    out = tmp_path / "run"
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0), drifted=drifted)
    opened(own, out, "close", trigger={"new_data": 2, "drift": True})
    assert [tasks for _, tasks in growths_of(out)[1:]] == ([[[0, 2]]] if drifted else [])
    told = [one for record in records_of(out) for one in record.get("drifted", ())]
    assert told == ([{"client": 0, "task": 1, "line": drifted}] if drifted else [])


def test_a_task_after_drift_does_not_wait_for_the_one_before_it(own, tmp_path):
    """Client 0 has a task that alone is not enough, and behind it one that is."""
    out = tmp_path / "run"
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    add_task(own, 0, arrays_in(tmp_path / "more", [1, 2], 1), drifted="the mean of column 0")
    add_task(own, 0, arrays_in(tmp_path / "last", [1, 2], 2))
    opened(own, out, "close", trigger={"new_data": 2, "drift": True})
    assert [tasks for _, tasks in growths_of(out)[1:]] == [[[0, 2]], [[0, 3]]]


def forget_last_task(client: Path) -> None:
    """Let a client have one task less."""
    about = json.loads((client / "client.json").read_text())
    about["tasks"].pop()
    (client / "client.json").write_text(json.dumps(about))


# --- what comes -----------------------------------------------------------------------------------


def arrays_in(place: Path, labels: list[int], seed: int) -> Path:
    """Write a task of noise, six examples to train on of each label and two to test on."""
    place.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for part, count in (("train", 6), ("test", 2)):
        y = np.repeat(np.array(labels, dtype=np.int64), count)
        np.save(place / f"{part}_y.npy", y)
        np.save(place / f"{part}_x.npy", rng.integers(0, 256, (len(y), 1, 8, 8), dtype=np.uint8))
    return place


def opened(data: Path, out: Path, at_rest: str = "pause", **options: Any) -> dict[str, Any] | None:
    """Go on with an open run of two clients, of which the first brings tasks."""
    schedule = {**OPEN, "rounds": options.pop("rounds", 1), "clients": 2}
    schedule |= options.pop("schedule", {})
    names = ("net", "method", "trigger", "training", "evaluate", "server", "deploy")
    tables = {name: options.pop(name) for name in names if name in options}
    experiment = tiny_experiment(schedule=schedule, **tables)
    data_of = options.pop("data_of", None)
    experiment = experiment.model_copy(update={"scenario": None, "data": data_of})
    try:
        return run_in_process(experiment, data, out, resume=True, at_rest=at_rest, **options)
    except RunPaused:
        return None


@pytest.fixture
def own(digits: Path, tmp_path: Path) -> Path:
    """Two clients' data that no config dealt out, each with one task."""
    for client in "01":
        shutil.copytree(digits / client, tmp_path / "data" / client)
        about = json.loads((tmp_path / "data" / client / "client.json").read_text())
        del about["tasks"][1:], about["partition"]
        (tmp_path / "data" / client / "client.json").write_text(json.dumps(about))
        shutil.rmtree(tmp_path / "data" / client / "task-1")
    return tmp_path / "data"


class Dies:
    """Ends the process before its n-th order; at None never."""

    def __init__(self, at: int | None) -> None:
        self.left = at

    def __call__(self, order: Any) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Killed


def grown(data: Path, out: Path, kills: dict[int, int], **tables: Any) -> dict[str, Any]:
    """Run while tasks come, some with new classes; old training data go once they were learned.

    Args:
        data: of the clients.
        out: the run directory.
        kills: after how many orders the process dies, in which of the stretches between tasks.
        tables: what is run.
    """
    summary = None
    for stretch in range(6):
        if stretch:
            source = arrays_in(data.parent / "in" / f"{stretch}", [stretch, 8 + stretch], stretch)
            add_task(data, stretch % 2, source)
            for gone in data.glob(f"{stretch % 2}/task-{(stretch - 1) // 2}/train*"):
                gone.unlink()
        at_rest = "close" if stretch == 5 else "pause"
        if stretch in kills:
            with pytest.raises(Killed):
                opened(data, out, at_rest, before=Dies(kills[stretch]), **tables)
        summary = opened(data, out, at_rest, **tables)
    assert summary is not None
    return summary


OTHER_NET = {"name": "mlp", "hidden": [16], "by_client": [{"name": "mlp", "hidden": [8, 16]}]}


@pytest.mark.parametrize(
    "tables",
    [
        {"method": {"name": "gldp", "t": 1, "s": 1}},
        {"method": {"name": "fedmlp"}},
        {"method": {"name": "lg-fedavg"}, "net": OTHER_NET},
    ],
    ids=lambda tables: tables["method"]["name"],
)
def test_a_run_that_grows_and_dies_ends_in_the_same_bits(tables, own, tmp_path):
    """Labels 10 to 13 are new: heads and prototypes grow while training data of old tasks go."""
    other = tmp_path / "other" / "data"
    shutil.copytree(own, other)
    whole = grown(own, tmp_path / "whole", {}, **tables)
    kills = {0: 0, 1: 3, 2: 1, 3: 2, 4: 1, 5: 0}
    again = grown(other, tmp_path / "again", kills, **tables)
    assert again["state_sha256"] == whole["state_sha256"]
    records = records_of(tmp_path / "whole")
    new = [g["classes"] for record in records for g in record.get("growths", ())]
    assert [*filter(None, new)][1:] == [["10"], ["11"], ["12"], ["13"]]
    assert growths_of(tmp_path / "whole") == growths_of(tmp_path / "again")


def test_what_is_kept_for_validation_outlives_the_training_data(own, tmp_path, monkeypatch):
    """Task 0 is validated as before once its training data are gone."""
    kept, out = Data(name="directory", validation_share=0.2), tmp_path / "run"
    opened(own, out, data_of=kept)
    before = TaskStream(ClientData(own / "0"), validation=Validation.of(kept))
    before.meet(1)
    x, y = before.validation(0)
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    for gone in own.glob("0/task-0/train*"):
        gone.unlink()
    after = TaskStream(ClientData(own / "0"), validation=Validation.of(kept))
    after.meet(1)
    assert (after.validation(0)[0] == x).all()
    assert (after.validation(0)[1] == y).all()
    scored, check = dict[str, int](), ReportValidator.check_report

    def note(rules: ReportValidator, client: int, order: rpc.Order, report: rpc.Report) -> None:
        check(rules, client, order, report)
        scored.update({c.test_set: sum(c.support) for c in report.counts if client == 0})

    monkeypatch.setattr(ReportValidator, "check_report", note)
    assert opened(own, out, "close", data_of=kept)
    assert scored["validation/0"] == len(y)
    assert scored["validation/1"] == 2, "one of six examples of each of two classes"


def test_a_task_that_is_not_usual_is_told_where_it_begins(own, tmp_path, monkeypatch):
    """Digits have shades from 0 to 16, and noise up to 255, in classes that were there."""
    told, tell, out = list[str](), EventLog.tell, tmp_path / "run"

    def note(log: EventLog, kind: str, *whom: object, **facts: Any) -> None:
        told.extend([facts["line"]] if kind == "note" else [])
        tell(log, kind, *whom, **facts)

    monkeypatch.setattr(EventLog, "tell", note)
    opened(own, out)
    most = np.argsort(np.bincount(np.load(own / "0/task-0/train_y.npy")))[-2:]
    assert not add_task(own, 0, arrays_in(tmp_path / "in", most.tolist(), 0)).set_aside
    opened(own, out, "close")
    (one,) = records_of(out)[-1]["unusual"]
    assert (one["client"], one["task"]) == (0, 1)
    assert re.fullmatch("column 0 has 1[45] times the range of earlier tasks", one["line"])
    assert f"task 1 of client 0 is unlike its earlier tasks: {one['line']}" in told
    assert "unusual" not in records_of(out)[0]


def test_a_part_that_could_not_be_stored_is_tried_again_before_data_are_spare(
    own, tmp_path, caplog
):
    """The data of task 0 were said to be spare, and its validation part was nowhere else."""
    kept, out = Data(name="directory", validation_share=0.2), tmp_path / "run"
    folder = Validation.of(kept).folder
    assert folder != replace(Validation.of(kept), by_group=True).folder, "they keep other examples"
    caplog.set_level("INFO")
    (blocked := own / "0" / "task-0" / f"{folder}.part").touch()
    for again in range(2):
        opened(own, out, data_of=kept)
        add_task(own, 0, arrays_in(tmp_path / "in" / f"{again}", [1, 2], again))
    assert caplog.text.count("the validation part of task 0 cannot be stored") == 2
    assert "not needed any more" not in caplog.text
    blocked.unlink()
    opened(own, out, data_of=kept)
    assert "the training data of tasks 0 to 1 are not needed any more" in caplog.text
    assert (own / "0" / "task-0" / folder / "y.npy").exists()


@pytest.mark.parametrize("kills", [{}, {0: 1, 1: 3, 2: 1}])
def test_a_course_of_the_rate_begins_anew_with_each_task_of_a_client(kills, own, tmp_path):
    """Client 0 has three tasks of two rounds, client 1 stays at its first one.

    A line from 1 to 0 over two rounds: 1, 0.5 for each task, then 0 for who has no other one.
    """
    rates: dict[int, dict[int, float]] = {0: {}, 1: {}}

    def note(order: Any) -> None:
        if order.kind == rpc.ORDER_KIND_TRAIN:
            course = LrSchedule(kind="linear", length=2)
            rate = factor_at(course, order.round - order.task_began, 2)
            assert rates[int(order.client_id)].setdefault(order.interaction, rate) == rate

    training = {"lr": 0.1, "lr_schedule": {"kind": "linear", "length": 2}}
    for stretch in range(3):
        if stretch:
            add_task(own, 0, arrays_in(tmp_path / "in" / f"{stretch}", [stretch, 3], stretch))
        facts = {"rounds": 2, "training": training}
        if stretch in kills:
            dies = Dies(kills[stretch])
            with pytest.raises(Killed):
                opened(own, tmp_path / "run", before=lambda o, d=dies: (note(o), d(o)), **facts)
        opened(own, tmp_path / "run", "pause" if stretch < 2 else "close", before=note, **facts)
    assert [*rates[0].values()] == [1, 0.5, 1, 0.5, 1, 0.5]
    assert [*rates[1].values()] == [1, 0.5, 0, 0, 0, 0]


def test_clients_that_retire_are_asked_no_more_and_may_be_forgotten(own, tmp_path):
    out = tmp_path / "run"
    opened(own, out)
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    assert opened(own, out, "close", retired=[1], forgets=True)
    records = records_of(out)
    assert records[-1]["growths"][0]["retired"] == [1]
    assert [record["cohort"] for record in records] == [[0, 1], [0]]
    with pytest.raises(RunFailed, match="none is left"):
        opened(own, tmp_path / "other", retired=[0, 1])


def test_what_an_operator_decides_in_the_middle_of_a_round_outlives_a_crash(own, tmp_path):
    """The call is answered, and the coordinator dies before the next round: client 1 retires all
    the same, and the run ends, also where it would wait."""
    out, decided = tmp_path / "run", []

    def before(order: Any) -> None:
        if order.kind == rpc.ORDER_KIND_TRAIN and order.interaction == 1 and not decided:
            decided.append(order)
            store(RETIRE, {"client": 1, "forgets": True})
            store(CLOSE, {"now": False})
            raise Killed

    with deciding() as store, pytest.raises(Killed):
        opened(own, out, "close", rounds=2, before=before)
    assert opened(own, out, "wait", rounds=2)
    records = records_of(out)
    assert [record["cohort"] for record in records] == [[0, 1], [0]]
    (growth,) = records[-1]["growths"]
    assert (growth["retired"], growth["forgets"]) == ([1], [1])


def test_a_client_is_forgotten_where_it_was_said_of_that_one(own, tmp_path):
    """--forget stuck to every later retirement. A run of before says it of all that retired."""
    shutil.copytree(own / "1", own / "2")
    out, three = tmp_path / "run", {"clients": 3}
    opened(own, out, schedule=three)
    for client, forgets in ((1, True), (2, False)):
        decide(out, RETIRE, {"client": client, "forgets": forgets})
        add_task(own, 0, arrays_in(tmp_path / f"{client}", [1, 2], client))
        opened(own, out, schedule=three)
    found = [g for r in records_of(out) for g in r.get("growths", ()) if g["retired"]]
    assert [(g["retired"], g["forgets"]) for g in found] == [([1], [1]), ([2], [])]
    earlier = {**found[0], "forgets": True}
    assert Growth.from_json(earlier) == Growth.from_json(found[0])


def test_who_would_leave_nobody_in_the_run_is_told_so(own, tmp_path):
    with closing(Store(tmp_path / "run", tiny_experiment(schedule=OPEN), False)) as store:
        part = OpenRuns(store, EventLog())
        with pytest.raises(PayloadError, match="the run has not begun"):
            part.offers()["retire"]([0])
        part._before = [Growth(Interaction(0), {0: 1, 1: 1})], {}
        part.offers()["retire"]([0], forgets=True)
        with pytest.raises(
            PayloadError, match="no client would be left: fedsrv close ends the run"
        ):
            part.offers()["retire"]([1])
        part.offers()["close"](True)
        assert store.decided(RETIRE) == [{"client": 0, "forgets": True}]
        assert store.decided(CLOSE) == [{"now": True}]


def test_clients_retire_also_while_too_few_have_new_data(own, tmp_path):
    """Client 0 alone has a new task, and two are needed for a new stage."""
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    opened(own, out := tmp_path / "run", "close", rounds=2, trigger={"new_data": 2}, retired=[1])
    assert growths_of(out) == [(0, [[0, 1], [1, 1]]), (0, [])]
    assert [record["cohort"] for record in records_of(out)] == [[0], [0]]


def test_an_excluded_client_takes_no_part_in_what_is_left_of_a_stage(own, tmp_path, monkeypatch):
    made: list[Exclusions] = []
    init = Exclusions.__init__
    monkeypatch.setattr(
        Exclusions, "__init__", lambda self, *args: (made.append(self), init(self, *args))[1]
    )

    def before(order: Any) -> None:
        if order.kind == rpc.ORDER_KIND_TRAIN and order.interaction == 1:
            made[-1].ask([1])

    def dies(order: Any) -> None:
        before(order)
        if order.interaction == 3:
            raise Killed

    out = tmp_path / "run"
    with pytest.raises(Killed):
        opened(own, out, rounds=4, before=dies)
    resumed = opened(own, out, "close", rounds=4)
    whole = opened(own, tmp_path / "whole", "close", rounds=4, before=before)
    assert whole is not None
    assert [r["cohort"] for r in records_of(tmp_path / "whole")] == [[0, 1]] * 2 + [[0]] * 2
    assert whole["clients_set_aside"] == [1]
    assert resumed is not None
    assert resumed["state_sha256"] == whole["state_sha256"]


# --- what is taken --------------------------------------------------------------------------------


class Absence:
    """Lets client 1 of an open run in one process be away for some looks."""

    def __init__(self, patch: pytest.MonkeyPatch, first: int, last: int) -> None:
        self.looks, self.rests, self.away = 0, 0, range(first, last)
        news = InProcessCohort.news

        def now(cohort: InProcessCohort) -> Any:
            self.looks += 1
            return replace(news(cohort), away={1} if self.looks in self.away else set())

        def rest(cohort: InProcessCohort, number: int, seconds: float | None) -> None:
            self.rests += 1
            assert self.rests < 100

        patch.setattr(InProcessCohort, "news", now)
        patch.setattr(InProcessCohort, "rest", rest)


@pytest.mark.parametrize("wait", ["most", "all"])
def test_with_wait_all_a_run_ends_alike_whoever_was_away(wait, own, tmp_path, monkeypatch):
    for client in range(2):
        for task in range(2):
            add_task(own, client, arrays_in(tmp_path / f"{client}-{task}", [1, task], task))
    found, more = {}, {"wait": wait}
    for first in (0, 2, 3, 4):
        with monkeypatch.context() as patch:
            absence = Absence(patch, first, first + 3 if first else 0)
            out = tmp_path / f"{wait}-{first}"
            found[first] = opened(own, out, "close", rounds=2, schedule=more)
            rows = [(record["cohort"], record.get("growths")) for record in records_of(out)]
            found[first] = found[first]["state_sha256"], rows
            assert (absence.rests > 0) == (wait == "all" and first > 0)
    assert all(one == found[0] for one in found.values()) == (wait == "all")


def test_a_client_that_retires_is_not_waited_for(own, tmp_path, monkeypatch):
    """Nor one that is excluded, or whose task is set aside, as these are operators' decisions."""
    add_task(own, 0, arrays_in(tmp_path / "in", [1], 0))
    said = []
    decisions = [(RETIRE, {"forgets": False}), (EXCLUDE, {}), (SET_ASIDE, {"task": 0})]
    for what, facts in decisions:
        with monkeypatch.context() as patch:
            absence = Absence(patch, 2, 1000)

            def decided(stages: Stages, late: list[int], what=what, facts=facts) -> None:
                said.append(late)
                stages.store.decide(what, {"client": 1, **facts})

            patch.setattr(Stages, "_tell_late", decided)
            out = tmp_path / what
            schedule = {"wait": "all"}
            opened(own, out, "close", schedule=schedule, server={"min_clients": 1})
            assert absence.rests == 1
            assert [0, 2] in [g for _, tasks in growths_of(out) for g in tasks]
    assert said == [[1]] * 3


def test_a_run_that_rests_says_who_is_away_and_whose_data_are_refused():
    """Client 5 was set out, so nobody waits for it."""
    stages: Any = Stages.__new__(Stages)
    told, standings = [], {2: {"refused": "client 2 has the class 'Wolf'"}, 1: {"state": "away"}}
    stages.store = SimpleNamespace(
        experiment=SimpleNamespace(begins=Trigger()), aside=lambda: {5: 1},
        ledger=SimpleNamespace(standings=lambda: standings),
    )  # fmt: skip
    stages._owed = {1: 2}
    stages.events = SimpleNamespace(tell=lambda kind, **facts: told.append(facts["line"]))
    stages._tell_rest({1, 2, 5})
    assert told[0].startswith("the run waits for client 1, which did not learn all and left, and")
    assert told[0].endswith(
        "; away: client 2; what client 2 brought last is refused: client 2 has the class 'Wolf'"
    )


def test_wait_all_is_for_rounds_that_wait(own, tmp_path):
    def line(**tables: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            tiny_experiment(**tables)
        return str(refused.value)

    asynchronous = {"open": True, "order": "asynchronous", "buffer": 1, "wait": "all"}
    assert 'order = "asynchronous" for the first uploads' in line(schedule=asynchronous)
    with pytest.raises(
        ConfigError, match='deadline_s goes on without who is late: leave wait = "all"'
    ):
        opened(
            own, tmp_path, schedule={"wait": "all"}, server={"min_clients": 1, "deadline_s": 3.0}
        )
    made = waits_for_most(tiny_experiment(schedule={**OPEN, "wait": "all"}), None)
    assert (made.server.min_clients, made.server.deadline_s) == (1, None)
    assert waits_for_most(tiny_experiment(schedule=OPEN), None).server.deadline_s == 3600


def test_a_client_in_one_process_is_read_again_once_its_data_were_written_anew(own, tmp_path):
    """All of them were read at each look for new tasks, with all tasks that they ever had."""
    experiment = tiny_experiment(schedule={**OPEN, "clients": 2})
    cohort, read = InProcessCohort(experiment, own, tmp_path / "states"), []
    real = cohort.workers.data
    cohort.workers.data = lambda client: read.append(client) or real(client)
    told = cohort.gather()
    assert cohort.gather() == told
    assert read == [0, 1]
    add_task(own, 1, arrays_in(tmp_path / "in", [1], 0))
    more = cohort.gather()
    assert read == [0, 1, 1]
    assert more[0] == told[0]
    assert len(json.loads(more[1])["tasks"]) == 2


def described(*tasks: list[int], **facts: Any) -> str:
    counts = [{"train": task, "test": task} for task in tasks]
    about = {"format": 1, "input_shape": [1], "num_classes": len(tasks[0]), "tasks": counts}
    return json.dumps({**about, **facts})


def admission(method: str = "fedavg", **schedule: Any) -> OpenAdmission:
    """Return the admission of an open run that has begun with client 0."""
    experiment = tiny_experiment(method=method, net="mlp", schedule={**OPEN, **schedule})
    found = OpenAdmission.of(experiment.model_copy(update={"scenario": None, "data": None}), {})
    found.admit(0, described([3, 3]))
    found.settle()
    return found


def test_an_open_run_takes_more_tasks_and_classes_behind_those_it_knows():
    taken = admission()
    taken.check(0, longer := described([3, 3], [0, 4]))
    taken.admit(0, longer)
    taken.check(0, longer)
    taken.check(0, described([3, 3, 0], [0, 4, 0], [1, 0, 5]))
    taken.check(2, described([1, 1, 1]))
    taken.check(0, described([3, 3, 0], [0, 4, 0], [0, 0, 5], class_names=["0", "1", "fox"]))


def test_a_resumed_run_knows_the_classes_that_it_began_with():
    """Client 0 brought a class with a name to a run without names; client 1 has none still."""
    experiment = tiny_experiment(method="fedavg", net="mlp", schedule=OPEN)
    experiment = experiment.model_copy(update={"scenario": None, "data": None})
    longer = described([3, 3, 0], [0, 4, 5], class_names=["0", "1", "fox"])
    begun = {0: longer, 1: described([2, 2])}
    resumed = OpenAdmission.of(experiment, begun, classes=RunClasses(("0", "1")))
    resumed.check(0, longer)
    resumed.check(1, begun[1])
    resumed.check(2, described([1, 1]))
    resumed.check(2, described([1, 1], class_names=["fox", "1"]))
    with pytest.raises(PayloadError, match="has the class '2', a number without a name"):
        resumed.check(2, described([1, 1, 1]))
    OpenAdmission.of(experiment, begun).check(0, described([3, 3]))  # stored, and not begun


def test_a_class_that_the_config_does_not_list_may_come_to_an_open_run():
    data = {"name": "table", "classes": ["sit", "run"], "columns": {"label": "a", "window": 4}}
    experiment = tiny_experiment(method="fedavg", net="mlp", schedule=OPEN, data=data)
    taken = OpenAdmission.of(experiment.model_copy(update={"scenario": None}), {})
    sit = described([3, 3], class_names=["sit", "run"])
    taken.admit(0, sit)
    jumps = described([3, 3, 0], [1, 0, 4], class_names=["sit", "run", "jump"])
    taken.check(0, jumps)
    taken.settle()
    taken.check(0, jumps)
    taken.check(1, described([3], class_names=["run"]))
    with pytest.raises(PayloadError, match=r"has the class '0', a number .* run has 'sit'"):
        taken.check(1, described([3, 3]))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (described([3, 4], [1, 1]), "has other data as its task 0 than the run learned"),
        (described([3, 3], [1, 1], dataset="others"), "had other data in its first 1 tasks"),
        (described([3, 3, 1], [1, 1, 1]), "has other data as its task 0"),
        (described([3, 3], class_names=["a", "b"]), "calls its classes"),
        (described([3, 3], [1, 1], input_shape=[2]), "has inputs [2]"),
        (described([3, 3, *[0] * 9], [1, 1, *[1] * 9]), "[schedule] max_classes = 10"),
    ],
)
def test_what_a_client_had_stays_and_what_comes_is_bounded(text, line):
    with pytest.raises(PayloadError) as refused:
        admission(max_classes=10).check(0, text)
    assert line in str(refused.value)


def test_two_announcements_at_one_moment_keep_within_max_classes(monkeypatch):
    """Each fits by itself; the second is checked once the first one counts, and passed over."""
    taken, both = admission(max_classes=3), threading.Barrier(2)
    cohort = RemoteCohort(2, None, EventLog(), admission=taken)  # type: ignore[arg-type]
    sessions = [cohort.session(c, cohort.join(c, described([3, 3]), b"", ())) for c in (0, 1)]
    taken.settle()
    of_all = taken.taken

    def meeting(client: int, text: str) -> str:
        found = of_all(client, text)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return found

    def announced(client: int) -> dict[int, str]:
        names = ["0", "1", ("fox", "elk")[client]]
        text = described([3, 3, 0], [1, 1, 1], class_names=names)
        cohort.announce(client, sessions[client], text)
        return {**taken.refused(client)}

    monkeypatch.setattr(taken, "taken", meeting)
    with ThreadPoolExecutor(2) as pool:
        (refused,) = filter(None, pool.map(announced, (0, 1)))
    assert "brings 1 new classes to 3, and [schedule] max_classes = 3" in refused[1]


def test_fewer_tasks_than_before_are_refused():
    taken = admission()
    taken.admit(0, described([3, 3], [1, 1]))
    with pytest.raises(PayloadError, match="has 1 tasks, and had 2: put back its client"):
        taken.check(0, described([3, 3]))


@pytest.mark.parametrize(
    ("now", "task"),
    [(["a", "b"], None), (["a", "c"], 2), (["c", "c"], 1), (["a", ""], 2), (["a", "b", "d"], None)],
)
def test_a_task_is_the_one_that_was_learned_by_its_content(now, task):
    """The counts are equal everywhere; digests of letters stand for those of contents."""
    texts = []
    for letters in (["a", "b"], now):
        about = json.loads(described([3, 3], *[[1, 1]] * len(letters)))
        for counts, letter in zip(about["tasks"][1:], letters, strict=True):
            counts |= {"digest": letter * 32} if letter else {}
        texts.append(json.dumps(about))
    taken = admission()
    taken.admit(0, texts[0])
    if task is None:
        taken.check(0, texts[1])
        return
    with pytest.raises(PayloadError) as refused:
        taken.check(0, texts[1])
    line = str(refused.value)
    assert f"has other data as its task {task} than the run learned under that number" in line
    assert "fedcli recover --client-id 0 at its site puts what is new behind the 3 tasks" in line


def test_a_task_without_a_digest_goes_by_its_counts():
    """As in runs of before: the run does not know the digest that the site has by now."""
    taken = admission()
    about = json.loads(described([3, 3]))
    about["tasks"][0]["digest"] = "a" * 32
    taken.check(0, json.dumps(about))


def test_a_restored_site_learns_its_new_month_behind_those_of_the_run(own, tmp_path, caplog):
    """It has as many examples as the lost one, and so it was taken for that, and never learned."""
    assert opened(own, tmp_path / "run") is None
    shutil.copytree(own, tmp_path / "backup")
    add_task(own, 0, arrays_in(tmp_path / "in" / "may", [0, 1], 1))
    assert opened(own, tmp_path / "run") is None
    assert growths_of(tmp_path / "run")[-1][1] == [[0, 2]]
    known = ClientFile.model_validate_json(ClientData(own / "0").announcement())
    shutil.rmtree(own)
    shutil.copytree(tmp_path / "backup", own)
    add_task(own, 0, arrays_in(tmp_path / "in" / "june", [0, 1], 2))
    assert opened(own, tmp_path / "run") is None
    assert "has other data as its task 1 than the run learned" in caplog.messages[-1]
    found = recover_tasks(own, 0, known)
    assert (found.lost, found.moved) == ([1], {1: 2})
    assert opened(own, tmp_path / "run") is None
    assert growths_of(tmp_path / "run")[-1][1] == [[0, 3]]


def test_a_method_that_cannot_grow_refuses_new_classes_in_a_line():
    taken = admission("fedavg", rounds=1)
    taken._refusal = lambda: "it cannot"  # type: ignore[method-assign]
    with pytest.raises(PayloadError, match="has a new class '2': it cannot"):
        taken.check(0, described([3, 3, 0], [1, 1, 1]))


def test_the_operator_and_clients_wake_a_run_that_rests():
    cohort = RemoteCohort(3, None, EventLog(), admission=admission())  # type: ignore[arg-type]
    token = cohort.join(0, described([3, 3]), b"", ())
    before = cohort.news()
    cohort.rest(before.number, 0.0)
    cohort.announce(0, cohort.session(0, token), longer := described([3, 3], [1, 1]))
    told = cohort.news()
    cohort.look_again()
    cohort.rest(told.number, None)
    assert told.number > before.number
    assert told.descriptions == {0: longer}


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        ({"schedule": {"open": True}}, 'open = true needs order = "tasks_outer"'),
        ({"schedule": {"begin_with": 1}}, "begin_with belongs to open = true"),
        ({"schedule": {**OPEN, "begin_with": 9}}, "begin_with = 9 exceeds clients = 3"),
        ({"trigger": {"new_data": 2}}, "[trigger] belongs to [schedule] open = true"),
        ({"schedule": OPEN, "evaluate": {"reference": "x"}}, "needs the rounds of a run"),
    ],
)
def test_what_an_open_run_cannot_have_is_said(tables, line):
    with pytest.raises(ConfigError) as refused:
        tiny_experiment(**tables)
    assert line in str(refused.value)


# --- what it reports ------------------------------------------------------------------------------


def scored(**rows: tuple[int, list[float | None]]) -> Any:
    """Return a record with clients' present tasks and their accuracies by task."""
    views = {c[1:]: {"task": t, "views": {"global": {"tasks": a}}} for c, (t, a) in rows.items()}
    return {"clients": views}


def test_forgetting_of_streams_is_that_of_each_client_over_its_own_tasks():
    """Client 0: max(0.9, 0.7) - 0.5 and 0.8 - 0.6, mean 0.3; client 1: 0.6 - 0.5."""
    records = [
        scored(c0=(0, [0.9]), c1=(0, [0.4])),
        scored(c0=(1, [0.7, 0.8]), c1=(0, [0.6]), c2=(0, [0.3])),
        scored(c0=(2, [0.5, 0.6, 0.9]), c1=(1, [0.5, 0.1]), c2=(0, [0.2])),
    ]
    assert forgetting_of_streams(records, "global") == pytest.approx((0.3 + 0.1) / 2)
    window = [*records[:2], scored(c0=(2, [None, 0.6, 0.9]))]
    assert forgetting_of_streams(window, "global") == pytest.approx(0.2)
    window[-1]["clients"]["0"]["views"]["global"] = {"first_task": 1, "tasks": [0.6, 0.9]}
    assert forgetting_of_streams(window, "global") == pytest.approx(0.2)


def test_an_open_run_of_python_learns_when_asked(tmp_path):
    tables = {
        "data": {"name": "digits"}, "scenario": {"kind": "iid", "tasks": 1}, "net": {"name": "mlp"},
        "method": {"name": "fedavg"}, "schedule": {**OPEN, "rounds": 1, "clients": 2},
    }  # fmt: skip
    with pytest.raises(ConfigError, match="open_run needs"):
        fedtide.open_run(tables, {"schedule.open": False}, tmp_path / "run")
    run = fedtide.open_run(tables, out=tmp_path / "run")
    run.learn()
    added = run.add_task(1, arrays_in(tmp_path / "in", [3, 4], 0))
    assert added.task == 1
    assert growths_of(run.close().path) == [(0, [[0, 1], [1, 1]]), (1, [[1, 2]])]
