"""Decimal marks and marks between thousands: never a wrong number in silence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcli.data.own.new_inputs import _read_tables
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.transforms import TableTransform
from fedmodels.errors import ConfigError, DataError

pandas = pytest.importorskip("pandas")


def loaded(root: Path, **columns: Any) -> Dataset:
    return load(Data(name="table", root=str(root), columns=Columns(**columns)))


def every(found: Dataset) -> np.ndarray:
    return np.concatenate([found.train.x, found.test.x])


def written(path: Path, *columns: list[str]) -> Path:
    """Write columns ``a``, ``b`` … and labels; the last row is there twice, so it is tested on."""
    names = "abc"[: len(columns)]
    lines = [";".join((*names, "label"))]
    lines += [";".join((*cells, "x")) for cells in zip(*columns, strict=True)]
    path.write_text("\n".join([*lines, lines[-1]]) + "\n")
    return path


READ: dict[str, tuple[list[list[str]], list[float], str]] = {
    "points between thousands": (
        [["1.198", "12,5"]], [1198, 12.5], "a decimal comma, points between thousands",
    ),
    "a decimal comma in another column": (
        [["1.198", "2.450"], ["0,5", "1,5"]], [1198, 2450], "points between thousands",
    ),
    "both marks in one number": (
        [["1.234.567,5", "-1.000"]], [1234567.5, -1000], "points between thousands",
    ),
    "commas between thousands": (
        [["1,198", "0.5"], ["1", "2"]], [1198, 0.5], "commas between thousands",
    ),
    "spaces": ([["1 198,5", "2\u00a0450", "3\u202f000", "7"]], [1198.5, 2450, 3000, 7],
               "a decimal comma, spaces between thousands"),
    "apostrophes": ([["1'198.5", "2\u2019450"]], [1198.5, 2450], "apostrophes between thousands"),
    "a printed minus": ([["\u22120,5", "1,5"]], [-0.5, 1.5], "a decimal comma"),
    "a whole number of four digits without a mark": ([["1.198", "2450"]], [1.198, 2450], ""),
    "a comma there": ([["1,198", "2450"]], [1.198, 2450], "a decimal comma"),
    "fractions of three digits": (
        [["9.812", "9.790"]], [9.812, 9.79],
        "a decimal point in 9.812 (if 9812 is meant, set [data.columns] decimal = ',')",
    ),
    "powers of ten": ([["1,5e3", "2,25E-1"]], [1500, 0.225], "a decimal comma"),
}  # fmt: skip
"""Columns, the numbers of the first one, and what a note says of them."""


@pytest.mark.parametrize(("columns", "numbers", "told"), READ.values(), ids=READ)
def test_marks_are_found(tmp_path, caplog, columns, numbers, told):
    found = every(loaded(written(tmp_path / "a.csv", *columns)))
    assert sorted({*found[:, 0].tolist()}) == sorted(np.float32(numbers).tolist())
    assert told in caplog.text
    if not told:
        assert "decimal" not in caplog.text
        assert "thousands" not in caplog.text


@pytest.mark.parametrize(
    ("columns", "greatest", "line"),
    [
        ([["0,5", "1,5"], ["1.5", "2.5"]], 1.5,
         "with a decimal point, '1.5' in column 'b', and others with a decimal comma, '0,5' in "
         "column 'a': write all alike, or say with [data.columns] decimal"),
        ([["1.198", "998"]], 1198, "'1.198' in column 'a', and no number tells whether its mark"),
        ([["1,198", "2,450"]], 2.45, "'1,198' in column 'a', and no number tells whether its"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_asked_for(tmp_path, columns, greatest, line):
    file = written(tmp_path / "a.csv", *columns)
    with pytest.raises(DataError, match=re.escape(line)):
        loaded(file)
    found = loaded(file, decimal=",")
    assert found.columns == ("a",)
    assert every(found).max() == np.float32(greatest)


def test_a_column_may_not_be_of_another_writing(tmp_path):
    """Rows far below those from which the marks are found were left out as texts."""
    rows = "".join(f"{i}.5;;x\n" for i in range(1100)) + "1.5;-0,132;x\n" * 3
    (tmp_path / "a.csv").write_text("a;b;label\n" + rows)
    line = "column 'b' holds '-0,132' in line 1102, a number with a decimal comma, and numbers are"
    with pytest.raises(DataError, match=re.escape(line)) as caught:
        loaded(tmp_path / "a.csv")
    assert "set [data.columns] decimal = ','" in str(caught.value)
    assert loaded(tmp_path / "a.csv", decimal=".").columns == ("a",)
    with pytest.raises(DataError, match=r"holds '-0,132' in line 1102.* decimal = ','"):
        loaded(tmp_path / "a.csv", features=["b"], decimal=".", missing="drop")


def test_thousands_far_below_whole_numbers_are_asked_for(tmp_path):
    """Beyond the rows from which the marks are found, 1.198 was read as one and a bit."""
    rows = "".join(f"{i % 998};x\n" for i in range(1200)) + "1.198;x\n"
    (tmp_path / "a.csv").write_text("a;label\n" + rows)
    with pytest.raises(DataError, match=r"'1.198' in column 'a', and no number tells whether"):
        loaded(tmp_path / "a.csv")
    assert every(loaded(tmp_path / "a.csv", decimal=",")).max() == 1198


def test_files_of_a_directory_tell_for_each_other(tmp_path):
    written(tmp_path / "a.csv", ["1.198", "2.450"])
    written(tmp_path / "b.csv", ["12,5", "0,5"])
    with pytest.raises(DataError, match=r"a.csv holds 1.198, .*b.csv has a decimal comma: set"):
        loaded(tmp_path)
    assert every(loaded(tmp_path, decimal=",")).max() == 2450


def test_texts_of_parquet_have_marks_too(tmp_path):
    """The key ``decimal`` was passed over."""
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"a": ["1.198", "12,5", "12,5"], "label": ["x"] * 3})
    frame.to_parquet(tmp_path / "a.parquet")
    assert every(loaded(tmp_path / "a.parquet")).max() == 1198
    frame["a"] = ["1.198", "998", "998"]
    frame.to_parquet(tmp_path / "a.parquet")
    assert every(loaded(tmp_path / "a.parquet", decimal=".")).min() == np.float32(1.198)
    with pytest.raises(ConfigError, match=r"delimiter is for CSV, and .* has none: leave it out"):
        loaded(tmp_path / "a.parquet", delimiter=";", decimal=".")


def test_a_new_file_that_tells_nothing_is_read_as_those_of_training(tmp_path):
    found = loaded(written(tmp_path / "a.csv", ["1.198", "12,5"]))
    assert found.transform is not None
    how = TableTransform.model_validate(found.transform)
    for cells, numbers in ((["1.250", "998"], [1250, 998]), (["1.5", "2.25"], [1.5, 2.25])):
        new = written(tmp_path / "new.csv", cells)
        assert _read_tables(new, how)[0].x[:2, 0].tolist() == numbers


# --- numbers that stand for an empty cell


def test_what_stands_for_an_empty_cell_may_be_named(tmp_path):
    file = written(tmp_path / "a.csv", ["1", "-999", "?", "4"], ["5", "6", "-999", "8"])
    how: dict[str, Any] = {"missing_values": [-999, "?"], "features": ["a", "b"]}
    with pytest.raises(DataError, match="column 'a' is empty in line 3 and in 1 more: set"):
        loaded(file, **how)
    assert every(loaded(file, missing="interpolate", **how))[:, 0].tolist() == [1, 2, 3, 4, 4]
    assert every(loaded(file, missing="drop", **how))[:, 1].tolist() == [5, 8, 8]
    assert loaded(file, missing_values=[-999, "?"], missing="drop").columns == ("a", "b")
