"""Files of tables: what is not what it was meant to be gets one line that names it."""

from __future__ import annotations

import gzip
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.errors import DataError

pytest.importorskip("pandas")


def loaded(root: Path, **columns: Any) -> Dataset:
    return load(Data(name="table", root=str(root), columns=Columns(**columns)))


def test_wrong_places_get_one_line(tmp_path):
    with pytest.raises(DataError, match="is not there"):
        loaded(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"holds no file \*.csv"):
        loaded(tmp_path)
    (tmp_path / "x.xls").write_text("")
    advice = r"; save such spreadsheets as \*.xlsx or CSV"
    with pytest.raises(DataError, match=rf"none of \*.csv, .* or \*.sql{advice}"):
        loaded(tmp_path / "x.xls")
    with pytest.raises(DataError, match=rf"holds no file \*.csv, .*sql{advice}"):
        loaded(tmp_path)
    for name, content in (("empty.csv", b""), ("x.parquet", b"PAR1")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="cannot be read") as caught:
            loaded(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("header", "line"),
    [
        ("ax,ay,label,ax", "a.csv has 2 columns called 'ax': rename or remove all but one"),
        ("label,ax,ay,label", "a.csv has 2 columns called 'label': rename"),
        ("\ufeffax,ax,label,ax", "a.csv has 3 columns called 'ax': rename"),
    ],
)
def test_two_columns_of_one_name_are_refused(tmp_path, header, line):
    (tmp_path / "a.csv").write_text(header + "\n" + "1,2,1,2\n3,4,3,4\n" * 3, "utf-8")
    with pytest.raises(DataError, match=re.escape(line)):
        loaded(tmp_path / "a.csv", label="label", features=["ax", "ay"])


def test_a_column_without_a_name_is_no_feature(tmp_path):
    """pandas writes the numbers of rows first, without a name; they tell the class."""
    rows = "".join(f"{i},{i % 3},{'xy'[i // 5]},\n" for i in range(10))
    (tmp_path / "a.csv").write_text(",ax,label,\n" + rows)
    assert loaded(tmp_path / "a.csv", label="label").columns == ("ax",)
    (tmp_path / "b.csv").write_text("Unnamed: 0,ax,label,\n" + rows)  # read and written again
    assert loaded(tmp_path / "b.csv", label="label").columns == ("ax",)
    assert loaded(tmp_path / "b.csv", label="label", features=["Unnamed: 0"]).input_shape == (1,)


@pytest.mark.parametrize("text", ["foo", "?", "0x10", "1,00,0", "\x1b[0m"])
def test_a_text_among_numbers_is_named(tmp_path, text):
    """The whole column was left out of the features."""
    content = "ax,ay,label\n" + "1,1,x\n" * 5 + f'"{text}",1,y\n' + "?,1,y\n" * 3
    (tmp_path / "a.csv").write_text(content)
    shown = text.replace("\x1b", "\\x1b")
    with pytest.raises(DataError, match=re.escape(f"'ax' holds '{shown}' in line 7 and oth")):
        loaded(tmp_path / "a.csv", label="label")
    assert loaded(tmp_path / "a.csv", label="label", features=["ay"]).columns == ("ay",)


def test_a_column_of_texts_may_hold_numbers(tmp_path):
    """Labels, clients and parts are texts; so are notes, most of which are none."""
    content = "ax,note,who,label\n" + "1,,7,1\n2,fell,7,2\n3,8,7,3\n4,,8,1\n5,,x,2\n6,,7,z\n" * 2
    (tmp_path / "a.csv").write_text(content)
    assert loaded(tmp_path / "a.csv", label="label", client="who").columns == ("ax",)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("ax,label\n1,x\n2,x\n?,x\n4,x\n5,y\n", 4),
        ("\nax,label\n\n1,x\n  \n2,x\n?,x\n4,x\n5,y\n", 7),
        ('ax,label,"a\nnote"\n1,x,"one\n\ntwo"\n2,x,\n?,x,\n4,x,\n5,y,\n', 7),
        ("\ufeffax,label\r\n1,x\r\n2,x\r\n?,x\r\n4,x\r\n5,y\r\n", 4),
    ],
    ids=["plain", "blank lines", "ends of lines in quotes", "windows"],
)
def test_a_row_is_named_by_its_line_in_the_file(tmp_path, content, line):
    """People count lines of a file; rows of data are fewer."""
    (tmp_path / "a.csv").write_bytes(content.encode())
    with pytest.raises(DataError, match=rf"holds '\?' in line {line}, and numbers elsewhere"):
        loaded(tmp_path / "a.csv", label="label")


def test_a_cell_that_is_too_long_is_named(tmp_path):
    (tmp_path / "a.csv").write_text(f"ax,label,note\n1,x,\n2,y,{'z' * 140_000}\n?,x,\n4,x,\n5,y,\n")
    with pytest.raises(
        DataError, match="row that starts in line 3 has more than 131072 characters"
    ):
        loaded(tmp_path / "a.csv", label="label", features=["ax"])


def test_rows_out_of_order_are_told_to_be_sorted(tmp_path):
    """It was advised to set window to 1, which would have trained on single rows."""
    rows = [f"{i},{'xy'[i % 2]}\n" for i in range(40)]
    (tmp_path / "a.csv").write_text("ax,label\n" + "".join(rows))
    line = "has 1, of 40 stretches; sort the rows so that those of a recording follow each other"
    with pytest.raises(DataError, match=line):
        loaded(tmp_path / "a.csv", label="label", window=8)
    (tmp_path / "a.csv").write_text("ax,label\n" + "".join(sorted(rows, key=lambda r: r[-2])))
    assert loaded(tmp_path / "a.csv", label="label", window=8).input_shape == (8, 1)


def test_columns_without_a_name_may_be_several(tmp_path):
    (tmp_path / "a.csv").write_text(",,ax,label\n" + "1,2,3,x\n5,6,7,y\n" * 3)
    assert loaded(tmp_path / "a.csv", label="label", features=["ax"]).input_shape == (1,)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"ax,label\n", "a.csv holds no row below the names of its columns"),
        (
            b"ax,label\n1,0.31\n2,0.25\n",
            "a.csv: there is no test example; every class has one example: is 'label' the column",
        ),
        (
            b"ax,label,who\n1,x,a\n2,x,b\n",
            "a.csv: there is no test example; that takes a client with two examples of a class",
        ),
        (
            b"ax,label\n1,x\n1e300,x\n",
            "'ax' holds 1e+300 in line 3, which is too large for",
        ),
        (b"ax,label\n1,x\n-1e39,x\n", "'ax' holds -1e+39 in line 3, which is too large for"),
        (b"ax,label\n1,x\n-inf,x\n", "'ax' holds -inf in line 3, which is no finite number"),
    ],
)
def test_a_file_that_cannot_be_meant_is_named(tmp_path, content, line):
    (tmp_path / "a.csv").write_bytes(content)
    columns = {"client": "who"} if b"who" in content else {}
    with pytest.raises(DataError, match=re.escape(line)) as caught:
        loaded(tmp_path / "a.csv", label="label", **columns)
    assert "\n" not in str(caught.value)


def test_a_file_without_rows_beside_others_adds_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("ax,label\n")
    (tmp_path / "b.csv").write_text("ax,label\n" + "1,x\n2,y\n" * 3)
    assert len(loaded(tmp_path, label="label").train.y) == 4


@pytest.mark.parametrize("rest", ["9", ""])
def test_rows_longer_than_the_header_do_not_shift_the_columns(tmp_path, rest):
    file = tmp_path / "a.csv"
    file.write_text("ax,label\n" + f"1,x,{rest}\n2,y,{rest}\n" * 3)
    with pytest.raises(DataError, match="rows have more fields than the first line has names"):
        loaded(file, label="label")


def test_without_pandas_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    (tmp_path / "a.csv").write_text("ax,label\n")
    with pytest.raises(DataError, match=r": pip install .*'pandas>="):
        loaded(tmp_path / "a.csv")


def test_a_packed_table_is_read_as_the_table_in_it(tmp_path):
    """Lines are those of the table, a file's name goes without its endings, and damage is told."""
    text = "ax,label\n" + "".join(f"{n},{'uv'[n % 2]}\n" for n in range(20))
    with gzip.open(tmp_path / "ann.csv.gz", "wt") as file:
        file.write(text)
    with zipfile.ZipFile(tmp_path / "ben.CSV.zip", "w") as archive:
        archive.writestr("__MACOSX/._ben.csv", "no table")
        archive.writestr("out/ben.csv", text.replace("13,", "x,"))
    columns = {"features": ["ax"], "client_from": "file"}
    data = {"name": "table", "root": str(tmp_path), "columns": columns}
    with pytest.raises(DataError, match=r"ben.CSV.zip: column 'ax' holds 'x' in line 15"):
        load(Data.model_validate(data))
    found = load(Data.model_validate({**data, "bad": "skip"}))
    assert len(found.train.y) + len(found.test.y) == 39
    assert found.group_names == ("ann", "ben")
    with zipfile.ZipFile(tmp_path / "ben.CSV.zip", "a") as archive:
        archive.writestr("two.csv", text)
    with pytest.raises(DataError, match=r"zip holds 2 tables \*.csv and \*.tsv; it must hold one"):
        load(Data.model_validate(data))
    for name in ("ann.csv.gz", "ben.CSV.zip"):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"ann.csv.gz cannot be read: .* 2 files are bad in all"):
        load(Data.model_validate(data))


def test_columns_of_one_name_that_nobody_asks_for_are_no_error(tmp_path, caplog):
    rows = "".join(f"{n},{n},{n},{'uv'[n % 2]}\n" for n in range(20))
    (tmp_path / "a.csv").write_text("note,ax,note,label\n" + rows)
    data = {"name": "table", "root": str(tmp_path / "a.csv")}
    found = load(Data.model_validate({**data, "columns": {"features": ["ax"]}}))
    assert found.columns == ("ax",)
    assert load(Data.model_validate({**data, "columns": {}})).columns == ("ax",)
    assert "left out are columns of one name: 'note'" in caplog.text
    with pytest.raises(DataError, match="2 columns called 'note'"):
        load(Data.model_validate({**data, "columns": {"features": ["note"]}}))
