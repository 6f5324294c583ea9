"""What would decide open intervals: numbers of seeds by hand, and the page's studies."""

from __future__ import annotations

import re

import pytest

from benchmarks import deciding
from benchmarks.papers.page import record_of
from fedsrv.report.frame import difference
from tests.integration.harness import ROOT


@pytest.mark.parametrize(
    ("mean", "seeds"),
    # Student's t over the square root of n falls below mean / deviation:
    # 3.182 / 2 = 1.59 and 2.776 / 2.236 = 1.24; 2.571 / 2.449 = 1.05 and 2.447 / 2.646 = 0.925
    [(1.5, 5), (1.0, 7)],
)
def test_the_seeds_that_decide(mean, seeds):
    found = difference({0: mean - 1, 1: mean, 2: mean + 1}, {0: 0, 1: 0, 2: 0})
    assert found is not None
    assert not found.is_clear
    assert deciding.seeds_needed(found) == seeds


def test_no_number_of_seeds_decides_a_mean_of_zero():
    nothing = difference({0: -1, 1: 1}, {0: 0, 1: 0})
    little = difference({0: -0.999, 1: 1}, {0: 0, 1: 0})
    assert nothing
    assert little
    assert deciding.seeds_needed(nothing) is None
    assert deciding.seeds_needed(little) is None


def test_what_is_clear_needs_no_more_seeds_than_it_has():
    for study in deciding.studies():
        record = record_of(study)
        assert record is not None
        for one in record.compared:
            needed = deciding.seeds_needed(one)
            assert one.is_clear == (needed is not None and needed <= one.pairs)


def test_the_page_has_every_study():
    page = (ROOT / "docs" / "results" / "open-questions.md").read_text()
    table = page.partition("<!-- deciding: steps -->")[2].partition("<!-- end")[0]
    assert re.findall(r"^\| `([\w-]+)`", table, re.MULTILINE) == list(deciding.studies())


def test_the_steps_of_a_run():
    # the mean of 10,000 with tasks alone and 22,000 with accumulated ones
    row = deciding.row_of("views-digits")
    assert row["net"] == "mlp"
    assert row["step_ms"] > 0
    assert row["steps"] == 16_000
