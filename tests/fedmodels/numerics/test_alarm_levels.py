"""Levels of a stream of tests, and alarms that are told once."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedmodels.numerics.alarm_levels import ALPHA, Alarms, Levels

THEIRS = [
    0.0024999999999999996, 0.0024999999999999996, 0.004908254691067039, 0.0029713473342091404,
    0.005269565272125132, 0.005650033522040602, 0.003539000799000878, 0.0032923940439962517,
]  # fmt: skip
STREAM = [0.3, 0.001, 0.4, 1e-5, 0.002, 0.9, 0.01, 0.0001]


def levels_of(stream, memory: int) -> tuple[list[float], Levels]:
    levels, found = Levels(memory), list[float]()
    for p in stream:
        found.append(levels.level())
        levels = levels.after(p)
    return found, levels


def test_by_hand():
    """With δ = 0.9: half of 0.05 × 0.1 at first; a discovery at 2 pays 0.05 × 0.9 γ_1 at 3."""
    found, levels = levels_of(STREAM, 10)
    gamma = [
        0.07720838 * math.log(max(j, 2)) / j / math.exp(math.sqrt(math.log(j))) for j in (1, 2)
    ]
    assert found[:2] == pytest.approx([0.0025, 0.0025])
    assert found[2] == pytest.approx(0.0025 + 0.05 * 0.9 * gamma[0])
    assert found[3] == pytest.approx(0.0025 + 0.05 * 0.81 * gamma[1])
    assert levels.found == (2, 4, 5, 8)


def test_the_levels_are_those_of_another_program():
    """``LORDMemoryDecay(0.05, delta=0.9, eta=0.5)`` of online-fdr 1.0.0 gave these."""
    assert levels_of(STREAM, 10)[0] == pytest.approx(THEIRS, rel=1e-12)


def test_levels_never_end_and_what_is_kept_is_bounded():
    _, levels = levels_of([1.0] * 5000, 100)
    assert levels.level() == pytest.approx(ALPHA * 0.5 / 100)
    _, levels = levels_of([0.0] * 500, 10)
    assert len(levels.found) <= 81
    assert levels.level() < ALPHA


def test_thirty_sites_for_a_year_have_less_than_one_false_line():
    """720 tests a year of chance alone: at 0.01 each there were seven."""
    rng, told = np.random.default_rng(0), 0
    for _ in range(10):
        alarms = Alarms(Levels(100))
        told += sum(
            alarms.tells(str(site), float(rng.random()), 0.1)
            for month in range(12)
            for site in range(60)
        )
    assert told <= 6


def test_an_alarm_is_told_once_until_it_is_over_or_doubles():
    alarms = Alarms(Levels(10))
    assert not alarms.tells("a", 0.5, 0.1)
    assert alarms.tells("a", 1e-6, 0.2)
    tests = alarms.levels.tests
    assert not alarms.tells("a", 1e-9, 0.39)
    assert alarms.tells("a", 1e-9, 0.4)
    assert not alarms.tells("a", 0.04, 0.5)
    assert alarms.tells("b", 1e-6, 0.1), "another one"
    assert not alarms.tells("a", 0.06, 0.5)
    assert alarms.levels.tests == tests + 1, "an alarm that lasts pays for no other"
    assert alarms.tells("a", 1e-6, 0.2)
