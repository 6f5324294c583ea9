"""Every format of tables gives one answer: for empty cells, names, and cells of mixed types."""

import logging
import re
import sqlite3

import numpy as np
import pytest

from fedcli.data.sets.registry import load
from fedmodels.config.data import Data
from fedmodels.config.recipe import recipe_of
from fedmodels.errors import DataError

pandas, h5py = pytest.importorskip("pandas"), pytest.importorskip("h5py")
openpyxl = pytest.importorskip("openpyxl")
N, LOST = 60, {"y": 7, "c": 17, "g": 27, "x": 37, "t": 47}
"""Rows, and in which of them a column is empty; of the categories it is the last one."""
COLUMNS = {
    "label": "y", "client": "c", "group": "g", "features": ["x", "k"],
    "categories": {"k": ["1", "2"]},
}  # fmt: skip


def frame():
    at = np.arange(N)
    found = pandas.DataFrame(
        {"y": at % 2 + 1, "c": at // 30 + 9, "g": at // 3, "k": at % 3 + 1, "x": at / 4, "t": at},
    ).astype(dict.fromkeys("ycgkt", "Int64") | {"x": "Float64"})
    for name, row in (*LOST.items(), ("k", N - 1)):
        found.loc[row, name] = pandas.NA
    return found


def as_floats(table):
    return table.astype("float64")


def as_texts(table):
    texts = {name: table[name].astype("string") for name in "ycgk"}
    return table.assign(**texts)


def as_categories(table):
    return table.astype(dict.fromkeys("ycgk", "category"))


def as_bytes(table):
    return table.assign(
        **{n: [None if v is pandas.NA else str(v).encode() for v in table[n]] for n in "ycgk"}
    )


def write_csv(table, folder):
    table.to_csv(folder / "a.csv", index=False)
    return folder / "a.csv"


def write_parquet(table, folder):
    table.to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def write_book(table, folder):
    book = openpyxl.Workbook()
    book.active.append([*table.columns])
    for row in table.astype(object).where(table.notna(), None).to_numpy().tolist():
        book.active.append(row)
    book.save(folder / "a.xlsx")
    return folder / "a.xlsx"


def write_hdf5(table, folder):
    kinds = [(n, h5py.string_dtype() if table[n].dtype == "string" else "f8") for n in table]
    rows = np.zeros(len(table), dtype=kinds)
    for name in table:
        of_texts = table[name].dtype == "string"
        rows[name] = table[name].fillna("") if of_texts else table[name].astype("float64")
    with h5py.File(folder / "a.h5", "w") as file:
        file["t"] = rows
    return folder / "a.h5"


def write_duckdb(table, folder):
    pytest.importorskip("duckdb")
    table.to_parquet(folder / "b.parquet")
    (folder / "a.sql").write_text("SELECT * FROM 'b.parquet'")
    return folder / "a.sql"


def write_sqlite(table, folder):
    with sqlite3.connect(folder / "b.sqlite") as db:
        table.to_sql("t", db, index=False)
    db.close()
    (folder / "a.sql").write_text("SELECT * FROM t")
    return folder / "a.sql"


FORMATS = {
    "csv": lambda t, f: write_csv(t, f),
    "workbook": lambda t, f: write_book(t, f),
    "workbook of floats": lambda t, f: write_book(as_floats(t), f),
    "workbook of texts": lambda t, f: write_book(as_texts(t), f),
    "parquet Int64": lambda t, f: write_parquet(t, f),
    "parquet float64": lambda t, f: write_parquet(as_floats(t), f),
    "parquet string": lambda t, f: write_parquet(as_texts(t), f),
    "parquet categories": lambda t, f: write_parquet(
        t.astype(dict.fromkeys("ycgk", "category")), f
    ),
    "parquet bytes": lambda t, f: write_parquet(as_bytes(t), f),
    "hdf5 floats": lambda t, f: write_hdf5(as_floats(t), f),
    "hdf5 texts": lambda t, f: write_hdf5(as_texts(t), f),
    "duckdb": lambda t, f: write_duckdb(t, f),
    "duckdb of texts": lambda t, f: write_duckdb(as_texts(t), f),
    "sqlite": lambda t, f: write_sqlite(t, f),
}


def read(path, **data):
    recipe = recipe_of({"database": "b.sqlite"}, "site.toml")
    found = load(
        Data(name="table", root=str(path), columns=COLUMNS | data.pop("columns", {}), **data),
        recipe=recipe if (path.parent / "b.sqlite").exists() else recipe_of({}, ""),
    )
    return (
        found.class_names, found.group_names, found.train.x.tolist(), found.train.y.tolist(),
        found.test.x.tolist(), found.test.y.tolist(), found.train.wholes.tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_gives_what_csv_gives(kind, tmp_path, caplog):
    """An empty label, client, group, number or time sets its row aside; a category is another."""
    caplog.set_level(logging.WARNING)
    told, found = [], []
    for place, name in (("first", "csv"), ("second", kind)):
        (tmp_path / place).mkdir()
        path = FORMATS[name](frame(), tmp_path / place)
        caplog.clear()
        found.append(read(path, bad="skip", bad_share=0.2, columns={"time": "t"}))
        lines = [line for line in caplog.messages if "set aside" in line]
        told.append(re.findall(r"('.' is empty)", "; ".join(lines)))
    assert found[1] == found[0]
    assert found[0][:2] == (("1", "2"), ("9", "10"))
    assert told == [[f"'{name}' is empty" for name in LOST]] * 2


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_names_the_rows_of_empty_cells(kind, tmp_path):
    path = FORMATS[kind](frame(), tmp_path)
    unit, first = ("line", 2) if kind == "csv" else ("row", 1 + ("workbook" in kind))
    with pytest.raises(DataError) as error:
        read(path, columns={"time": "t"})
    for name, row in LOST.items():
        assert f"{unit} {row + first}: '{name}' is empty" in str(error.value)


def test_numbers_and_texts_of_one_column_are_read_alike(tmp_path):
    """A workbook holds 97 and the text 97,5; the recipe gives the column a unit of its own."""
    book = openpyxl.Workbook()
    book.active.append(["Temp.", "y"])
    for at in range(40):
        book.active.append([36 + at % 5 if at % 3 else f"{36 + at % 5},5 °C", "ab"[at % 2]])
    book.save(tmp_path / "x.xlsx")
    recipe = {"columns": {"t": {"from": "Temp.", "unit": "°C"}}, "decimal": ","}
    found = load(
        Data(
            name="table", root=str(tmp_path / "x.xlsx"), columns={"label": "y", "features": ["t"]}
        ),
        recipe=recipe_of(recipe, "site.toml"),
    )
    expected = sorted(36 + at % 5 + (0 if at % 3 else 0.5) for at in range(40))
    assert sorted([*found.train.x[:, 0], *found.test.x[:, 0]]) == expected
