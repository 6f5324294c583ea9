"""The page ``report.html``: an answer, the runs' settings, then all figures, in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
import tomli_w

from fedsrv.report import panels
from fedsrv.report.comparison import TEST, Comparison, comparison
from fedsrv.report.panels import Panel
from fedsrv.report.run_record import SeedGroup
from fedsrv.report.story import story

TEMPLATE = Path(__file__).with_name("page.html.j2")
MOST_FIGURES = 6
"""Figures that are not folded away."""

MOST_NAMED = 4
"""Groups that a heading calls by name."""

CLASSES = (
    "Last accuracy on each class, by the model that was scored. Then a confusion matrix at the end "
    "of the run, over all clients' own test data: of each class (a row), the share that was taken "
    "for each class (a column). Runs that have not ended, and those of more than 100 classes, have "
    "no matrix."
)


@dataclass(frozen=True)
class Grid:
    """The figures of one group, or of all of them."""

    label: str
    """Empty where there is nothing to tell apart."""
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Section:
    """What one fold of a page holds."""

    title: str
    intro: str
    grids: Sequence[Grid]


def page(groups: Sequence[SeedGroup]) -> str:
    """Return the whole page about groups of runs."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        heading=_heading(groups),
        sentences=story(groups),
        headline=comparison(groups),
        everything=comparison(groups, everything=True),
        figures=list(panels.leading(groups))[:MOST_FIGURES],
        sections=[section for section in _sections(groups) if section.grids],
        settings=[
            (group.label, tomli_w.dumps(dict(group.runs[0].config)), group.runs[0].environment())
            for group in groups
        ],
        test=TEST,
        rows=_rows,
        zipped=zip,
    )


def _heading(groups: Sequence[SeedGroup]) -> str:
    if len(groups) == 1:
        return groups[0].runs[0].title()
    labels = [group.label for group in groups]
    last = {group.runs[0].title().partition(" on ")[2] for group in groups}
    if len(groups) > MOST_NAMED or len(last) > 1:
        return f"{len(groups)} experiments"
    return f"{', '.join(labels[:-1])} and {labels[-1]} on {last.pop()}"


def _rows(cells: Comparison) -> Iterator[tuple[str, list[tuple[str, bool]]]]:
    """Yield each quantity with its values, and whether a value is the winner's."""
    for name, values in cells.lines.items():
        yield name, [(value, cells.best.get(name) == index) for index, value in enumerate(values)]


def _sections(groups: Sequence[SeedGroup]) -> Iterator[Section]:
    yield Section(
        "Over rounds",
        "One line per experiment; a band is one standard deviation over its seeds.",
        [Grid("", found)] if (found := list(panels.over_rounds(groups))) else [],
    )
    for title, intro, panels_of in (
        (
            "Clients",
            "Last accuracy of every client, by the model that was scored.",
            panels.of_clients,
        ),
        ("Classes", CLASSES, panels.of_classes),
        (
            "Tasks",
            "Mean accuracy over the clients scored on a task, and on each task after each was "
            "learnt: what drops below the diagonal has been forgotten.",
            panels.of_tasks,
        ),
        ("Who helped whom", "Aggregation weights of the group's first run.", panels.of_weights),
        (
            "What clients drew",
            "Drawn by clients of the group's first run for themselves, where their directories lie "
            "in the run's: their test data among prototypes (two principal directions), images "
            "they replay.",
            panels.of_pictures,
        ),
        (
            "Cost",
            "Logical bytes are what the method defines; wire bytes are what crossed.",
            panels.of_cost,
        ),
    ):
        yield Section(title, intro, list(_grids(groups, panels_of)))


def _grids(
    groups: Sequence[SeedGroup], panels_of: Callable[[SeedGroup], Iterator[Panel]]
) -> Iterator[Grid]:
    for group in groups:
        found = list(panels_of(group))
        if found:
            yield Grid(group.label if len(groups) > 1 else "", found)
