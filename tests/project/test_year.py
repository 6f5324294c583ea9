"""The year of a stream: what comes to its sites, and how it is counted who trained on what."""

from __future__ import annotations

import json

import pytest

from benchmarks import year
from fedcli.data.store.opened_data import open_data
from fedmodels.config.combinations import refusals


@pytest.fixture(scope="module")
def months(tmp_path_factory):
    """Return the tiny year after its last month, without a run."""
    found = year.Year(year.FORMS["tiny"], tmp_path_factory.mktemp("year"), year.recordings("tiny"))
    found.begin()
    for month in range(1, found.form.months):
        found.happen(month)
    return found


def test_sites_have_what_the_year_says(months):
    """Site 5 comes in month 1, and site 1 retires then. Sites 0 and 3 are silent in month 2.

    Site 4 would be silent in month 1, but for the activity that it spells otherwise then.
    """
    assert months.tasks == {0: 2, 1: 1, 2: 3, 3: 2, 4: 3, 5: 2}
    assert months.refused == 1, "a spelling"
    assert months.retired(0) == []
    assert months.retired(2) == [year.RETIRES, year.FORGOTTEN]
    bad, good = (
        max(abs(parts["train"][0]).max() for site, month, parts, _ in months.seen(bad=True)
            if ((site, month) == (year.BAD, 1)) == is_bad)
        for is_bad in (True, False)
    )  # fmt: skip
    assert bad > 100 * good
    sizes = {site: len(p["train"][1]) for site, month, p, _ in months.seen() if month == 0}
    assert sizes[year.LARGE] == months.form.times * sizes[0]
    assert open_data(months.data, 3).file.class_names == ("a1", "a2", "a3", "a4")


def test_who_trained_too_seldom_is_found(tmp_path):
    """Client 0 needs two rounds of each task and had one of its second; client 1's went aside."""
    growth = {"interaction": 0, "tasks": [[0, 1], [1, 1]]}
    later = {"interaction": 2, "tasks": [[0, 2], [1, 2]], "set_aside": [[1, 1, "why"]]}
    records = [
        {"growths": [growth], "cohort": [0, 1]},
        {"cohort": [0, 1]},
        {"growths": [later], "cohort": [0]},
    ]
    (tmp_path / "rounds.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in records))
    assert year.short_of(tmp_path, 2) == ([(0, 1)], 1)
    assert year.short_of(tmp_path, 1) == ([], 1)


@pytest.mark.parametrize("method", year.METHODS)
def test_its_runs_can_be(method):
    given = year.experiment(method, year.FORMS["small"], 3)
    assert [*refusals(given)] == []
    assert given.schedule.open
