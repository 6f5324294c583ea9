"""Rows for a trained model: each is answered by itself, or has its reason, as the file has them."""

from pathlib import Path

import pytest

from fedcli.data.own.new_inputs import _read_tables, given_rows
from fedmodels.config.transforms import TableTransform
from fedmodels.nets.trained import ModelFacts

COLUMNS = {
    "label": "y", "client": "ward", "session": "visit", "time": "arrived", "features": ["temp"],
}  # fmt: skip
LINES = [
    "arrived,ward,visit,temp", "2026-02-03,B,1,3", "soon,A,1,4", ",A,,5", "2026-02-01,,2,x",
    "2026-02-02,A,2,7", "2026-01-01,A,3,",
]  # fmt: skip


def how_of(**columns):
    fill = columns.pop("fill", None)
    return TableTransform.model_validate({"columns": {**COLUMNS, **columns}, "fill": fill})


def test_a_row_that_stands_alone_needs_no_time_and_keeps_its_place(tmp_path):
    (tmp_path / "a.csv").write_text("\n".join(LINES) + "\n")
    (found,) = _read_tables(tmp_path / "a.csv", how_of())
    assert found.x.tolist() == [[3], [4], [5], [7]]
    assert [first for first, _ in found.places] == [2, 3, 4, 6]
    assert [(at, why) for at, why, _ in found.left] == [(5, "temp holds 'x'"), (7, "temp is empty")]


def test_so_does_a_row_of_json():
    names, *cells = (line.split(",") for line in LINES)
    rows = [{n: c or None for n, c in zip(names, line, strict=True)} for line in cells]
    facts = ModelFacts("mlp", {}, (1,), 2, transform=how_of().facts())
    found = given_rows(rows, Path("the input"), facts, how_of())
    assert found.x.tolist() == [[3], [4], [5], [7]]
    assert [(at, why) for at, why, _ in found.left] == [(4, "temp holds 'x'"), (6, "temp is empty")]


@pytest.mark.parametrize(
    ("missing", "fill", "last"), [("mean", [8.5], [8.5]), ("drop", None, None)]
)
def test_what_training_did_with_empty_cells_is_done(tmp_path, missing, fill, last):
    (tmp_path / "a.csv").write_text("\n".join(LINES) + "\n")
    (found,) = _read_tables(tmp_path / "a.csv", how_of(missing=missing, fill=fill))
    assert found.x.tolist() == [[3], [4], [5], [7]] + ([last] if last else [])
    assert next(why for _, why, _ in found.left) == "temp holds 'x'"


def test_windows_pass_over_a_row_without_a_time(tmp_path):
    """As in training; the windows come as the file has them, not in the order of time."""
    lines = ["arrived,ward,temp"]
    lines += [f"2026-02-0{9 - at // 2} 0{at % 2}:00,{'AB'[at // 4]},{at}" for at in range(8)]
    lines.insert(3, "soon,A,50")
    lines.insert(6, "2026-02-09 03:00,,60")
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    (found,) = _read_tables(tmp_path / "a.csv", how_of(session=None, window=2, gap=10**6))
    assert found.x[..., 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [(at, why) for at, why, _ in found.left] == [
        (4, "arrived holds 'soon'"), (7, "ward is empty"),
    ]  # fmt: skip


def test_a_text_among_cells_that_are_interpolated_is_one_row(tmp_path):
    lines = ["arrived,ward,visit,temp", "3,A,1,30", "1,A,1,10", "2,A,1,", "4,A,1,x", "5,B,1,"]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    (found,) = _read_tables(tmp_path / "a.csv", how_of(missing="interpolate"))
    assert found.x.tolist() == [[30], [10], [20]]
    assert [(at, why) for at, why, _ in found.left] == [(5, "temp holds 'x'"), (6, "left out")]
