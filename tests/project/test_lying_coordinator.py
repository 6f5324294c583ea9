"""The coordinator that lies: what it hears of a site with conditions, and that it would notice."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.attacks import lying_coordinator
from benchmarks.attacks.lying_coordinator import (
    NOISE,
    Ask,
    Heard,
    by_own_loop,
    epsilon_of,
    play,
    play_early,
    scores,
    unpaid,
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


def test_a_training_loop_of_a_site_s_own_tells_no_more_and_pays_as_well(digits, tmp_path):
    assert play("client", digits, tmp_path, most=2, asks=FEW, joins=by_own_loop) == []


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


def heard_with(noise, uploads):
    sent = [{"weights/net": one} for one in noise]
    return Heard({}, sent, ["lie"] * uploads, [0] * uploads, "", ["Push"] * uploads)


def unpaid_of(monkeypatch, tmp_path, uploads, charged, rng, size=1210):
    """Return what is found of uploads that are noise alone, so many of which are charged."""
    ledger = Mock(epsilon=Mock(return_value=epsilon_of(charged**0.5 / NOISE)))
    monkeypatch.setattr(lying_coordinator, "PrivacyLedger", Mock(return_value=ledger))
    sites = [heard_with(NOISE * rng.standard_normal((uploads, size)), uploads) for _ in range(2)]
    return unpaid("client", *sites, [1.0] * uploads, tmp_path / "site.db")


def test_noise_that_chance_has_measured_smaller_is_no_finding(monkeypatch, tmp_path):
    """1210 numbers tell their deviation to 2 %, in one site of fifty worse than to 4 %."""
    rng = np.random.default_rng(0)
    assert all(unpaid_of(monkeypatch, tmp_path, 3, 3, rng) == [] for _ in range(60))


@pytest.mark.parametrize("uploads", [3, 7])
def test_one_release_too_many_is_found_beside_chance(uploads, monkeypatch, tmp_path):
    rng = np.random.default_rng(1)
    assert all(unpaid_of(monkeypatch, tmp_path, uploads, uploads - 1, rng) for _ in range(20))


def test_its_closed_form_is_dp_accounting_s():
    account = accounting.pld.PLDAccountant().compose(accounting.GaussianDpEvent(NOISE), 7)
    assert epsilon_of(7**0.5 / NOISE) == pytest.approx(account.get_epsilon(1e-3), rel=1e-3)
