"""The figures of a page: which quantities are drawn, how, and the numbers behind each."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from fedmodels.numerics.metric_names import metric
from fedsrv.report import quantities as q
from fedsrv.report.comparison import main_metrics
from fedsrv.report.figures import Unit, bars, curves, heat_map
from fedsrv.report.quantities import view_name
from fedsrv.report.run_record import RunRecord, SeedGroup, Spread

MATRICES = 4
"""Interactions, from the first to the last, whose weights between clients are drawn."""

COSTS: tuple[tuple[str, tuple[str, ...], Unit], ...] = (
    ("bytes", ("down", "up", "wire_down", "wire_up"), "bytes"),
    ("seconds", ("train", "server", "wall"), "seconds"),
)
"""What an interaction costs: entry of a row, its parts, and their unit."""

Lines = Mapping[str, Mapping[int, Spread]]
Cells = Mapping[tuple[int, int], float]
CurveOf = Callable[[RunRecord], Mapping[int, float]]
ViewQuantity = Callable[..., Mapping[int, float]]


@dataclass(frozen=True)
class Panel:
    """One figure: the words under it, its SVG or picture, and its numbers."""

    caption: str
    svg: str = ""
    picture: str = ""
    """A ``data:`` address in place of an SVG."""
    table: Sequence[Sequence[object]] = ()
    """The numbers, heads first."""

    @property
    def data(self) -> str:
        """Return the numbers as the address of a CSV file; empty for a picture.

        They have six digits, and whole numbers all of theirs.
        """
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        lines.writerows([*map(_short, line)] for line in self.table)
        written = quote(text.getvalue(), safe=",()=:")
        return f"data:text/csv;charset=utf-8,{written}" if self.table else ""

    @property
    def file_name(self) -> str:
        """Return what the file of numbers is called."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.caption).split()) + ".csv"


def _short(value: object) -> object:
    is_short = not isinstance(value, float) or value.is_integer()
    return value if is_short else float(f"{value:.6g}")


def curve_panel(caption: str, lines: Lines, *, x: str, y: str, unit: Unit = "") -> Panel:
    """Return lines over integers with their numbers."""
    svg = curves(lines, x=x, y=y, unit=unit)
    return Panel(caption, svg, table=_listed(lines, x, y))


def bar_panel(caption: str, series: Lines, *, y: str, x: str = "client", unit: Unit = "") -> Panel:
    """Return bars with their numbers."""
    return Panel(caption, bars(series, x=x, y=y, unit=unit), table=_listed(series, x, y))


def matrix_panel(caption: str, cells: Cells, *, x: str, y: str, unit: Unit = "") -> Panel:
    """Return a matrix with its numbers."""
    rows = [(row, column, value) for (row, column), value in sorted(cells.items())]
    return Panel(caption, heat_map(cells, x=x, y=y, unit=unit), table=[(y, x, "value"), *rows])


def _listed(lines: Lines, x: str, y: str) -> list[Sequence[object]]:
    rows = [
        (label, at, spread.mean, spread.std, spread.n)
        for label, points in lines.items()
        for at, spread in sorted(points.items())
    ]
    return [("line", x, f"{y}, mean", "standard deviation", "runs"), *rows]


# --- the first six ------------------------------------------------------------------------------


def leading(groups: Sequence[SeedGroup]) -> Iterator[Panel]:
    """Yield at most six figures: how good, on rare and old classes, forgotten, helped, cost."""
    name = _main_curve(groups)
    for title, key in (("How good", name), ("On rare classes", f"{name}_minority")):
        lines = _per_label(groups, partial(q.metric_curve, name=key))
        if lines:
            text = f"{title}: {metric(key).title}"
            unit: Unit = "percent" if metric(key).unit else ""
            yield curve_panel(text, lines, x="round", y=metric(name).title, unit=unit)
    view = q.comparable_view([run for group in groups for run in group.runs])
    ends = _per_label(groups, partial(q.final_task_accuracy, view=view))
    if any(len(points) > 1 for points in ends.values()):
        text = f"On old tasks: models at the end, {view_name(view)}"
        yield bar_panel(text, ends, x="task", y="accuracy", unit="percent")
    lost = _per_label(groups, partial(q.lost_by_task, view=view))
    if lost:
        text = f"What was forgotten: best earlier accuracy minus the last, {view_name(view)}"
        yield bar_panel(text, lost, x="task", y="accuracy lost", unit="percent")
    yield from _last_weights(groups)
    sent = _per_label(groups, q.bytes_up_so_far)
    if sent:
        text = "At what cost: bytes that clients sent so far"
        yield curve_panel(text, sent, x="interaction", y="bytes up", unit="bytes")


def _main_curve(groups: Sequence[SeedGroup]) -> str:
    """Return the main metric, or the next one where that is a figure of the whole run alone."""
    names = main_metrics(groups)
    curves = (n for n in names if _per_label(groups, partial(q.metric_curve, name=n)))
    return next(curves, names[0])


def _per_label(groups: Sequence[SeedGroup], quantity: CurveOf) -> Lines:
    merged = {group.label: group.merge(quantity) for group in groups}
    return {label: points for label, points in merged.items() if points}


def _last_weights(groups: Sequence[SeedGroup]) -> Iterator[Panel]:
    for group in groups:
        matrices = q.weight_matrices(group.runs[0])
        if matrices:
            at = max(matrices)
            text = f"Who helped whom: weights of {group.label} in interaction {at}"
            yield matrix_panel(text, matrices[at], x="contributing client", y="receiving client")
            return


# --- everything else ----------------------------------------------------------------------------


def over_rounds(groups: Sequence[SeedGroup]) -> Iterator[Panel]:
    """Yield a figure for each metric, with a line for each group."""
    runs = [run for group in groups for run in group.runs]
    quantities: dict[str, tuple[CurveOf, bool]] = {
        name: (partial(q.metric_curve, name=name), metric(name).unit == "%")
        for name in dict.fromkeys(name for run in runs for name in q.metric_names(run))
    }
    if not any(percent for _, percent in quantities.values()):
        for view in dict.fromkeys(view for run in runs for view in q.views_of(run)):
            label = f"mean client accuracy, {view_name(view)}"
            quantities[label] = (partial(q.view_curve, view=view), True)
    if "loss" not in quantities:
        quantities["mean training loss of the cohort"] = (q.training_loss, False)
    for name, (quantity, percent) in quantities.items():
        lines = _per_label(groups, quantity)
        if lines:
            yield curve_panel(name, lines, x="round", y=name, unit="percent" if percent else "")


def of_clients(group: SeedGroup) -> Iterator[Panel]:
    """Yield the last accuracy of each client, by view."""
    series = _by_view(group, q.client_accuracy)
    if series:
        yield bar_panel("last accuracy per client", series, y="accuracy", unit="percent")


def of_classes(group: SeedGroup) -> Iterator[Panel]:
    """Yield the last accuracy on each class, and the confusion matrix, by view."""
    series = _by_view(group, q.class_accuracy)
    if series:
        text = "last accuracy per class, mean over clients"
        yield bar_panel(text, series, x="class", y="accuracy", unit="percent")
    for view, name in _views(group):
        counts = group.merge(partial(q.confusion, view=view))
        if any(spread.mean for spread in counts.values()):  # a view may have scored no example
            yield _confusion_panel(f"confusion matrix, {name}", counts)


def _confusion_panel(caption: str, counts: Mapping[tuple[int, int], Spread]) -> Panel:
    """Return a confusion matrix as shares of each true class; the table has the examples, too."""
    examples: dict[int, float] = {}
    for (true, _), spread in counts.items():
        examples[true] = examples.get(true, 0.0) + spread.mean
    shares = {
        (true, predicted): spread.mean / examples[true]
        for (true, predicted), spread in counts.items()
        if examples[true]
    }
    svg = heat_map(shares, x="predicted class", y="true class", unit="percent")
    rows = [
        (true, predicted, counts[true, predicted].mean, share)
        for (true, predicted), share in sorted(shares.items())
    ]
    heads = ("true class", "predicted class", "examples", "share of the true class")
    return Panel(caption, svg, table=[heads, *rows])


def of_tasks(group: SeedGroup) -> Iterator[Panel]:
    """Yield accuracies on tasks over time, and the matrix of accuracies, by view."""
    for view, name in _views(group):
        scored = group.merge(partial(q.task_accuracy, view=view))
        tasks = sorted({task for _, task in scored})
        if tasks:
            lines = {
                f"task {task}": {at: s for (at, k), s in scored.items() if k == task}
                for task in tasks
            }
            text = f"accuracy per task, {name}"
            yield curve_panel(text, lines, x="interaction", y="accuracy", unit="percent")
        matrix = group.merge(partial(q.accuracy_matrix, view=view))
        if len(tasks) > 1 and len({learnt for learnt, _ in matrix}) > 1:
            cells = {key: spread.mean for key, spread in matrix.items()}
            yield matrix_panel(
                f"matrix of accuracies, {name}",
                cells,
                x="accuracy on task",
                y="after learning task",
                unit="percent",
            )


def of_weights(group: SeedGroup) -> Iterator[Panel]:
    """Yield the aggregation weights of the group's first run."""
    matrices = q.weight_matrices(group.runs[0])
    times = sorted(matrices)
    shown = {times[i * (len(times) - 1) // (MATRICES - 1)] for i in range(MATRICES) if times}
    for at in sorted(shown):
        text = f"aggregation weights, interaction {at}"
        yield matrix_panel(text, matrices[at], x="contributing client", y="receiving client")
    own = {(i, at): w for at in times for (i, j), w in matrices[at].items() if i == j}
    if len(times) > 1 and own:
        yield matrix_panel("weight of a client's own model", own, x="interaction", y="client")
    vectors = q.weight_vectors(group.runs[0])
    if vectors:
        turned = {(client, at): weight for (at, client), weight in vectors.items()}
        yield matrix_panel("aggregation weights", turned, x="interaction", y="client")


def of_pictures(group: SeedGroup) -> Iterator[Panel]:
    """Yield what clients of the group's first run drew."""
    for client, path in group.runs[0].pictures():
        data = base64.b64encode(path.read_bytes()).decode()
        yield Panel(f"{path.stem} of client {client}", picture=f"data:image/png;base64,{data}")


def of_cost(group: SeedGroup) -> Iterator[Panel]:
    """Yield bytes and seconds, per interaction and per client."""
    for part, names, unit in COSTS:
        merged = {name: group.merge(partial(q.spent, part=part, name=name)) for name in names}
        lines = {name.replace("_", " "): points for name, points in merged.items() if points}
        if lines:
            yield curve_panel(f"{part} per interaction", lines, x="interaction", y=part, unit=unit)
    moved = {way: group.merge(partial(q.bytes_of_client, direction=way)) for way in ("down", "up")}
    if any(moved.values()):
        yield bar_panel("logical bytes per client", moved, y="bytes", unit="bytes")
    seconds = group.merge(q.seconds_of_client)
    if seconds:
        text = "seconds of training per client"
        yield bar_panel(text, {"training": seconds}, y="seconds", unit="seconds")


def _views(group: SeedGroup) -> Iterator[tuple[str, str]]:
    for view in dict.fromkeys(view for run in group.runs for view in q.views_of(run)):
        yield view, view_name(view)


def _by_view(group: SeedGroup, quantity: ViewQuantity) -> dict[str, Mapping[int, Spread]]:
    merged = {name: group.merge(partial(quantity, view=view)) for view, name in _views(group)}
    return {name: values for name, values in merged.items() if values}
