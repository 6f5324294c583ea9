"""What of an open run may be changed: keys, values, and the table of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedmodels import plugins
from fedmodels.config.changes import forbidden_changes
from fedmodels.config.open_changes import (
    CHANGEABLE,
    changed,
    changes_between,
    settings_of,
    with_settings,
)
from fedmodels.errors import PayloadError
from tests.conftest import gone_keys, tiny_experiment

PAGE = Path(__file__).parents[3] / "docs" / "streams.md"
OPEN = {"open": True, "order": "tasks_outer", "rounds": 2}
NEW = {
    "training": {"lr": 0.5, "lr_schedule": {"kind": "linear", "length": 3}},
    "trigger": {"new_data": 2},
    "evaluate": {"drift": True, "last_tasks": 3},
    "deploy": {"tolerance": 0.1},
    "server": {"min_clients": 2, "deadline_s": 9.0},
    "schedule": {**OPEN, "rounds": 7, "clients": 9},
}


def test_the_page_has_the_keys_that_change_and_what_they_hold_for():
    rows = re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert {key: what for key, what in rows if key not in gone_keys()} == CHANGEABLE


def test_changes_lead_from_one_config_to_the_other_and_back():
    before, now = tiny_experiment(schedule=OPEN), tiny_experiment(**NEW)
    found = changes_between(before, now)
    there = {key: value for key, (_, value) in found.items()}
    back = {key: value for key, (value, _) in found.items()}
    assert changed(before, there) == now
    assert changed(now, back) == before
    assert with_settings(now, settings_of(before)) == before
    assert found["trigger.new_data"] == (None, 2)


def test_what_follows_from_a_key_keeps_it_as_it_is():
    before, now = tiny_experiment(schedule=OPEN), tiny_experiment(**NEW)
    assert forbidden_changes(before, now) == ["schedule.clients"], "data were dealt out"
    no_data = {"scenario": None, "data": None}
    assert not forbidden_changes(*(e.model_copy(update=no_data) for e in (before, now)))


def test_settings_of_a_plugin_that_is_gone_are_left_out_at_their_defaults(monkeypatch):
    """A run that stored them goes on without the plugin, unless it was on."""
    brings = {"tables": {"evaluate": {"loud": False}, "sounds": {"on": False}}, "owns": ["sounds"]}
    really = {name: plugins.known()[name] for name, _ in plugins.gone_plugins()}
    monkeypatch.setattr(plugins, "known", lambda: {**really, "sounds": brings})
    before = tiny_experiment(schedule=OPEN)
    off = {"evaluate.loud": False, "sounds.on": False}
    assert changed(before, {**off, "training.lr": 0.5}).training.lr == 0.5
    with pytest.raises(PayloadError, match=r"\[evaluate\] loud is of the plugin sounds, which"):
        changed(before, {"evaluate.loud": True})


@pytest.mark.parametrize(
    "change",
    [{"seed": 3}, {"training.lr": -1.0}, {"training.lr": "x"}, {"deploy.nothing": 1},
     {"deploy": 3}, {"training.lr.more": 1}, {"trigger.new_data": {"a": 1}}],
)  # fmt: skip
def test_a_change_that_cannot_be_is_one_line(change):
    with pytest.raises(PayloadError, match=r"^[^\n]+$"):
        changed(tiny_experiment(schedule=OPEN), change)
