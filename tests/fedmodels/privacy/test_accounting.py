"""Epsilon against published figures and against the closed form of Gaussian releases."""

import math
from statistics import NormalDist

import pytest

from fedmodels.privacy.accounting import GaussianReleases, epsilon_of, least_noise

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


def exact_delta(sigma, epsilon):
    """Return delta of one Gaussian release: Balle and Wang, ICML 2018, Theorem 8."""
    normal = NormalDist()
    a, b = 1 / (2 * sigma), epsilon * sigma
    return normal.cdf(a - b) - math.exp(epsilon) * normal.cdf(-a - b)


@pytest.mark.parametrize(("sigma", "times"), [(1.0, 1), (4.0, 1), (8.0, 50)])
def test_gaussian_releases_lie_little_above_the_closed_form(sigma, times):
    """T releases with sigma cost what one does with sigma / sqrt(T)."""
    found, delta = epsilon_of((GaussianReleases(sigma, times),), 1e-5), 1e-5
    at_once = sigma / math.sqrt(times)
    assert exact_delta(at_once, found) <= delta, "it is a bound"
    assert exact_delta(at_once, found / 1.2) > delta, "and no loose one"


def test_dp_sgd_of_the_moments_accountant():
    """Abadi et al., CCS 2016, Section 3.2: q = 0.01, sigma = 4, T = 10000 steps, delta = 1e-5 gives
    epsilon = 1.26. Conversions to epsilon have become tighter since."""
    found = epsilon_of((GaussianReleases(4.0, 10_000, rate=0.01),), 1e-5)
    assert 0.9 * 1.26 / 1.2 < found <= 1.26


def test_dp_sgd_on_mnist_as_tensorflow_privacy_tells_it():
    """Its tutorial: 60,000 examples, batches of 256, 60 epochs, noise multiplier 1.1: 2.92 with the
    older conversion, 2.6 with the present one."""
    found = epsilon_of((GaussianReleases(1.1, 60 * 60_000 // 256, rate=256 / 60_000),), 1e-5)
    assert found == pytest.approx(2.6, abs=0.02)


@pytest.mark.parametrize(("sigma", "epochs", "published"), [(1.3, 20, 1.34), (0.7, 70, 8.68)])
def test_noisy_sgd_of_the_moments_accountant(sigma, epochs, published):
    """Deep Learning With Gaussian Differential Privacy, Harvard Data Sci. Review, 2020, Figure 4:
    q = 256 / 60,000, delta = 1e-5. Conversions to epsilon have become tighter since."""
    steps = epochs * 60_000 // 256
    found = epsilon_of((GaussianReleases(sigma, steps, rate=256 / 60_000),), 1e-5)
    assert 0.8 * published < found <= published


def test_the_least_noise_keeps_the_limit_and_no_less_does():
    noise = least_noise(lambda z: (GaussianReleases(z, 20),), 4.0, 1e-3)
    assert epsilon_of((GaussianReleases(noise, 20),), 1e-3) <= 4.0
    assert epsilon_of((GaussianReleases(0.999 * noise, 20),), 1e-3) > 4.0


def test_nothing_costs_nothing_and_sampling_costs_less():
    assert epsilon_of((), 1e-5) == epsilon_of((GaussianReleases(1.0, 0),), 1e-5) == 0.0
    every, some = (epsilon_of((GaussianReleases(2.0, 10, rate),), 1e-3) for rate in (1.0, 0.2))
    assert some < every / 2
