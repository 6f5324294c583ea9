"""Metrics of a custom method: those that a run cannot keep are told of."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import fedtide
from fedmodels.errors import ConfigError
from fedmodels.numerics.metric_names import is_written_by_runs
from tests.fedtide.test_front_door import TINY

METHOD = """
from dataclasses import dataclass
from fedtide import FedAvg

@dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    citation = "none"

    def finish(self, ctx, state, uploads):
        return state, {"METRIC": float("VALUE")}

    def reported(self, run):
        return frozenset({"CLIENT"})
"""


def run(place: Path, **words: str) -> fedtide.Run:
    text = METHOD
    for key, word in {"METRIC": "mine", "VALUE": "1", "CLIENT": "own", **words}.items():
        text = text.replace(key, word)
    (place / "mine.py").write_text(text)
    changes = {"method.name": f"{place}/mine.py:Mine", "schedule.rounds": 2}
    return fedtide.run(TINY, changes, backend="inprocess", out=place / "run")


@pytest.mark.parametrize("name", ["loss", "a_loc", "a_glo_minority", "prototype_drift"])
def test_finish_may_not_report_what_a_run_writes(name, tmp_path):
    with pytest.raises(ConfigError, match=f"finish of Mine reports '{name}', .* another name"):
        run(tmp_path, METRIC=name)


@pytest.mark.parametrize("name", ["loss", "seconds"])
def test_clients_may_not_report_what_reports_have(name, tmp_path):
    with pytest.raises(ConfigError, match=f"clients of Mine cannot report '{name}'"):
        run(tmp_path, CLIENT=name)


def test_what_is_not_finite_is_told_of_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        summary = run(tmp_path, VALUE="nan").summary
    lines = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert lines == [
        "note: finish of Mine reports 'mine' as nan; records leave out what is not finite"
    ]
    assert "mine" not in summary["metrics"]


def test_names_of_ones_own():
    assert is_written_by_runs("best_a_glo_balanced")
    assert not is_written_by_runs("weights_entropy")
