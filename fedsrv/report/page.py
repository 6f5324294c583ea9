"""The page ``report.html``: sections of figures, in one file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import TYPE_CHECKING

from fedmodels.numerics.metric_names import VIEWS, metric
from fedsrv.report import quantities as q
from fedsrv.report.figures import Unit, bars, curves, heat_map
from fedsrv.report.run_record import RunRecord, SeedGroup, Spread

if TYPE_CHECKING:
    from fedsrv.report.comparison import Comparison

OPEN_GROUPS = 3
"""With more groups than this, the figures of each group are folded away."""

MATRICES = 4
"""Interactions, from the first to the last, whose weights between clients are drawn."""

COSTS: tuple[tuple[str, tuple[str, ...], Unit], ...] = (
    ("bytes", ("down", "up", "wire_down", "wire_up"), "bytes"),
    ("seconds", ("train", "server", "wall"), "seconds"),
)
"""What an interaction costs: entry of a row, its parts, and their unit."""

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --soft: #5b6670; --line: #dfe4e8; --paper: #f7f8f9; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .25rem; }
p { margin: 0 0 .75rem; color: var(--soft); max-width: 60rem; }
nav { margin-top: .5rem; }
nav a { color: #0072b2; margin-right: 1rem; text-decoration: none; }
nav a:hover, nav a:focus { text-decoration: underline; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; background: white; border: 1px solid var(--line);
  border-radius: .5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem; text-align: right; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--line); }
th[scope=row] { text-align: left; font-weight: 500; color: var(--soft); }
th small { display: block; font-weight: 400; color: var(--soft); }
td.best { font-weight: 700; }
.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr));
  gap: 1rem; margin: .5rem 0 1rem; }
figure { margin: 0; padding: .75rem; background: white; border: 1px solid var(--line);
  border-radius: .5rem; }
figure svg, figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: .85rem; color: var(--soft); text-align: center; padding-top: .25rem; }
summary { cursor: pointer; font-weight: 600; padding: .25rem 0; }
@media print { body { background: white; } details { break-inside: avoid; } }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{title}</h1><nav>{links}</nav></header>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Panel:
    """One figure, as an element of a page, and the words under it."""

    caption: str
    svg: str


PanelsOf = Callable[[SeedGroup], Iterator[Panel]]
CurveOf = Callable[[RunRecord], Mapping[int, float]]
ViewQuantity = Callable[..., Mapping[int, float]]


def page(groups: Sequence[SeedGroup], cells: Comparison) -> str:
    """Return the whole page about groups of runs."""
    sections = [
        ("Summary", "", _table(cells)),
        (
            "Over rounds",
            "One line per experiment; a band is one standard deviation over its seeds.",
            _grid(_curves(groups)),
        ),
        (
            "Clients",
            "Last accuracy of every client, by the model that was scored.",
            _per_group(groups, _client_panels),
        ),
        (
            "Tasks",
            "Mean accuracy over the clients scored on a task, and on each task after each was "
            "learnt: what drops below the diagonal has been forgotten.",
            _per_group(groups, _task_panels),
        ),
        (
            "Who helped whom",
            "Aggregation weights of the group's first run.",
            _per_group(groups, _weight_panels),
        ),
        (
            "What clients drew",
            "Drawn by clients of the group's first run for themselves, where their directories lie "
            "in the run's: their test data among prototypes (two principal directions), images "
            "they replay.",
            _per_group(groups, _client_pictures),
        ),
        (
            "Cost",
            "Logical bytes are what the method defines; wire bytes are what crossed.",
            _per_group(groups, _cost_panels),
        ),
    ]
    shown = [(title, intro, body) for title, intro, body in sections if body]
    heading = groups[0].runs[0].title() if len(groups) == 1 else f"{len(groups)} experiments"
    return _document(heading, shown)


def _document(heading: str, shown: Sequence[tuple[str, str, str]]) -> str:
    links = " ".join(f'<a href="#s{i}">{escape(t)}</a>' for i, (t, _, _) in enumerate(shown))
    body = "\n".join(
        f'<section id="s{i}"><h2>{escape(title)}</h2>'
        + (f"<p>{escape(intro)}</p>" if intro else "")
        + f"{content}</section>"
        for i, (title, intro, content) in enumerate(shown)
    )
    return PAGE.format(title=escape(heading), links=links, body=body, style=STYLE)


def _table(cells: Comparison) -> str:
    heads = "".join(
        f'<th scope="col">{escape(group)}<small>{escape(note)}</small></th>'
        for group, note in zip(cells.groups, cells.notes, strict=True)
    )
    lines = []
    for name, values in cells.lines.items():
        best = cells.best.get(name)
        row = "".join(
            f"<td{' class=best' if index == best else ''}>{escape(value)}</td>"
            for index, value in enumerate(values)
        )
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{row}</tr>')
    return (
        f'<div class="wide"><table><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _grid(panels: Iterator[Panel]) -> str:
    figures = "\n".join(
        f"<figure>{panel.svg}<figcaption>{escape(panel.caption)}</figcaption></figure>"
        for panel in panels
    )
    return f'<div class="grid">{figures}</div>' if figures else ""


def _per_group(groups: Sequence[SeedGroup], panels_of: PanelsOf) -> str:
    """Return one grid per group, named and foldable where there are several."""
    grids = {group.label: _grid(panels_of(group)) for group in groups}
    shown = {label: grid for label, grid in grids.items() if grid}
    if len(groups) == 1:
        return "".join(shown.values())
    state = "" if len(shown) > OPEN_GROUPS else " open"
    return "".join(
        f"<details{state}><summary>{escape(label)}</summary>{grid}</details>"
        for label, grid in shown.items()
    )


def _curves(groups: Sequence[SeedGroup]) -> Iterator[Panel]:
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
        merged = {group.label: group.merge(quantity) for group in groups}
        lines = {label: points for label, points in merged.items() if points}
        if lines:
            unit: Unit = "percent" if percent else ""
            yield Panel(name, curves(lines, x="round", y=name, unit=unit))


def _client_panels(group: SeedGroup) -> Iterator[Panel]:
    series = _by_view(group, q.client_accuracy)
    if series:
        yield Panel("last accuracy per client", bars(series, y="accuracy", unit="percent"))


def _task_panels(group: SeedGroup) -> Iterator[Panel]:
    for view, name in _views(group):
        scored = group.merge(partial(q.task_accuracy, view=view))
        tasks = sorted({task for _, task in scored})
        if tasks:
            lines = {
                f"task {task}": {at: s for (at, k), s in scored.items() if k == task}
                for task in tasks
            }
            svg = curves(lines, x="interaction", y="accuracy", unit="percent")
            yield Panel(f"accuracy per task, {name}", svg)
        matrix = group.merge(partial(q.forgetting_matrix, view=view))
        if len(tasks) > 1 and len({learnt for learnt, _ in matrix}) > 1:
            cells = {key: spread.mean for key, spread in matrix.items()}
            svg = heat_map(cells, x="accuracy on task", y="after learning task", unit="percent")
            yield Panel(f"forgetting, {name}", svg)


def _weight_panels(group: SeedGroup) -> Iterator[Panel]:
    matrices = q.weight_matrices(group.runs[0])
    times = sorted(matrices)
    shown = {times[i * (len(times) - 1) // (MATRICES - 1)] for i in range(MATRICES) if times}
    for at in sorted(shown):
        svg = heat_map(matrices[at], x="contributing client", y="receiving client")
        yield Panel(f"aggregation weights, interaction {at}", svg)
    own = {(i, at): w for at in times for (i, j), w in matrices[at].items() if i == j}
    if len(times) > 1 and own:
        svg = heat_map(own, x="interaction", y="client")
        yield Panel("weight of a client's own model", svg)
    vectors = q.weight_vectors(group.runs[0])
    if vectors:
        turned = {(client, at): weight for (at, client), weight in vectors.items()}
        yield Panel("aggregation weights", heat_map(turned, x="interaction", y="client"))


def _client_pictures(group: SeedGroup) -> Iterator[Panel]:
    for client, path in group.runs[0].pictures():
        data = base64.b64encode(path.read_bytes()).decode()
        caption = f"{path.stem} of client {client}"
        yield Panel(caption, f'<img alt="{escape(caption)}" src="data:image/png;base64,{data}">')


def _cost_panels(group: SeedGroup) -> Iterator[Panel]:
    for part, names, unit in COSTS:
        merged = {name: group.merge(partial(q.spent, part=part, name=name)) for name in names}
        lines = {name.replace("_", " "): points for name, points in merged.items() if points}
        if lines:
            svg = curves(lines, x="interaction", y=part, unit=unit)
            yield Panel(f"{part} per interaction", svg)
    moved = {way: group.merge(partial(q.bytes_of_client, direction=way)) for way in ("down", "up")}
    if any(moved.values()):
        yield Panel("logical bytes per client", bars(moved, y="bytes", unit="bytes"))
    seconds = group.merge(q.seconds_of_client)
    if seconds:
        svg = bars({"training": seconds}, y="seconds", unit="seconds")
        yield Panel("seconds of training per client", svg)


def view_name(view: str) -> str:
    """Return how a page calls a view; ``global:nearest`` is one scored by a rule of its own."""
    model, _, rule = view.partition(":")
    name = VIEWS[model].title if model in VIEWS else model
    return f"{name}, {rule}" if rule else name


def _views(group: SeedGroup) -> Iterator[tuple[str, str]]:
    for view in dict.fromkeys(view for run in group.runs for view in q.views_of(run)):
        yield view, view_name(view)


def _by_view(group: SeedGroup, quantity: ViewQuantity) -> dict[str, Mapping[int, Spread]]:
    merged = {name: group.merge(partial(quantity, view=view)) for view, name in _views(group)}
    return {name: values for name, values in merged.items() if values}
