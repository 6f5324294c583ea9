"""The relay that lies to a site with conditions, before an honest run, and that it would notice."""

from __future__ import annotations

import pytest

from benchmarks.attacks import lying_columns
from benchmarks.attacks.lying_coordinator import Ask, scores
from benchmarks.attacks.lying_relay import HONEST, Lie, claims, play, play_columns, play_early
from fedcli.gate.gate import Gate
from fedpb.tables import table_of

pytest.importorskip("dp_accounting", reason="needs the extra privacy")
pytestmark = pytest.mark.loopback
LEVELS = ("client", pytest.param("example", marks=pytest.mark.whole))
FEW = [
    HONEST,
    Ask("replay", {"trip": 1}),
    Ask("settings", {"trip": 2, "settings": table_of({"training.lr": 0.1 + 1e-7})}),
    Ask("payload", {"trip": 3}, 1e-6),
    Ask("another round", {"trip": 4, "round": 1}),
    *scores(2),
]


@pytest.mark.parametrize("level", LEVELS)
def test_a_site_tells_a_relay_nothing_without_noise_and_pays_for_each_release(
    level, digits, tmp_path
):
    """It hides its own orders among true ones, claims counts, and comes back as a new process."""
    lie = Lie(FEW, up=claims, forgets=True)
    assert play(level, digits, tmp_path, "few", lie, most=2) == []


@pytest.mark.parametrize("brings", [pytest.param(0, marks=pytest.mark.whole), 2])
def test_an_upload_that_a_relay_drops_or_brings_twice_is_charged_all_the_same(
    brings, digits, tmp_path
):
    assert play("client", digits, tmp_path, "few", Lie(FEW[:2], brings=brings)) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_site_stays_away_from_a_relay_that_says_another_run(level, digits, tmp_path):
    assert play_early(level, digits, tmp_path) == []


def test_a_site_cuts_its_files_by_no_other_table_than_that_of_the_run(tmp_path):
    """Every ninth wish; ``python -m benchmarks.attacks.lying_relay`` tries all."""
    assert play_columns(tmp_path, lying_columns.wishes()[::9]) == []


def found_in(digits, tmp_path) -> str:
    lie = Lie(FEW[:3])
    return "; ".join(each.what for each in play("client", digits, tmp_path, "few", lie))


def test_it_hears_of_a_loss_that_a_gate_lets_through(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(Gate, "look", lambda gate, message: None)
    assert "Report.loss" in found_in(digits, tmp_path)
