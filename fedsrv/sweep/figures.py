"""The figures of a sweep's runs, and paired differences between its rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fedmodels.numerics.metric_names import find, metric
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


def values_of(path: str, runs: Iterable[PlannedRun]) -> Values:
    """Return one column of finished runs, in the unit that tables show."""
    table, _, name = path.partition(".")
    factor, _ = unit_of(path)
    found: dict[Cell, dict[int, float | None]] = {}
    for run in runs:
        values = summary_of(run.directory).get(table, {})
        value = find(values, name) if table == "metrics" else values.get(name)
        number = factor * value if isinstance(value, int | float) else None
        found.setdefault(run.cell, {})[run.seed] = number
    return found


def summary_of(run: Path) -> dict[str, Any]:
    """Return a run's summary, with what its clients told in the last round averaged."""
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    *_, last = rounds_of(run)
    told = [row for client, row in last["clients"].items() if client.isdigit()]
    numbers = {key for row in told for key, value in row.items() if isinstance(value, int | float)}
    summary["clients"] = {key: fmean(row[key] for row in told if key in row) for key in numbers}
    return summary


def rounds_of(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a run's interactions."""
    return map(json.loads, (run / "rounds.jsonl").read_text().splitlines())


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
