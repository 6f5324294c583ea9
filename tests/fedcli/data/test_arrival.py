"""One table: what is untidy in a file × the door that it comes by, each with the same answer.

A door gives the rows that it took, as (number, temperature), whatever it makes of them.
"""

from __future__ import annotations

import json
import logging
import os
from types import SimpleNamespace

import numpy as np
import pytest

from fedcli.data.archives import archives
from fedcli.data.own.new_inputs import given_rows, new_files, read_file
from fedcli.data.store.commands import run_partition
from fedcli.data.store.findings import inspected
from fedcli.data.store.growing import Incoming, add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.site import cut
from fedcli.data.store.trying import check_files
from fedcli.runtime.reporting import accuracies
from fedmodels.config.data import Data
from fedmodels.config.scenario import Natural
from fedmodels.config.transforms import parse_transform
from fedmodels.nets.trained import ModelFacts
from fedmodels.problems.targets import targets_in
from fedpb.v1 import coordinator_pb2 as rpc

openpyxl = pytest.importorskip("openpyxl")
COLUMNS = {
    "label": "y", "client": "site", "group": "patient", "features": ["number", "temp"],
    "missing": "mean",
}  # fmt: skip
NAMES = ["site", "patient", "number", "temp", "y"]
FIRST = [["h", f"P{p}", 10 * p + at, 36 + at / 4, "ab"[at % 2]] for p in range(10) for at in (0, 1)]
NEW = [["h", f"P{p}", 10 * p + at, 37 + at / 4, "ab"[at % 2]] for p in (20, 21) for at in (0, 1)]
MEAN = 36.125


def changed(row, place, value):
    return [*row[:place], value, *row[place + 1 :]]


CASES = {
    # rows that come, and what each door takes of them
    "plain": (NEW, {(row[2], row[3]) for row in NEW}),
    "a text beside numbers": (
        [changed(NEW[0], 3, "37,0"), *NEW[1:]], {(row[2], row[3]) for row in NEW},
    ),
    "a bad row": ([changed(NEW[0], 3, "?"), *NEW[1:]], {(row[2], row[3]) for row in NEW[1:]}),
    "a filled cell": (
        [changed(NEW[0], 3, None), *NEW[1:]],
        {(200, MEAN), *((row[2], row[3]) for row in NEW[1:])},
    ),
    "a missing label": ([changed(NEW[0], 4, None), *NEW[1:]], {(r[2], r[3]) for r in NEW[1:]}),
    "a missing patient": ([changed(NEW[0], 1, None), *NEW[1:]], {(r[2], r[3]) for r in NEW[1:]}),
    "a grown file": ([*FIRST, *NEW], {(row[2], row[3]) for row in NEW}),
    "a patient who returns": (
        [*NEW, ["h", "P9", 99, 38.5, "a"]], {(99, 38.5), *((row[2], row[3]) for row in NEW)},
    ),
}  # fmt: skip
UNLABELLED = ("predict", "serve-model")
FURTHER = ("add-task", "watch", "feedback")
WORTH = {"a": 1.5, "b": 2.5, None: None}
"""What stands in place of a class where a number is learned."""
DOORS = ("check", "partition", "join", *FURTHER, *UNLABELLED)


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        cells = [[("" if c is None else str(c).replace(",", ";")) for c in row] for row in rows]
        lines = ["|".join(row).replace(".", ",").replace(";", ",") for row in (NAMES, *cells)]
        path.write_text("\n".join(lines) + "\n")
    else:
        book = openpyxl.Workbook()
        for row in (NAMES, *rows):
            book.active.append(row)
        book.save(path)
    (path.parent / "site.toml").write_text('decimal = ","\n')
    return path


def data_of(path, columns=None):
    return Data(name="table", root=str(path), columns=columns or COLUMNS, bad="skip", bad_share=0.5)


def tables_of(data):
    return data.model_dump(mode="json", exclude_none=True, exclude={"root"})


def held_rows(root, task):
    parts = [open_data(root, 0).arrays(task, part)[0] for part in ("train", "test")]
    return {(int(n), round(float(t), 4)) for n, t in np.concatenate(parts)}


def fed_back(root, path, facts):
    """Send rows by their columns, with what is learned of each, and let them become a task."""
    from fedplugins.serving.model_server import _labelled
    from fedplugins.serving.site import Site

    rows = ROWS[path]
    body = {
        "id": "a" * 16, "inputs": [dict(zip(NAMES, row, strict=True)) for row in rows],
        "labels": [row[4] for row in rows],
    }  # fmt: skip
    targets = targets_in(facts.transform, "the model")
    model = SimpleNamespace(facts=facts, class_names=["a", "b"], targets=targets)
    here = Site(root, 0, 1)
    now = SimpleNamespace(model=model, sha256="", run="")
    _labelled(here, now, json.dumps(body).encode(), "")
    here.end()  # waits until the task is made
    return held_rows(root, 1)


def taken(door, path, place, columns=None):
    """Return the rows that a door takes of a file."""
    data = data_of(path, columns)
    if door == "partition":
        run_partition(data, Natural(kind="natural"), 1, 0, place / "cut")
        return held_rows(place / "cut", 0)
    if door == "join":
        return held_rows(cut(path, tables_of(data), 0, 0, place / "own"), 0)
    first = write(place / "first" / path.name, FIRST if columns is None else priced(FIRST))
    root = cut(first, tables_of(data_of(first, columns)), 0, 0, place / "own")
    if door == "add-task":
        add_task(root, 0, path, data_of(first, columns))
        return held_rows(root, 1)
    if door == "watch":
        inbox = Incoming(place / "in", root, 0, lambda: (data_of(first, columns), 0))
        write(place / "in" / path.name, [])
        os.replace(path, place / "in" / path.name)
        inbox._settled.among = list  # it has come to rest
        inbox.take()
        return held_rows(root, 1)
    facts = open_data(root, 0).file.transform
    facts = ModelFacts("mlp", {}, (2,), 2, transform=facts)
    how = parse_transform(facts.transform, "the model")
    if door == "feedback":
        return fed_back(root, path, facts)
    if door == "serve-model":
        columns = dict.fromkeys(NAMES)
        rows = [columns | dict(zip(NAMES, row, strict=True)) for row in ROWS[path]]
        found = [given_rows(rows, path, facts, how)]
    else:
        with archives() as packed:
            paths = new_files([path], how, packed)
            found = [one for f in paths for one in read_file(f, facts, how, (), packed)]
    return {(int(n), round(float(t), 4)) for one in found for n, t in one.x}


ROWS = {}


def priced(rows):
    return [changed(row, 4, WORTH[row[4]]) for row in rows]


@pytest.mark.parametrize("end", ["csv", "xlsx"])
@pytest.mark.parametrize("door", [door for door in DOORS if door != "check"])
@pytest.mark.parametrize("case", CASES)
def test_each_door_gives_one_answer(case, door, end, tmp_path):
    rows, expected = CASES[case]
    if case == "a filled cell" and door in ("partition", "join"):
        others = [row[3] for row in NEW[1:] if row[1] == "P20"]
        expected = {(200, others[0]), *((row[2], row[3]) for row in NEW[1:])}
    if case == "a grown file" and door not in FURTHER:
        expected = {(row[2], row[3]) for row in rows}
    if case in ("a missing label", "a missing patient") and door in UNLABELLED:
        expected = {(row[2], row[3]) for row in NEW}  # nothing of a new row needs them
    if case == "a missing patient" and door == "feedback":
        expected = {(row[2], row[3]) for row in NEW}
    if case == "a patient who returns" and door in ("partition", "join"):
        assert rows[-1][1] == "P9"
    path = write(tmp_path / "site" / f"a.{end}", rows)
    ROWS[path] = rows
    assert taken(door, path, tmp_path) == expected


NUMBERS = {
    **{key: value for key, value in COLUMNS.items() if key != "label"},
    "target": "y", "target_mean": [2.0], "target_std": [0.5],
}  # fmt: skip


@pytest.mark.parametrize("door", [door for door in DOORS if door != "check"])
@pytest.mark.parametrize("case", ["plain", "a bad row", "a missing label", "a grown file"])
def test_each_door_gives_one_answer_where_a_number_is_learned(case, door, tmp_path):
    rows, expected = CASES[case]
    if case == "a grown file" and door not in FURTHER:
        expected = {(row[2], row[3]) for row in rows}
    if case == "a missing label" and door in UNLABELLED:
        expected = {(row[2], row[3]) for row in NEW}
    path = write(tmp_path / "site" / "a.csv", priced(rows))
    ROWS[path] = priced(rows)
    assert taken(door, path, tmp_path, NUMBERS) == expected


def test_a_check_counts_what_join_takes(tmp_path, caplog, capsys):
    caplog.set_level(logging.WARNING)
    rows, expected = CASES["a bad row"]
    path = write(tmp_path / "site" / "a.csv", rows)
    check_files(path, tables_of(data_of(path)), 0)
    assert "1 of 4 rows are set aside" in caplog.text
    assert len(expected) == 3


# --- what is said of what comes -------------------------------------------------------------------


def test_gaps_are_told_where_windows_are_cut_alone(tmp_path, caplog):
    lines = ["t,x,y"] + [f"{at + 100 * (at > 20)},{at},{'ab'[at % 2]}" for at in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    columns = {"label": "y", "features": ["x"], "time": "t"}
    data = Data(name="table", root=str(tmp_path / "a.csv"), columns=columns)
    cut(tmp_path / "a.csv", tables_of(data), 0, 0, tmp_path / "own")
    assert "gaps" not in caplog.text


def test_a_class_that_the_client_has_is_not_suggested_again(tmp_path, caplog):
    columns = {"label": "y", "features": ["x"]}

    def file(name, *classes, shift=0):
        lines = ["x,y"] + [f"{at + shift},{classes[at % len(classes)]}" for at in range(20)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    data = Data(
        name="table", root=str(file("a.csv", "flu", "cold")), columns=columns,
        classes=("flu", "cold"),
    )  # fmt: skip
    root = cut(tmp_path / "a.csv", tables_of(data), 0, 0, tmp_path / "own")
    add_task(root, 0, file("b.csv", "flu", "covid", shift=100), data)
    assert caplog.text.count("lists no class 'covid'") == 1
    add_task(root, 0, file("c.csv", "flu", "covid", shift=200), data)
    assert caplog.text.count("lists no class 'covid'") == 1
    assert json.loads((root / "0" / "client.json").read_text())["class_names"][-1] == "covid"


def test_the_line_of_a_client_counts_test_examples_alone():
    report = rpc.Report()
    for name, right in (("task/0", 6), ("validation/0", 10), ("task/1", 8)):
        report.counts.add(view="personal", test_set=name, support=[10], correct=[right])
    assert accuracies(report) == {"personal": 0.7}


@pytest.mark.parametrize(("shared", "is_wrong"), [(4, False), (8, True)])
def test_equal_rows_may_be_chance_unless_they_are_most_of_a_part(tmp_path, shared, is_wrong):
    """Four of ten test rows are equal to one that is trained on: a note."""
    place = tmp_path / "0" / "task-0"
    place.mkdir(parents=True)
    train = np.arange(40.0).reshape(-1, 1)
    test = np.concatenate([train[:shared], 100 + train[: 10 - shared]])
    for part, x in (("train", train), ("test", test)):
        np.save(place / f"{part}_x.npy", x.astype(np.float32))
        np.save(place / f"{part}_y.npy", np.arange(len(x)) % 2)
    (tmp_path / "0" / "client.json").write_text('{"input_shape": [1], "num_classes": 2}')
    (found,) = [one for one in inspected(tmp_path)[1] if "more than by chance" in str(one)]
    assert found.is_wrong == is_wrong
