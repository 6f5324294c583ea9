"""How many tasks a run gives each client."""

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedmodels.config.experiment import Experiment
from fedmodels.errors import RunFailed
from fedsrv.engine.roster import Roster
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
    roster = Roster(store)
    roster.add({client: described(count) for client, count in enumerate(tasks)})
    found = roster.tasks(len(tasks))
    store.close()
    return found


def own_data(**server: Any) -> Experiment:
    """Return an experiment whose clients bring data of their own."""
    experiment = tiny_experiment(schedule={"rounds": 1, "clients": 4}, server=server)
    return experiment.model_copy(update={"scenario": None, "data": None})


def test_nobody_is_a_cohort_alone_by_a_longer_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = tasks_of(tmp_path / "run", own_data(min_clients=2), 2, 1, 2, 9999)
    assert found == {0: 2, 1: 1, 2: 2, 3: 2}
    assert "clients 3 announce more than 2 tasks; fewer than min_clients = 2" in caplog.text


def test_streams_of_different_lengths_stay_where_all_are_needed(tmp_path: Path) -> None:
    assert tasks_of(tmp_path / "run", own_data(), 2, 1, 2, 4) == {0: 2, 1: 1, 2: 2, 3: 4}
    dealt = tiny_experiment(
        schedule={"rounds": 1, "clients": 4}, server={"min_clients": 2},
        scenario={"kind": "iid", "tasks": [2, 1, 2, 4]},
    )  # fmt: skip
    assert tasks_of(tmp_path / "other", dealt, 2, 1, 2, 4) == {0: 2, 1: 1, 2: 2, 3: 4}


def test_a_task_stays_where_just_enough_clients_have_it(tmp_path: Path) -> None:
    found = tasks_of(tmp_path / "run", own_data(min_clients=2), 3, 1, 2, 9)
    assert found == {0: 3, 1: 1, 2: 2, 3: 3}


def test_an_unknown_client_weighs_as_much_as_the_mean(tmp_path: Path) -> None:
    """Each task has ten examples; client 2 has not joined when the run begins."""
    schedule = {"rounds": 1, "clients": 3, "per_round": 2, "sampling": "weighted"}
    store = Store(tmp_path / "run", tiny_experiment(schedule=schedule), resume=False)
    roster = Roster(store)
    roster.add({0: described(1), 1: described(4)})
    assert roster.weights() == {0: 10, 1: 40, 2: 25}
    roster.add({2: described(9)})
    assert roster.weights() == {0: 10, 1: 40, 2: 25}, "fixed when the run began"
    store.close()


def test_a_step_whose_task_nobody_has_is_one_line(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "run", own_data(), resume=False)) as store:
        roster = Roster(store)
        roster.add({0: described(2), 1: described(1)})
        assert roster.cohort_of(Step(1, 0, 1, (0, 1, 2), True, True)) == (0,)
        with pytest.raises(RunFailed, match="interaction 6: no known client has task 1"):
            roster.cohort_of(Step(5, 2, 1, (1, 2), True, True))


def test_reports_can_read_what_clients_announced(tmp_path: Path) -> None:
    def named(client: str, *counts: int) -> str:
        facts = json.loads(described(1, counts))  # type: ignore[arg-type]
        return json.dumps(facts | {"class_names": ["cat", "dog"], "name": client})

    with closing(Store(tmp_path / "run", own_data(), resume=False)) as store:
        Roster(store).add({0: named("", 6, 4), 1: named("ann\x1b[2J", 6, 2)})
    assert json.loads((tmp_path / "run" / "data.json").read_text()) == {
        "classes": ["cat", "dog"],
        "examples": [12, 6],
        "rare": [1],
        "clients": {"1": "ann\\x1b[2J"},
    }


def test_rare_classes_are_those_of_all_tasks_together(tmp_path: Path) -> None:
    """Twice (6, 4) and once (0, 3) are (12, 11), where one of each would be (6, 7)."""
    with closing(Store(tmp_path / "run", own_data(), resume=False)) as store:
        roster = Roster(store)
        roster.add({0: described(2, (6, 4)), 1: described(1, (0, 3))})
        assert roster.groups["minority"] == [1]
