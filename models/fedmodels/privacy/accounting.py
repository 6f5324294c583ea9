"""What releases with Gaussian noise cost: epsilon for a delta, for one member more or less.

The library dp-accounting computes it, by the distribution of the privacy loss (PLD: Koskela et al.,
AISTATS 2020; Doroshenko et al., PoPETs 2022): an upper bound that lies hardly above the exact cost.
Releases without sampling have a closed form (Balle and Wang, ICML 2018, Theorem 8). Renyi
accounting (Mironov, 2017) is told beside it, for comparison with figures of papers. It counts where
it says more than ``MOST``, which hides nothing and whose distribution would not fit, and for deltas
below ``LEAST``, which differences of float64 numbers cannot tell from 0.

The cost of one evaluation does not grow with the number of releases: the grid of losses is the
coarser the more there are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import OWN_TASKS
from fedmodels.errors import ConfigError

MAX_NOISE = 1e6
"""A noise multiplier beyond it is no answer."""
MOST, LEAST = 100.0, 1e-11
"""Largest epsilon and smallest delta of the distribution of the privacy loss."""
_FINE = [1 + x / 10 for x in range(1, 100)]
_WHOLE = [*range(2, 25), *range(26, 49, 2), 56, 64, 80, 96, 128, 192, 256]
"""Orders of the Renyi divergence: fractions and integers."""
_ERROR = 1e-3
"""About the part of epsilon that a grid of losses may add."""
_COARSEST = 2.0**-7
"""Largest distance of two losses of a grid."""


@dataclass(frozen=True, order=True)
class GaussianReleases:
    """Releases of one kind: sums with Gaussian noise."""

    noise: float
    """The noise multiplier: standard deviation over the largest norm of one contribution."""
    times: int = 1
    rate: float = 1.0
    """The chance of each member to take part, independent of the others (Poisson sampling). It is 1
    where members are drawn in another way, or where somebody may know who was drawn."""


@cache
def epsilon_of(releases: tuple[GaussianReleases, ...], delta: float) -> float:
    """Return the epsilon that releases cost together, at this delta.

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    counted = [each for each in releases if each.times > 0]
    if not counted:
        return 0.0
    found = renyi_epsilon_of(releases, delta)
    if found > MOST or delta < LEAST:
        return found
    plain = [each for each in counted if each.rate == 1]
    combined = 1 / math.sqrt(sum(each.times / each.noise**2 for each in plain)) if plain else 0.0
    if len(plain) == len(counted):
        with np.errstate(divide="ignore"):  # of a delta of 0
            exact = _library("gaussian_mechanism").get_epsilon_gaussian(combined, delta)
        return min(found, float(exact))
    step = _interval(found, sum(each.times for each in counted))
    sampled = [each for each in counted if each.rate < 1]
    whole = _losses(sampled[0].noise, sampled[0].rate, step).self_compose(sampled[0].times)
    for each in sampled[1:]:
        whole = whole.compose(_losses(each.noise, each.rate, step).self_compose(each.times))
    if plain:
        whole = whole.compose(_losses(combined, 1.0, step))
    return min(found, float(whole.get_epsilon_for_delta(delta)))


def _interval(epsilon: float, times: int) -> float:
    """Return the distance of two losses of a grid: a power of 2, for few grids to be kept.

    Each release adds about the square of the distance to epsilon.
    """
    wanted = math.sqrt(_ERROR * max(epsilon, 0.01) / times)
    return 2.0 ** math.floor(math.log2(min(wanted, _COARSEST)))


@lru_cache(maxsize=16)
def _losses(noise: float, rate: float, interval: float) -> Any:
    """Return the distribution of the privacy loss of one release."""
    library = _library("pld.privacy_loss_distribution")
    return library.from_gaussian_mechanism(
        noise, value_discretization_interval=interval, sampling_prob=rate
    )


@cache
def renyi_epsilon_of(releases: tuple[GaussianReleases, ...], delta: float) -> float:
    """Return the epsilon of releases by Renyi accounting: never less than it is, and coarser.

    Raises:
        ConfigError: dp-accounting is not installed.
    """
    counted = [each for each in releases if each.times > 0]
    if not counted:
        return 0.0
    library, rdp = _library(), _library("rdp")
    sampled = any(each.rate < 1 for each in counted)
    accountant = rdp.RdpAccountant(
        orders=_WHOLE
        if sampled
        else [*_FINE, *_WHOLE, 512, 1024],  # sampling is costly at fractional orders
        neighboring_relation=library.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )
    for each in counted:
        event = library.GaussianDpEvent(each.noise)
        if each.rate < 1:
            event = library.PoissonSampledDpEvent(each.rate, event)
        accountant.compose(event, each.times)
    return float(accountant.get_epsilon(delta))


def least_noise(
    releases_at: Callable[[float], Sequence[GaussianReleases]], epsilon: float, delta: float
) -> float:
    """Return the smallest noise multiplier whose releases cost at most ``epsilon``.

    It is rounded up to four digits.

    Raises:
        ConfigError: no noise is enough, or dp-accounting is not installed.
    """

    def over(z: float) -> float:
        return epsilon_of(tuple(releases_at(z)), delta) - epsilon

    low, high = 0.5, 1.0
    while over(high) > 0:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise ConfigError(
                f"[privacy] epsilon = {epsilon:g} with delta = {delta:g} is out of reach of any "
                "noise: give more of either, or fewer rounds"
            )
    while over(low) <= 0:
        low, high = low / 2, low
    found = import_module("scipy.optimize").brentq(over, low, high, rtol=1e-4)
    unit = 10.0 ** (math.floor(math.log10(found)) - 3)
    digits = math.ceil(found / unit)
    while over(noise := float(f"{digits * unit:.4g}")) > 0:  # with another grid of losses
        digits += 1
    return noise


def releases_of_clients(
    experiment: Experiment, noise: float, times: int, *, reads_each: bool = False
) -> tuple[GaussianReleases, ...]:
    """Return the releases of a run whose noise hides clients.

    Sampling counts where the server draws clients by independent chances from the run's secret, and
    adds the noise. Cohorts of a fixed size, and those chosen by data or by a trace, count as if
    everybody took part. So do clients that add the noise: the server, from which they hide, knows
    whom it drew. Of a method that ``reads_each`` upload each one has all of the noise.
    """
    schedule, privacy = experiment.schedule, experiment.privacy
    assert privacy is not None, "there is something to hide"
    if not reads_each:
        noise = noise_seen(experiment, noise)
    if schedule.sampling != "poisson" or not privacy.noise_at_server:
        return (GaussianReleases(noise, times),)
    return (GaussianReleases(noise, times, experiment.cohort_size / schedule.clients),)


def noise_seen(experiment: Experiment, noise: float) -> float:
    """Return the noise multiplier of the smallest sum, as the colluders see it.

    The noise of clients adds up: the sum of a group has the noise of that group alone, and clients
    of it that collude take their own noise away. That of the client that they look for is left.
    """
    privacy = experiment.privacy
    assert privacy is not None, "there is something to hide"
    if not privacy.noise_at_clients:
        return noise
    left = max(1, experiment.fewest_summed - privacy.colluders)
    return noise * math.sqrt(left / experiment.min_clients)


class Reducing(Protocol):
    """A method, as far as its noise goes."""

    @property
    def reduction(self) -> str:
        """What its server half reads: the ``mean``, or ``each`` upload."""
        ...


def with_noise(experiment: Experiment, method: Reducing) -> Experiment:
    """Return the experiment with a noise multiplier in ``[privacy]``, for a method.

    It is found from epsilon where noise hides clients and the config gives none. Where noise hides
    examples, each client finds its own.

    Raises:
        ConfigError: the number of interactions is not known, or no noise is enough.
    """
    privacy, schedule = experiment.privacy, experiment.schedule
    if privacy is None or not privacy.hides_clients or privacy.noise_multiplier is not None:
        return experiment
    assert privacy.epsilon is not None, "the table is whole"
    if experiment.scenario is None:
        raise ConfigError(OWN_TASKS)
    tasks = experiment.most_tasks
    if tasks is None:
        raise ConfigError(
            "[privacy] epsilon alone needs [scenario] tasks: give noise_multiplier as well, and "
            "the run ends before it spends epsilon"
        )
    noise = least_noise(
        lambda z: releases_of_clients(
            experiment, z, schedule.rounds * tasks, reads_each=method.reduction == "each"
        ),
        privacy.epsilon,
        privacy.chance,
    )
    return experiment.model_copy(
        update={"privacy": privacy.model_copy(update={"noise_multiplier": noise})}
    )


def _library(module: str = "") -> ModuleType:
    """Return dp-accounting, or a module of it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        found = import_module(f"dp_accounting.{module}".rstrip("."))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"[privacy] level needs the package {error.name}: pip install fedtide[privacy]"
        ) from None
    logging.getLogger("absl").setLevel(logging.ERROR)
    return found
