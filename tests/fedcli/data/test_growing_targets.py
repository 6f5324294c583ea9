"""Tasks that are added to a client that learns numbers, or several labels of each example."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from fedcli.data.store.growing import add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.site import cut
from fedmodels.config.data import Data
from fedmodels.errors import DataError

HEADS = ("a", "price", "weight", "hot", "wet")
NUMBERS = {"target": ["price", "weight"], "target_mean": [50.0, 1.0], "target_std": [20.0, 0.5]}
LABELS = {"labels": ["hot", "wet"]}


def table(path, first, count=40, unit=1.0):
    """Write rows of ten repeating prices; each input is another one."""
    with path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(HEADS)
        for at in range(first, first + count):
            price, weight = 50 + at % 10, 1 + at % 7 / 10
            lines.writerow([at % 50 + at / 1000, price * unit, weight, at % 2, int(at % 3 == 0)])
    return path


def data_of(learned):
    return Data(name="table", columns={"features": ["a"], **learned})


@pytest.fixture(params=[NUMBERS, LABELS], ids=["numbers", "labels"])
def learned(request):
    return request.param


def site(tmp_path, learned):
    tables = data_of(learned).model_dump(mode="json", exclude_none=True)
    return cut(table(tmp_path / "first.csv", 0), tables, 0, 0, tmp_path / "own")


def held_in(root, task):
    """Return input and targets of each example of a task."""
    parts = [open_data(root, 0).arrays(task, part) for part in ("train", "test")]
    pairs = (pair for xs, ys in parts for pair in zip(xs, ys, strict=True))
    return sorted((round(float(x[0]), 3), *y) for x, y in pairs)


def rows_of(path, learned):
    names = learned.get("target") or learned["labels"]
    with path.open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    return sorted((round(float(r["a"]), 3), *(float(r[k]) for k in names)) for r in rows)


def test_a_task_holds_the_targets_of_its_file(tmp_path, learned):
    root, week = site(tmp_path, learned), table(tmp_path / "week.csv", 100)
    before = json.loads((root / "0" / "client.json").read_text())
    added = add_task(root, 0, week, data_of(learned))
    assert (added.task, added.new_classes, added.notes) == (1, (), ())
    assert held_in(root, 1) == rows_of(week, learned)
    after = json.loads((root / "0" / "client.json").read_text())
    assert after["class_names"] == before["class_names"]
    assert after["transform"]["columns"] == before["transform"]["columns"]
    assert [sum(t["train"]) + sum(t["test"]) for t in after["tasks"]] == [40, 40]
    assert add_task(root, 0, week, data_of(learned)).was_there


def test_of_a_grown_file_what_is_new_becomes_the_task(tmp_path, learned):
    root = site(tmp_path, learned)
    added = add_task(root, 0, table(tmp_path / "grown.csv", 0, 60), data_of(learned))
    assert added.known[0] == 40
    assert held_in(root, 1) == rows_of(table(tmp_path / "new.csv", 40, 20), learned)


@pytest.mark.parametrize("way", ["unlike", "learned anew"])
def test_numbers_in_another_unit_are_told(tmp_path, way):
    """Thousandths of them: the range from 0.05 to 0.95 is 9 to begin with, and 9,000 after."""
    root = site(tmp_path, NUMBERS)
    if way == "learned anew":  # what is known of tasks is made of their files
        add_task(root, 0, table(tmp_path / "usual.csv", 200), data_of(NUMBERS))
        (root / "0" / "rows.db").unlink()
    (note,) = add_task(root, 0, table(tmp_path / "odd.csv", 100, unit=1000), data_of(NUMBERS)).notes
    assert "column price has 1,000 times the range of earlier tasks" in note


@pytest.mark.parametrize(
    "other", [{"label": "hot"}, {"labels": ["wet", "hot"]}, {**NUMBERS, "target": ["weight", "a"]}]
)
def test_what_else_is_learned_is_no_task(tmp_path, other, learned):
    root = site(tmp_path, learned)
    columns = {"features": ["a"], **other} if "a" not in other.get("target", ()) else {
        **other, "features": ["hot"],
    }  # fmt: skip
    with pytest.raises(DataError, match=r"what is to be learned is .* in the client's other tasks"):
        add_task(root, 0, table(tmp_path / "b.csv", 100), Data(name="table", columns=columns))
    assert open_data(root, 0).num_tasks == 1


def test_targets_are_no_task_of_a_client_of_classes(tmp_path):
    columns = {"features": ["a"], "label": "hot"}
    tables = Data(name="table", columns=columns).model_dump(mode="json", exclude_none=True)
    root = cut(table(tmp_path / "first.csv", 0), tables, 0, 0, tmp_path / "own")
    with pytest.raises(DataError, match="what is to be learned"):
        add_task(root, 0, table(tmp_path / "b.csv", 100), data_of(NUMBERS))


def test_rows_without_a_target_are_set_aside_in_later_files_too(tmp_path):
    root, path = site(tmp_path, NUMBERS), table(tmp_path / "week.csv", 100)
    lines = path.read_text("utf-8").splitlines()
    path.write_text("\n".join([*lines[:-1], lines[-1].replace(lines[-1].split(",")[1], "")]))
    data = data_of(NUMBERS).model_copy(update={"bad": "skip"})
    add_task(root, 0, path, data)
    assert len(held_in(root, 1)) == 39
    assert np.isfinite(np.array(held_in(root, 1))).all()
