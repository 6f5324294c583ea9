"""What may not be meant in data: found by check, said by partition, launch and join, each once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedcli.cli import main
from fedcli.data.store.column_findings import Extremes
from fedcli.data.store.commands import run_partition
from fedcli.data.store.findings import Finding, inspected, summaries, tell, tell_own
from fedmodels.config.data import Data
from fedmodels.config.scenario import Iid, Natural
from fedmodels.errors import DataError

QUIET = Console(quiet=True)


def client(
    root: Path, number: int, train: list[int], test: list[int], x: Any = None, **about: Any
) -> Path:
    """Write a client with labels, whose inputs are all different unless given."""
    place = root / str(number)
    (place / "task-0").mkdir(parents=True)
    rng = np.random.default_rng(number)
    for part, labels in (("train", train), ("test", test)):
        inputs = rng.normal(size=(len(labels), 2)) if x is None else x[: len(labels)]
        np.save(place / f"task-0/{part}_x.npy", inputs.astype(np.float32))
        np.save(place / f"task-0/{part}_y.npy", np.array(labels, dtype=np.int64))
    facts = {"input_shape": [2], "num_classes": 3, "class_names": ["sit", "Walk", "run"], **about}
    (place / "client.json").write_text(json.dumps(facts))
    return place


GOOD = [0, 1, 2] * 8
HALF = np.stack([np.arange(40.0) / 40, np.ones(40)], axis=1)
RISING = np.stack([np.zeros(40), np.arange(40.0)], axis=1)
CASES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "one class": ((GOOD, [1]), {}, "all its training examples are of class Walk"),
    "handful": (([0, 1, 2], [0, 1, 2]), {}, "3 examples to train on: little can be learnt from a"),
    "no test": ((GOOD, []), {}, "there is no test example, so its model has no score"),
    "untested": ((GOOD, [0]), {}, "class Walk, run has no test example"),
    "only tested": (([0, 1] * 8, [0, 1, 2]), {}, "class run has test examples and none to train"),
    "gaps": (([0, 1] * 8, [0, 1]), {}, "1 of 3 classes have no example: run"),
    "capitals": (
        (GOOD, [0, 1, 2]), {"class_names": ["walk", "Walk ", "run"]},
        "classes 'walk' and 'Walk' differ only in case or punctuation",
    ),
    "constant": ((GOOD, [0, 1, 2], HALF), {}, "column 1 has one value in all examples"),
    "stand-in": (
        (GOOD, [0, 1, 2], np.where(np.arange(40.0)[:, None] % 9 == 4, [[1, -999]], HALF + RISING)),
        {}, "column 1 holds -999 in 3 of 27 places, far from all other values: if it stands for",
    ),
    "leaked": (
        (GOOD, [0, 1, 2], HALF * [[1, 0]] + np.arange(40)[:, None]), {},
        "3 test examples are among its training examples",
    ),
}  # fmt: skip
"""Labels (and inputs) of a client, what its client.json says, and a line about it."""


@pytest.mark.parametrize("names", [["-1", "0", "1"], ["A+", "A-", "B"], ["x<0", "x>0", "0"]])
def test_signs_that_mean_something_tell_classes_apart(tmp_path, names):
    client(tmp_path, 0, GOOD, [0, 1, 2], class_names=names)
    assert not [line for finding in inspected(tmp_path)[1] if "alone" in (line := str(finding))]


@pytest.mark.parametrize(
    "names", [["1", "1.0", "2"], ["walk-up", "Walk up", "x"], ["a.", "a", "b"]]
)
def test_other_spellings_of_a_class_are_found(tmp_path, names):
    client(tmp_path, 0, GOOD, [0, 1, 2], class_names=names)
    assert any("punctuation: one class?" in str(finding) for finding in inspected(tmp_path)[1])


@pytest.mark.parametrize(("given", "about", "line"), CASES.values(), ids=CASES)
def test_what_may_not_be_meant_is_found(tmp_path, caplog, given, about, line):
    name = line.split(" ")[0]
    labels = [1] * 16 if name == "all" else given[0]
    client(tmp_path, 0, labels, *given[1:], **about)
    client(tmp_path, 1, labels, *given[1:], **about) if name in ("1", "classes") else None
    lines = [str(finding) for finding in inspected(tmp_path)[1]]
    assert any(line in one for one in lines), lines
    tell(tmp_path)
    assert line in caplog.text
    with pytest.raises(DataError, match="--strict: "):
        tell(tmp_path, strict=True)
    caplog.clear()
    if "classes" not in line:  # one client of a run may lack a class
        tell_own(tmp_path, [0])
        assert line in caplog.text
        with pytest.raises(DataError, match="--strict: "):
            tell_own(tmp_path, [0], strict=True)


@pytest.mark.parametrize("levels", [3, 9, 40])
def test_rows_that_are_equal_by_chance_are_different_people(tmp_path, levels, capsys):
    """check called them wrong, said to remove them, and ended with 1."""
    rng = np.random.default_rng(levels)
    for number in range(4):
        place = client(tmp_path, number, GOOD, [0, 1, 2])
        for part, size in (("train", 600), ("test", 200)):
            x = rng.integers(levels, size=(size, 2)).astype(np.float32)
            np.save(place / f"task-0/{part}_x.npy", x)
            np.save(place / f"task-0/{part}_y.npy", rng.integers(3, size=size))
    assert [str(one) for one in inspected(tmp_path)[1]] == []
    with pytest.raises(SystemExit) as ended:
        main(["check", str(tmp_path)])
    assert not ended.value.code
    assert "nothing wrong" in capsys.readouterr().out
    # but what was copied is found, where rows of one client are seldom equal
    copied = np.load(tmp_path / "0/task-0/train_x.npy")
    np.save(tmp_path / "0/task-0/test_x.npy", copied[:200])
    np.save(tmp_path / "1/task-0/train_x.npy", copied)
    lines = [str(one) for one in inspected(tmp_path)[1]]
    assert bool(lines) == (levels == 40), lines


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([20.5, 21, 19] * 5 + [-999, -999], {-999.0: 2}),
        ([20.5, 21, 19] * 5 + [-999], {}),
        ([20.5, 21, 19] * 5 + [-999, 9999] * 2, {-999.0: 2, 9999.0: 2}),
        ([20.5, 21, 19] * 5 + [85.0] * 3, {85.0: 3}),
        ([20.5, 21, 19] * 5 + [85.0, 90.0, 95.0], {}),  # another sitting, say
        ([0, 1] * 9 + [0] * 30, {}),
        ([0] * 9 + [99999.0] * 2, {99999.0: 2}),
        (list(range(0, 20000, 7)) + [9999] * 5, {}),
    ],
)
def test_values_far_from_all_others_that_repeat_may_stand_for_none(values, found):
    one, two = Extremes(), Extremes()
    one.add(np.array(values[::2]))
    two.add(np.array(values[1::2]))
    one.join(two)
    assert dict(one.stand_ins()) == found


def check(*words: object, status: int = 0) -> None:
    """Type ``fedcli check`` with these words."""
    with pytest.raises(SystemExit) as ended:
        main(["check", *map(str, words)])
    assert ended.value.code == status


def test_good_data_are_passed_over_in_silence(tmp_path, caplog):
    for number in range(2):
        client(tmp_path, number, GOOD, [0, 1, 2])
    tell(tmp_path, strict=True)
    tell_own(tmp_path, [0, 1], strict=True)
    assert caplog.text == ""


def test_a_line_for_each_kind_names_the_clients():
    found = [Finding("no test", client=str(i), kind="t") for i in range(9)]
    found += [Finding("one class", client="2", kind="c"), Finding("of all"), Finding("of others")]
    assert summaries(found, ["ann", "ben\x1b"]) == [
        "client 0 (ann) (likewise 1 (ben\\x1b), 2, 3, 4, 5 and others): no test",
        "client 2: one class",
        "of all",
        "of others",
    ]


def test_a_partition_of_own_data_says_it(tmp_path, caplog):
    pytest.importorskip("pandas")
    rows = "".join(f"{i},1,{'ab'[i % 2]},{'xy'[i >= 30]}\n" for i in range(60))
    (tmp_path / "r.csv").write_text("ax,one,who,label\n" + rows)
    tables = {"label": "label", "client": "who"}
    data = Data.model_validate(
        {"name": "table", "root": str(tmp_path / "r.csv"), "columns": tables}
    )
    given = (data, Natural(kind="natural"), 2, 0)
    run_partition(*given, tmp_path / "out", QUIET)
    line = "column one has one value in all examples: leave it out of features"
    assert f"note: {line}\n" in caplog.text
    with pytest.raises(DataError, match=f"--strict: {line}"):
        run_partition(*given, tmp_path / "out", QUIET, strict=True)
    assert (tmp_path / "out" / "0").is_dir()


def test_a_partition_of_a_published_set_is_not_looked_at(tmp_path, caplog, capsys):
    """Who has one class there was said by the scenario."""
    data = Data(name="digits", max_per_class=4, max_test_per_class=1)
    run_partition(data, Iid(kind="iid"), 20, 0, tmp_path / "out", QUIET, strict=True)
    check("--brief", "--strict", tmp_path / "out")
    assert "note:" not in caplog.text.replace("note: no test example for", "")
    check(tmp_path / "out")
    assert "little can be learnt from a handful" in capsys.readouterr().out


def test_check_shows_which_classes_are_tested(tmp_path, capsys):
    client(tmp_path, 0, GOOD, [0, 1])
    check(tmp_path)
    said = capsys.readouterr().out
    assert "2 of 3" in said
    assert "note: client 0: class run has no test example" in said
    check("--strict", tmp_path, status=1)
    assert "error: --strict: client 0: class run" in capsys.readouterr().err
