"""Who trains in an open run, and when a task is learned: its owner has trained on it enough."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcli.data.store.growing import add_task
from fedmodels.errors import ConfigError
from fedmodels.facts.position import Stage, Task
from fedmodels.methods import make
from fedsrv.engine.cohort import News
from fedsrv.parts.open_plan import Growth, stage_cohort, stage_steps
from fedsrv.parts.stages import RunPaused, Stages
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies, arrays_in, opened, own
from tests.runs import Killed

__all__ = ["own"]
OPEN = {"order": "tasks_outer", "open": True, "rounds": 3, "clients": 12}


def cohorts(owed: dict[int, int], clients: int = 12, **schedule: Any) -> list[tuple[int, ...]]:
    """Return the cohorts of a stage in which some clients have still to train."""
    experiment = tiny_experiment(schedule={**OPEN, "clients": clients, **schedule})
    tasks = dict.fromkeys(range(clients), Task(0))
    return [step.cohort for step in stage_steps(experiment, Stage(1), 4, tasks, owed)]


def trainings(found: list[tuple[int, ...]]) -> Counter[int]:
    return Counter(client for cohort in found for client in cohort)


# --- who takes part -------------------------------------------------------------------------------


@pytest.mark.parametrize("per_round", [3, 5, 12, None])
def test_everybody_with_new_data_trains_as_often_as_the_schedule_says(per_round):
    """Twelve clients owe three rounds each: of three at a time that takes twelve rounds."""
    found = cohorts(dict.fromkeys(range(12), 3), per_round=per_round)
    assert all(trainings(found)[client] >= 3 for client in range(12))
    assert len(found) == {3: 12, 5: 8, 12: 3, None: 3}[per_round]
    assert {len(cohort) for cohort in found} == {per_round or 12}


def test_who_has_new_data_comes_first_and_others_as_people_choose():
    owed = {2: 3, 7: 2}
    everybody = cohorts(owed)
    assert everybody == [tuple(range(12))] * 3
    alone = cohorts(owed, participants="new")
    assert alone == [(2, 7), (2, 7), (2,)]
    beside = cohorts(owed, participants="new + 2")
    assert [len(cohort) for cohort in beside] == [4, 4, 3 + 0]
    assert all({2, 7} <= {*cohort} for cohort in beside[:2])
    few = cohorts(owed, per_round=3)
    assert [len(cohort) for cohort in few] == [3, 3, 3]
    assert [2 in cohort for cohort in few] == [True] * 3
    assert len({*few}) > 1, "others are drawn anew in each round"


def test_who_has_the_most_to_learn_comes_first_where_there_is_no_room():
    experiment = tiny_experiment(schedule={**OPEN, "per_round": 3})
    found = stage_cohort(experiment, 0, range(12), {0: 1, 1: 1, 8: 3, 9: 2, 10: 2})
    assert found == (8, 9, 10)


def test_slow_clients_with_new_data_are_waited_for_once_there_is_room():
    """More are asked than count while more have new data than count, and not after that."""
    found = cohorts(dict.fromkeys(range(4), 1), per_round=3, over_select=1)
    assert found[0] == (0, 1, 2, 3)
    assert len(cohorts({5: 1}, per_round=3, over_select=1)[0]) == 3


def test_a_stage_ends_where_who_has_new_data_is_set_aside():
    experiment = tiny_experiment(schedule={**OPEN, "clients": 3})
    tasks = dict.fromkeys(range(3), Task(0))
    found = stage_steps(experiment, Stage(1), 4, tasks, {0: 3}, aside={0: 6})
    assert [step.cohort for step in found] == [(0, 1, 2)] * 2
    assert [step.ends_stage for step in found] == [False, True]


def test_participants_are_said_by_a_number_or_a_word():
    for wrong in ("none", "new + 0", "new+3", "new + x"):
        with pytest.raises(ConfigError, match="participants"):
            tiny_experiment(schedule={**OPEN, "participants": wrong})
    with pytest.raises(ConfigError, match=r"participants belongs to \[schedule\] open = true"):
        tiny_experiment(schedule={"participants": "new"})


def test_a_course_of_the_rate_follows_the_rounds_that_a_client_trains_in(tmp_path):
    """One of two clients at a time, two rounds each: each has its first round, and its second."""
    course = {"lr_schedule": {"kind": "linear", "length": 2}}
    run = Told(tmp_path, schedule={"per_round": 1}, training=course)
    began = [
        (step.cohort, step.round - run.plan.task_began(step.cohort[0], step))
        for step in run.plan.steps
    ]
    assert sorted(began) == [((0,), 0), ((0,), 1), ((1,), 0), ((1,), 1)]
    run.store.close()


# --- what was learned -----------------------------------------------------------------------------


def trained(run: Path) -> Counter[tuple[int, int]]:
    """Return how often each client has trained on each of its tasks, by the records."""
    return Counter(
        (client, record["clients"][str(client)]["task"])
        for record in records_of(run)
        for client in record["cohort"]
    )


@pytest.mark.parametrize(
    ("schedule", "kills"),
    [
        ({"per_round": 1}, (2, 3)),
        ({"per_round": 2, "over_select": 1}, (3,)),
        ({"per_round": 1, "participants": "new", "sampling": "weighted"}, (1,)),
        ({"begin_with": 1, "newcomers": 1, "per_round": 1}, (2,)),
    ],
)
def test_no_task_is_left_before_its_owner_has_trained_on_it(schedule, kills, digits, tmp_path):
    """Three clients have two tasks each, of two rounds; it dies on the way, and comes to the same.

    At rest a task comes to nobody: all are there from the beginning.
    """
    experiment = tiny_experiment(schedule={**OPEN, "rounds": 2, "clients": 3, **schedule})
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    counted = trained(tmp_path / "whole")
    assert counted.keys() == {(client, task) for client in range(3) for task in range(2)}
    assert min(counted.values()) >= 2
    for number in kills:
        with pytest.raises(Killed):
            run_in_process(experiment, digits, tmp_path / "again", resume=True, before=Dies(number))
    again = run_in_process(experiment, digits, tmp_path / "again", resume=True)
    assert again["state_sha256"] == whole["state_sha256"]


def test_silent_clients_do_not_train_where_people_choose_so(own, tmp_path):
    schedule: dict[str, Any] = {"participants": "new"}
    opened(own, tmp_path / "run", schedule=schedule)
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    opened(own, tmp_path / "run", "close", schedule=schedule)
    assert [record["cohort"] for record in records_of(tmp_path / "run")] == [[0, 1], [0]]


# --- what does not count --------------------------------------------------------------------------


class Told:
    """Clients that announced one task each, and a run that knows what has become of uploads."""

    def __init__(self, place: Path, rounds: int = 2, resume: bool = False, **tables: Any) -> None:
        schedule = {**OPEN, "rounds": rounds, "clients": 2, **tables.pop("schedule", {})}
        experiment = tiny_experiment(schedule=schedule, **tables)
        self.store = Store(place, experiment, resume=resume)
        self.away: tuple[int, ...] = ()
        self.texts = {client: described(1) for client in range(2)}
        self.lines: list[str] = []
        events: Any = SimpleNamespace(tell=lambda *_, line="", **__: self.lines.append(line))
        cohort: Any = SimpleNamespace(
            begin=lambda classes: None, rest=self._rest,
            news=lambda: News(0, self.texts, away=self.away),
        )  # fmt: skip
        method = make(experiment.method.name)
        self.stages = Stages(method, self.store, cohort, events, self.texts)
        self.plan: Any = self.stages.first

    def _rest(self, *_: object) -> None:
        raise RunPaused

    def round(self, number: int, cohort: list[int], failed: list[int] = []) -> Any:  # noqa: B006
        """Do a round in which some uploads count; return the plan of the next one."""
        record: Any = {"interaction": number, "cohort": cohort}
        record["failed"] = {str(client): "its upload lies far out" for client in failed}
        self.stages.trained(record)
        with suppress(RunPaused):
            self.plan = self.stages.following(self.plan, number + 1, lambda *_: None)
        return self.plan

    def stages_of(self) -> list[tuple[int, dict[int, int], dict[int, int]]]:
        return [(g.interaction, dict(g.tasks), dict(g.owed)) for g in self.stages.growths]


def described(tasks: int) -> str:
    counts = [{"train": [3, 3], "test": [1, 1]}] * tasks
    return json.dumps({"format": 1, "input_shape": [64], "num_classes": 2, "tasks": counts})


def test_an_upload_that_does_not_count_is_made_up_for(tmp_path):
    """Client 1 fails in the second of two rounds, so a third one follows."""
    run = Told(tmp_path)
    run.round(0, [0, 1])
    run.round(1, [0], failed=[1])
    assert run.stages_of() == [(0, {0: 1, 1: 1}, {0: 2, 1: 2}), (2, {}, {1: 1})]
    assert run.stages.growths[-1].failed == {1: 1}
    assert len(run.plan.steps) == 3
    run.round(2, [0, 1])
    assert len(run.plan.steps) == 3
    again = Growth.from_json(run.stages.growths[-1].to_json())
    assert again == run.stages.growths[-1]
    run.store.close()


def test_a_client_goes_on_to_its_next_task_once_it_has_learned_the_one_before(tmp_path):
    run = Told(tmp_path)
    run.texts = {client: described(2) for client in range(2)}
    run.round(0, [0, 1])
    run.round(1, [0], failed=[1])
    assert run.stages_of()[1:] == [(2, {0: 2}, {1: 1, 0: 2})]
    run.round(2, [0, 1])
    assert run.stages_of()[2:] == [(3, {1: 2}, {0: 1, 1: 2})]
    run.store.close()


@pytest.mark.parametrize("has_joined", [True, False])
def test_who_is_away_holds_up_nobody_and_goes_on_when_it_is_back(has_joined, tmp_path):
    """Whoever has not joined again since the coordinator restarted is away as well."""
    run = Told(tmp_path)
    joined = run.texts
    if has_joined:
        run.away = (1,)
    else:
        run.texts = {0: joined[0]}
    run.round(0, [0])
    run.round(1, [0])
    assert len(run.stages.growths) == 1
    assert "the run waits for client 1, which did not learn all and left" in run.lines[-1]
    run.texts = {**run.texts, 0: described(2)}
    plan = run.round(1, [])
    assert run.stages_of()[1:] == [(2, {0: 2}, {1: 2, 0: 2})]
    assert run.stages.growths[-1].away == (1,)
    assert len(plan.steps) == 4
    run.round(2, [0])
    run.round(3, [0])
    run.away, run.texts = (), {**joined, **run.texts}
    plan = run.round(3, [])
    assert run.stages_of()[2:] == [(4, {}, {1: 2})]
    assert len(plan.steps) == 6
    run.store.close()


def test_a_task_whose_uploads_come_to_nothing_again_and_again_is_given_up(tmp_path):
    run = Told(tmp_path)
    run.texts = {client: described(2) for client in range(2)}
    for number in range(4):
        run.round(number, [0], failed=[1])
    assert run.stages.growths[-1].tasks == {1: 2}
    assert run.stages.growths[-1].interaction == 3
    why = "3 of its uploads failed; the last one: its upload lies far out"
    assert f"task 0 of client 1 is set aside: {why}" in run.lines
    assert run.plan.set_aside == {(1, 0): why}
    again = Growth.from_json(json.loads(json.dumps(run.stages.growths[-1].to_json())))
    assert again.set_aside == {(1, 0): why}
    run.store.close()


def test_what_was_trained_is_read_from_the_records(tmp_path):
    """As after a restart, or where the run has gone back."""
    run = Told(tmp_path)
    record: Any = {"interaction": 0, "cohort": [0], "failed": {"1": "far out"}}
    run.store.ledger.append(record, None)
    for _ in range(2):
        run.stages.plan_at(run.plan, 0)
        assert (run.stages._owed, run.stages._failed) == ({0: 1, 1: 2}, {1: 1})
    run.stages.plan_at(run.plan, -1)
    assert (run.stages._owed, run.stages._failed) == ({0: 2, 1: 2}, {})
    run.store.close()


def test_a_client_that_is_back_wakes_a_run_that_rests():
    now = [0.0]
    cohort = RemoteCohort(2, None, EventLog(), admission=None, clock=lambda: now[0])  # type: ignore[arg-type]
    token = cohort.join(0, described(1), b"", ())
    now[0] = 2 * RemoteCohort.lease_s
    before = cohort.news()
    assert before.away == {0}
    session = cohort.session(0, token)
    cohort.caller({0: session}, {0: 0})
    cohort.rest(before.number, None)
    assert cohort.news().away == set()
