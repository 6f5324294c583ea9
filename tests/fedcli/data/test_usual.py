"""What is not usual in a new task: units, ranges, empty places, the mix of labels, by hand."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedcli.data.store import usual
from fedcli.data.store.client_data import ClientData
from fedcli.data.store.growing import add_task
from fedcli.data.store.usual import cells_of, unlike
from fedmodels.config.data import Data
from fedmodels.errors import DataError
from fedmodels.facts.data_description import HIDDEN, UNUSUAL

BODY = 36 + np.arange(10) / 10
"""Ten temperatures: the quantiles of 5 and 95 % are 36.045 and 36.855, 0.81 apart."""
LABELS = np.repeat([0, 1], 10)


def month(temperature: np.ndarray, pressure: np.ndarray | None = None) -> np.ndarray:
    """Return twenty examples of two classes with two columns, (20, 2)."""
    pressure = 1000 + np.arange(10.0) if pressure is None else pressure
    return np.stack([np.tile(temperature, 2), np.tile(pressure, 2)], axis=1)


def lines(x: np.ndarray, *earlier: np.ndarray, y: np.ndarray = LABELS) -> list[str]:
    """Return what is not usual in a task after earlier ones of the same labels."""
    before = [cell for n, one in enumerate(earlier) for cell in cells_of(n, one, LABELS)]
    return unlike(before, [*cells_of(9, x, y)], [], [], ["temp", "press"])


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (month(BODY), []),
        # the range is 810
        (month(BODY * 1000), ["column temp has 1,000 times the range of earlier tasks"]),
        (month(BODY / 1000), ["column temp has 0.05 times the range of earlier tasks"]),  # a floor
        # 97.61 - 36.45 = 61.16 = 75.5 × 0.81
        (month(BODY * 1.8 + 32),
         ["column temp lies 76 times the range of earlier tasks away from them"]),
        (month(np.full(10, 36.5)),
         ["column temp has one value in all examples, and varied in each earlier task"]),
        (month(np.where(np.arange(10) < 4, np.nan, BODY)),
         ["column temp lacks numbers in 40% (at most 0% before)"]),
        (month(np.full(10, np.nan)), ["column temp lacks numbers in 100% (at most 0% before)"]),
        (month(BODY * 1000, np.arange(10.0) * 50),
         ["column temp has 1,000 times the range of earlier tasks (likewise press)"]),
    ],
)  # fmt: skip
def test_units_ranges_and_empty_places_by_hand(x, said):
    assert lines(x, month(BODY)) == said


def test_what_earlier_tasks_differed_in_is_usual():
    """From 4.5 to 26.5 is 2.7 times the range of 8.1; to 40.5 is 4.4 times, but not from 26.5."""
    winter, summer, hot = (month(first + np.arange(10.0)) for first in (0, 22, 36))
    assert lines(summer, winter) == []
    assert lines(hot, winter) == [
        "column temp lies 4.4 times the range of earlier tasks away from them"
    ]
    assert lines(hot, winter, summer) == []


def test_new_classes_are_compared_with_all_by_wider_bounds():
    """A range 1,000 times as wide counts as 31.6; one 60 times as wide as 7.7, which is usual."""
    others = LABELS + 2
    assert lines(month(BODY * 60 - 60 * 36.45 + 36.45), month(BODY), y=others) == []
    assert lines(month(BODY * 1000), month(BODY), y=others)


def test_a_class_without_numbers_has_no_range():
    """It had zeros, so that a task of pressures about 1,000 had 112 times their range."""
    many, few = np.repeat(month(BODY)[:10], 10, axis=0), month(BODY, np.full(10, np.nan))[:10]
    some, y = np.concatenate([many, few]), np.repeat([0, 1], [100, 10])
    assert lines(some, month(BODY), y=y) == []
    wide = [*cells_of(1, month(BODY, 1000 + np.arange(10.0) * 10), LABELS)]
    assert unlike([*cells_of(0, some, y)], wide, [], [])[0].startswith("column 1 has 9 times")


def test_a_column_that_tells_classes_stands_still_in_a_task_of_one():
    """It varied over the classes of earlier tasks, and in none of them."""
    told = np.stack([np.tile(BODY, 2), LABELS], axis=1)
    assert lines(told[:10], told, y=LABELS[:10]) == []


def test_of_large_inputs_fewer_are_looked_at(monkeypatch):
    """512 photos of 224 × 224 were 600 MB as numbers, several times over."""
    monkeypatch.setattr(usual, "VALUES", 40)
    (cell,) = cells_of(0, np.arange(80.0).reshape(20, 4), np.zeros(20, dtype=np.int64))
    assert (cell.count, cell.marks[4].max()) == (20, 75), "every second one: 10 of 4 values"


@pytest.mark.parametrize(
    ("counts", "now", "far"),
    [
        ([[80, 20], [75, 25]], [10, 90], "65%"),  # |0.75 - 0.1|
        ([[80, 20], [75, 25]], [30, 70], ""),
        ([[80, 20]], [10, 90], ""),  # nobody knows how much tasks differ
        ([[80, 20], [0, 50]], [10, 90], ""),
        ([[80, 20, 0], [75, 25, 0]], [8, 2, 99], ""),  # a class that no earlier task has
        ([[80, 20], [75, 25]], [1, 9], ""),  # too few
    ],
)
def test_a_mix_of_labels_by_hand(counts, now, far):
    found = unlike([], [], counts, now)
    assert found == (
        [f"{far} of its labels are others than in the earlier task most like it"] if far else []
    )


def test_the_last_tasks_count_and_none_that_is_set_aside(monkeypatch):
    """So the work for a task does not grow with how many came before."""
    monkeypatch.setattr(usual, "LATEST", 2)
    held = SimpleNamespace(tasks=[SimpleNamespace(set_aside=n == 2) for n in range(4)])
    assert usual.counting(held) == [1, 3]
    with closing(sqlite3.connect(":memory:")) as db:
        db.execute(usual.TABLE)
        for n in range(4):
            db.execute("INSERT INTO cells VALUES (?, 0, 5, ?)", (n, np.zeros((6, 1)).tobytes()))
        assert [cell.task for cell in usual.earlier_cells(db, [1, 3])] == [1, 3]
        assert usual.earlier_cells(db, []) == []


@pytest.fixture
def site(tmp_path: Path) -> Callable[[np.ndarray], Path]:
    """A client with a usual task; returns what writes another one to add."""

    def write(place: Path, x: np.ndarray) -> Path:
        place.mkdir(parents=True)
        for part in ("train", "test"):
            np.save(place / f"{part}_x.npy", x + (0.001 if part == "test" else 0))
            np.save(place / f"{part}_y.npy", LABELS)
        return place

    write(tmp_path / "data/0/task-0", month(BODY))
    about = {"format": 1, "input_shape": [2], "num_classes": 2}
    (tmp_path / "data/0/client.json").write_text(json.dumps(about))
    return lambda x: write(tmp_path / f"in-{np.nansum(x):.0f}", x)


def test_a_task_that_is_not_usual_is_told_or_set_aside_and_blocks_no_other(site, tmp_path):
    root, wide, line = tmp_path / "data", site(month(BODY * 1000)), "column 0 has 1,000 times"
    with pytest.raises(DataError, match="--strict"):
        add_task(root, 0, wide, strict=True)
    aside = Data(name="directory", unusual="set-aside")
    added = add_task(root, 0, wide, aside)
    assert added.set_aside
    assert any(line in note for note in added.notes)
    after = add_task(root, 0, site(month(BODY + 0.01)), aside)
    assert not after.set_aside
    told = add_task(root, 0, wide, aside, unusual="tell")
    assert not told.set_aside
    tasks = ClientData(root / "0").tasks
    assert [task.set_aside for task in tasks] == [False, True, False, False]
    assert tasks[1].why.startswith(f"{UNUSUAL}: {line}")
    assert tasks[3].unusual.startswith(line)
    assert not add_task(root, 0, site(month(BODY * 1000 + 1)), aside).set_aside, "usual by now"
    rounded = ClientData(root / "0").file.told("rounded").tasks
    assert (rounded[1].why, rounded[3].unusual) == (UNUSUAL, HIDDEN)
