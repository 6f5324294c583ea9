"""A comparison of runs: which numbers it shows, and its table."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from fedmodels.console.charts import Spread
from fedmodels.console.printable import bytes_text, text_of
from fedmodels.numerics.metric_names import OF_FIGURE
from fedmodels.numerics.metric_tables import FIGURES, metric, with_population
from fedsrv.report.frame import (
    CONFIDENCE,
    MIN_SEEDS,
    RunNumbers,
    SeedGroup,
    column,
    over_seeds,
    rare_classes,
    winner,
)
from fedsrv.report.table import Name, Table
from fedsrv.state.run_record import RunRecord

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
COSTS = {f"{part}.{name}": label for part, names in SPENT.items() for name, label in names.items()}

_AT_ONE_MOMENT = {
    "a_loc": ("a_loc_received", "a_loc_trained"),
    "a_loc_minority": ("a_loc_received_minority", "a_loc_trained_minority"),
    "forgetting": ("forgetting_received", "forgetting_trained"),
}
_AT_ONE_MOMENT |= {
    f"{figure}_loc": (f"{figure}_loc_received", f"{figure}_loc_trained") for figure in FIGURES
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

OF_TARGETS = ("mae_loc", "rmse_loc", "r2_loc", "mae_glo", "auroc_loc", "average_precision_loc",
              "auroc_glo")  # fmt: skip
"""Of runs that learn targets: what a table shows first."""
MAX_METRICS = 4
"""Metrics of a headline; with bytes up and seconds that makes six numbers."""
HEADLINE_COSTS = ("bytes.up", "seconds.wall")
TEST = (
    f"bold: better than every other in a paired t-test over seeds, "
    f"p < {1 - CONFIDENCE:.2g}, at least {MIN_SEEDS} seeds"
)
NOT_THERE: Mapping[str, str] = {
    "no class of these data is rarer than others": "_minority|_medium|_many",
    "it needs a second task": "forgetting|afm|backward|_domains|recovered",
    "no global model was scored": "a_glo|global|generalization|_glo$",
    "models were not scored at that moment": "_received|_trained",
}
"""Why a run may lack a metric, by a pattern of its names."""
MERGED = "± is the sample standard deviation over seeds"


def numbers_of(label: str, run: RunRecord) -> RunNumbers:
    """Return the metrics of a run and what it cost, as an entry of a frame."""
    values = {f"metrics.{name}": value for name, value in run.metrics().items()}
    for part in SPENT:
        values |= {f"{part}.{name}": value for name, value in run.totals(part).items()}
    return RunNumbers(label, str(run.seed), values)


def comparison(groups: Sequence[SeedGroup], everything: bool = False) -> Table:
    """Return a table of groups of runs: the headline's numbers, or every one."""
    frame = [[numbers_of(group.label, run) for run in group.runs] for group in groups]
    runs = [run for group in frame for run in group]
    has = list(dict.fromkeys(key for run in runs for key in run.values))
    metrics = [key.removeprefix("metrics.") for key in has if key.startswith("metrics.")]
    costs = [key for key in COSTS if key in has]
    shown = [f"metrics.{name}" for name in (metrics if everything else headline(groups, metrics))]
    shown += [key for key in costs if everything or key in HEADLINE_COSTS]
    bold = set()
    for down, key in enumerate(shown):
        if (first := winner(column(runs, key), _better(key))) is not None:
            at = [group.label for group in groups].index(str(first))
            if not _is_guessing(groups[at], key):
                bold.add((down, at))
    merged = any(len({run.seed for run in group}) > 1 for group in frame)
    captions = [MERGED] if merged else []
    captions += [TEST] if bold else []
    if hidden := len(metrics) + len(costs) - len(shown):
        captions.append(f"{hidden} more: fedsrv report --all RUN")
    captions += why_missing(
        {key.partition(".")[2]: Name(COSTS.get(key, metric(key.partition(".")[2]).title)).text
         for key in shown if any(run.values.get(key) is None for run in runs)}
    )  # fmt: skip
    columns = [Name(group.label, _note(group)) for group in groups]
    selected = " or ".join(sorted({group.runs[0].selected for group in groups} - {""}))
    rows = [_name(key, selected, groups) for key in shown]
    cells = [
        [_text(key, [(run.seed, run.values.get(key)) for run in group]) for group in frame]
        for key in shown
    ]
    return Table(columns, rows, cells, bold, captions)


def why_missing(titles: Mapping[str, str]) -> list[str]:
    """Return a caption that says why there is a dash, by what metrics are called; or none."""
    found = dict[str, list[str]]()
    for name, title in titles.items():
        fits = (why for why, names in NOT_THERE.items() if re.search(names, name))
        found.setdefault(next(fits, "not measured"), []).append(title)
    said = "; ".join(f"{', '.join(of)}: {why}" for why, of in found.items())
    return [f"A dash: {said}"] if said else []


def one_column(run: RunRecord, everything: bool = True) -> Table:
    """Return the numbers of one run alone: the headline's, or every one."""
    found = comparison([SeedGroup("", (run,))], everything)
    return replace(found, columns=[Name("value")], corner="metric")


def _better(key: str) -> int:
    return metric(key.removeprefix("metrics.")).better if key.startswith("metrics.") else 0


def _is_guessing(group: SeedGroup, key: str) -> bool:
    """Tell whether a group's mean of an accuracy is no better than an answer without a model."""
    name = key.removeprefix("metrics.")
    least, spread = least_of([group], name), group.merge(RunRecord.metrics).get(name)
    if least is None or spread is None:
        return False
    return is_no_better(name, spread.mean, least)


def _name(key: str, selected: str, groups: Sequence[SeedGroup]) -> Name:
    if key in COSTS:
        return Name(COSTS[key])
    name = key.removeprefix("metrics.")
    title = with_population(name, selected)
    return Name(title, guesses_text(groups, name), metric(name).meaning)


def _text(key: str, values: Sequence[tuple[Hashable, float | None]]) -> str:
    """Return one cell: the mean over seeds, of metrics with the deviation."""
    found = [(seed, value) for seed, value in values if value is not None]
    if not found:
        return "–"
    table, _, name = key.partition(".")
    spread = over_seeds(found)
    if table == "metrics":
        return metric_text(name, spread)
    return bytes_text(spread.mean) if table == "bytes" else f"{spread.mean:.1f} s"


def metric_text(name: str, spread: Spread) -> str:
    """Return a metric's value: percentages with two decimals, ``±`` where seeds are merged."""
    scale, form = (100, ".2f") if metric(name).unit else (1, ".4g")
    text = f"{scale * spread.mean:{form}}"
    return f"{text} ± {scale * spread.std:{form}}" if spread.n > 1 else text


def headline(groups: Sequence[SeedGroup], names: Sequence[str]) -> list[str]:
    """Return the few of these metrics that matter most in the groups' scenario."""
    kind = str(groups[0].runs[0].kind) if groups else ""
    wanted = next(HEADLINES[start] for start in HEADLINES if kind.startswith(start))
    wanted = (*wanted, *OF_TARGETS)
    if len(groups) > 1:
        wanted = tuple(_at_one_moment(groups, name) for name in wanted)
    hidden = "_minority" if rare_classes(groups) == [] else None
    found = [name for name in wanted if name in names and not (hidden and name.endswith(hidden))]
    if own := [name for name in names if name.startswith("prequential")]:  # its config asks for it
        found = [*found[: MAX_METRICS - 1], own[0]]
    return found[:MAX_METRICS] or list(names)[:MAX_METRICS]


def _at_one_moment(groups: Sequence[SeedGroup], name: str) -> str:
    """Return the metric that compares the same moment of most groups; ``name`` where none does."""
    held = [group.runs[0].metrics() for group in groups]
    counts = {other: sum(other in has for has in held) for other in _AT_ONE_MOMENT.get(name, ())}
    most = max(counts, key=lambda other: counts[other], default=name)
    return most if counts.get(most) else name


def main_metrics(groups: Sequence[SeedGroup]) -> list[str]:
    """Return the metrics that say how good the groups' runs are, the main one first."""
    names = dict.fromkeys(n for g in groups for run in g.runs for n in run.metrics())
    return headline(groups, [n for n in names if metric(n).better]) or ["loss"]


def who_chooses(groups: Sequence[tuple[str, str]]) -> str:
    """Return among which classes groups choose, in one sentence; empty where one does not say.

    Args:
        groups: label and :attr:`RunRecord.chooses_among` of each.
    """
    met = [label for label, among in groups if among == "classes met"]
    if not groups or not all(among for _, among in groups):
        return ""
    if not met:
        return "Each chooses among all classes."
    own = "the classes that a client has met"
    if len(met) == len(groups):
        return f"Each chooses among {own}."
    return f"{', '.join(met)}: chosen among {own}; the others choose among all classes."


def best_group(groups: Sequence[SeedGroup], name: str) -> str | None:
    """Return the label of the group that wins by a metric; None where none does."""
    found: Mapping[str, Mapping[str, float]] = {
        group.label: {
            str(run.seed): has[name] for run in group.runs if name in (has := run.metrics())
        }
        for group in groups
    }
    return winner(found, metric(name).better)


def _note(group: SeedGroup) -> str:
    """Return how many seeds stand behind a group, and whether some run is not finished."""
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


MOST_FREQUENT = {"a_loc": "own", "a_loc_received": "own", "a_loc_trained": "own", "a_glo": "all"}
"""Metrics that are accuracies on clients' own test data: whose most frequent class is answered."""


WITHOUT_MODEL: Mapping[str, str | float] = {
    "mae": "mae_of_mean", "r2": 0.0, "average_precision": "base_rate", "auroc": 0.5,
}  # fmt: skip
"""Figures of targets, and what they are of an answer that looks at no example."""
WHO = {-1: "always the mean", 1: "an answer that looks at no example"}


def least_of(groups: Sequence[SeedGroup], name: str) -> float | None:
    """Return what a metric has to be better than in every group; None where it is not known."""
    found = [max(each) for group in groups if (each := _without_model(group, name))]
    found += _of_figures(groups, name)
    return max(found, key=lambda value: metric(name).better * value, default=None)


def is_no_better(name: str, value: float, least: float) -> bool:
    """Tell whether a metric is no better than what an answer without a model has."""
    better = metric(name).better
    return better * value <= better * least


def _of_figures(groups: Sequence[SeedGroup], name: str) -> list[float]:
    found = (_of_figure(group, name) for group in groups)
    return [value for value in found if value is not None]


def _of_figure(group: SeedGroup, name: str) -> float | None:
    """Return a figure of targets of who knows their mean, or the base rate of labels, alone."""
    match = OF_FIGURE.fullmatch(name)
    base = None if match is None else WITHOUT_MODEL.get(match[3])
    if match is None or base is None:
        return None
    if isinstance(base, float):
        return base
    spread = group.merge(RunRecord.metrics).get(name.replace(match[3], base))
    return None if spread is None else spread.mean


def guesses_text(groups: Sequence[SeedGroup], name: str) -> str:
    """Return the two accuracies of a metric in words, in percent; empty where not known.

    Where groups have other data, each of the two goes from the least to the largest.
    """
    found = [each for group in groups if (each := _without_model(group, name))]
    if figures := _of_figures(groups, name):
        unit = metric(name).unit
        low, high = (text_of(of(figures), "percent" if unit else "") for of in (min, max))
        return f"{WHO[metric(name).better]} {low if low == high else f'{low} to {high}'}"
    if not found:
        return ""
    chance, frequent = (_span(values) for values in zip(*found, strict=True))
    return f"chance {chance}, most frequent class {frequent}"


def _without_model(group: SeedGroup, name: str) -> tuple[float, float] | None:
    """Return the accuracy of guesses and of the most frequent class, means over a group's runs."""
    key = MOST_FREQUENT.get(name)
    found = [run.guesses for run in group.runs]
    if key is None or not all("chance" in each and key in each for each in found):
        return None
    return (
        sum(each["chance"] for each in found) / len(found),
        sum(each[key] for each in found) / len(found),
    )


def _span(values: Sequence[float]) -> str:
    low, high = (f"{100 * value:.1f} %" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
