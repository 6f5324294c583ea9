"""Asynchronous rounds of open runs: what a stage needs, which orders stay, what a crash leaves."""

from __future__ import annotations

import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedcli.data.store.growing import add_task
from fedmodels.errors import ConfigError, RunFailed
from fedsrv.engine.cohort import AnyOf
from fedsrv.parts.open_buffer import OpenBuffer, kept_orders, on_present_task
from fedsrv.parts.open_plan import Growth, buffer_steps, classes_of, rounds_ahead
from fedsrv.state.store import Store
from fedsrv.transport.open_trips import OpenTrips
from fedtide.inprocess import InProcessCohort, run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedsrv.engine.test_open_run import Dies, arrays_in, opened, own
from tests.runs import Killed

__all__ = ["own"]
OPEN = {"order": "asynchronous", "open": True, "rounds": 2}


def trained(run: Path) -> Counter[tuple[int, int]]:
    """Return how often uploads of each client on each of its tasks counted, by the records."""
    records, found = records_of(run), Counter[tuple[int, int]]()
    tasks: dict[int, dict[int, int]] = {}
    present: dict[int, int] = {}
    for record in records:
        for growth in record.get("growths", ()):
            present |= {client: number - 1 for client, number in growth["tasks"]}
        tasks[record["interaction"]] = dict(present)
        for client, begun in record.get("arrivals", ()):
            found[client, tasks[begun][client]] += client in record["cohort"]
    return found


# --- what a stage needs ---------------------------------------------------------------------------


def test_a_stage_needs_as_many_rounds_as_a_buffer_and_each_client_do():
    """Seven trainings by threes take three rounds, and five of one client take five."""
    found = [rounds_ahead(3, owed) for owed in ({0: 3, 1: 2, 2: 2}, {0: 5, 1: 2}, {})]
    assert found == [3, 5, 0]
    steps = buffer_steps(2, 7, 2, {0: 1, 3: 0, 4: 0}, {(3, 0)})  # type: ignore[arg-type, dict-item]
    assert [(s.interaction, s.task, s.cohort, s.ends_stage) for s in steps] == [
        (7, 2, (0, 4), False), (8, 2, (0, 4), False),
    ]  # fmt: skip


def plan_of(*growths: Growth, aside: dict[int, int] | None = None, **facts: Any) -> Any:
    """Return a plan of three clients that were on task 0, and since interaction 4 are on task 1."""
    steps = [SimpleNamespace(task_of=lambda client, n=n: int(n >= 4)) for n in range(9)]
    gone = {place: why for growth in growths for place, why in growth.set_aside.items()}
    began = dict.fromkeys(range(3), (0, 4))
    return SimpleNamespace(
        growths=growths,
        classes=classes_of(growths),
        aside=aside or {},
        set_aside=gone,
        steps=steps,
        began=began,
        **facts,
    )


def test_orders_stay_until_their_client_or_task_goes_or_a_class_comes():
    first, under_way = Growth(0, classes=("a", "b")), {0: 2, 1: 5, 2: 3}
    assert kept_orders(plan_of(first, Growth(4)), 6, under_way) == under_way
    fox = Growth(4, classes=("fox",))
    assert kept_orders(plan_of(first, fox), 6, under_way) == {1: 5}
    assert kept_orders(plan_of(first, aside={1: 6}), 6, under_way) == {0: 2, 2: 3}
    bad = Growth(6, set_aside={(2, 0): "bad", (1, 0): "bad"})
    assert kept_orders(plan_of(first, bad), 6, under_way) == {0: 2, 1: 5}


def test_uploads_count_for_the_task_that_their_orders_were_of():
    assert on_present_task(plan_of(), {0: 2, 1: 5, 2: 4}) == [1, 2]


def drawing(owed: dict[int, int], under_way: dict[int, int], **schedule: Any) -> Any:
    """Return what draws clients for orders while some owe and some train."""
    rounds: Any = OpenBuffer.__new__(OpenBuffer)
    rounds.experiment = tiny_experiment(
        method="fedavg", schedule={**OPEN, "clients": 8, "buffer": 2, **schedule}
    )
    rounds._owed, rounds.under_way = owed, under_way
    step = SimpleNamespace(round=3)
    return lambda free: rounds._draw(step, range(8), free)


def test_who_owes_the_most_gets_orders_first_and_others_as_people_choose():
    owed = {0: 3, 2: 1, 5: 3, 7: 2}
    assert drawing(owed, {})(3) == (0, 5, 7)
    assert drawing(owed, {0: 1})(3) == (2, 5, 7)
    assert len(drawing(owed, {})(6)) == 6
    assert drawing(owed, {}, participants="new")(6) == (0, 2, 5, 7)
    assert len(drawing(owed, {}, participants="new + 2")(8)) == 6
    beside = drawing(owed, {1: 0, 3: 0}, participants="new + 2")
    assert beside(8) == (0, 2, 5, 7), "two others train already"
    assert drawing({}, {1: 0, 3: 0}, participants="new + 2")(8) == ()


def test_orders_of_some_clients_are_recalled_and_those_of_others_stay():
    trips, first, second = OpenTrips(), *(
        SimpleNamespace(
            trip=SimpleNamespace(orders=dict.fromkeys(clients)), results={}, failed={},
            taken=set(), intake=SimpleNamespace(answered=set()), issue=clients[0],
        ) for clients in ((0, 1), (2,))
    )  # fmt: skip
    trips.add_lasting([first, second])  # type: ignore[list-item]
    trips._arrived = [(0, first), (2, second)]  # type: ignore[list-item]
    assert trips.recall([0, 2]) == [(0, 0), (2, 2)]
    assert trips.lasting == [first]
    assert trips._arrived == []
    assert (first.taken, first.intake.answered) == ({0}, {0})


# --- runs -----------------------------------------------------------------------------------------


def test_a_buffer_of_all_has_the_bits_of_rounds_that_wait_for_all(digits, tmp_path):
    tables = {**OPEN, "order": "tasks_outer", "rounds": 1}
    waits = run_in_process(
        tiny_experiment(method="fedavg", schedule=tables), digits, tmp_path / "a"
    )
    tables = {**OPEN, "buffer": 3, "rounds": 1}
    takes = run_in_process(
        tiny_experiment(method="fedavg", schedule=tables), digits, tmp_path / "b"
    )
    assert takes["state_sha256"] == waits["state_sha256"]


@pytest.mark.parametrize(
    "schedule",
    [{"buffer": 1, "per_round": 2}, {"buffer": 2, "participants": "new"}],
)
def test_every_task_is_learned_and_a_run_that_dies_comes_to_the_same(schedule, digits, tmp_path):
    """Three clients have two tasks of two trainings each; followed arrivals give the same, too."""
    experiment = tiny_experiment(method="fedavg", schedule={**OPEN, **schedule})
    whole = run_in_process(experiment, digits, tmp_path / "whole")
    counted = trained(tmp_path / "whole")
    assert counted.keys() == {(client, task) for client in range(3) for task in range(2)}
    assert min(counted.values()) >= 2
    last = records_of(tmp_path / "whole")[-1]
    assert last["under_way"] == []
    assert all("views" in last["clients"][client] for client in "012"), "a stage ends with scores"
    for number in (3, 5):
        with pytest.raises(Killed):
            run_in_process(experiment, digits, tmp_path / "again", resume=True, before=Dies(number))
    again = run_in_process(experiment, digits, tmp_path / "again", resume=True)
    assert again["state_sha256"] == whole["state_sha256"]
    assert again["metrics"] == whole["metrics"]


@pytest.mark.parametrize("back", [None, 0, 1])
def test_a_round_whose_deadline_nobody_kept_is_as_it_was_after_a_crash(
    back, own, tmp_path, monkeypatch, caplog
):
    """Nobody brings anything in round 2; the orders of round 1 stay under way, one for round 3."""
    out, take = tmp_path / "run", InProcessCohort.take

    def late(cohort: Any, flush: AnyOf) -> Any:
        return take(cohort, replace(flush, size=0) if flush.interaction == 1 else flush)

    tables: Any = {"schedule": {**OPEN, "buffer": 1}, "server": {"max_rollback": 9}, "rounds": 2}
    with monkeypatch.context() as patch:
        patch.setattr(InProcessCohort, "take", late)
        whole = opened(own, tmp_path / "whole", "close", **tables)
        with pytest.raises(Killed):
            opened(own, out, before=Dies(4), **tables)
    before = records_of(out)
    assert [r["arrivals"] for r in before] == [[[0, 0]], [], [[1, 0]]]
    assert before[1]["under_way"] == [[1, 0], [0, 1]]
    if back is not None:
        schedule = {**tables["schedule"], "rounds": 2, "clients": 2}
        experiment = tiny_experiment(schedule=schedule, server=tables["server"])
        experiment = experiment.model_copy(update={"scenario": None, "data": None})
        with closing(Store(out, experiment, resume=True)) as store:
            store.roll_back(back)
    again = opened(own, out, "close", **tables)
    assert again is not None
    assert whole is not None
    assert again["state_sha256"] == whole["state_sha256"]
    assert not [line for line in caplog.messages if "the replay differs" in line]


def grown(data: Path, out: Path, kills: dict[int, int]) -> dict[str, Any]:
    """Run while tasks with new classes come to one client, and old training data go."""
    summary: Any = None
    schedule = {**OPEN, "buffer": 1, "per_round": 2}
    for stretch in range(3):
        if stretch:
            source = arrays_in(data.parent / "in" / f"{stretch}", [stretch, 9 + stretch], stretch)
            add_task(data, 0, source)
            for gone in data.glob(f"0/task-{stretch - 1}/train*"):
                gone.unlink()
        at_rest, options = "close" if stretch == 2 else "pause", {"schedule": schedule}
        if stretch in kills:
            with pytest.raises(Killed):
                opened(data, out, at_rest, rounds=2, before=Dies(kills[stretch]), **options)
        summary = opened(data, out, at_rest, rounds=2, **options)
    return summary


def test_classes_come_while_orders_are_under_way(own, tmp_path):
    """Labels 10 and 11 are new; the run dies in each stretch, and old training data are gone."""
    other = tmp_path / "other" / "data"
    shutil.copytree(own, other)
    whole = grown(own, tmp_path / "whole", {})
    again = grown(other, tmp_path / "again", {0: 2, 1: 4, 2: 3})
    assert again["state_sha256"] == whole["state_sha256"]
    counted = trained(tmp_path / "whole")
    assert [counted[0, task] >= 2 for task in range(3)] == [True] * 3
    new = [g["classes"] for r in records_of(tmp_path / "whole") for g in r.get("growths", ())]
    assert [*filter(None, new)][1:] == [["10"], ["11"]]


def test_arrivals_are_followed_as_far_as_they_go(own, tmp_path):
    schedule = {**OPEN, "buffer": 1}
    first = opened(own, tmp_path / "first", "close", schedule=schedule)
    follows = {**schedule, "arrivals": str(tmp_path / "first")}
    again = opened(own, tmp_path / "again", "pause", schedule=follows)
    assert again is None
    add_task(own, 0, arrays_in(tmp_path / "in", [1, 2], 0))
    with pytest.raises(RunFailed, match=r"followed ended before interaction 5, and this one has"):
        opened(own, tmp_path / "again", "close", schedule=follows)
    assert first is not None


def test_a_rate_over_rounds_is_refused_and_over_epochs_is_not():
    for over in ("rounds", "epochs"):
        course = {"kind": "cosine", "over": over, **({"length": 2} if over == "rounds" else {})}
        tables: Any = {"schedule": {**OPEN, "buffer": 2}, "training": {"lr_schedule": course}}
        if over == "epochs":
            tiny_experiment(method="fedavg", **tables)
            continue
        with pytest.raises(ConfigError, match=r"asynchronous rounds are not those of each client"):
            tiny_experiment(method="fedavg", **tables)
