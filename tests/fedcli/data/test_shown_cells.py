"""Workbooks that show otherwise than they are read: per cent, and rows that a filter hides."""

from __future__ import annotations

import logging

import pytest

from fedcli.data.store.site import cut
from fedmodels.config.data import Data

openpyxl = pytest.importorskip("openpyxl")
COLUMNS = {"label": "y", "features": ["share", "other"]}


def book(path, percents=(), hidden=(), form="0%", title=False):
    """Write 20 rows; of those in ``percents`` the share is a fraction that is shown as per cent."""
    made = openpyxl.Workbook()
    sheet = made.active
    if title:
        sheet.append(["shares of a ward", None, None])
    sheet.append(["share", "other", "y"])
    for at in range(20):
        sheet.append([(60 + at) / (100 if at in percents else 1), at, "ab"[at % 2]])
        cell = sheet.cell(sheet.max_row, 1)
        cell.number_format = form if at in percents else "0.00"
        sheet.row_dimensions[sheet.max_row].hidden = at in hidden
    made.save(path)
    return path


def notes(tmp_path, caplog, path):
    caplog.set_level(logging.WARNING)
    tables = Data(name="table", columns=COLUMNS).model_dump(mode="json", exclude_none=True)
    cut(path, tables, 0, 0, tmp_path / "own")
    return [r.getMessage() for r in caplog.records if "per cent" in r.getMessage()
            or "hidden" in r.getMessage()]  # fmt: skip


@pytest.mark.parametrize("form", ["0%", "0.00%", "#,##0.0 %"])
@pytest.mark.parametrize("title", [False, True])
def test_numbers_and_per_cents_in_one_column_are_counted(tmp_path, caplog, form, title):
    path = book(tmp_path / "a.xlsx", percents={3, 4, 5}, form=form, title=title)
    (note,) = notes(tmp_path, caplog, path)
    assert "column 'share' has 20 numbers, of which 3 are shown as per cent" in note
    assert "0.63 is read for 63 %" in note


@pytest.mark.parametrize("percents", [(), range(20)])
def test_a_column_of_one_form_has_no_note(tmp_path, caplog, percents):
    assert notes(tmp_path, caplog, book(tmp_path / "a.xlsx", percents=percents)) == []


def test_rows_that_a_filter_hides_are_counted_and_read(tmp_path, caplog):
    path = book(tmp_path / "a.xlsx", hidden={0, 7, 19})
    (note,) = notes(tmp_path, caplog, path)
    assert "3 of its 20 rows are hidden, as by a filter, and are read like the others" in note
