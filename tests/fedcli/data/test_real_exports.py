"""Workbooks, archives, HDF5, queries and DICOM are read as others are, and refused if hostile."""

from __future__ import annotations

import importlib
import re
import sqlite3
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedcli.data import archives, settled
from fedcli.data.folders import BOOKS
from fedcli.data.image_files import read_image
from fedcli.data.own.tables import NothingNew
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import load
from fedcli.data.store import growing
from fedcli.data.store.client_data import PARTS
from fedcli.data.store.growing import Incoming, add_task
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.site import cut
from fedmodels.config.columns import Columns
from fedmodels.config.data import Data
from fedmodels.config.recipe import recipe_of
from fedmodels.config.transforms import ImageTransform
from fedmodels.errors import DataError

pd = pytest.importorskip("pandas")
LETTERS = ["x", "y"] * 10
ROWS = pd.DataFrame(
    {
        "id": range(1, 21),
        "t": pd.date_range("2026-05-01", periods=20, freq="12h"),
        "a": [i / 4 for i in range(20)],
        "b": [float(i % 3) for i in range(20)],
        "label": LETTERS,
    }
)


def loaded(root: Path, recipe: dict[str, Any] | None = None, since: Any = None, **columns: Any):
    columns = {"label": "label", "features": ("a", "b"), **columns}
    data = Data(name="table", root=str(root), columns=Columns(**columns))
    return load(data, whose="site", recipe=recipe_of(recipe or {}, "r"), since=since)


def refused(root: Path, line: str, recipe: dict[str, Any] | None = None, **columns: Any) -> None:
    with pytest.raises(DataError, match=line) as caught:
        loaded(root, recipe, **columns)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def like() -> Any:
    def check(found: Dataset, rows: int = 20) -> None:
        x = np.concatenate([found.train.x, found.test.x])
        y = np.concatenate([found.train.y, found.test.y])
        order = np.argsort(x[:, 0])
        kept = ROWS.iloc[20 - rows :]
        np.testing.assert_array_equal(x[order], kept[["a", "b"]].to_numpy(np.float32))
        assert [found.class_names[k] for k in y[order]] == kept.label.tolist()

    return check


# --- workbooks ------------------------------------------------------------------------------------


def test_a_sheet_is_found_by_its_columns_below_a_title_and_units(tmp_path, like):
    openpyxl = pytest.importorskip("openpyxl")
    with pd.ExcelWriter(tmp_path / "b.xlsx") as book:
        pd.DataFrame({"about": ["x"]}).to_excel(book, sheet_name="Info", index=False)
        ROWS.to_excel(book, sheet_name="Data", index=False, startrow=3)
        book.sheets["Data"]["A1"] = "Export of May"
    like(loaded(tmp_path / "b.xlsx"))
    like(loaded(tmp_path / "b.xlsx", sheet="Data", time="t"))
    like(loaded(tmp_path, {"sheet": "Data"}, client_from="sheet"))
    refused(tmp_path / "b.xlsx", r"no sheet or table 'Date'\. Did you mean 'Data'", sheet="Date")
    refused(tmp_path / "b.xlsx", r"b.xlsx \[Info\] has no column 'label'", sheet="Info")
    book = openpyxl.load_workbook(tmp_path / "b.xlsx")
    book["Data"]["D7"] = "Q"
    book.save(tmp_path / "b.xlsx")
    refused(tmp_path / "b.xlsx", r"\[Data\]: column 'b' holds 'Q' in row 7")


def test_nothing_is_computed_and_nothing_grows(tmp_path, monkeypatch):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.active.append(["a", "b", "label"])
    book.active.append([1, "=1+1", "x"])
    book.save(tmp_path / "f.xlsx")
    refused(tmp_path / "f.xlsx", "cell B2 holds a formula, and not what it comes to")
    with zipfile.ZipFile(tmp_path / "f.xlsx") as old:
        held = {name: old.read(name) for name in old.namelist()}
    lol = b'<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    sheet = held["xl/worksheets/sheet1.xml"]
    held["xl/worksheets/sheet1.xml"] = lol + sheet.replace(b"<v>1</v>", b"<v>&a;</v>")
    with zipfile.ZipFile(tmp_path / "e.xlsx", "w") as new:
        for name, content in held.items():
            new.writestr(name, content)
    refused(tmp_path / "e.xlsx", "cannot be read: EntitiesForbidden")
    monkeypatch.setattr(archives, "MUCH", 1000)
    monkeypatch.setattr(archives, "TIMES", 1)
    refused(tmp_path / "f.xlsx", "unpacks to .*, more than 1 times its size")
    (tmp_path / "z.xlsx").write_bytes(b"PK\3\4" + bytes(99))
    refused(tmp_path / "z.xlsx", "z.xlsx cannot be read: ")


FAR = '<row r="99999999999">{}</row>', '<row r="22"><c r="ZZZ22"/>{}</row>'


@pytest.mark.parametrize("row", FAR)
def test_a_sheet_has_an_end(tmp_path, row, like, monkeypatch):
    """A row far off, or a wide one, is refused where it holds anything, and not looked at else."""
    pytest.importorskip("openpyxl")
    workbooks = importlib.import_module("fedcli.data.own.workbooks")
    monkeypatch.setattr(workbooks, "MAX_CELLS", 10_000)
    ROWS.to_excel(tmp_path / "w.xlsx", index=False)
    with zipfile.ZipFile(tmp_path / "w.xlsx") as old:
        held = {name: old.read(name) for name in old.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    for value in ("", "<c><v>1</v></c>"):
        end = f"{row.format(value)}</sheetData>".encode()
        with zipfile.ZipFile(tmp_path / "w.xlsx", "w") as new:
            for name, content in held.items():
                new.writestr(name, content.replace(b"</sheetData>", end))
        if not value:
            like(loaded(tmp_path / "w.xlsx"))
    assert sheet in held
    refused(tmp_path / "w.xlsx", "sheet 'Sheet1' has more than 1048576 rows, or more than 10000")


@pytest.mark.parametrize("size", [1 << 20, 7])
def test_a_value_below_a_thousand_empty_rows_is_read(tmp_path, like, size, monkeypatch):
    """Rows without a number of their own follow the last one, also where pieces cut a tag."""
    openpyxl = pytest.importorskip("openpyxl")
    workbooks = importlib.import_module("fedcli.data.own.workbooks")
    monkeypatch.setattr(workbooks, "PIECE", size)
    ROWS[:19].to_excel(tmp_path / "w.xlsx", index=False)
    book = openpyxl.load_workbook(tmp_path / "w.xlsx")
    last = ROWS.iloc[19]
    for at, value in enumerate((20, last.t, last.a, last.b, last.label), 1):
        book["Sheet1"].cell(1000, at, value)
    book.save(tmp_path / "w.xlsx")
    like(loaded(tmp_path / "w.xlsx"))
    with zipfile.ZipFile(tmp_path / "w.xlsx") as old:
        held = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(tmp_path / "w.xlsx", "w") as new:
        for name, content in held.items():
            new.writestr(name, re.sub(rb' (?:r|spans)="[A-Z0-9:]+"', b"", content))
    like(loaded(tmp_path / "w.xlsx"))


def test_columns_of_two_sheets_are_refused_with_the_query_that_joins_them(tmp_path, like):
    pytest.importorskip("openpyxl")
    pytest.importorskip("duckdb")
    both = ROWS.assign(site="A")  # rows are of one patient where all that both have is equal
    sheets = {"Labs": both[["site", "id", "a", "label"]], "Ward 1": both[["site", "id", "b"]]}
    with pd.ExcelWriter(tmp_path / "b.xlsx") as book:
        for name, rows in sheets.items():
            rows.to_excel(book, sheet_name=name, index=False)
            rows.to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(DataError) as caught:
        loaded(tmp_path / "b.xlsx")
    line, query = str(caught.value).split("beside them: ")
    assert line.endswith("b.xlsx [Labs] has no column 'b'. 'Ward 1' has it: save both as CSV, and "
                         "give a file join.sql ")  # fmt: skip
    (tmp_path / "join.sql").write_text(query)
    like(loaded(tmp_path / "join.sql"))
    refused(tmp_path / "b.xlsx", r"\[Ward 1\] has no column 'label'. 'Labs' has", sheet="Ward 1")
    with pd.ExcelWriter(tmp_path / "b.xlsx") as book:
        ROWS[["a", "b"]].to_excel(book, sheet_name="x", index=False)
        ROWS[["label"]].to_excel(book, sheet_name="y", index=False)
    refused(tmp_path / "b.xlsx", "'y' has it, and no column that says which rows are of one")


# --- archives -------------------------------------------------------------------------------------


def test_an_archive_is_the_folder_that_it_packs(tmp_path, like, monkeypatch):
    with zipfile.ZipFile(tmp_path / "days.zip", "w", zipfile.ZIP_DEFLATED) as days:
        days.writestr("export/d1.csv", ROWS[:10].to_csv(index=False))
        days.writestr("export/d2.csv", ROWS[10:].to_csv(index=False))
        days.writestr("__MACOSX/d1.csv", "hello")
    like(loaded(tmp_path / "days.zip"))
    like(loaded(tmp_path, client_from="file"))
    refused(tmp_path, r"^\S+/days.zip/export/d1.csv has no column 'c'", features=("a", "c"))
    for name, line in (("../x.csv", "leads out of it"), ("/etc/x.csv", "leads out of it")):
        with zipfile.ZipFile(tmp_path / "bad.zip", "w") as bad:
            bad.writestr(name, "a")
        refused(tmp_path / "bad.zip", line)
    with zipfile.ZipFile(tmp_path / "bad.zip", "w", zipfile.ZIP_DEFLATED) as bad:
        bad.writestr("x.csv", bytes(1 << 20))
    monkeypatch.setattr(archives, "MUCH", 1 << 12)
    refused(tmp_path / "bad.zip", "unpacks to .*, more than 100 times its size")


def test_photos_may_be_packed(tmp_path):
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as packed:
        for k, name in enumerate(("cat", "dog")):
            for i in range(3):
                Image.new("L", (4, 4), 40 * k + i).save(tmp_path / "i.png")
                packed.write(tmp_path / "i.png", f"photos/{name}/{i}.png")
    found = load(Data(name="directory", root=str(tmp_path / "p.zip")))
    assert found.class_names == ("cat", "dog")
    assert len(found.train.y) == 4


def test_an_archive_may_lie_in_others_but_not_for_ever(tmp_path, like):
    name, content = "a.csv", ROWS.to_csv(index=False).encode()
    for depth in range(1, archives.MAX_DEPTH + 2):
        with zipfile.ZipFile(tmp_path / "n.zip", "w") as outer:
            outer.writestr(name, content)
        name, content = "n.zip", (tmp_path / "n.zip").read_bytes()
        if depth == archives.MAX_DEPTH:
            like(loaded(tmp_path / "n.zip"))
            line = rf"{tmp_path}/n.zip/n.zip/n.zip/n.zip/a.csv has no column 'c'"
            refused(tmp_path / "n.zip", line, features=("a", "c"))
    refused(tmp_path / "n.zip", rf"^{tmp_path}/n.zip holds archives within archives")


def test_archives_in_others_share_one_bound(tmp_path, monkeypatch):
    """Three that lie in one may not each unpack to as much as the one, nor to as many files."""
    content = ROWS.to_csv(index=False)
    with zipfile.ZipFile(tmp_path / "i.zip", "w", zipfile.ZIP_DEFLATED) as inner:
        inner.writestr("a.csv", content)
    with zipfile.ZipFile(tmp_path / "o.zip", "w") as outer:
        for number in range(3):
            outer.write(tmp_path / "i.zip", f"{number}.zip")
    needs = 3 * (tmp_path / "i.zip").stat().st_size + 3 * len(content)
    monkeypatch.setattr(archives, "TIMES", 1)
    monkeypatch.setattr(archives, "MUCH", needs - 1)
    refused(tmp_path / "o.zip", rf"^{tmp_path}/o.zip unpacks to more than there is room for")
    monkeypatch.setattr(archives, "MUCH", needs)
    monkeypatch.setattr(archives, "MAX_FILES", 5)
    refused(tmp_path / "o.zip", rf"^{tmp_path}/o.zip holds more than 5 files")
    monkeypatch.setattr(archives, "MAX_FILES", 6)
    loaded(tmp_path / "o.zip")


def test_names_in_utf8_are_read_without_the_flag_that_says_so(tmp_path):
    """So macOS packs them. A colon is in many names, and leads nowhere; ``C:`` is a drive."""
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as packed:
        for k, name in enumerate(("Äpfel", "Birnen")):
            for i in range(3):
                Image.new("L", (4, 4), 40 * k + i).save(tmp_path / "i.png")
                packed.write(tmp_path / "i.png", f"{name}/12:0{i}.png")
    content = bytearray((tmp_path / "p.zip").read_bytes())
    for mark, place in ((b"PK\3\4", 7), (b"PK\1\2", 9)):
        at = content.find(mark)
        while at >= 0:
            content[at + place] &= ~8
            at = content.find(mark, at + 4)
    (tmp_path / "p.zip").write_bytes(content)
    assert load(Data(name="directory", root=str(tmp_path / "p.zip"))).class_names == (
        "Birnen", "Äpfel"
    )  # fmt: skip
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as packed:
        packed.writestr("C:/x.csv", "a")
    refused(tmp_path / "p.zip", "leads out of it")


def test_notes_name_the_archive_and_no_place_of_today(tmp_path, caplog):
    pytest.importorskip("openpyxl")
    with pd.ExcelWriter(tmp_path / "b.xlsx") as book:
        pd.DataFrame({"about": ["x"]}).to_excel(book, sheet_name="Info", index=False)
        ROWS.to_excel(book, sheet_name="Data", index=False)
    with zipfile.ZipFile(tmp_path / "n.zip", "w") as packed:
        packed.write(tmp_path / "b.xlsx", "d/b.xlsx")
        packed.writestr("d/c.csv", "a,a,b,c,label\n" + "1,1,2,3,x\n" * 5)
        packed.writestr("d/e.parquet", "hello")
    data = {"root": str(tmp_path / "n.zip"), "bad": "skip", "bad_share": 0.5}
    load(Data(name="table", columns=Columns(label="label", features=("b",)), **data), whose="site")
    with zipfile.ZipFile(tmp_path / "n.zip", "w") as packed:
        packed.writestr("d/c.csv", "a,a,b,c,label\n" + "1,1,2,3,x\n" * 5)
    load(Data(name="table", columns=Columns(label="label"), **data), whose="site")
    with zipfile.ZipFile(tmp_path / "n.zip", "w") as packed:
        for i in range(10):
            Image.new("L", (4, 4), i).save(tmp_path / "i.png")
            packed.write(tmp_path / "i.png", f"p/{'cat' if i % 2 else 'dog'}/{i}.png")
        packed.writestr("p/dog/z.txt", "x")
        packed.writestr("p/dog/z.png", "x")
    load(Data(name="directory", **data))
    notes = [record.getMessage() for record in caplog.records]
    for line in (
        "Info",
        "left out are columns of one name",
        "files are set aside: .*e.parquet",
        "no test part",
        "1 file is left out: .*z.txt",
        "images are set aside: .*z.png",
    ):
        (found,) = [note for note in notes if re.search(line, note)]
        assert "fedtide-" not in found
        assert f"{tmp_path}/n.zip" in found


# --- HDF5 -----------------------------------------------------------------------------------------


def test_tables_of_hdf5(tmp_path, like):
    h5py = pytest.importorskip("h5py")
    texts = np.array(LETTERS, dtype="S1")
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file["run/a"], file["run/b"], file["run/label"] = ROWS.a, ROWS.b, texts
        file["other"] = ROWS[["a", "b"]].to_numpy()
        file["other"].attrs["columns"] = ["a", "b"]
    like(loaded(tmp_path / "m.h5"))
    refused(tmp_path / "m.h5", r"\[other\] has no column 'label'", sheet="other")
    records = np.array(list(zip(ROWS.a, ROWS.b, texts, strict=True)),
                       [("a", "f8"), ("b", "f8"), ("label", "S1")])  # fmt: skip
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["rows"] = records
    like(loaded(tmp_path / "r.h5"))
    with h5py.File(tmp_path / "o.h5", "w") as file:
        file["a"], file["b"] = ROWS.a, ROWS.b
        file.create_dataset("label", data=[b"\x80"] * 20, dtype=h5py.opaque_dtype(np.dtype("V1")))
    refused(tmp_path / "o.h5", "label holds .*objects of a program are not unpacked")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("a", (2,), "f8", external=[("/etc/passwd", 0, 16)])
    refused(tmp_path / "x.h5", "/a is in another file, which is not followed")


# --- queries --------------------------------------------------------------------------------------


def test_a_query_reads_what_is_new(tmp_path, like):
    pytest.importorskip("duckdb")
    (tmp_path / "lab").mkdir()
    ROWS.to_parquet(tmp_path / "lab" / "may.parquet")
    (tmp_path / "n.sql").write_text("SELECT * FROM 'lab/*.parquet' -- all\n;")
    assert loaded(tmp_path / "n.sql", {"mark": "id"}).transform["mark"] == 20
    like(loaded(tmp_path, {"mark": "id"}, since=8), 12)
    for root in (tmp_path / "n.sql", tmp_path / "lab" / "may.parquet"):
        found = loaded(root, {"mark": "t"}, since="2026-05-05T00:00:00")
        like(found, 11)
        assert found.transform["mark"] == "2026-05-10T12:00:00"
    with pytest.raises(DataError, match="nothing is beyond the last mark, 20"):
        loaded(tmp_path / "n.sql", {"mark": "id"}, since=20)
    with pytest.raises(DataError, match="of another kind than '2026-05-05'"):
        loaded(tmp_path / "n.sql", {"mark": "id"}, since="2026-05-05")
    refused(tmp_path / "n.sql", "column 'label' holds 'x' in row 1: a mark is", {"mark": "label"})


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ("COPY (SELECT 1) TO 'x.csv'", "it must be one SELECT"),
        ("SELECT 1; DROP TABLE x", "it must be one SELECT"),
        ("SELECT * FROM read_text('/etc/passwd')", "Permission Error"),
        ("SELECT * FROM '../up.parquet'", "Permission Error"),
        ("selec", "Parser Error"),
    ],
)
def test_a_query_writes_nothing_and_stays_in_its_directory(tmp_path, query, line):
    pytest.importorskip("duckdb")
    ROWS.to_parquet(tmp_path / "up.parquet")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "n.sql").write_text(query)
    refused(tmp_path / "q" / "n.sql", line)
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["n.sql"]


def test_a_query_of_a_data_base(tmp_path, like):
    with sqlite3.connect(tmp_path / "lis.db") as base:
        ROWS.assign(t=ROWS.t.astype(str)).to_sql("lab", base, index=False)
    (tmp_path / "n.sql").write_text("SELECT * FROM lab")
    of_base = {"database": "lis.db"}
    like(loaded(tmp_path, {**of_base, "mark": "id"}, since=8), 12)
    like(loaded(tmp_path, {**of_base, "mark": "t"}, since="2026-05-05T00:00:00"), 11)
    for query in ("DELETE FROM lab", "ATTACH 'z.db' AS z", "SELECT load_extension('x')"):
        (tmp_path / "n.sql").write_text(query)
        refused(tmp_path / "n.sql", "it must be one SELECT", of_base)
    refused(tmp_path / "n.sql", "is a link out of|does not exist", {"database": "no.db"})


@pytest.mark.parametrize("base", [None, "lis.db"])
def test_a_query_without_an_end_is_stopped(tmp_path, base, monkeypatch):
    pytest.importorskip("duckdb")
    monkeypatch.setattr(importlib.import_module("fedcli.data.own.queries"), "QUERY_S", 0.1)
    sqlite3.connect(tmp_path / "lis.db").execute("CREATE TABLE lab (a)").close()
    counted = "WITH RECURSIVE n(a) AS (SELECT 1 UNION ALL SELECT a + 1 FROM n) SELECT max(a) FROM n"
    (tmp_path / "n.sql").write_text(counted)
    refused(tmp_path / "n.sql", "n.sql took more than 0.1 s and was stopped",
            {"database": base} if base else {})  # fmt: skip


def test_rows_that_are_not_new_are_counted(tmp_path, like, caplog):
    """A file that has grown, and one more whose rows are old."""
    ROWS.to_csv(tmp_path / "a.csv", index=False)
    ROWS[:5].to_csv(tmp_path / "b.csv", index=False)
    like(loaded(tmp_path, {"mark": "id"}, since=8), 12)
    assert f"{tmp_path}: 13 rows that are not beyond the last mark, 8, are left out" in caplog.text


@pytest.mark.parametrize(
    ("name", "kept", "since"),
    [
        ("id", (ROWS.id + 91).astype(str), 99),  # "100" is less than "99" as a text
        ("t", ROWS.t.dt.strftime("%Y%m%dT%H%M%S"), "2026-05-04T12:00:00"),
        ("t", ROWS.t.dt.strftime("%Y-%m-%dT%H:%M:%S+0200"), "2026-05-04T10:00:00"),
    ],
)
def test_marks_that_a_data_base_keeps_as_texts(tmp_path, like, name, kept, since):
    with sqlite3.connect(tmp_path / "lis.db") as base:
        ROWS.assign(t=ROWS.t.astype(str)).assign(**{name: kept}).to_sql("lab", base, index=False)
    (tmp_path / "n.sql").write_text("SELECT * FROM lab")
    like(loaded(tmp_path, {"database": "lis.db", "mark": name}, since=since), 12)


def test_each_night_adds_the_rows_that_are_new_once(tmp_path, monkeypatch):
    pytest.importorskip("duckdb")
    place, query = tmp_path / "site", tmp_path / "site" / "n.sql"
    place.mkdir()
    query.write_text("SELECT * FROM 'lab.parquet'")
    (place / "site.toml").write_text('mark = "id"')
    ROWS[:10].to_parquet(place / "lab.parquet")
    columns = {"label": "label", "features": ["a", "b"]}
    tables = {"name": "table", "columns": columns, "classes": ["x", "y"]}
    root = cut(query, tables, 0, 7, tmp_path / "own")
    data = Data.model_validate(tables)
    with pytest.raises(NothingNew):
        add_task(root, 7, query, data)
    ROWS.to_parquet(place / "lab.parquet")  # a whole export, of which the half is new

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(growing, "write_about", killed)
        with pytest.raises(KeyboardInterrupt):
            add_task(root, 7, query, data)
    added = add_task(root, 7, query, data)
    assert (added.task, sum(added.examples), added.known, added.notes) == (1, 10, (0, 0), ())
    held = open_data(root, 7)
    assert sorted(np.concatenate([held.arrays(1, part)[0][:, 0] for part in PARTS])) == [
        *ROWS.a[10:]
    ]
    with pytest.raises(NothingNew, match="nothing is beyond the last mark, 20"):
        add_task(root, 7, query, data)
    (place / "site.toml").write_text("")
    with pytest.raises(DataError, match="say in the recipe which column tells what is new"):
        add_task(root, 7, query, data)


@pytest.mark.parametrize("dies", ["save_arrays", "write_about", "sync_path", "_move"])
def test_a_death_beside_a_watched_folder_loses_and_doubles_no_row(tmp_path, monkeypatch, dies):
    """Each export holds all rows so far; the mark tells which of them are new."""
    site, watched = tmp_path / "site", tmp_path / "incoming"
    site.mkdir()
    watched.mkdir()
    (site / "site.toml").write_text('mark = "id"')
    ROWS[:8].to_csv(site / "april.csv", index=False)
    columns = {"label": "label", "features": ["a", "b"]}
    tables = {"name": "table", "columns": columns, "classes": ["x", "y"]}
    root = cut(site / "april.csv", tables, 0, 7, tmp_path / "own")
    data = Data.model_validate({**tables, "repeats": "keep"})  # or equal rows would be left out
    incoming = Incoming(watched, root, 7, lambda: (data, 0))
    for name, rows in (("05", 14), ("06", 20)):
        ROWS[:rows].to_csv(watched / f"{name}.csv", index=False)

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(settled, "SETTLE_S", 0.0)
    incoming.take()  # a second look finds them at rest
    with monkeypatch.context() as patch:
        patch.setattr(Incoming if dies == "_move" else growing, dies, killed)
        with pytest.raises(KeyboardInterrupt):
            incoming.take()
    incoming.take()
    held = open_data(root, 7)
    first, *later = ([held.arrays(task, part)[0][:, 0] for part in PARTS] for task in range(3))
    assert sorted(np.concatenate([*first, *later[0], *later[1]])) == [*ROWS.a]
    assert sorted(path.name for path in watched.glob("*/*")) == ["05.csv", "06.csv"]


def test_what_a_query_gives_is_cut_anew_until_its_client_has_joined(tmp_path):
    pytest.importorskip("duckdb")
    place, cache = tmp_path / "site", tmp_path / "state" / "own"
    place.mkdir()
    (place / "n.sql").write_text("SELECT * FROM 'lab.parquet'")
    (place / "site.toml").write_text('mark = "id"')
    tables = {"name": "table", "columns": {"label": "label", "features": ["a", "b"]}}

    def rows(number: int) -> tuple[int, Path]:
        ROWS[:number].to_parquet(place / "lab.parquet")
        root = cut(place / "n.sql", tables, 0, 7, cache)
        return sum(len(open_data(root, 7).arrays(0, part)[1]) for part in PARTS), root

    assert rows(10)[0] == 10
    size, root = rows(14)
    assert size == 14
    (tmp_path / "state" / "7").mkdir()
    (tmp_path / "state" / "7" / "session.json").write_text("{}")
    assert rows(20) == (14, root)  # a run keeps what it began with, and the mark tells the rest
    added = add_task(root, 7, place / "n.sql", Data.model_validate(tables))
    assert sum(added.examples) == 6


# --- what all of them share -----------------------------------------------------------------------


@pytest.mark.parametrize("end", [".xlsx", ".h5", ".sql", ".dcm"])
def test_a_missing_package_is_named(tmp_path, end, monkeypatch):
    for name in ("openpyxl", "h5py", "duckdb", "pydicom"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / f"a{end}"
    path.write_bytes(b"SELECT 1")
    extra = BOOKS[end][1] if end in BOOKS else "dicom"
    wanted = {"xlsx": "openpyxl", "hdf5": "h5py", "sql": "duckdb", "dicom": "pydicom"}[extra]
    with pytest.raises(DataError, match=rf"a{end} .*pip install .*{wanted}"):
        read_image(path) if end == ".dcm" else loaded(path)


def test_a_column_may_have_several_names(tmp_path, like):
    for name, part, own in (("a", ROWS[:10], "A (mg)"), ("b", ROWS[10:], "A mg/l")):
        part.rename(columns={"a": own}).to_csv(tmp_path / f"{name}.csv", index=False)
    recipe = {"columns": {"a": ["A (mg)", "A mg/l"]}}
    like(loaded(tmp_path, recipe))
    (tmp_path / "a.csv").write_text("A (mg),A mg/l,b,label\n1,1,1,x\n")
    with pytest.raises(Exception, match=re.escape("the columns 'A (mg)' and 'A mg/l', which")):
        loaded(tmp_path, recipe)


def test_dates_of_declared_formats(tmp_path):
    texts = ["2026-05-02 10:00", "01.05.2026 09:00", "5/3/26 8:00"]
    rows = "".join(f"{texts[i % 3]},{i},0,{LETTERS[i // 3]},{i}\n" for i in range(12))
    (tmp_path / "a.csv").write_text("t,a,b,label,s\n" + rows)
    formats = ["ISO8601", "%d.%m.%Y %H:%M", "%m/%d/%y %H:%M"]
    found = loaded(tmp_path / "a.csv", {"date_formats": formats}, time="t", session="s")
    assert len(found.train.y) + len(found.test.y) == 12
    refused(tmp_path / "a.csv", "holds '5/3/26 8:00' in line 4, which is no time",
            {"date_formats": formats[:2]}, time="t", session="s")  # fmt: skip


# --- DICOM ----------------------------------------------------------------------------------------


def scan(path: Path, values: Any, **tags: Any) -> Path:
    pydicom = pytest.importorskip("pydicom")
    values, found = np.asarray(values), pydicom.Dataset()
    found.file_meta = pydicom.dataset.FileMetaDataset()
    found.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    found.SOPClassUID = pydicom.uid.CTImageStorage
    found.SOPInstanceUID = "1.2.3"
    found.Rows, found.Columns = values.shape[-2:]
    found.SamplesPerPixel, found.PhotometricInterpretation = 1, "MONOCHROME2"
    found.BitsAllocated = found.BitsStored = 8 * values.itemsize
    found.HighBit = found.BitsStored - 1
    found.PixelRepresentation = int(values.dtype.kind == "i")
    found.PixelData = values.tobytes()
    for name, value in tags.items():
        setattr(found, name, value)
    found.save_as(path, enforce_file_format=True)
    return path


def test_shades_are_as_modality_and_window_say(tmp_path):
    # CT: -1000 of air is stored as 24, water 0 as 1024, bone 976 as 2000; window 0 ± 1000
    tags = {"RescaleIntercept": -1024, "RescaleSlope": 1, "BitsStored": 12, "HighBit": 11}
    values = np.array([[24, 1024, 2000, 4095]], np.uint16)
    (plain,) = read_image(scan(tmp_path / "IM0001", values, **tags))
    assert plain.tolist() == [[[384, 16388, 32007, 65535]]]  # 65535 * v / 4095
    tags |= {"WindowCenter": 0.5, "WindowWidth": 2001}
    (seen,) = read_image(scan(tmp_path / "IM0001", values, **tags))
    assert seen.tolist() == [[[0, 32768, 64749, 65535]]]  # 65535 * (v + 1000) / 2000
    dark = np.array([[0, 255]], np.uint8)
    (negative,) = read_image(
        scan(tmp_path / "n.dcm", dark, PhotometricInterpretation="MONOCHROME1")
    )
    assert negative.tolist() == [[[255, 0]]]
    assert negative.dtype == np.uint8


def test_scans_of_a_folder_are_a_data_set(tmp_path):
    for k, name in enumerate(("benign", "malign")):
        (tmp_path / name).mkdir()
        for i in range(5):
            scan(tmp_path / name / f"IM{i:04}", np.full((4, 4), 100 * k + i, np.uint8))
    found = load(Data(name="directory", root=str(tmp_path)))
    assert found.class_names == ("benign", "malign")
    assert found.train.x.shape == (8, 1, 4, 4)


def test_scans_without_one_reading_are_refused(tmp_path):
    frames = scan(tmp_path / "f.dcm", np.zeros((2, 4, 4), np.uint8), NumberOfFrames=2)
    assert len(read_image(frames, ImageTransform(frames="all"))) == 2
    huge = scan(tmp_path / "h.dcm", np.zeros((1, 1), np.uint8), NumberOfFrames=10**9)
    short = scan(tmp_path / "s.dcm", np.zeros((1, 1), np.uint8), Rows=100)
    (tmp_path / "t.dcm").write_bytes(frames.read_bytes()[:200])
    for path, line in ((frames, "2 frames"), (huge, "million pixels"), (short, "cannot be read: "),
                       (tmp_path / "t.dcm", "cannot be read: ")):  # fmt: skip
        with pytest.raises(DataError, match=line) as caught:
            read_image(path)
        assert "\n" not in str(caught.value)


def test_a_cell_of_several_values_is_no_number(tmp_path):
    (tmp_path / "lab").mkdir()
    lists = ROWS.assign(a=[[value] for value in ROWS["a"]])
    lists.to_parquet(tmp_path / "lab" / "may.parquet")
    refused(tmp_path, r"cells of column 'a' hold several values each: give each")
