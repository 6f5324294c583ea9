"""The plan of a run: what it takes from the clients that it knows."""

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.errors import RunFailed
from fedmodels.methods.fedavg import FedAvg
from fedsrv.engine.plan import Plan, fixed_tasks, fixed_weights, stored_profiles
from fedsrv.engine.schedule import Step
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment


def described(tasks: int, train: tuple[int, int] = (5, 5)) -> str:
    each = {"train": train, "test": [1, 1]}
    facts = {"format": 1, "input_shape": [1], "num_classes": 2, "tasks": [each] * tasks}
    return json.dumps(facts)


def tasks_of(directory: Path, experiment: Experiment, *tasks: int) -> dict[int, int]:
    """Return the tasks that a run gives clients with so many."""
    store = Store(directory, experiment, resume=False)
    said = {client: described(count) for client, count in enumerate(tasks)}
    found = fixed_tasks(store, stored_profiles(store, said))
    store.close()
    return found


def own_data(**server: Any) -> Experiment:
    """Return an experiment whose clients bring data of their own."""
    experiment = tiny_experiment(schedule={"rounds": 1, "clients": 4}, server=server)
    return experiment.model_copy(update={"scenario": None, "data": None})


def test_nobody_is_a_cohort_alone_by_a_longer_stream(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        found = tasks_of(tmp_path / "run", own_data(min_clients=2), 2, 1, 2, 9999)
    assert found == {0: 2, 1: 1, 2: 2, 3: 2}
    assert "clients 3 announce more than 2 tasks; fewer than min_clients = 2" in caplog.text


def test_streams_of_different_lengths_stay_where_all_are_needed(tmp_path):
    assert tasks_of(tmp_path / "run", own_data(), 2, 1, 2, 4) == {0: 2, 1: 1, 2: 2, 3: 4}
    dealt = tiny_experiment(
        schedule={"rounds": 1, "clients": 4}, server={"min_clients": 2},
        scenario={"kind": "iid", "tasks": [2, 1, 2, 4]},
    )  # fmt: skip
    assert tasks_of(tmp_path / "other", dealt, 2, 1, 2, 4) == {0: 2, 1: 1, 2: 2, 3: 4}


def test_a_task_stays_where_just_enough_clients_have_it(tmp_path):
    found = tasks_of(tmp_path / "run", own_data(min_clients=2), 3, 1, 2, 9)
    assert found == {0: 3, 1: 1, 2: 2, 3: 3}


def test_an_unknown_client_weighs_as_much_as_the_mean(tmp_path):
    """Each task has ten examples; client 2 has not joined when the run begins."""
    schedule = {"rounds": 1, "clients": 3, "per_round": 2, "sampling": "weighted"}
    store = Store(tmp_path / "run", tiny_experiment(schedule=schedule), resume=False)
    for said in ({0: described(1), 1: described(4)}, {2: described(9)}):
        profiles = stored_profiles(store, said)
        assert fixed_weights(store, profiles) == {0: 10, 1: 40, 2: 25}, "fixed at the beginning"
    assert [*profiles] == [0, 1, 2]
    store.close()


def plan_of(store: Store, said: dict[int, str]) -> Plan:
    return Plan.of(FedAvg(), store, said)


def test_a_step_whose_task_nobody_has_is_one_line(tmp_path):
    with closing(Store(tmp_path / "run", own_data(), resume=False)) as store:
        plan = plan_of(store, {0: described(2), 1: described(1)})
        assert plan.cohort_of(Step(1, 0, 1, (0, 1, 2), True, True)) == (0,)
        with pytest.raises(RunFailed, match="interaction 6: no known client has task 1"):
            plan.cohort_of(Step(5, 2, 1, (1, 2), True, True))


def test_a_run_that_grows_gets_another_plan(tmp_path):
    with closing(Store(tmp_path / "run", own_data(min_clients=1), resume=False)) as store:
        first = plan_of(store, {0: described(1, (6, 4))})
        assert first.with_clients(store, {0: described(9)}) is first, "a known client stays"
        second = first.with_clients(store, {2: described(1, (0, 7))})
    assert [*first.profiles] == [0]
    assert first.groups["minority"] == [1]
    assert [*second.profiles] == [*second.terms.profiles] == [0, 2]
    assert second.groups["minority"] == [0]
    assert second.steps is first.steps


def test_reports_can_read_what_clients_announced(tmp_path):
    def named(client: str, *counts: int) -> str:
        facts = json.loads(described(1, counts))  # type: ignore[arg-type]
        return json.dumps(facts | {"class_names": ["cat", "dog"], "name": client})

    with closing(Store(tmp_path / "run", own_data(), resume=False)) as store:
        stored_profiles(store, {0: named("", 6, 4), 1: named("ann\x1b[2J", 6, 2)})
    assert json.loads((tmp_path / "run" / "data.json").read_text()) == {
        "classes": ["cat", "dog"],
        "examples": [12, 6],
        "tests": {"0": [1, 1], "1": [1, 1]},
        "rare": [1],
        "guesses": {"chance": 0.5, "own": 0.5, "all": 0.5},
        "again": {},
        "clients": {"1": "ann\\x1b[2J"},
    }


def test_rare_classes_are_those_of_all_tasks_together(tmp_path):
    """Twice (6, 4) and once (0, 3) are (12, 11), where one of each would be (6, 7)."""
    with closing(Store(tmp_path / "run", own_data(), resume=False)) as store:
        plan = plan_of(store, {0: described(2, (6, 4)), 1: described(1, (0, 3))})
        assert plan.groups["minority"] == [1]
