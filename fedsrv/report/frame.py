"""Numbers of runs as one frame: by row, seed and key. Means, tests and intervals come from it.

A row is what a table compares: an experiment, or a method in a setting. A key is the path of a
number in ``summary.json``, such as ``metrics.a_loc`` or ``bytes.up``. Runs of one row differ in
their seed alone.

Every quantity of a report is a mapping from keys to numbers (``{round: accuracy}``, ``{client:
accuracy}``, ``{(learnt task, task): accuracy}``), so that runs which differ only in their seed
merge in one way, :meth:`SeedGroup.merge`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import TypeVar

from fedmodels.config.combinations import BESIDE
from fedmodels.console.charts import Spread
from fedmodels.console.printable import printable
from fedmodels.own.code_names import short_name
from fedsrv.state.run_record import RunRecord, leaves_of

CONFIDENCE = 0.95
"""Level of the confidence intervals of differences."""
FALSE_DISCOVERIES = 0.05
"""Part of the differences kept by :func:`kept_up_to` that may be of zero."""
MIN_SEEDS = 3
"""Least number of seeds that both rows have, for one of them to win."""
MAX_TOLD = 4
"""Settings in the label of a run; of more, nobody reads them."""
_NOT_COMPARED = {"seed", "evaluate.reference", "data.root"}
"""Config keys in which two runs may differ and still be the same experiment."""
K = TypeVar("K", bound=Hashable)
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
    """Return mean and sample standard deviation of several values; one value has none."""
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0, len(values))


def over_seeds(found: Iterable[tuple[Hashable, float]]) -> Spread:
    """Return mean and deviation over seeds of values, each with the seed of its run.

    Runs of one seed are one value, their mean: they say nothing of other seeds. A run that does
    not say its seed, which is then ``None``, stands for itself.
    """
    values: dict[Hashable, list[float]] = {}
    for number, (seed, value) in enumerate(found):
        values.setdefault((number,) if seed is None else str(seed), []).append(value)
    return spread_of([fmean(each) for each in values.values()])


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


def rare_classes(groups: Sequence[SeedGroup]) -> list[str] | None:
    """Return the names of the rare classes of the groups' data; None where no run knows them."""
    known = (run.rare_classes for group in groups for run in group.runs)
    return max((found for found in known if found is not None), key=len, default=None)


@dataclass(frozen=True)
class SeedGroup:
    """Runs of one experiment that differ only in their seed."""

    label: str
    runs: tuple[RunRecord, ...]

    def merge(self, quantity: Callable[[RunRecord], Mapping[K, float]]) -> dict[K, Spread]:
        """Merge one quantity, key by key, over the runs of the group that have the key."""
        values: dict[K, list[tuple[object, float]]] = {}
        for run in self.runs:
            for key, value in quantity(run).items():
                values.setdefault(key, []).append((run.seed, value))
        return {key: over_seeds(found) for key, found in values.items()}


def group_runs(runs: Iterable[RunRecord]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, in the order in which they come."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_experiment_of(run), sort_keys=True), []).append(run)
    members = list(groups.values())
    return [
        SeedGroup(label, tuple(own)) for label, own in zip(_labels(members), members, strict=True)
    ]


def _experiment_of(run: RunRecord) -> dict[str, str]:
    """Return the settings that make the experiment, by dotted key."""
    stated = run.config or {
        key: run.summary.get(key) for key in ("method", "data", "scenario", "rounds")
    }
    found = {
        key: json.dumps(value, default=str, ensure_ascii=False)
        for key, value in leaves_of(stated)
        if key not in _NOT_COMPARED and key.partition(".")[0] not in BESIDE
    }
    for key in ("data.name", "method.name", "net.name"):
        if key in found:  # the place of a custom file tells no experiments apart
            found[key] = short_name(str(json.loads(found[key])))
    if gone := run.without:  # who took part makes another experiment of it, whatever its config is
        found["without"] = " and ".join(gone)
    # Runs of earlier versions have readings beside the hyper-parameters.
    return {key.replace("method.reading.", "method.", 1): found[key] for key in found}


def _labels(groups: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Name groups by their method, and by what sets them apart where methods repeat.

    Where that is more than ``MAX_TOLD`` settings, their directories' names set them apart.
    """
    experiments = [_experiment_of(group[0]) for group in groups]
    labels = []
    for group, own in zip(groups, experiments, strict=True):
        method = group[0].method
        twins = [e for g, e in zip(groups, experiments, strict=True) if g[0].method == method]
        keys = sorted({key for twin in twins for key in twin.keys() | own.keys()})
        apart = [key for key in keys if len({twin.get(key) for twin in twins}) > 1]
        said = [f"{key.removeprefix('method.')}={own[key]}" for key in apart if key in own]
        said = [] if len(said) > MAX_TOLD else said
        labels.append(printable(method + (f" ({', '.join(said)})" if said else "")))
    repeated = {label for label, count in Counter(labels).items() if count > 1}
    names = Counter(group[0].path.name for group in groups)
    return [
        f"{label} [{printable(_called(group[0].path, names))}]" if label in repeated else label
        for label, group in zip(labels, groups, strict=True)
    ]


def _called(path: Path, names: Mapping[str, int]) -> str:
    """Return a directory's name, with that of the one above it where several have the name."""
    return path.name if names[path.name] == 1 else str(Path(*path.resolve().parts[-2:]))
