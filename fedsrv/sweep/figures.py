"""The figures of a sweep's runs, and paired differences between its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedmodels.errors import ArchiveError
from fedmodels.numerics.metric_names import find, metric
from fedsrv.report.comparison import best_of
from fedsrv.sweep.plan import Cell, PlannedRun

CONFIDENCE = 0.95
"""Of the intervals of differences."""
UNITS = {
    "bytes": (1e-6, "{:.1f}"),
    "compute": (1e-6, "{:.0f}"),
    "seconds": (1, "{:.0f}"),
    "metrics": (100, "{:.2f}"),
    "clients": (1, "{:.1f}"),
}
"""Factor and format of a column, by the table it is read from."""

Values = Mapping[Cell, Mapping[int, float | None]]
"""One column: by cell and seed; None where a run has no such figure."""


def unit_of(path: str) -> tuple[float, str]:
    """Return factor and format of a column."""
    table, _, name = path.partition(".")
    if table == "metrics" and not metric(name).unit:
        return 1, "{:.3f}"
    if table == "clients" and metric(name).unit:
        return UNITS["metrics"]
    return UNITS.get(table, (1, "{:.3f}"))


@dataclass(frozen=True)
class Figures:
    """What the tables of a sweep need of one finished run."""

    cell: Cell
    seed: int
    values: Mapping[str, float | None]
    """By path, as in ``summary.json``; None where the run has no such figure."""
    curves: Mapping[str, Sequence[float | None]]
    """By metric, as in ``rounds.jsonl``: its value after each round, None after one without."""
    environment: Mapping[str, str | int]
    """Versions and commit the run was made with, as in ``env.json``."""


def read_figures(run: PlannedRun, columns: Iterable[str], curves: Iterable[str]) -> Figures:
    """Read the figures of a finished run.

    Args:
        run: of the sweep.
        columns: paths into its summary.
        curves: metrics of its rounds.

    Raises:
        ArchiveError: one of its files is damaged.
    """
    environment = run.directory / "env.json"
    try:
        summary, rounds = summary_of(run.directory), list(rounds_of(run.directory))
        return Figures(
            run.cell,
            run.seed,
            {path: _figure(summary, path) for path in columns},
            {name: _curve(rounds, name) for name in curves},
            json.loads(environment.read_text("utf-8")) if environment.exists() else {},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArchiveError(f"a file of {run.directory} is damaged: {error!r}") from None


def _curve(rounds: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return a metric after each round, up to the last one that has it."""
    found = {
        one.get("round", index): value
        for index, one in enumerate(rounds)
        if (value := find(one["metrics"], name)) is not None
    }
    return [found.get(at) for at in range(1 + max(found, default=-1))]


def paths_of(run: Path) -> list[str]:
    """Return every path that a column may take from a finished run."""
    tables = {key: value for key, value in summary_of(run).items() if isinstance(value, dict)}
    return [f"{table}.{name}" for table, names in tables.items() for name in names]


def _figure(summary: Mapping[str, Any], path: str) -> float | None:
    table, _, name = path.partition(".")
    found = summary.get(table)
    if not isinstance(found, Mapping):  # a word or a number, such as the method's name
        return None
    value = find(found, name) if table == "metrics" else found.get(name)
    return value if isinstance(value, int | float) else None


def values_of(path: str, runs: Iterable[Figures]) -> Values:
    """Return one column of finished runs, in the unit that tables show."""
    factor, _ = unit_of(path)
    found: dict[Cell, dict[int, float | None]] = {}
    for run in runs:
        value = run.values.get(path)
        found.setdefault(run.cell, {})[run.seed] = None if value is None else factor * value
    return found


def summary_of(run: Path) -> dict[str, Any]:
    """Return a run's summary, with the figures of its clients in the last round averaged."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text("utf-8"))
    *_, last = rounds_of(run)
    rows = [row for client, row in last["clients"].items() if client.isdigit()]
    numbers = {key for row in rows for key, value in row.items() if isinstance(value, int | float)}
    summary["clients"] = {key: fmean(row[key] for row in rows if key in row) for key in numbers}
    return summary


def rounds_of(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's interactions."""
    return map(json.loads, (run / "rounds.jsonl").read_text("utf-8").splitlines())


@dataclass(frozen=True)
class Difference:
    """A row minus another one, seed by seed."""

    mean: float
    low: float
    """Lower end of the confidence interval by Student's t; minus infinity for one pair."""
    high: float
    pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside of the interval."""
        return self.low > 0 or self.high < 0


def difference(row: Mapping[int, float | None], other: Mapping[int, float | None]) -> Difference:
    """Return the mean difference over the seeds that both rows have, with its interval.

    Raises:
        ValueError: they have no seed in common.
    """
    pairs = [
        value - base
        for seed, value in row.items()
        if value is not None and (base := other.get(seed)) is not None
    ]
    if not pairs:
        raise ValueError("no seed in common")
    mean, n = fmean(pairs), len(pairs)
    if n == 1:
        return Difference(mean, -math.inf, math.inf, 1)
    from scipy.stats import t  # takes a second: only where it is needed

    half = float(t.ppf((1 + CONFIDENCE) / 2, n - 1)) * stdev(pairs) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def differences(values: Values, against: str, cells: Sequence[Cell]) -> dict[Cell, Difference]:
    """Return the difference of each cell to the row ``against`` in the same setting."""
    found = {}
    for cell in cells:
        base = values.get(Cell(cell.setting, against), {})
        if cell.row != against and any(
            value is not None and base.get(seed) is not None
            for seed, value in values.get(cell, {}).items()
        ):
            found[cell] = difference(values[cell], base)
    return found


def winners(values: Values, cells: Sequence[Cell], better: int) -> set[Cell]:
    """Return the cells that beat every other row of their setting.

    A row beats another where the interval of their difference over the same seeds, three at least,
    leaves out zero: the same test as that of reports.

    Args:
        values: of one column.
        cells: of the table.
        better: 1 where more is better, -1 where less is, 0 where neither is.
    """
    known = {cell: _known(values.get(cell, {})) for cell in cells}
    settings = {cell.setting for cell in cells}
    rivals = ({c: known[c] for c in cells if c.setting == setting} for setting in settings)
    return {first for each in rivals if (first := best_of(each, better)) is not None}


def _known(seeds: Mapping[int, float | None]) -> dict[int, float]:
    return {seed: value for seed, value in seeds.items() if value is not None}
