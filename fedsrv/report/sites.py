"""Each site of a run on own data by itself: a mean hides the one that fares badly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fedmodels.console.charts import Spread
from fedmodels.console.printable import Unit, text_of
from fedmodels.numerics.metric_tables import FIGURES, metric
from fedsrv.report import quantities as q
from fedsrv.report.frame import SeedGroup
from fedsrv.report.table import Name, Table

MAX_ROWS = 12
"""Sites, times groups, that have a row each; of more, folds of the page tell."""
MAX_CLASSES = 12
"""Classes that have a column each."""
FURTHER = {"auroc": "AUROC %", "examples": "training examples", "task": "task"}
FURTHER |= {"round": "task since round", "tests": "test examples"}
"""What else a row has, and how the table calls it."""
RECALL = "share of the test examples of this class that the site's model calls so (sensitivity)"
COUNTED = "Of N: test examples; in brackets the 95 % confidence interval of the share (Wilson)."
IN_UNITS = ("mae", "rmse", "mae_of_mean", "pinball")
"""Figures that have the unit of their target."""
Z = 1.96
"""Quantile of the normal distribution at 97.5 %."""


def sites_table(groups: Sequence[SeedGroup]) -> Table | None:
    """Return each site's accuracy, its recall of each class, and what it has; None with many.

    Runs on data that a scenario dealt out have clients and no sites: they have no such table.
    """
    if any(group.runs[0].kind not in ("", "natural") for group in groups):
        return None
    found = [group.merge(q.of_sites) for group in groups]
    places = [
        (group, spreads, client)
        for group, spreads in zip(groups, found, strict=True)
        for client in sorted({client for client, _ in spreads})
    ]
    has = {what for spreads in found for _, what in spreads}
    labels = sorted(what for what in has if isinstance(what, int))
    labels = labels if len(labels) <= MAX_CLASSES else []
    figures = [figure for figure in FIGURES if figure in has]
    is_dealt = any(group.runs[0].kind for group in groups)
    if len(places) > MAX_ROWS or not {main_of(has)} & has or (is_dealt and "accuracy" in has):
        return None
    names = groups[0].runs[0].class_names
    shown: list[tuple[str | int, Name]] = [("accuracy", Name("accuracy\u00a0%", "own test data"))]
    if "accuracy" not in has:
        shown = [(name, _heading(name, groups[0].runs[0].target)) for name in figures]
    tests = {(id(group), client): n for group in groups for client, n in _tests(group).items()}
    has |= {"tests"} if tests else set()
    shown += [(k, Name(f"{names.get(k, k)}\u00a0%", "recall", RECALL)) for k in labels]
    further = {what: name for what, name in FURTHER.items() if what not in dict(shown)}
    shown += [(what, Name(name)) for what, name in further.items() if what in has]
    live = {id(group): group.runs[0].live_models() for group in groups}
    rows, cells = list[Name](), list[list[str]]()
    for group, spreads, client in places:
        rows.append(Name(_called(group, client), group.label if len(groups) > 1 else ""))
        counts = tests.get((id(group), client), [])
        cells.append([_text(what, spreads.get((client, what)), counts) for what, _ in shown])
        if any(live.values()):
            cells[-1].append(live[id(group)].get(client, "–"))
    columns = [name for _, name in shown] + ([Name("live model")] if any(live.values()) else [])
    counted = [COUNTED] if tests and "accuracy" in has else []
    return Table(columns, rows, cells, captions=counted, corner="site")


def _tests(group: SeedGroup) -> dict[int, list[float]]:
    """Return each client's test examples by class, of a run alone: seeds may divide data anew."""
    return group.runs[0].tests if len(group.runs) == 1 else {}


def _heading(figure: str, target: str) -> Name:
    """Return the heading of a figure of targets; an error is in the unit of its target."""
    found = metric(figure)
    title = f"{found.title}\u00a0%" if found.unit else found.title
    unit = f", in the unit of {target}" if target and figure in IN_UNITS else ""
    return Name(title, f"own test data{unit}", found.meaning)


def main_of(has: Iterable[str | int]) -> str:
    """Return what tells how good a site's model is: accuracy, or of targets the first figure."""
    return next((name for name in ("accuracy", "mae", "auroc") if name in {*has}), "accuracy")


def how_apart(groups: Sequence[SeedGroup]) -> Iterator[str]:
    """Yield of each group on own data its worst and its best site, and the worst class of a site.

    Clients that a scenario dealt out anew for each seed are no sites.
    """
    for group in groups:
        spreads = {} if group.runs[0].kind else group.merge(q.of_sites)
        main = main_of(what for _, what in spreads)
        each = {c: s.mean for (c, what), s in spreads.items() if what == main}
        if len(each) < 2:
            continue
        low, high = min(each, key=lambda c: each[c]), max(each, key=lambda c: each[c])
        unit: Unit = "" if main == "mae" else "percent"
        ends = [text_of(each[client], unit) for client in (low, high)]
        said = f"from {ends[0]} ({_called(group, low)}) to {ends[1]} ({_called(group, high)})"
        said = said if ends[0] != ends[1] else f"{ends[0]} at each"
        recalls = {at: s.mean for at, s in spreads.items() if isinstance(at[1], int)}
        if recalls:
            client, label = at = min(recalls, key=lambda at: recalls[at])
            name = group.runs[0].class_names.get(int(label), str(label))
            said += f"; least recall: {text_of(recalls[at], 'percent')} of {name} at "
            said += _called(group, client)
        whose = f"{group.label}, by site" if len(groups) > 1 else "By site"
        yield f"{whose}: {said}."


def _text(what: str | int, spread: Spread | None, tests: Sequence[float]) -> str:
    """Return one cell; shares are percentages, with the deviation where seeds are merged.

    ``tests`` are test examples by class; a share of a known number of them has an interval.
    """
    if what == "tests":
        return f"{sum(tests):.0f}" if tests else "–"
    if spread is None:
        return "–"
    if isinstance(what, str) and what != "accuracy" and not (what in FIGURES and metric(what).unit):
        return f"{spread.mean:.4g}"
    more = f" ± {100 * spread.std:.1f}" if spread.n > 1 else ""
    text = f"{100 * spread.mean:.1f}{more}"
    n = sum(tests[what : what + 1] if isinstance(what, int) else tests)
    if not n or what in FIGURES:
        return text
    low, high = wilson(spread.mean, n)
    return f"{text} of {n:.0f} [{100 * low:.1f}, {100 * high:.1f}]"


def wilson(share: float, n: float) -> tuple[float, float]:
    """Return the 95 % interval of a share of n (Wilson, JASA 22, 1927)."""
    middle, width = (
        share + Z**2 / (2 * n),
        Z * math.sqrt(share * (1 - share) / n + (Z / n) ** 2 / 4),
    )
    return (max(0.0, middle - width) / (1 + Z**2 / n), (middle + width) / (1 + Z**2 / n))


def _called(group: SeedGroup, client: int) -> str:
    return f"client {group.runs[0].client_names.get(client, client)}"
