"""Custom tables: windows by hand, parts that share no row, and one line for each mistake."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedcli.data.cuts.held_out import last_of_each, near_tests, tasks_in_order
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store.commands import run_partition
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.scenario import DirichletPooled, Natural, ScenarioTable
from fedmodels.errors import ConfigError, DataError

pandas = pytest.importorskip("pandas")


def recording(label: str, client: str, rows: int, first: int = 0) -> list[dict[str, Any]]:
    """Return rows whose ``ax`` counts from ``first`` on."""
    return [
        {"ax": float(first + i), "ay": -1.0, "activity": label, "person": client}
        for i in range(rows)
    ]


def loaded(root: Path, **columns: Any) -> Dataset:
    asked = {"label": "activity", **columns}
    return load(Data(name="table", root=str(root), columns=Columns(**asked)))


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    """Return a file with ten rows of walking, eight of sitting, and four more of walking."""
    rows = [
        *recording("walk", "ann", 10),
        *recording("sit", "ann", 8, 100),
        *recording("walk", "ben", 4, 200),
    ]
    place = tmp_path / "one.csv"
    pandas.DataFrame(rows).to_csv(place, index=False)
    return place


def test_rows_are_examples_and_the_last_of_each_class_test(csv):
    found = loaded(csv, client="person", test_share=0.25)
    assert found.class_names == ("sit", "walk")
    assert found.group_names == ("ann", "ben")
    assert found.input_shape == (2,)
    # a quarter, rounded, of ann's 10 and 8 and of ben's 4 rows: 2, 2 and 1
    assert found.test.x[:, 0].tolist() == [8, 9, 106, 107, 203]
    assert found.test.y.tolist() == [1, 1, 0, 0, 1]
    assert found.test.groups is not None
    assert found.test.groups.tolist() == [0, 0, 0, 0, 1]
    assert len(found.train.y) == 17


def test_windows_stay_within_a_class_and_parts_share_no_row(csv):
    found = loaded(csv, window=4, hop=2, test_share=0.25, client="person", features=["ax"])
    # walking starts at 0, 2, 4, 6 and tests on 6; 4 shares rows 6 and 7 with it and is left out.
    # sitting starts at 100, 102, 104 and tests on 104; 102 is left out. ben has one window only.
    assert found.test.x[:, 0, 0].tolist() == [6, 104]
    assert found.train.x[:, 0, 0].tolist() == [0, 2, 100, 200]
    assert found.input_shape == (4, 1)
    assert not set(found.train.x[..., 0].ravel()) & set(found.test.x[..., 0].ravel())


def test_a_column_may_say_which_part_a_row_is_of(csv):
    frame = pandas.read_csv(csv)
    frame["part"] = np.where(frame["person"] == "ben", "test", "train")
    frame.to_csv(csv, index=False)
    found = loaded(csv, split="part", features=["ax"])
    assert found.test.x[:, 0].tolist() == [200, 201, 202, 203]
    assert found.groups is None


def test_a_directory_of_parquet_reads_as_its_csv_does(csv, tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "many").mkdir()
    frame = pandas.read_csv(csv)
    frame[:9].to_parquet(tmp_path / "many" / "a.parquet")
    frame[9:].to_csv(tmp_path / "many" / "b.csv", index=False)
    one, many = loaded(csv), loaded(tmp_path / "many")
    assert np.array_equal(one.train.x, many.train.x)
    assert np.array_equal(one.test.y, many.test.y)
    # but no window crosses the border of two files: 9 + 1 rows of walking give 4 of 2, not 5
    one, many = loaded(csv, window=2), loaded(tmp_path / "many", window=2)
    assert [len(found.train.y) + len(found.test.y) for found in (one, many)] == [11, 10]


def test_a_changed_file_is_another_data_set(csv):
    before = loaded(csv).identity
    csv.write_text(csv.read_text().replace("100.0", "101.0"))
    assert loaded(csv).identity != before


@pytest.mark.parametrize(
    ("label", "line"),
    [
        (
            lambda i: f"{i * 0.37:.2f}",
            "60 different numbers with decimals in 60 rows, which is",
        ),
        (lambda i: f"{i % 25}.5", "25 different numbers with decimals in 60 rows"),
        (lambda i: f"id{i}", "60 different values in 60 rows, so most classes have one example"),
    ],
)
def test_labels_that_are_no_classes_are_refused(tmp_path, label, line):
    rows = [f"{i},{label(i)}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["ax,label", *rows]) + "\n")
    with pytest.raises(DataError, match=re.escape(line)):
        loaded(tmp_path / "t.csv", label="label", features=["ax"])


def test_few_labels_with_decimals_are_classes(tmp_path):
    rows = [f"{i},{i % 4 / 2}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["ax,label", *rows]) + "\n")
    found = loaded(tmp_path / "t.csv", label="label", features=["ax"])
    assert sorted(found.class_names) == ["0.0", "0.5", "1.0", "1.5"]


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"label": "activitie"}, "has no column 'activitie'. Did you mean 'activity'?"),
        ({"features": ["ax", "az"]}, "has no column 'az'"),
        ({"features": ["person"]}, "column 'person' holds 'ann' in line 2 and in 21 more"),
        ({"classes": ["walk", "run"]}, "holds the class 'sit', which"),
        ({"window": 11}, "the longest stretch of one client and class has 10"),
        ({"split": "person"}, "holds 'ann' in line 2; it must say train or test"),
        ({"features": ["ax"], "client": "persn"}, "has no column 'persn'. Did you mean 'person'?"),
    ],
)
def test_a_wrong_column_gets_one_line(csv, columns, line):
    with pytest.raises(DataError, match=re.escape(line)) as caught:
        loaded(csv, **columns)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("column", "value", "line"),
    [
        (
            "ax",
            np.nan,
            "column 'ax' is empty in line 4: set [data.columns] missing = 'drop'",
        ),
        ("ax", np.inf, "column 'ax' holds inf in line 4"),
        ("activity", None, "column 'activity' is empty in line 4"),
    ],
)
def test_a_hole_gets_one_line(csv, column, value, line):
    frame = pandas.read_csv(csv)
    frame.loc[2, column] = value
    frame.to_csv(csv, index=False)
    with pytest.raises(DataError, match=re.escape(line)):
        loaded(csv)


def test_columns_are_found_by_their_names_in_every_file(tmp_path):
    (tmp_path / "a.csv").write_text("ax,ay,label\n1,10,x\n2,20,y\n3,30,x\n4,40,y\n")
    (tmp_path / "b.csv").write_text("ay,label,ax\n50,x,5\n60,y,6\n70,x,7\n80,y,8\n")
    found = loaded(tmp_path, label="label")
    every = np.concatenate([found.train.x, found.test.x])
    assert (every[:, 1] == 10 * every[:, 0]).all()
    (tmp_path / "b.csv").write_text("ay,label,az\n50,x,5\n60,y,6\n")
    with pytest.raises(DataError, match=r"b.csv has no column of numbers 'ax', unlike the first"):
        loaded(tmp_path, label="label")
    (tmp_path / "b.csv").write_text("ax,ay,label,az\n5,50,x,5\n6,60,y,6\n")
    with pytest.raises(DataError, match=r"b.csv has a column of numbers 'az', unlike the first"):
        loaded(tmp_path, label="label")


def test_labels_are_what_stands_in_the_file(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("ax,label\n" + "1,01\n2,1\n3,NA\n4,None\n" * 3)
    assert loaded(file, label="label").class_names == ("01", "1", "NA", "None")
    file.write_text("ax,label\n" + "1,10.0\n2,9.5\n3,-1.0\n4,x\n5,1.5.0\n" * 3)
    assert loaded(file, label="label").class_names == ("-1.0", "9.5", "10.0", "1.5.0", "x")
    file.write_text("ax,label\n1,a\n2,\n")
    with pytest.raises(DataError, match="column 'label' is empty in line 3"):
        loaded(file, label="label")
    file.write_text("ax,label\n1,0\n2,1\n3,0\n4,1\n")
    (tmp_path / "b.csv").write_text("ax,label\n1,0.0\n2,1.0\n")
    with pytest.raises(DataError, match=r"holds '0' and '0\.0': write equal numbers alike"):
        loaded(tmp_path, label="label")


def test_a_part_without_examples_says_why(tmp_path):
    (tmp_path / "a.csv").write_text("ax,label,part\n" + "1,x,train\n" * 4)
    with pytest.raises(DataError, match="no test example; column 'part' must say test of some row"):
        loaded(tmp_path, label="label", split="part")
    with pytest.raises(DataError, match="no training example; all windows overlap with one for"):
        loaded(tmp_path, label="label", window=3, hop=1)


@pytest.mark.parametrize("column", ["label", "who"])
def test_names_that_differ_in_spaces_alone_are_refused(tmp_path, column):
    file, columns = tmp_path / "a.csv", {"label": "label", "client": "who"}
    rows = "ax,label,who\n" + "1,rest,rest\n2,walk,walk\n" * 2
    file.write_text(rows + {"label": "5, rest,rest\n", "who": "5,rest, rest\n"}[column])
    line = f"a.csv: column {column!r} holds ' rest' in line 6 and 'rest' in line 2 of {file}, which"
    with pytest.raises(DataError, match=re.escape(line)):
        loaded(file, **columns)
    file.write_text(rows)
    loaded(tmp_path, **columns)
    (tmp_path / "b.csv").write_text(rows.replace("rest", "rest\xa0") if column == "who" else rows)
    (tmp_path / "c.csv").write_text(rows.replace("walk,", "walk ,") if column == "label" else rows)
    with pytest.raises(DataError, match="differ in spaces alone: write equal names alike"):
        loaded(tmp_path, **columns)


def test_spaces_that_are_everywhere_are_no_part_of_a_name(tmp_path):
    (tmp_path / "a.csv").write_text("ax,label\n1, x\n2, y\n3, x\n4, y\n")
    assert loaded(tmp_path, label="label").class_names == ("x", "y")


def test_other_rows_are_another_partition(csv):
    before = loaded(csv).identity
    assert loaded(csv).identity == before
    csv.write_text(csv.read_text().replace("203.0", "204.0"))
    assert loaded(csv).identity != before


def dealt(csv: Path, out: Path, scenario: ScenarioTable) -> dict[str, np.ndarray]:
    """Deal windows of four rows, two apart, out to ann and ben; return all inputs of each part."""
    columns = Columns(
        label="activity", window=4, hop=2, test_share=0.25, client="person", features=("ax",)
    )
    data = Data(name="table", root=str(csv), columns=columns)
    run_partition(data, scenario, 2, 0, out, Console(quiet=True))
    parts = {
        part: [np.load(path) for path in sorted(out.glob(f"[01]/task-0/{part}_x.npy"))]
        for part in ("train", "test")
    }
    return {part: np.concatenate([x.ravel() for x in xs]) for part, xs in parts.items()}


def test_natural_clients_keep_the_parts_of_their_windows(csv, tmp_path):
    found = dealt(csv, tmp_path / "out", Natural(kind="natural"))
    assert not {*found["train"]} & {*found["test"]}
    assert set(found["test"]) == {6, 7, 8, 9, 104, 105, 106, 107}
    with pytest.raises(ConfigError, match=r"\[scenario\] split is for sensor data sets that come"):
        dealt(csv, tmp_path / "other", Natural(kind="natural", split=0.7))


def told(
    people: str,
    clients: int,
    out: Path,
    caplog: pytest.LogCaptureFixture,
    label: Sequence[str] = "xy",
) -> str:
    """Deal four rows of each person, each a letter, out to so many clients; return what is said."""
    file = out.with_suffix(".csv")
    rows = [f"{i},{label[i % 2]},{who}" for who in people.split() for i in range(4)]
    file.write_text("ax,label,who\n" + "\n".join(rows) + "\n")
    data = Data(name="table", root=str(file), columns=Columns(client="who"))
    console = Console(file=io.StringIO(), width=100)
    caplog.clear()
    run_partition(data, Natural(kind="natural"), clients, 0, out, console)
    return caplog.text + console.file.getvalue()  # type: ignore[attr-defined]


def test_people_who_take_no_part_are_named(tmp_path, caplog):
    line = "note: 3 natural clients, of which schedule.clients = 2 are used; left out: c\n"
    assert line in told("b c a", 2, tmp_path / "two", caplog)
    assert "left out: b, c, d, e, f and 2 more\n" in told(
        "a b c d e f g h", 1, tmp_path / "o", caplog
    )
    assert "left out" not in told("a b c", 3, tmp_path / "three", caplog)
    assert "left out: b\\x1b[2J\n" in told("a b\x1b[2J", 1, tmp_path / "one", caplog)


def test_the_table_tells_which_person_is_which_client(tmp_path, caplog):
    said = told("cem ann ben", 2, tmp_path / "two", caplog, label="rw")
    assert "│ client │ name │ task │" in re.sub(" +", " ", said.replace("┃", "│"))
    rows = [line.split() for line in said.splitlines() if "r:1" in line]
    assert [row[1:5:2] + row[-3:-1] for row in rows] == [
        ["0", "ann", "r:1", "w:1"],
        ["1", "ben", "r:1", "w:1"],
    ]
    content = json.loads((tmp_path / "two" / "partition.json").read_bytes())
    assert content["client_names"] == ["ann", "ben"]
    # names come from data: no markup, no escape sequence
    assert "│ [red]a\\x1b[2J │" in told("[red]a\x1b[2J b", 2, tmp_path / "red", caplog)
    long = ["a" * 20, "b" * 20]
    assert "0:1  1:1" in told("ann", 1, tmp_path / "long", caplog, label=long)


def test_windows_that_overlap_are_not_dealt_out_anew(csv, tmp_path):
    with pytest.raises(ConfigError, match="these windows overlap: set same_props"):
        dealt(csv, tmp_path / "out", DirichletPooled(kind="dirichlet_pooled", alpha=10.0))


def test_a_hop_without_a_window_is_refused():
    with pytest.raises(ConfigError, match="hop needs window"):
        Columns(hop=2)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ({"label": "y", "features": ("a", "y")}, "features names 'y', which is the label"),
        ({"client": "who", "features": ("who",)}, "features names 'who', which is the client"),
        ({"split": "part", "features": ("part",)}, "features names 'part', which is the split"),
        ({"features": ("a", "b", "a")}, "features names 'a' twice"),
    ],
)
def test_a_feature_is_nothing_else(columns, line):
    """A net that sees the label is always right."""
    with pytest.raises(ConfigError, match=line):
        Columns(**columns)


def test_columns_of_another_data_set_are_refused():
    with pytest.raises(ConfigError, match="belongs to table and huggingface, not to digits"):
        load(Data(name="digits", columns=Columns()))


def test_partitions_made_before_columns_keep_their_digest():
    assert "columns" not in Data(name="digits").identity()
    assert "columns" in Data(name="table", columns=Columns()).identity()


def test_a_column_of_times_is_no_number(tmp_path):
    pytest.importorskip("pyarrow")
    times = pandas.date_range("2026-01-01", periods=4)
    frame = pandas.DataFrame({"when": times, "ax": [1.0, 2, 3, 4], "label": list("abab")})
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match="column 'when' holds times: make numbers of them"):
        loaded(tmp_path / "a.parquet", label="label", features=("when", "ax"))
    assert loaded(tmp_path / "a.parquet", label="label").columns == ("ax",)


def test_other_clients_or_names_are_another_partition(csv):
    found = {loaded(csv).identity, loaded(csv, client="person").identity}
    csv.write_text(csv.read_text().replace("ben", "bob"))
    found.add(loaded(csv, client="person").identity)
    csv.write_text(csv.read_text().replace("sit", "sat"))
    found.add(loaded(csv, client="person").identity)
    assert len(found) == 4


def test_the_parts_of_many_rows_are_found_at_once():
    """Half a million rows of alternating people: a look through all of them for each took hours."""
    n = 500_000
    keys, begin = np.arange(n) % (n // 4), time.monotonic()
    test = last_of_each(keys, 0.2)
    assert np.flatnonzero(test).tolist() == list(range(3 * n // 4, n))
    owners, places = np.repeat(np.arange(n // 2), 2), np.arange(n)
    assert np.array_equal(near_tests(owners, places, places % 2 == 1, 2), places % 2 == 0)
    assert not near_tests(owners, places, test, 1).any()
    assert tasks_in_order(np.arange(n) % 4, [2] * 4).sum() == n // 2
    assert time.monotonic() - begin < 20
