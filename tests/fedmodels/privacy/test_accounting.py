"""Epsilon against published figures, closed forms, and the privacy loss itself, worked out here."""

import math

import numpy as np
import pytest
import torch

from fedmodels.privacy import accounting
from fedmodels.privacy.accounting import (
    GaussianReleases,
    epsilon_of,
    least_noise,
    renyi_epsilon_of,
)

pytest.importorskip("dp_accounting", reason="needs the extra privacy")


def epsilon(sigma, times, rate=1.0, delta=1e-5):
    return epsilon_of((GaussianReleases(sigma, times, rate),), delta)


def exact_delta(sigma, epsilon):
    """Return delta of one Gaussian release: Balle and Wang, ICML 2018, Theorem 8."""
    a, b = 1 / (2 * sigma), epsilon * sigma
    one, other = (math.erfc(x / math.sqrt(2)) / 2 for x in (b - a, a + b))
    return one - math.exp(epsilon) * other


@pytest.mark.parametrize(("sigma", "times"), [(1.0, 1), (4.0, 1), (8.0, 50), (1.0, 20)])
def test_gaussian_releases_cost_what_the_closed_form_says(sigma, times):
    """T releases with sigma cost what one does with sigma / sqrt(T)."""
    found, at_once = epsilon(sigma, times), sigma / math.sqrt(times)
    assert exact_delta(at_once, found) == pytest.approx(1e-5, rel=1e-6)


def loss_of(x, sigma, rate):
    """Return the logarithm of the ratio of densities at x: with the member over without it."""
    return np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2)))


@pytest.mark.parametrize(("sigma", "rate", "delta"), [(1.0, 0.3, 1e-3), (0.6, 0.1, 1e-5)])
def test_one_sampled_release_costs_what_integration_gives(sigma, rate, delta):
    """Delta is the integral of max(0, p - e^epsilon q) over x, of whichever way round is worse:
    Poisson sampling is not the same both ways."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 400_001)
    without = np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    with_it = without * np.exp(loss_of(x, sigma, rate))

    def lost(e):
        both = ((with_it, without), (without, with_it))
        return max(np.trapezoid(np.maximum(0, p - math.exp(e) * q), x) for p, q in both)

    found = epsilon(sigma, 1, rate, delta)
    assert lost(found) <= delta * (1 + 1e-6), "it is a bound"
    assert lost(0.998 * found) > delta, "and hardly above the exact cost"


def bounds_of_delta(sigma, rate, times, epsilon, step=1e-3):
    """Return bounds of delta from below and above, by the sum of the losses of all releases.

    Losses are rounded down, and up, to multiples of a step. Their distribution is convolved with
    itself by the Fourier transform, on a circle far wider than their sum.
    """
    edges, size = np.linspace(-40, 40, 200_001) * sigma, 2**18
    at_edges = torch.from_numpy(edges)
    without, shifted = (torch.special.ndtr((at_edges - m) / sigma).numpy() for m in (0, 1))
    found = []
    for sign, chance in ((1, (1 - rate) * without + rate * shifted), (-1, without)):
        mass, at = np.diff(chance), sign * loss_of(edges, sigma, rate)
        for low in (True, False):
            ends = np.minimum(at[:-1], at[1:]) if low else np.maximum(at[:-1], at[1:])
            places = (np.floor if low else np.ceil)(ends / step).astype(int)
            one = np.bincount(places % size, mass, size)
            whole = np.clip(np.fft.irfft(np.fft.rfft(one) ** times, size), 0, None)
            losses = (np.arange(size) + size // 2) % size - size // 2
            beyond = np.maximum(0, -np.expm1(epsilon - losses * step))
            found.append(float(whole @ beyond))
    return max(found[0], found[2]), max(found[1], found[3])


@pytest.mark.parametrize(
    ("sigma", "rate", "times", "delta"), [(1.0, 0.3, 20, 1e-3), (0.6, 0.1, 100, 1e-3)]
)
def test_many_sampled_releases_cost_what_the_sum_of_their_losses_gives(sigma, rate, times, delta):
    found = epsilon(sigma, times, rate, delta)
    low, high = bounds_of_delta(sigma, rate, times, found)
    assert low <= delta <= high * 1.001
    assert high < 1.1 * low, "the bounds say something"


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "published"),
    [
        (0.8, 0.001, 100, 0.270403), (0.8, 0.05, 100, 6.741052), (1.5, 0.05, 100, 1.953853),
        (2.0, 0.2, 100, 5.672056), (3.0, 0.2, 100, 3.381221), (1.5, 0.05, 1000, 6.209969),
        (3.0, 0.05, 1000, 2.527574), (3.0, 0.05, 20_000, 13.961115), (3.0, 0.05, 50_000, 24.942006),
    ],
)  # fmt: skip
def test_the_accountant_of_gopi_lee_and_wutschitz(sigma, rate, steps, published):
    """Numerical Composition of Differential Privacy, NeurIPS 2021: figures of the authors' program
    (microsoft/prv_accountant) at delta = 1e-6, in tests/prv_accountant.py of pytorch/opacus. The
    program has an error of 0.01 in epsilon, up or down."""
    assert epsilon(sigma, steps, rate, 1e-6) == pytest.approx(published, rel=2e-3, abs=0.01)


def test_renyi_accounting_as_opacus_tells_it():
    """tests/accountants_test.py of pytorch/opacus: noise 1.5, q = 0.04, 2250 steps, delta 1e-5."""
    found = renyi_epsilon_of((GaussianReleases(1.5, 2250, 0.04),), 1e-5)
    assert found == pytest.approx(7.32911, rel=2e-3), "orders are others"


def test_dp_sgd_of_the_moments_accountant():
    """Abadi et al., CCS 2016, Section 3.2: q = 0.01, sigma = 4, T = 10000 steps, delta = 1e-5 gives
    epsilon = 1.26. Conversions and accountants have become tighter since."""
    assert 0.9 * 1.26 / 1.2 < epsilon(4.0, 10_000, 0.01) <= 1.26


def test_dp_sgd_on_mnist_as_tensorflow_privacy_tells_it():
    """Its tutorial: 60,000 examples, batches of 256, 60 epochs, noise multiplier 1.1: 2.92 with the
    older conversion, 2.6 with the present one, both by Renyi accounting."""
    releases = (GaussianReleases(1.1, 60 * 60_000 // 256, rate=256 / 60_000),)
    assert renyi_epsilon_of(releases, 1e-5) == pytest.approx(2.6, abs=0.02)
    assert epsilon_of(releases, 1e-5) < 2.4


@pytest.mark.parametrize(("sigma", "epochs", "published"), [(1.3, 20, 1.34), (0.7, 70, 8.68)])
def test_noisy_sgd_of_the_moments_accountant(sigma, epochs, published):
    """Deep Learning With Gaussian Differential Privacy, Harvard Data Sci. Review, 2020,
    Figure 4: q = 256 / 60,000, delta = 1e-5. Accountants have become tighter since."""
    found = epsilon(sigma, epochs * 60_000 // 256, 256 / 60_000)
    assert 0.75 * published < found <= published


def test_releases_of_several_kinds_add_up():
    """Without sampling all are one release. With it they cost no less than each alone, and no more
    than epsilons and deltas together."""
    plain = (GaussianReleases(4.0, 10), GaussianReleases(2.0, 3))
    at_once = 1 / math.sqrt(10 / 4**2 + 3 / 2**2)
    assert epsilon_of(plain, 1e-5) == pytest.approx(epsilon(at_once, 1))
    sampled = GaussianReleases(1.0, 50, 0.1)
    both = epsilon_of((sampled, *plain), 1e-5)
    assert epsilon(1.0, 50, 0.1) < both
    assert both < epsilon(1.0, 50, 0.1, 5e-6) + epsilon_of(plain, 5e-6)
    halves = (GaussianReleases(1.0, 25, 0.1), GaussianReleases(1.0, 25, 0.1))
    assert epsilon_of(halves, 1e-5) == pytest.approx(epsilon_of((sampled,), 1e-5), rel=1e-4)


def test_renyi_accounting_is_a_coarser_bound_and_counts_where_epsilon_hides_nothing():
    for sigma, times, rate in ((1.0, 20, 0.3), (1.0, 20, 1.0), (8.0, 1, 1.0)):
        releases = (GaussianReleases(sigma, times, rate),)
        assert epsilon_of(releases, 1e-3) < renyi_epsilon_of(releases, 1e-3)
    little = (GaussianReleases(1e-9, 6), GaussianReleases(0.1, 6, 0.5))
    assert epsilon_of(little, 1e-3) == renyi_epsilon_of(little, 1e-3) > 1e18


def test_the_grid_of_losses_grows_coarser_and_not_longer_with_more_releases():
    sizes = [100.0 / accounting._interval(math.sqrt(times), times) for times in (10, 10**3, 10**5)]
    assert max(sizes) <= 2**20


def test_the_least_noise_keeps_the_limit_and_no_less_does():
    for rate, times, limit in ((1.0, 20, 4.0), (0.3, 20, 1.0)):
        noise = least_noise(lambda z, n=times, q=rate: (GaussianReleases(z, n, q),), limit, 1e-3)
        assert epsilon(noise, times, rate, 1e-3) <= limit
        assert epsilon(0.999 * noise, times, rate, 1e-3) > limit


def test_nothing_costs_nothing_and_sampling_costs_less():
    assert epsilon_of((), 1e-5) == epsilon_of((GaussianReleases(1.0, 0),), 1e-5) == 0.0
    every, some = (epsilon_of((GaussianReleases(2.0, 10, rate),), 1e-3) for rate in (1.0, 0.2))
    assert some < every / 2
