"""Tasks of own recordings: each is tested on its own time, and nothing of later ones is known.

The first feature of a row is the number of the row, so that a test sees which rows an example has.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from numpy.typing import NDArray

from fedcli.data.cuts.held_out import near_tests, tasks_in_order
from fedcli.data.sets.dataset import Examples
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedmodels.config.data import Data
from fedmodels.config.scenario import Natural
from fedmodels.errors import ConfigError

TASKS = 3


def cut(tmp_path: Path, rows: int = 300, tasks: int = TASKS, **keys: Any) -> ClientData:
    """Return the data of one of two persons who walk and sit by turns, twenty rows each."""
    table = [
        {"row": float(row), "activity": ("walk", "sit")[row // 20 % 2], "person": person,
         "day": row // 10}
        for person in ("ann", "ben") for row in range(rows)
    ]  # fmt: skip
    pandas.DataFrame(table).to_csv(tmp_path / "one.csv", index=False)
    columns = {"label": "activity", "client": "person", "features": ["row"]}
    columns |= {k: keys.pop(k) for k in ("group", "window", "hop") if k in keys}
    data = Data.model_validate(
        {"name": "table", "root": str(tmp_path / "one.csv"), "columns": columns, **keys}
    )
    scenario = Natural.model_validate({"kind": "natural", "tasks": tasks})
    return ClientData(Path(run_partition(data, scenario, 2, 0, tmp_path / "cut")) / "1")


def rows_of(data: ClientData, task: int, part: Any) -> NDArray[np.int64]:
    """Return the rows that some examples have, ascending."""
    return np.unique(data.arrays(task, part)[0]).astype(np.int64)


def test_each_task_is_tested_on_the_later_part_of_its_own_time(tmp_path):
    data = cut(tmp_path)
    for task in range(TASKS):
        train, test = (rows_of(data, task, part) for part in ("train", "test"))
        mine = np.arange(100 * task, 100 * (task + 1))
        assert np.array_equal(np.union1d(train, test), mine)
        assert not np.intersect1d(train, test).size
        for label in range(2):
            of_class = [
                x[y == label].ravel().astype(int)
                for x, y in (data.arrays(task, "train"), data.arrays(task, "test"))
            ]
            assert of_class[0].max() < of_class[1].min()
            assert len(of_class[1]) == round(0.2 * sum(map(len, of_class)))


@pytest.mark.parametrize(("keys", "apart"), [({}, 1), ({"test_gap": 5}, 6)])
def test_windows_for_training_keep_away_from_tests_of_every_task(tmp_path, keys, apart):
    """The first windows of a task come right after the test windows of the one before."""
    data = cut(tmp_path, window=8, hop=4, **keys)
    train = np.concatenate([rows_of(data, task, "train") for task in range(TASKS)])
    for task in range(TASKS):
        test = rows_of(data, task, "test")
        assert np.abs(train[:, None] - test[None, :]).min() >= apart
        assert test.min() >= 100 * task
        assert test.max() < 100 * (task + 1) + 8


def test_a_group_is_of_one_task_and_one_part(tmp_path):
    data, seen = cut(tmp_path, group="day", test_share=0.3), list[int]()
    for task in range(TASKS):
        train, test = ({*(rows_of(data, task, p) // 10)} for p in ("train", "test"))
        assert len(test) == 3
        assert max(train) < min(test)
        seen += [*train, *test]
    assert sorted(seen) == [*range(30)]


def test_inputs_are_normalised_by_what_the_first_task_holds(tmp_path):
    data = cut(tmp_path)
    x = data.arrays(0, "train")[0]
    assert data.file.mean == pytest.approx([x.mean()])
    assert data.file.std == pytest.approx([x.std()])
    later = data.normaliser(data.arrays(2, "train")[0])
    assert later.mean() > 5  # far from 0: nobody knew what would come


def test_unequal_streams_and_examples_of_a_function_are_cut_likewise():
    owners, y = np.repeat([4, 7], [6, 10]), np.zeros(16, dtype=np.int64)
    examples = Examples(np.arange(16.0)[:, None], y, owners.astype(np.int64))
    train, test = examples.split(0.2, tasks=(1, 2))
    assert test.x.ravel().tolist() == [5, 10, 15]
    assert test.tasks is not None
    assert test.tasks.tolist() == [0, 0, 1]
    assert train.first_inputs.ravel().tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
    assert tasks_in_order(np.array([0, 0, 1, 2]), (2,)).tolist() == [0, 1, 0, 0]


def test_nobody_is_near_the_tests_of_another():
    owners, places = np.array([0, 0, 0, 1, 1]), np.arange(5)
    test = np.array([False, False, True, False, False])
    assert near_tests(owners, places, test, 2).tolist() == [False, True, False, False, False]
    assert near_tests(owners, places, test, 3).tolist() == [True, True, False, False, False]
    assert not near_tests(owners, places, np.zeros(5, dtype=bool), 3).any()


def test_a_gap_that_nothing_heeds_is_refused(tmp_path):
    digits = Data(name="digits", test_gap=2)
    with pytest.raises(ConfigError, match=r"\[data\] test_gap is for a table whose rows"):
        run_partition(digits, Natural(kind="natural"), 2, 0, tmp_path / "cut")
    with pytest.raises(ConfigError, match=r"\[data\] test_gap is for a table whose rows"):
        cut(tmp_path, test_gap=2, group="day")
