"""The cells of a comparison of runs: what a terminal's table and the page both show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedmodels.numerics.metric_names import metric
from fedsrv.report.run_record import RunRecord, SeedGroup, Spread

SPENT = {
    "bytes": {
        "down": "bytes down",
        "up": "bytes up",
        "wire_down": "wire bytes down",
        "wire_up": "wire bytes up",
    },
    "seconds": {"train": "seconds training", "server": "seconds server", "wall": "seconds wall"},
}
"""What a run costs, and how a table calls it."""


@dataclass(frozen=True)
class Comparison:
    """The cells of a comparison: one line per quantity, one column per group of runs."""

    groups: list[str]
    notes: list[str]
    """How many seeds stand behind each group, and whether some run is not finished."""
    lines: dict[str, list[str]]
    """By quantity; a dash where a group has no value."""
    best: dict[str, int]
    """Index of the best group, for quantities that have a better and a worse."""


def comparison(groups: Sequence[SeedGroup]) -> Comparison:
    """Return the cells of a comparison of groups of runs."""
    lines: dict[str, list[str]] = {}
    best: dict[str, int] = {}
    merged = [group.merge(RunRecord.metrics) for group in groups]
    for name in dict.fromkeys(name for values in merged for name in values):
        label = metric(name).label
        spreads = [values.get(name) for values in merged]
        lines[label] = [metric_text(name, spread) for spread in spreads]
        if metric(name).better and sum(spread is not None for spread in spreads) > 1:
            best[label] = _best(spreads, metric(name).better)
    for part, names in SPENT.items():
        totals = [group.merge(lambda run, part=part: run.totals(part)) for group in groups]  # type: ignore[misc]
        for name, label in names.items():
            if any(name in values for values in totals):
                found = [values.get(name) for values in totals]
                lines[label] = [cost_text(part, s.mean) if s else "–" for s in found]
    return Comparison([g.label for g in groups], [_note(g) for g in groups], lines, best)


def metric_text(name: str, spread: Spread | None) -> str:
    """Return a metric's value: percentages with two decimals, ``±`` where seeds are merged."""
    if spread is None:
        return "–"
    scale, form = (100, ".2f") if metric(name).unit else (1, ".4g")
    text = f"{scale * spread.mean:{form}}"
    return f"{text} ± {scale * spread.std:{form}}" if spread.n > 1 else text


def cost_text(part: str, value: float) -> str:
    """Return bytes in the unit that suits them, or seconds."""
    if part == "seconds":
        return f"{value:.1f} s"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def _best(spreads: Sequence[Spread | None], sign: int) -> int:
    ranked = [(sign * s.mean, -index) for index, s in enumerate(spreads) if s is not None]
    return -max(ranked)[1]


def _note(group: SeedGroup) -> str:
    seeds = [run.seed for run in group.runs]
    count = len(seeds)
    if count == 1:
        note = "" if seeds[0] is None else f"seed {seeds[0]}"
    else:
        note = f"{count} {'seeds' if len(set(map(str, seeds))) == count else 'runs'}"
    going_on = sum(not run.is_finished for run in group.runs)
    if going_on:
        note += ", not finished" if count == 1 else f", {going_on} not finished"
    return note.removeprefix(", ")
