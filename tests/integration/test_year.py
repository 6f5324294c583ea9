"""A year of an open run by processes that die, and the same year undisturbed."""

from __future__ import annotations

import pytest

from benchmarks.year_processes import PLANS, Sites, row_of


@pytest.mark.loopback
@pytest.mark.whole
@pytest.mark.timeout(600)
def test_a_year_of_processes_that_die_has_the_bits_of_one_that_nothing_happens_to(tmp_path):
    """With newcomers, a lost disk, upgrades and wishes in the middle of rounds; SystemExit else."""
    found = row_of("tiny", tmp_path)
    assert found["strikes"] == PLANS["tiny"].strikes
    assert found["killed"] > found["strikes"]
    assert found["digest"] == found["alone_digest"]


@pytest.mark.parametrize("form", PLANS)
def test_each_week_of_a_plan_has_as_many_sites_with_news(form, tmp_path):
    """So that a stage begins when all have told, in whatever order they do."""
    plan = PLANS[form]
    sites = Sites(plan, tmp_path)
    weeks = [sites.news(week) for week in range(1, plan.weeks)]
    assert {len(week) for week in weeks} == {plan.news}
    assert all(site in weeks[at - 1] for at, site in plan.joins.items())
