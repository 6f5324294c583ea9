"""The charts of a page: which quantities are drawn, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from fedmodels.config.part import parts_of_plugins
from fedmodels.console.charts import Chart, Spread
from fedmodels.console.printable import Unit
from fedmodels.numerics.metric_tables import FIGURES, metric
from fedmodels.plugins import part_of
from fedsrv.report import quantities as q
from fedsrv.report.comparison import main_metrics
from fedsrv.report.frame import SeedGroup, rare_classes
from fedsrv.report.quantities import view_name
from fedsrv.state.run_record import RunRecord

NO_NAMES: Mapping[int, str] = {}
MAX_LISTED = 5
"""Classes that a caption or a sentence calls by name."""
MATRICES = 4
"""Interactions, from the first to the last, whose weights between clients are drawn."""

COSTS: tuple[tuple[str, tuple[str, ...], Unit], ...] = (
    ("bytes", ("down", "up", "wire_down", "wire_up"), "bytes"),
    ("seconds", ("train", "server", "wall"), "seconds"),
)
"""What an interaction costs: entry of a row, its parts, and their unit."""

Lines = Mapping[str, Mapping[int, Spread]]
Cells = Mapping[tuple[int, int], float]
QuantityOf = Callable[[RunRecord], Mapping[int, float]]
Charts = Iterator[Chart]


def telling(charts: Charts) -> list[Chart]:
    """Return the charts in which there is something to see."""
    return [chart for chart in charts if chart.is_telling]


def with_moments(charts: Charts, groups: Sequence[SeedGroup]) -> Charts:
    """Yield charts, those over rounds with the moments at which data or their clients change."""
    moments = {
        round + 1: f"round {round + 1}: the mean is over other clients"
        for g in groups for round, *_ in g.runs[0].population
    }  # fmt: skip
    moments |= {at: text for g in groups for at, text in q.moments_of_change(g.runs[0]).items()}
    return (replace(c, moments=moments) if c.x == "round" else c for c in charts)


def cells_of(
    caption: str,
    cells: Cells,
    x: str,
    y: str,
    unit: Unit = "",
    x_names: Mapping[int, str] = NO_NAMES,
    y_names: Mapping[int, str] = NO_NAMES,
) -> Chart:
    """Return a chart of coloured cells."""
    values = {"": {at: Spread(value) for at, value in cells.items()}}
    return Chart(caption, "cells", values, x, y, unit, x_names, y_names)


def weights_of(caption: str, run: RunRecord, cells: Cells) -> Chart:
    """Return a chart of the weights between a run's clients."""
    names = run.client_names
    x, y = "contributing client", "receiving client"
    return cells_of(caption, cells, x, y, x_names=names, y_names=names)


def _by_label(groups: Sequence[SeedGroup], quantity: QuantityOf) -> Lines:
    return {group.label: group.merge(quantity) for group in groups}


def _curve(groups: Sequence[SeedGroup], name: str) -> Lines:
    return _by_label(groups, partial(q.metric_curve, name=name))


def unit_of(name: str) -> Unit:
    """Return the unit of a metric in charts: of scores ``percent``, of what is small ``points``."""
    found = metric(name)
    is_score = found.better >= 0 and found.range == "0 … 1"
    return ("percent" if is_score else "points") if found.unit else ""


# --- the first six ------------------------------------------------------------------------------


def leading(groups: Sequence[SeedGroup]) -> Charts:
    """Yield at most six charts: how good, on rare and old classes, forgotten, helped, cost."""
    name = _main_curve(groups)
    title = metric(name).title
    yield Chart(f"How good: {title}", "lines", _curve(groups, name), "round", title, unit_of(name))
    if (rare := rare_classes(groups)) != []:
        text, lines = f"On rare classes{listed(rare)}: {title}", _curve(groups, f"{name}_minority")
        yield Chart(text, "lines", lines, "round", title, unit_of(name))
    view = q.comparable_view([run for group in groups for run in group.runs])
    ends = _by_label(groups, partial(q.final_task_accuracy, view=view))
    if any(len(points) > 1 for points in ends.values()):
        text = f"On old tasks: models at the end, {view_name(view)}"
        yield Chart(text, "bars", ends, "task", "accuracy", "percent")
    lost = _by_label(groups, partial(q.lost_by_task, view=view))
    text = f"What was forgotten: best earlier accuracy minus the last, {view_name(view)}"
    yield Chart(text, "bars", lost, "task", "accuracy lost", "points")
    yield from _last_weights(groups)
    sent, text = (
        _by_label(groups, q.bytes_up_so_far),
        "At what cost: bytes that clients sent so far",
    )
    yield Chart(text, "lines", sent, "interaction", "bytes up", "bytes")


def listed(names: Sequence[str] | None) -> str:
    """Return a few names in brackets; nothing where there are many."""
    return f" ({', '.join(names)})" if names and len(names) <= MAX_LISTED else ""


def _main_curve(groups: Sequence[SeedGroup]) -> str:
    """Return the main metric, or the next one where that is a number of the whole run alone."""
    names = main_metrics(groups)
    return next((name for name in names if any(_curve(groups, name).values())), names[0])


def _last_weights(groups: Sequence[SeedGroup]) -> Charts:
    for group in groups:
        matrices = q.weight_matrices(group.runs[0])
        if matrices:
            at = max(matrices)
            text = f"Who helped whom: weights of {group.label} in interaction {at}"
            yield weights_of(text, group.runs[0], matrices[at])
            return


# --- everything else ----------------------------------------------------------------------------


def over_rounds(groups: Sequence[SeedGroup]) -> Charts:
    """Yield a chart for each metric, with a line for each group."""
    runs = [run for group in groups for run in group.runs]
    names = list(dict.fromkeys(name for run in runs for name in q.metric_names(run)))
    for name in names:
        text = metric(name).label.removesuffix(" %")
        yield Chart(text, "lines", _curve(groups, name), "round", name, unit_of(name))
    if not any(map(unit_of, names)):
        for view in dict.fromkeys(view for run in runs for view in q.views_of(run)):
            text = f"mean client accuracy, {view_name(view)}"
            lines = _by_label(groups, partial(q.view_curve, view=view))
            yield Chart(text, "lines", lines, "round", text, "percent")
    if "loss" not in names:
        text = "mean training loss of the cohort"
        yield Chart(text, "lines", _by_label(groups, q.training_loss), "round", text)


def after_tasks(groups: Sequence[SeedGroup]) -> Charts:
    """Yield how good a round's clients are after each task: in both views, also on rare classes."""
    for view in ("received", "trained"):
        for rare in ("", "_minority"):
            name = f"a_sel_{view}{rare}_task"
            text, lines = metric(name).title, _by_label(groups, partial(q.by_task, name=name))
            yield Chart(f"{text}, after each task", "lines", lines, "task", "accuracy", "percent")


def of_clients(group: SeedGroup) -> Charts:
    """Yield the last accuracy of each client, by view."""
    text, series = "last accuracy per client", _by_view(group, q.client_accuracy)
    names = group.runs[0].client_names
    yield Chart(text, "bars", series, "client", "accuracy", "percent", names)
    for figure, known in FIGURES.items():
        series = _by_view(group, partial(q.client_accuracy, name=figure))
        text = f"last {known.title} per client"
        yield Chart(text, "bars", series, "client", known.title, unit_of(figure), names)
    yield from of_plugins(group.runs[0])
    yield from of_uploads(group.runs[0])


def of_plugins(run: RunRecord) -> Charts:
    """Yield the charts of a run that plugins' parts bring."""
    for part in parts_of_plugins():
        if part.panels:
            yield from part_of(part.at("panels"))(run)


def lines_of_plugins(run: RunRecord) -> list[str]:
    """Return the lines on a run that plugins' parts bring."""
    brought = (part_of(part.at("lines"))(run) for part in parts_of_plugins() if part.lines)
    return [line for lines in brought for line in lines]


def of_uploads(run: RunRecord) -> Charts:
    """Yield share, direction and size of each upload of a run, and whose stood out how often."""
    names = run.client_names
    for name in ("aggregation_weight", "difference_cosine", "difference_norm"):
        cells, text = q.by_client(run, name), metric(name).title
        yield cells_of(text, cells, "interaction", "client", unit_of(name), y_names=names)
    warned = {client: Spread(times) for client, times in q.warnings_of_client(run).items()}
    text = "uploads that stood out of their cohort"
    yield Chart(text, "bars", {"": warned} if warned else {}, "client", "uploads", "", names)


def of_classes(group: SeedGroup) -> Charts:
    """Yield the last accuracy on each class, and the confusion matrix, by view."""
    text = "last accuracy per class, mean over clients"
    series, names = _by_view(group, q.class_accuracy), group.runs[0].class_names
    yield Chart(text, "bars", series, "class", "accuracy", "percent", names)
    for view, name in _views(group):
        counts = group.merge(partial(q.confusion, view=view))
        examples: dict[int, float] = {}
        for (true, _), spread in counts.items():
            examples[true] = examples.get(true, 0.0) + spread.mean
        shares = {
            (true, predicted): spread.mean / examples[true]
            for (true, predicted), spread in counts.items()
            if examples[true]
        }
        cells = {at: Spread(share) for at, share in shares.items()}
        values = {"share of the true class": cells, "examples": counts}
        text = f"confusion matrix, {name}"
        axes = "predicted class", "true class"
        yield Chart(text, "cells", values, *axes, "percent", names, names)


def of_tasks(group: SeedGroup) -> Charts:
    """Yield accuracies on tasks over time, and the matrix of accuracies, by view."""
    for view, name in _views(group):
        scored = group.merge(partial(q.task_accuracy, view=view))
        tasks = sorted({task for _, task in scored})
        lines = {
            f"task {task}": {at: s for (at, k), s in scored.items() if k == task} for task in tasks
        }
        text = f"accuracy per task, {name}"
        yield Chart(text, "lines", lines, "interaction", "accuracy", "percent")
        matrix = group.merge(partial(q.accuracy_matrix, view=view))
        if len(tasks) > 1 and len({learnt for learnt, _ in matrix}) > 1:
            text, axes = (
                f"matrix of accuracies, {name}",
                ("accuracy on task", "after learning task"),
            )
            yield Chart(text, "cells", {"": matrix}, *axes, "percent")


def of_weights(group: SeedGroup) -> Charts:
    """Yield the aggregation weights of the group's first run."""
    run = group.runs[0]
    matrices = q.weight_matrices(run)
    times, names = sorted(matrices), run.client_names
    shown = {times[i * (len(times) - 1) // (MATRICES - 1)] for i in range(MATRICES) if times}
    for at in sorted(shown):
        yield weights_of(f"aggregation weights, interaction {at}", run, matrices[at])
    own = {(i, at): w for at in times for (i, j), w in matrices[at].items() if i == j}
    if len(times) > 1:
        text = "weight of a client's own model"
        yield cells_of(text, own, "interaction", "client", y_names=names)
    vectors = {(c, at): weight for (at, c), weight in q.weight_vectors(run).items()}
    yield cells_of("aggregation weights", vectors, "interaction", "client", y_names=names)


def of_cost(group: SeedGroup) -> Charts:
    """Yield bytes and seconds, per interaction and per client."""
    for part, parts, unit in COSTS:
        merged = {name: group.merge(partial(q.spent, part=part, name=name)) for name in parts}
        lines = {name.replace("_", " "): points for name, points in merged.items() if points}
        yield Chart(f"{part} per interaction", "lines", lines, "interaction", part, unit)
    names = group.runs[0].client_names
    moved = {way: group.merge(partial(q.bytes_of_client, direction=way)) for way in ("down", "up")}
    yield Chart("logical bytes per client", "bars", moved, "client", "bytes", "bytes", names)
    seconds = {"training": group.merge(q.seconds_of_client)}
    text = "seconds of training per client"
    yield Chart(text, "bars", seconds, "client", "seconds", "seconds", names)


def _views(group: SeedGroup) -> Iterator[tuple[str, str]]:
    for view in dict.fromkeys(view for run in group.runs for view in q.views_of(run)):
        yield view, view_name(view)


def _by_view(group: SeedGroup, quantity: Callable[..., Mapping[int, float]]) -> Lines:
    merged = {name: group.merge(partial(quantity, view=view)) for view, name in _views(group)}
    return {name: values for name, values in merged.items() if values}
