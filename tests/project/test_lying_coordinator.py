"""The coordinator that lies: what it hears of a site with conditions, and that it would notice."""

from __future__ import annotations

import pytest

from benchmarks.attacks.lying_coordinator import (
    NOISE,
    Ask,
    epsilon_of,
    play,
    play_early,
    scores,
)
from fedcli.gate.gate import Gate
from fedcli.parts.privacy import clients
from fedmodels.privacy.ledger import PrivacyLedger
from fedpb.tables import table_of

accounting = pytest.importorskip("dp_accounting", reason="needs the extra privacy")
pytestmark = pytest.mark.loopback
LEVELS = ("client", "example")
FEW = [
    Ask("first"),
    Ask("replay", {"trip": 1}),
    Ask("settings", {"trip": 2, "settings": table_of({"training.lr": 0.1 + 1e-7})}),
    Ask("payload", {"trip": 3}, 1e-6),
    Ask("round", {"trip": 4, "round": 1}),
    *scores(2),
]


@pytest.mark.parametrize("level", LEVELS)
def test_a_site_tells_nothing_without_noise_and_pays_for_each_release(level, digits, tmp_path):
    """Three scores of one model after the other, of which the site allows two."""
    assert play(level, digits, tmp_path, most=2, asks=FEW) == []


@pytest.mark.parametrize("level", LEVELS)
def test_a_site_stays_away_before_it_tells_anything(level, digits, tmp_path):
    assert play_early(level, digits, tmp_path) == []


def found_in(digits, tmp_path) -> str:
    return "; ".join(each.what for each in play("client", digits, tmp_path, asks=FEW[:3]))


def test_it_hears_of_a_loss_that_a_gate_lets_through(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(Gate, "look", lambda gate, message: None)
    assert "Report.loss" in found_in(digits, tmp_path)


def test_it_finds_a_release_that_nobody_charged(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(PrivacyLedger, "note", lambda *a: None)
    assert "the ledger says 0" in found_in(digits, tmp_path)


def test_it_finds_noise_that_comes_twice(digits, tmp_path, monkeypatch):
    """As if noise were drawn for the interaction alone, whatever it is added to."""
    plain = clients.with_own_noise

    def alike(method, run, upload, payload, secret, name):
        sent = plain(method, run, upload, payload, secret, name)
        again = plain(method, run, payload, payload, secret, "")
        weights = {
            k: upload.weights[k] + again.weights[k] - payload.weights[k] for k in sent.weights
        }
        return type(sent)(weights, scalars=sent.scalars)

    monkeypatch.setattr(clients, "with_own_noise", alike)
    assert "its noise is that of upload" in found_in(digits, tmp_path)


def test_its_closed_form_is_dp_accounting_s():
    account = accounting.pld.PLDAccountant().compose(accounting.GaussianDpEvent(NOISE), 7)
    assert epsilon_of(7**0.5 / NOISE) == pytest.approx(account.get_epsilon(1e-3), rel=1e-3)
