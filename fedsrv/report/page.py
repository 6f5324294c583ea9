"""The page ``report.html``: an answer, the runs' settings, then all charts, in one file."""

from __future__ import annotations

import base64
import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from urllib.parse import quote

import jinja2
import tomli_w

from fedmodels.console.charts import CSS, Chart, document, svg
from fedsrv.report import panels
from fedsrv.report.comparison import comparison, one_column
from fedsrv.report.frame import SeedGroup, group_runs
from fedsrv.report.sites import sites_table
from fedsrv.report.story import story
from fedsrv.report.table import Table
from fedsrv.state.run_record import RunRecord

MAX_CHARTS = 6
"""Charts that are not folded away."""

MAX_COLUMNS = 6
"""Groups that are columns of the first table; more are its rows."""

MAX_LETTERS = 16
"""Letters of a fact about a machine; so many of a commit's hash tell it from others."""

MAX_NAMED = 4
"""Groups that a heading calls by name."""

CLASSES = (
    "Last accuracy on each class, by the model that was scored. Then a confusion matrix at the end "
    "of the run, over all clients' own test data: of each class (a row), the share that was taken "
    "for each class (a column). Runs that have not ended, and those of more than 100 classes, have "
    "no matrix."
)
PICTURES = (
    "Drawn by clients of the group's first run, if their directories are in the run's: "
    "their test data among prototypes, images they replay."
)
TASKS = (
    "Mean accuracy over the clients scored on a task, and on each task after each was learnt: what "
    "drops below the diagonal has been forgotten."
)


@dataclass(frozen=True)
class Picture:
    """What a client drew, as a ``data:`` address."""

    caption: str
    address: str


PanelsOf = Callable[[SeedGroup], Iterator[Chart | Picture]]
Panels = Sequence[Chart | Picture]


@dataclass(frozen=True)
class Section:
    """What one fold of a page holds."""

    title: str
    intro: str
    grids: Sequence[tuple[str, Panels]]
    """Charts of each group with its label; no label where there is nothing to tell apart."""
    tables: Sequence[Table] = ()


def page(groups: Sequence[SeedGroup], further: Sequence[Section] = ()) -> str:
    """Return the whole page about groups of runs.

    ``further`` are sections beside those of the runs, such as the tables of a sweep.
    """
    headline = comparison(groups)
    labels = [group.label for group in groups]
    machines = [_facts(group.runs[0].environment()) for group in groups]
    return template(Path(__file__).with_name("page.html.j2")).render(
        heading=_heading(groups),
        sentences=story(groups),
        headline=headline.turned() if len(groups) > MAX_COLUMNS else headline,
        sites=sites_table(groups),
        everything=comparison(groups, everything=True),
        charts=panels.telling(panels.with_moments(panels.leading(groups), groups))[:MAX_CHARTS],
        further=further,
        sections=[section for section in _sections(groups) if section.grids],
        machines={} if len({*machines}) == 1 else dict(zip(labels, machines, strict=True)),
        machine=machines[0],
        configs={group.label: tomli_w.dumps(dict(group.runs[0].config)) for group in groups},
    )


def cell(run: RunRecord) -> str:
    """Return a run as a notebook shows it: its numbers, and the charts as one image."""
    groups = group_runs([run])
    charts = panels.telling(panels.with_moments(panels.leading(groups), groups))[:MAX_CHARTS]
    data = base64.b64encode(document(charts).encode()).decode() if charts else ""
    return template(Path(__file__).with_name("cell.html.j2")).render(
        title=f"{run.title()}: {run.extent}",
        table=one_column(run, everything=False),
        drawing=f"data:image/svg+xml;base64,{data}" if data else "",
    )


def _facts(machine: Mapping[str, str | int]) -> str:
    """Return what a run says of its machine as one line."""
    facts = (f"{key} {str(value)[:MAX_LETTERS]}" for key, value in machine.items())
    return ", ".join(facts) or "no env.json says on which machine it ran"


def template(path: Path) -> jinja2.Template:
    """Return a template. It may use the parts in this room, and escapes what comes from a run."""
    environment = jinja2.Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader([path.parent, Path(__file__).parent]),
    )
    environment.globals.update(svg=svg, css=CSS, csv=csv_of)
    return environment.get_template(path.name)


def csv_of(chart: Chart) -> str:
    """Return a chart's numbers as the address of a CSV file: six digits, and whole numbers all."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerows([*map(_short, line)] for line in chart.table())
    return f"data:text/csv;charset=utf-8,{quote(text.getvalue(), safe=',()=:')}"


def _short(value: object) -> object:
    is_short = not isinstance(value, float) or value.is_integer()
    return value if is_short else float(f"{value:.6g}")


def _heading(groups: Sequence[SeedGroup]) -> str:
    if len(groups) == 1:
        return groups[0].runs[0].title()
    labels = [group.label for group in groups]
    last = {group.runs[0].title().partition(" on ")[2] for group in groups}
    if len(groups) > MAX_NAMED or len(last) > 1:
        return f"{len(groups)} experiments"
    return f"{', '.join(labels[:-1])} and {labels[-1]} on {last.pop()}"


def _sections(groups: Sequence[SeedGroup]) -> Iterator[Section]:
    over_rounds = panels.with_moments(panels.over_rounds(groups), groups)
    found = panels.telling(chain(over_rounds, panels.after_tasks(groups)))
    intro = "One line per experiment; a band is one standard deviation over its seeds."
    yield Section("Over rounds", intro, [("", found)] if found else [])
    sections: list[tuple[str, str, PanelsOf]] = [
        ("Clients", "Last accuracy of every client, by the scored model.", panels.of_clients),
        ("Classes", CLASSES, panels.of_classes),
        ("Tasks", TASKS, panels.of_tasks),
        ("Who helped whom", "Aggregation weights of the group's first run.", panels.of_weights),
        ("What clients drew", PICTURES, _pictures),
        (
            "Cost",
            "Logical bytes are what the method defines; wire bytes are what crossed.",
            panels.of_cost,
        ),
    ]
    for title, intro, panels_of in sections:
        grids = [
            (group.label if len(groups) > 1 else "", shown)
            for group in groups
            if (shown := [p for p in panels_of(group) if isinstance(p, Picture) or p.is_telling])
        ]
        yield Section(title, intro, grids)


def _pictures(group: SeedGroup) -> Iterator[Picture]:
    """Yield what clients of the group's first run drew."""
    run = group.runs[0]
    for name, client, address in run.pictures():
        yield Picture(f"{name} of client {run.client_names.get(client, client)}", address)
