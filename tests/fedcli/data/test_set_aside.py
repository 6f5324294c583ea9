"""Rows and files that cannot be used: listed together where they are refused, or set aside."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from PIL import Image

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store.site import cut
from fedmodels.config.data import Data
from fedmodels.errors import ConfigError, DataError

COLUMNS = {"label": "y", "features": ["a", "b"]}
SKIP = {"bad": "skip", "bad_share": 0.3}


def written(place: Path, rows: int = 40, **cells: dict[int, Any]) -> Path:
    """Write a table whose rows number themselves, with these cells in place of the usual ones."""
    table: dict[str, list[Any]] = {
        "a": [*range(rows)], "b": [0.5] * rows, "y": ["u", "v"] * (rows // 2),
        "t": [f"2025-01-01T10:{n // 60:02d}:{n % 60:02d}" for n in range(rows)],
    }  # fmt: skip
    for name, some in cells.items():
        for row, value in some.items():
            table[name][row] = value
    pandas.DataFrame(table).to_csv(place, index=False)
    return place


def read(root: Path, columns: dict[str, Any] | None = None, **keys: Any) -> Dataset:
    tables = {"name": "table", "root": str(root), "columns": COLUMNS | (columns or {}), **keys}
    return load(Data.model_validate(tables))


def numbers(dataset: Dataset) -> list[int]:
    """Return the first number of each row that is there."""
    found = np.concatenate([dataset.train.x, dataset.test.x])
    return sorted(found.reshape(-1, found.shape[-1])[:, 0].astype(int).tolist())


BAD = {"a": {3: "x", 9: ""}, "b": {9: "", 20: 1e60}, "y": {30: ""}}


def test_all_bad_rows_are_refused_together(tmp_path):
    """Those of all files, the first ten of them, with a count."""
    (tmp_path / "all").mkdir()
    written(tmp_path / "all" / "one.csv", **BAD)
    written(tmp_path / "all" / "two.csv", b=dict.fromkeys(range(8), "?"))
    with pytest.raises(DataError) as caught:
        read(tmp_path / "all")
    line = str(caught.value)
    assert "one.csv: column 'a' holds 'x' in line 5" in line
    assert "12 rows are bad in all: one.csv, line 5: 'a' holds 'x'; one.csv, line 11: 'a'" in line
    assert "two.csv, line 7: 'b' holds '?'; and 2 more; [data] bad = 'skip' sets them aside" in line
    assert line.count("\n") == 0
    written(tmp_path / "one.csv", a={3: "x"})
    with pytest.raises(DataError, match=r"'x' in line 5, which is no finite number: [^;]*$"):
        read(tmp_path / "one.csv")


def test_bad_rows_are_set_aside_counted_and_listed(tmp_path, caplog):
    found = read(written(tmp_path / "one.csv", **BAD), **SKIP)
    assert numbers(found) == [n for n in range(40) if n not in (3, 9, 20, 30)]
    assert "4 of 40 rows are set aside: one.csv, line 5: 'a' holds 'x'" in "".join(caplog.messages)
    every = load(Data.model_validate({
        "name": "table", "root": str(tmp_path / "one.csv"), **SKIP,
        "columns": {"label": "y", "time": "t"},
    }))  # fmt: skip
    assert every.columns == ("a", "b")
    with pytest.raises(DataError, match=r"4 of 40 rows are bad, and .* = 0\.05 allows 2:"):
        read(tmp_path / "one.csv", bad="skip")


def test_no_window_goes_over_a_bad_row_and_one_without_a_time_has_no_place(tmp_path):
    columns = {"window": 5, "time": "t"}
    cells = {"y": dict.fromkeys(range(40), "u"), "a": {12: "x"}, "t": {30: "soon", 31: ""}}
    found = read(written(tmp_path / "one.csv", **cells), columns, **SKIP)
    starts = np.concatenate([found.train.x, found.test.x])[..., 0]
    assert sorted(map(int, starts.min(0 if starts.ndim < 2 else 1))) == [0, 5, 13, 18, 23, 28, 35]
    left = numbers(found)
    assert not {12, 30, 31} & {*left}


def test_missing_cells_that_have_a_meaning_are_not_bad(tmp_path, caplog):
    path = written(tmp_path / "one.csv", a={3: "", 5: "x"})
    found = read(path, {"missing": "mean"}, **SKIP)
    assert len(numbers(found)) == 39
    assert "1 of 40 rows are set aside" in "".join(caplog.messages)
    dropped = read(path, {"missing": "drop"}, **SKIP)
    assert len(numbers(dropped)) == 38


def test_files_that_cannot_be_read_are_set_aside(tmp_path, caplog):
    written(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text("<html><body>Please log in</body></html>\n<p>now</p>\n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and no more")
    found = read(tmp_path, bad="skip", bad_share=0.7)
    assert len(numbers(found)) == 40
    assert "2 of 3 files are set aside: " in "".join(caplog.messages)
    with pytest.raises(DataError, match="2 of 3 files are bad"):
        read(tmp_path, bad="skip")


def photos(root: Path) -> Path:
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for n in range(10):
            Image.new("L", (4, 4), n).save(root / name / f"{n}.png")
    (root / "cat" / "3.png").write_bytes((root / "cat" / "4.png").read_bytes()[:40])
    (root / "dog" / "5.jpg").write_text("<html>Please log in</html>")
    return root


def test_photos_that_are_none_are_refused_together_or_set_aside(tmp_path, caplog):
    root = photos(tmp_path / "photos")
    tables: dict[str, Any] = {"name": "directory", "root": str(root), "test_share": 0.3}
    with pytest.raises(DataError, match=r"2 images are bad in all: .*3\.png .*; .*5\.jpg cannot"):
        load(Data.model_validate(tables))
    found = load(Data.model_validate({**tables, **SKIP}))
    assert len(found.train.y) + len(found.test.y) == 19
    assert "2 of 1" in "".join(caplog.messages)


def test_rows_of_a_table_beside_photos_are_set_aside(tmp_path, caplog):
    root = photos(tmp_path / "photos")
    rows = [{"file": f"{kind}/{n}.png", "what": kind} for kind in ("cat", "dog") for n in range(11)]
    rows[1]["what"] = ""
    pandas.DataFrame(rows).to_csv(root / "all.csv", index=False)
    tables = {"name": "directory", "root": str(root), "columns": {"file": "file", "label": "what"}}
    found = load(Data.model_validate({**tables, **SKIP}))
    assert len(found.train.y) + len(found.test.y) == 18  # 2 of 22 have no image, 1 no label
    told = "".join(caplog.messages)
    assert "3 of 22 rows are set aside: all.csv, line 3: 'what' is empty" in told
    assert "1 of 19 images are set aside" in told


def test_a_site_sets_its_own_rows_aside(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    tables = {"name": "table", "columns": COLUMNS, "classes": ["u", "v"], **SKIP}
    cut(written(tmp_path / "one.csv", **BAD), tables, 0, 3, tmp_path / "cache")
    assert "4 of 40 rows are set aside" in "".join(caplog.messages)


def test_a_rule_that_nothing_heeds_is_refused():
    with pytest.raises(ConfigError, match=r"\[data\] bad is for tables and images, not for digits"):
        load(Data(name="digits", bad="skip"))
    with pytest.raises(ConfigError, match=r"bad_share bounds what bad = 'skip' sets aside"):
        Data(name="table", bad_share=0.1)


def test_bad_rows_are_named_together_where_the_file_tells_its_columns(tmp_path):
    """The first text among numbers ended it, one at a time."""
    path = written(tmp_path / "one.csv", a={3: "x", 9: "y"}, b={20: "z"})
    with pytest.raises(DataError) as caught:
        read(path, {"features": None, "time": "t"})
    line = str(caught.value)
    assert "column 'a' holds 'x' in line 5" in line
    assert "3 rows are bad in all: one.csv, line 5: 'a' holds 'x'; one.csv, line 11: 'a'" in line


def test_bad_rows_of_a_table_beside_images_are_named_together(tmp_path):
    for name in "abcdef":
        Image.new("L", (4, 4)).save(tmp_path / f"{name}.png")
    rows = ["a,u", "b,", "c,v", "gone,u", "d,", "lost,v", "e,u", "f,v"]
    (tmp_path / "m.csv").write_text("file,label\n" + "\n".join(rows) + "\n")
    data = {"name": "directory", "root": str(tmp_path), "columns": {"file": "file"}}
    with pytest.raises(DataError) as caught:
        load(Data.model_validate(data))
    line = str(caught.value)
    assert "column 'label' is empty in line 3. 4 rows are bad in all: m.csv, line 3: " in line
    assert "m.csv, line 5: no one image is called 'gone'" in line
    assert "line 7: no one image is called 'lost'; [data] bad = 'skip' sets them aside" in line
