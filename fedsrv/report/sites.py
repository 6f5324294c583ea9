"""Each site of a run on own data by itself: a mean hides the one that fares badly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fedmodels.charts import Spread
from fedmodels.numerics.metric_tables import FIGURES, metric
from fedmodels.printable import Unit, text_of
from fedsrv.report import quantities as q
from fedsrv.report.frame import SeedGroup
from fedsrv.report.table import Name, Table

MAX_ROWS = 12
"""Sites, times groups, that have a row each; of more, folds of the page tell."""
MAX_CLASSES = 12
"""Classes that have a column each."""
FURTHER = {"auroc": "AUROC %", "examples": "training examples", "task": "task"}
FURTHER |= {"round": "task since round"}
"""What else a row has, and how the table calls it."""
RECALL = "share of the test examples of this class that the site's model calls so (sensitivity)"


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
        shown = [(name, _heading(name)) for name in figures]
    shown += [(k, Name(f"{names.get(k, k)}\u00a0%", "recall", RECALL)) for k in labels]
    further = {what: name for what, name in FURTHER.items() if what not in dict(shown)}
    shown += [(what, Name(name)) for what, name in further.items() if what in has]
    live = {id(group): group.runs[0].live_models() for group in groups}
    rows, cells = list[Name](), list[list[str]]()
    for group, spreads, client in places:
        rows.append(Name(_called(group, client), group.label if len(groups) > 1 else ""))
        cells.append([_text(what, spreads.get((client, what))) for what, _ in shown])
        if any(live.values()):
            cells[-1].append(live[id(group)].get(client, "–"))
    columns = [name for _, name in shown] + ([Name("live model")] if any(live.values()) else [])
    return Table(columns, rows, cells, corner="site")


def _heading(figure: str) -> Name:
    """Return the heading of a figure of targets."""
    found = metric(figure)
    title = f"{found.title}\u00a0%" if found.unit else found.title
    return Name(title, "own test data", found.meaning)


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


def _text(what: str | int, spread: Spread | None) -> str:
    """Return one cell; shares are percentages, with the deviation where seeds are merged."""
    if spread is None:
        return "–"
    if isinstance(what, str) and what != "accuracy" and not (what in FIGURES and metric(what).unit):
        return f"{spread.mean:.4g}"
    more = f" ± {100 * spread.std:.1f}" if spread.n > 1 else ""
    return f"{100 * spread.mean:.1f}{more}"


def _called(group: SeedGroup, client: int) -> str:
    return f"client {group.runs[0].client_names.get(client, client)}"
