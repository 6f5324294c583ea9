"""What releases with Gaussian noise cost: epsilon for a delta, by Renyi differential privacy.

The library dp-accounting computes it. Epsilon is an upper bound for neighbouring data sets: one
member, a client or an example, is added or removed. Renyi accounting lies 5 to 15 percent above
the exact cost of a Gaussian mechanism, and composes any number of releases in no time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError

MAX_NOISE = 1e6
"""A noise multiplier beyond it is no answer."""
_FINE = [1 + x / 10 for x in range(1, 100)]
_WHOLE = [*range(2, 25), *range(26, 49, 2), 56, 64, 80, 96, 128, 192, 256]
"""Orders of the Renyi divergence: fractions and integers."""


@dataclass(frozen=True)
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
    library, rdp = _library()
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

    def fits(z: float) -> bool:
        return epsilon_of(tuple(releases_at(z)), delta) <= epsilon

    low, high = 0.0, 1.0
    while not fits(high):
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise ConfigError(
                f"[privacy] epsilon = {epsilon:g} with delta = {delta:g} is out of reach of any "
                "noise: give more of either, or fewer rounds"
            )
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    digits = 10.0 ** (3 - math.floor(math.log10(high)))
    return math.ceil(high * digits) / digits


def releases_of_clients(
    experiment: Experiment, noise: float, times: int
) -> tuple[GaussianReleases, ...]:
    """Return the releases of a run whose noise hides clients.

    Sampling counts where the server draws clients by independent chances from the run's secret, and
    adds the noise. Cohorts of a fixed size, and those chosen by data or by a trace, count as if
    everybody took part. So do clients that add the noise: the server, from which they hide, knows
    whom it drew.
    """
    schedule, noise, privacy = (
        experiment.schedule,
        noise_seen(experiment, noise),
        experiment.privacy,
    )
    assert privacy is not None, "there is something to hide"
    if schedule.sampling != "poisson" or not privacy.noise_at_server:
        return (GaussianReleases(noise, times),)
    return (GaussianReleases(noise, times, experiment.cohort_size / schedule.clients),)


def fewest_summed(experiment: Experiment) -> int:
    """Return the fewest uploads of a sum that anybody sees, where clients add the noise.

    The server opens the sum of each group of a secure sum. So it is a group's part of the fewest
    uploads that an interaction may end with. No sum of fewer uploads is opened.
    """
    groups = experiment.secure_sum.groups if experiment.secure_sum is not None else 1
    return experiment.min_clients // groups


def noise_seen(experiment: Experiment, noise: float) -> float:
    """Return the noise multiplier of the smallest sum that anybody sees.

    The noise of clients adds up: the sum of a group has the noise of that group alone.
    """
    assert experiment.privacy is not None, "there is something to hide"
    if not experiment.privacy.noise_at_clients:
        return noise
    return noise * math.sqrt(fewest_summed(experiment) / experiment.min_clients)


def with_noise(experiment: Experiment) -> Experiment:
    """Return the experiment with a noise multiplier in ``[privacy]``.

    It is found from epsilon where noise hides clients and the config gives none. Where noise hides
    examples, each client finds its own.

    Raises:
        ConfigError: the number of interactions is not known, or no noise is enough.
    """
    privacy, schedule, scenario = experiment.privacy, experiment.schedule, experiment.scenario
    if privacy is None or not privacy.hides_clients or privacy.noise_multiplier is not None:
        return experiment
    assert privacy.epsilon is not None, "the table is whole"
    if schedule.open or scenario is None:
        raise ConfigError(
            "[privacy] epsilon alone needs a known number of tasks, and here clients bring their "
            "own: give noise_multiplier as well, and the run ends before it spends epsilon"
        )
    tasks = scenario.tasks if isinstance(scenario.tasks, int) else max(scenario.tasks)
    if scenario.fixes_tasks:
        raise ConfigError(
            "[privacy] epsilon alone needs [scenario] tasks: give noise_multiplier as well, and "
            "the run ends before it spends epsilon"
        )
    noise = least_noise(
        lambda z: releases_of_clients(experiment, z, schedule.rounds * tasks),
        privacy.epsilon,
        privacy.chance,
    )
    return experiment.model_copy(
        update={"privacy": privacy.model_copy(update={"noise_multiplier": noise})}
    )


def _library() -> tuple[Any, Any]:
    try:
        import dp_accounting
        from dp_accounting import rdp
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"[privacy] level needs the package {error.name}: pip install fedtide[privacy]"
        ) from None
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting, rdp
