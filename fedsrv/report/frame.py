"""Numbers of runs as one frame: by row, seed and key. Means, tests and intervals come from it.

A row is what a table compares: an experiment, or a method in a setting. A key is the path of a
number in ``summary.json``, such as ``metrics.a_loc`` or ``bytes.up``. Runs of one row differ in
their seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev, stdev
from typing import TypeVar

from fedmodels.charts import Spread

CONFIDENCE = 0.95
"""Level of the confidence intervals of differences."""
FALSE_DISCOVERIES = 0.05
"""Part of the differences kept by :func:`kept_up_to` that may be of zero."""
MIN_SEEDS = 3
"""Least number of seeds that both rows have, for one of them to win."""
R = TypeVar("R", bound=Hashable)
S = TypeVar("S", bound=Hashable)
Seeds = Mapping[S, float | None]
"""Values by seed; None where a run has none."""


@dataclass(frozen=True)
class RunNumbers:
    """What a frame holds of one run."""

    row: Hashable
    seed: Hashable
    values: Mapping[str, float | None]
    """By key; None where the run has no such number."""
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By metric, as in ``rounds.jsonl``: its value after each round, None after one without."""
    environment: Mapping[str, str | int] = field(default_factory=dict)
    """Versions and commit the run was made with, as in ``env.json``."""


def column(
    runs: Iterable[RunNumbers], key: str, factor: float = 1
) -> dict[Hashable, dict[Hashable, float | None]]:
    """Return one key of all runs, by row and seed."""
    found: dict[Hashable, dict[Hashable, float | None]] = {}
    for run in runs:
        value = run.values.get(key)
        found.setdefault(run.row, {})[run.seed] = None if value is None else factor * value
    return found


def spread_of(values: Sequence[float]) -> Spread:
    """Return mean and population standard deviation of several values."""
    return Spread(fmean(values), pstdev(values), len(values))


def known(seeds: Seeds[S]) -> dict[S, float]:
    """Return the values that are there."""
    return {seed: value for seed, value in seeds.items() if value is not None}


@dataclass(frozen=True)
class Difference:
    """A row minus another one, seed by seed."""

    mean: float
    low: float
    """Lower end of the confidence interval by Student's t; minus infinity for one pair."""
    high: float
    pairs: int
    p: float = 1
    """Probability of a mean as far from zero, were the true one zero: two-sided, by the same t."""

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.low > 0 or self.high < 0


def difference(row: Seeds[S], other: Seeds[S]) -> Difference | None:
    """Return the mean difference over the seeds that both rows have; None where there is none."""
    ours, theirs = known(row), known(other)
    pairs = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(pairs) < 2:
        return Difference(pairs[0], -math.inf, math.inf, 1) if pairs else None
    from scipy.special import stdtr, stdtrit  # slow to import, and most tables have no pairs

    mean, n = fmean(pairs), len(pairs)
    error = stdev(pairs) / math.sqrt(n)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Difference(mean, mean - half, mean + half, n, p)


def kept_up_to(probabilities: Iterable[float]) -> float:
    """Return the largest p-value that stays after correction; 0 where none does.

    The step-up rule of Benjamini and Hochberg (JRSS B 57, 1995, section 3.1): of m ascending
    values the last one, p_k, with p_k <= k / m * ``FALSE_DISCOVERIES``, and all before it.
    """
    ranked = sorted(probabilities)
    step = FALSE_DISCOVERIES / max(len(ranked), 1)
    return max((p for k, p in enumerate(ranked, 1) if p <= k * step), default=0.0)


def winner(rows: Mapping[R, Seeds[S]], better: int) -> R | None:
    """Return the row that beats every other one; None where none does.

    A row beats another where the interval of their difference over the same seeds, three at least,
    leaves out zero. Every other row has to be beaten, so the level needs no correction.

    Args:
        rows: their values by seed; a row without any takes no part.
        better: 1 where more is better, -1 where less is, 0 where neither is.
    """
    rivals = {row: found for row, seeds in rows.items() if (found := known(seeds))}
    if not better or len(rivals) < 2:
        return None
    first = max(rivals, key=lambda row: better * fmean(rivals[row].values()))
    others = (difference(rivals[first], rivals[row]) for row in rivals if row != first)
    beats = (d and d.is_clear and better * d.mean > 0 and d.pairs >= MIN_SEEDS for d in others)
    return first if all(beats) else None
