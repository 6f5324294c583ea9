"""Lower bounds on epsilon, from how often an attacker is right.

    epsilon_of_rates       Kairouz, Oh, Viswanath, ICML 2015, Theorem 2.1, as a test of an
                           implementation: Jagielski, Ullman, Oprea, NeurIPS 2020
    epsilon_of_gaussian    Nasr et al., USENIX Security 2023: rates to mu, mu to epsilon
    epsilon_of_mu          Dong, Roth, Su, JRSS B 2022, Corollary 2.13
    epsilon_of_one_run     Steinke, Nasr, Jagielski, NeurIPS 2023, Algorithm 1 and Theorem 5.2

The chance that a bound is above the true epsilon is at most 1 - ``CONFIDENCE``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm

CONFIDENCE = 0.95
MOST = 60.0
"""No epsilon beyond it is looked for."""


@dataclass(frozen=True)
class Rates:
    """Upper bounds on an attacker's two error rates, which hold together."""

    false_alarm: float
    """It says that the member is there, and it is not."""
    miss: float
    """It says that the member is not there, and it is."""


def any_bound(ins: Sequence[float], outs: Sequence[float], delta: float) -> float:
    """Return a bound that holds for any mechanism, by the best threshold on scores.

    The first third of the scores chooses the threshold, and the others are counted.

    Args:
        ins: scores of plays in which the member is there; higher ones say so.
        outs: scores of plays in which it is not.
        delta: of the promise.
    """
    (first_ins, last_ins), (first_outs, last_outs) = _split(ins), _split(outs)
    every = sorted({*first_ins, *first_outs})
    some = every[:: max(1, len(every) // 100)]
    best = max(some, key=lambda one: epsilon_of_rates(rates_at(one, first_ins, first_outs), delta))
    return epsilon_of_rates(rates_at(best, last_ins, last_outs), delta)


def gaussian_bound(ins: Sequence[float], outs: Sequence[float], delta: float) -> float:
    """Return a bound for Gaussian releases, by the threshold in the middle of the two means.

    Arguments are as for :func:`any_bound`. There both errors are about equally frequent.
    """
    (first_ins, last_ins), (first_outs, last_outs) = _split(ins), _split(outs)
    middle = float(np.mean(first_ins) + np.mean(first_outs)) / 2
    return epsilon_of_gaussian(rates_at(middle, last_ins, last_outs), delta)


def rates_at(threshold: float, ins: Sequence[float], outs: Sequence[float]) -> Rates:
    """Return bounds on the error rates of a threshold (Clopper and Pearson, 1934)."""
    false = int((np.asarray(outs) > threshold).sum())
    missed = int((np.asarray(ins) <= threshold).sum())
    return Rates(_upper(false, len(outs)), _upper(missed, len(ins)))


def epsilon_of_rates(rates: Rates, delta: float) -> float:
    """Return the least epsilon that any mechanism with these rates has at delta."""
    pairs = ((rates.false_alarm, rates.miss), (rates.miss, rates.false_alarm))
    return max(0.0, *(_log_ratio(1 - delta - other, one) for one, other in pairs))


def epsilon_of_gaussian(rates: Rates, delta: float) -> float:
    """Return the least epsilon of a Gaussian mechanism with these rates.

    It is above :func:`epsilon_of_rates`, and counts on the mechanism being Gaussian: releases
    without sampling.
    """
    mu = float(norm.isf(rates.false_alarm) - norm.ppf(rates.miss))
    return epsilon_of_mu(mu, delta)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return the epsilon at delta of Gaussian releases whose means lie mu deviations apart."""

    def excess(epsilon: float) -> float:
        second = math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        return float(norm.cdf(-epsilon / mu + mu / 2) - second - delta)

    return _root(excess) if mu > 0 else 0.0


def epsilon_of_one_run(right: int, guesses: int, canaries: int, delta: float) -> float:
    """Return a bound from one run with many canaries, each there with a chance of one half.

    Args:
        right: how many guesses are right.
        guesses: for how many canaries the attacker guesses; of the others it says nothing.
        canaries: how many there are.
        delta: of the promise.
    """

    def excess(epsilon: float) -> float:
        honest = 1 / (1 + math.exp(-epsilon))
        below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, honest))
        alpha = max((below / np.arange(1, right + 1)).max(initial=0.0), 0.0)
        chance = binom.sf(right - 1, guesses, honest) + 2 * canaries * delta * alpha
        return 1 - CONFIDENCE - float(chance)

    return _root(excess)


def _root(falls: Callable[[float], float]) -> float:
    """Return where a function that falls is 0; 0 where it never is above."""
    if falls(0.0) <= 0:
        return 0.0
    return float(brentq(falls, 0.0, MOST, xtol=1e-6)) if falls(MOST) < 0 else MOST


def _log_ratio(above: float, below: float) -> float:
    return math.log(above / below) if above > 0 else 0.0


def _upper(count: int, of: int) -> float:
    """Return the upper end of a rate; two of them hold with ``CONFIDENCE``."""
    left = (1 - CONFIDENCE) / 2
    return 1.0 if count == of else float(beta.isf(left, count + 1, of - count))


def _split(scores: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    third = len(scores) // 3
    return scores[:third], scores[third:]
