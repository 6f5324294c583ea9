"""The coordinator that asks for columns which a site does not allow, and that it would notice."""

from __future__ import annotations

import pytest

from benchmarks.attacks.lying_columns import ALLOWED, ROLES, SECRET, config, named_by, play, wishes
from fedcli.gate import rules
from fedcli.gate.rules import SEEN

pytestmark = pytest.mark.loopback


def test_each_wish_is_a_config_that_a_coordinator_may_show():
    for wish in wishes():
        config(wish.columns)
    assert {"label", "target", "labels", "features", "categories", "task", "time"} <= {*named_by()}


def test_two_sites_say_the_same_whatever_is_asked_for_that_they_do_not_allow(tmp_path):
    """Every sixth wish; ``python -m benchmarks.attacks.lying_columns`` asks for all."""
    assert play(tmp_path, asked=wishes()[::6]) == []


def test_what_a_site_tells_is_told_of_the_columns_and_roles_that_it_allows_alone(tmp_path):
    """``--tell labels`` lets names of an allowed label leave, and no other column become one."""
    tell = ["labels", "moments", "text", "metrics", "loss", "failure", "bare"]
    others = [wish for wish in wishes()[3::7] if wish.what not in ROLES]
    asked = [*others, *(wish for wish in wishes() if wish.what in ROLES)]
    assert len(asked) - len(others) == len(ROLES)
    assert play(tmp_path, asked=asked, tell=tell) == []


def test_it_notices_a_site_that_lets_a_column_have_another_role(tmp_path, monkeypatch):
    monkeypatch.setattr(rules, "_read", lambda columns: {("age", SEEN)})
    asked = [wish for wish in wishes() if wish.what in ("age:label", "age:task")]
    found = {one.lie for one in play(tmp_path, asked=asked, tell=["labels"])}
    assert found == {"age:label (shown)", "age:task (shown)"}


def test_it_notices_a_site_that_says_what_follows_from_the_column(tmp_path):
    (wish,) = (one for one in wishes() if one.what == f"categories = {{'{SECRET}': ['no', 'yes']}}")
    found = play(tmp_path, [*ALLOWED, SECRET], [wish])
    assert any("tells of data without noise" in one.what for one in found)
