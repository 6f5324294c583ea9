"""The cells of a comparison of runs: what a terminal's table and the page both show."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

from fedmodels.numerics.metric_names import metric, with_population
from fedsrv.report.run_record import RunRecord, SeedGroup, Spread

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Hashable)

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

_AT_ONE_MOMENT = {
    "a_loc": ("a_loc_received", "a_loc_trained"),
    "a_loc_minority": ("a_loc_received_minority", "a_loc_trained_minority"),
    "forgetting": ("forgetting_received", "forgetting_trained"),
}
"""Metrics of the model that each method's paper scores, and those that compare methods."""
_LOST = ("forgetting", "forgetting_scored")
HEADLINES = {
    "natural": ("personalization", "generalization", "global_f1", "a_loc", "a_glo"),
    "dirichlet_pooled": ("personalization", "generalization", "global_f1", "a_loc", "a_glo"),
    "replay": ("aa", "aa_scored", "afm", *_LOST, "a_loc", "a_glo"),
    "": ("a_loc", "a_loc_minority", *_LOST, "a_glo"),
}
"""Metrics that a table shows first, by the beginning of a scenario's kind; ``""`` is any other."""

MOST_METRICS = 4
"""Metrics of a headline; with bytes up and seconds that makes six figures."""
HEADLINE_COSTS = ("bytes up", "seconds wall")

MIN_SEEDS, LEVEL = 3, 0.05
TEST = (
    f"bold: better than every other column in a paired t-test over seeds, p < {LEVEL}, "
    f"at least {MIN_SEEDS} seeds"
)
"""How a winner is told; every other column has to be beaten, so the level needs no correction."""


@dataclass(frozen=True)
class Comparison:
    """The cells of a comparison: one line per quantity, one column per group of runs."""

    groups: list[str]
    notes: list[str]
    """How many seeds stand behind each group, and whether some run is not finished."""
    lines: dict[str, list[str]]
    """By quantity; a dash where a group has no value."""
    best: dict[str, int]
    """Index of the group that a paired test says is the best, by quantity."""
    hidden: int = 0
    """Quantities that are left out."""


def comparison(groups: Sequence[SeedGroup], everything: bool = False) -> Comparison:
    """Return the cells of a comparison of groups of runs: the headline's, or every quantity's."""
    lines: dict[str, list[str]] = {}
    best: dict[str, int] = {}
    merged = [group.merge(RunRecord.metrics) for group in groups]
    names = list(dict.fromkeys(name for values in merged for name in values))
    shown = names if everything else headline(groups, names)
    selected = " or ".join(sorted({group.runs[0].selected for group in groups} - {""}))
    for name in shown:
        label = with_population(name, selected)
        lines[label] = [metric_text(name, values.get(name)) for values in merged]
        if (first := winner(groups, name)) is not None:
            best[label] = first
    costs = dict(_costs(groups))
    kept = costs if everything else {k: v for k, v in costs.items() if k in HEADLINE_COSTS}
    hidden = len(names) + len(costs) - len(shown) - len(kept)
    notes = [_note(group) for group in groups]
    return Comparison([g.label for g in groups], notes, {**lines, **kept}, best, hidden)


def headline(groups: Sequence[SeedGroup], names: Sequence[str]) -> list[str]:
    """Return the few of these metrics that answer for the groups' scenario."""
    kind = str(groups[0].runs[0].kind) if groups else ""
    wanted = next(HEADLINES[start] for start in HEADLINES if kind.startswith(start))
    if len(groups) > 1:
        wanted = tuple(_at_one_moment(groups, name) for name in wanted)
    found = [name for name in wanted if name in names]
    return found[:MOST_METRICS] or list(names)[:MOST_METRICS]


def _at_one_moment(groups: Sequence[SeedGroup], name: str) -> str:
    """Return the metric that compares the same moment of most groups; ``name`` where none does."""
    held = [group.runs[0].metrics() for group in groups]
    counts = {other: sum(other in has for has in held) for other in _AT_ONE_MOMENT.get(name, ())}
    most = max(counts, key=lambda other: counts[other], default=name)
    return most if counts.get(most) else name


def main_metric(groups: Sequence[SeedGroup]) -> str:
    """Return the metric that says how good the groups' runs are."""
    return main_metrics(groups)[0]


def main_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the metrics that say how good the groups' runs are, the main one first."""
    names = dict.fromkeys(n for g in groups for run in g.runs for n in run.metrics())
    return headline(groups, [n for n in names if metric(n).better]) or ["loss"]


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


def winner(groups: Sequence[SeedGroup], name: str) -> int | None:
    """Return the group that beats every other one in a paired test, None without one."""
    values = {
        index: {
            str(run.seed): found[name] for run in group.runs if name in (found := run.metrics())
        }
        for index, group in enumerate(groups)
    }
    return best_of(values, metric(name).better)


def best_of(values: Mapping[K, Mapping[S, float]], better: int) -> K | None:
    """Return which beats every other one in a paired test over seeds; None without one.

    Args:
        values: by seed, of each; whoever has none takes no part.
        better: 1 where more is better, -1 where less is, 0 where neither is.
    """
    rivals = {key: by_seed for key, by_seed in values.items() if by_seed}
    if not better or len(rivals) < 2:
        return None
    first = max(rivals, key=lambda key: better * fmean(rivals[key].values()))
    others = [by_seed for key, by_seed in rivals.items() if key != first]
    return first if all(_beats(rivals[first], other, better) for other in others) else None


def paired_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the two-sided p of a paired t-test; pairs that differ by one number are certain."""
    from scipy.stats import t  # half a second to import, and most tables have no pairs

    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, spread = fmean(differences), stdev(differences)
    if not spread:
        return 0.0 if mean else 1.0
    size = len(differences)
    return float(2 * t.sf(abs(mean) / (spread / size**0.5), size - 1))


def _beats(ours: Mapping[S, float], theirs: Mapping[S, float], better: int) -> bool:
    """Tell whether ours are better over the seeds in common, three at least."""
    seeds = [seed for seed in ours if seed in theirs]
    if len(seeds) < MIN_SEEDS:
        return False
    mine, other = [ours[s] for s in seeds], [theirs[s] for s in seeds]
    return better * (fmean(mine) - fmean(other)) > 0 and paired_p(mine, other) < LEVEL


def _costs(groups: Sequence[SeedGroup]) -> Iterator[tuple[str, list[str]]]:
    for part, names in SPENT.items():
        totals = [group.merge(lambda run, part=part: run.totals(part)) for group in groups]  # type: ignore[misc]
        for name, label in names.items():
            if any(name in values for values in totals):
                found = [values.get(name) for values in totals]
                yield label, [cost_text(part, s.mean) if s else "–" for s in found]


def _note(group: SeedGroup) -> str:
    seeds = [run.seed for run in group.runs]
    count = len(seeds)
    if count == 1:
        note = "" if seeds[0] is None else f"seed {seeds[0]}"
    else:
        different = len(set(map(str, seeds)))
        note = f"{count} seeds"
        if different < count:  # copies of a run, or one seed run twice
            note = f"{count} runs of {different} seed{'s' if different > 1 else ''}"
    going_on = sum(not run.is_finished for run in group.runs)
    if going_on:
        note += ", not finished" if count == 1 else f", {going_on} not finished"
    return note.removeprefix(", ")
