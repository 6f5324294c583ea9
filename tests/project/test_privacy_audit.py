"""The audit of noise: its bounds by hand, and a tiny form of it that finds a fault in seconds."""

import itertools
import math

import pytest

from benchmarks.privacy_audit.lower_bounds import (
    Rates,
    any_bound,
    epsilon_of_gaussian,
    epsilon_of_mu,
    epsilon_of_one_run,
    epsilon_of_rates,
    rates_at,
)
from fedmodels.numerics.secrecy import Secret

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


def test_rates_bound_epsilon_by_hand():
    """(1 - 0.1 - 0.2) / 0.1 is 7; no error in 100 is a rate of at most 1 - 0.025^(1/100)."""
    assert epsilon_of_rates(Rates(0.1, 0.2), 0.1) == pytest.approx(math.log(7))
    assert epsilon_of_rates(Rates(0.2, 0.1), 0.1) == pytest.approx(math.log(7))
    assert epsilon_of_rates(Rates(0.5, 0.5), 0.1) == 0.0
    found = rates_at(0.5, [1.0] * 100, [0.0] * 50)
    assert found.miss == pytest.approx(1 - 0.025 ** (1 / 100))
    assert found.false_alarm == pytest.approx(1 - 0.025 ** (1 / 50))


def test_a_gaussian_release_has_its_epsilon():
    """At epsilon 0 two normal distributions one deviation apart have a delta of 0.38292."""
    assert epsilon_of_mu(1.0, 0.38292492) == pytest.approx(0.0, abs=1e-5)
    accounting = pytest.importorskip("dp_accounting")
    exact = accounting.get_epsilon_gaussian(0.5, 1e-5)
    assert epsilon_of_mu(2.0, 1e-5) == pytest.approx(exact, abs=1e-3)
    half = Rates(0.3085375, 0.3085375)  # the threshold in the middle of two a deviation apart
    assert epsilon_of_gaussian(half, 1e-5) == pytest.approx(epsilon_of_mu(1.0, 1e-5), abs=1e-3)


def test_one_run_by_hand():
    """All of 100 guesses right: 0.05^(1/100) = 0.97049 is e^epsilon / (1 + e^epsilon)."""
    assert epsilon_of_one_run(100, 100, 100, 0.0) == pytest.approx(3.4926, abs=1e-3)
    assert epsilon_of_one_run(50, 100, 100, 0.0) == 0.0
    assert epsilon_of_one_run(100, 100, 1000, 1e-4) < 3.4926


def test_a_threshold_is_chosen_on_other_plays_than_it_is_counted_on():
    """The first third says that 0.5 parts them, and the rest are alike."""
    ins = [1.0] * 50 + [0.0] * 100
    assert any_bound(ins, [0.0] * 150, 1e-3) == 0.0


@pytest.fixture
def known_secrets(monkeypatch):
    """Secrets are 0, 1, 2 ... here, so that no chance is left."""
    number = itertools.count()
    fresh = classmethod(lambda cls: cls(next(number).to_bytes(32)))
    monkeypatch.setattr(Secret, "fresh", fresh)


@pytest.mark.parametrize(
    ("place", "canaries"),
    [
        (0, 12_000), (1, 12_000),
        *(pytest.param(*strong, marks=pytest.mark.whole)
          for strong in ((0, 60_000), (1, 60_000), (2, 12_000))),
    ],
)  # fmt: skip
def test_the_audit_of_one_step_finds_a_tenth_less_noise(place, canaries, known_secrets):
    """The bound is near what is charged: an audit that loses its power fails, too."""
    from benchmarks.privacy_audit import faults
    from benchmarks.privacy_audit.__main__ import STEPS, highest, stepped

    fair = stepped(STEPS[place], canaries)
    assert 0.85 * fair["charged"] < highest(fair) <= fair["charged"]
    found = stepped(STEPS[place], canaries, faults.nine_tenths_of_the_noise)
    assert found["charged"] == fair["charged"] < highest(found)


def test_the_audit_finds_noise_that_is_too_small_and_no_other(monkeypatch, known_secrets):
    """With a twentieth of the noise forty plays are enough."""
    from benchmarks.privacy_audit.__main__ import audited, highest
    from benchmarks.privacy_audit.client_level import ClientGame
    from fedsrv.parts import private_rounds

    game = ClientGame("tiny", {"noise_multiplier": 4.0})
    fair = audited(game, 40)
    assert highest(fair) <= fair["charged"]
    stds = private_rounds.noise_stds
    monkeypatch.setattr(private_rounds, "noise_stds", lambda clips, z: stds(clips, z / 20))
    found = audited(game, 40)
    assert found["charged"] == fair["charged"] < 1.2
    assert found["any_bound"] > found["charged"]
