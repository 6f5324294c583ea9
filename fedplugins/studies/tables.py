"""What a sweep came to as files: Markdown, LaTeX, CSV and charts."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from fedmodels.console.charts import Chart, Spread, document
from fedmodels.host.files import replacing, write_atomically
from fedplugins.studies.outcome import Outcome, unit_of
from fedplugins.studies.plan import Cell
from fedsrv.report import panels
from fedsrv.report.frame import FALSE_DISCOVERIES, Difference, known, spread_of

if TYPE_CHECKING:
    from fedsrv.report.page import Section


BOLD = "Bold: better than every other row of its setting in a paired test over seeds. "
OWN_RULE = "Each row chooses among the classes of its own method's rule."
DIFFERENCES = "Differences to {} over the same seeds: mean [95 % interval by Student's t]."
CORRECTED = (
    "{} of the {} intervals of scores leave out zero by themselves. A star marks the {} that stay "
    "at a rate of false discoveries of {:.0f} % among all of them (Benjamini and Hochberg), a star "
    "in brackets the others."
)


def _about(outcome: Outcome, base: str) -> str:
    """Return what stands above a table of differences; above the first, what holds for all."""
    found, said = outcome.compared, DIFFERENCES.format(base)
    if outcome.seeds == 1:
        return f"Differences to {base} with the same seed; one seed has no interval."
    if base != outcome.against:
        return said
    clear = [each for each in found if each.is_clear]
    stay = sum(each.p <= outcome.kept_up_to for each in clear)
    counts = CORRECTED.format(len(clear), len(found), stay, 100 * FALSE_DISCOVERIES)
    return f"{said} {counts}" if clear else said


def page(outcome: Outcome, *, pictured: bool = False) -> str:
    """Return the tables in Markdown: scores, ladders, differences, curves.

    With ``pictured``, ladders and curves are left to the picture (:func:`draw`), and rows without a
    clear difference are named.
    """
    parts = [outcome.table().markdown()]
    if outcome.paper:
        parts.append(f"{outcome.paper.caption}\n")
    elif outcome.winners:
        parts.append(f"{BOLD}{outcome.among or OWN_RULE}\n")
    parts += [f"{caption}\n" for caption in outcome.why_missing()]
    if outcome.fairness:
        parts.append(f"{outcome.fairness}\n")
    if not pictured:
        parts += [ladder.markdown() for ladder in outcome.ladders()]
    for base in outcome.differences:
        differences = outcome.difference_table(base, clear=pictured)
        if differences.rows or differences.captions:
            parts.append(f"{_about(outcome, base)}\n")
        if differences.rows:
            parts.append(replace(differences, captions=()).markdown())
        parts += [f"{caption}\n" for caption in differences.captions]
    curves = () if pictured else outcome.curve_tables()
    return "\n".join([*parts, *(table.markdown() for table in curves)])


def section_of(outcome: Outcome) -> Section:
    """Return the same tables, and the charts, for the page of the sweep."""
    from fedsrv.report.page import Section  # imports jinja: only when a page is wanted

    scores = outcome.table()
    if outcome.winners and not outcome.paper:
        scores = replace(scores, captions=[*scores.captions, f"{BOLD}{outcome.among or OWN_RULE}"])
    scores = replace(scores, captions=[*scores.captions, *outcome.why_missing()])
    told = [
        replace(outcome.difference_table(base), captions=[_about(outcome, base)])
        for base in outcome.differences
    ]
    tables = [scores, *outcome.ladders(), *(table for table in told if table.rows)]
    intro = "Means over seeds, with the standard deviation of metrics."
    return Section("The sweep's columns", intro, [("", [*charts_of(outcome)])], tables)


def write_csv(outcome: Outcome, out: Path) -> None:
    """Write ``runs.csv``, a value a line, ``differences.csv``, a comparison a line, and the table.

    ``table.csv`` has a line for each cell, with its sample standard deviation.
    """
    cells = (
        [cell.setting, cell.row, heading, len(found), fmean(found), *_deviation(found)]
        for cell in outcome.cells
        for heading, values in outcome.values.items()
        if (found := list(known(values.get(cell, {})).values()))
    )
    _write(out / "table.csv", "setting row column seeds mean deviation", cells)
    runs = (
        [cell.setting, cell.row, seed, heading, outcome.columns[heading], _or_blank(value)]
        for heading, values in outcome.values.items()
        for cell, seeds in values.items()
        for seed, value in seeds.items()
    )
    _write(out / "runs.csv", "setting row seed column path value", runs)
    compared = (
        [cell.setting, cell.row, base, heading, d.pairs, d.mean, *_ends(d), d.p]
        for base, by_heading in outcome.differences.items()
        for heading, found in by_heading.items()
        for cell, d in found.items()
    )
    _write(out / "differences.csv", "setting row against column pairs mean low high p", compared)


def _deviation(values: Sequence[float]) -> list[float | str]:
    return [stdev(values) if len(values) > 1 else ""]


def _write(place: Path, heads: str, lines: Iterable[Sequence[object]]) -> None:
    with replacing(place) as path, path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([heads.split(), *lines])


def _or_blank(value: float | None) -> float | str:
    return "" if value is None else value


def _ends(found: Difference) -> list[float | str]:
    return ["" if math.isinf(end) else end for end in (found.low, found.high)]


def draw(outcome: Outcome, path: Path) -> bool:
    """Write the charts of an outcome as SVG, with the same bytes for the same outcome.

    Returns:
        Whether there was anything to draw.
    """
    charts = [*charts_of(outcome)] if outcome.runs else []
    if charts:
        write_atomically(path, document(charts))
    return bool(charts)


def charts_of(outcome: Outcome) -> Iterator[Chart]:
    """Yield a chart of each metric against length, where lengths differ, and one of each curve.

    Where runs differ in length, a curve is of the longest ones.
    """
    longest = max(outcome.lengths.values(), default=1)
    sizes = {math.log2(n): f"×{n}" for n in sorted(set(outcome.lengths.values()))}
    for heading, path in outcome.columns.items() if len(sizes) > 1 else ():
        if path.startswith("metrics."):
            lines: dict[str, dict[float, Spread]] = {}
            for cell in outcome.cells:
                line = lines.setdefault(_line(cell, outcome), {})
                if found := list(known(outcome.values[heading].get(cell, {})).values()):
                    line[math.log2(outcome.lengths[cell.setting])] = _whole(path, found)
            unit = panels.unit_of(path.partition(".")[2])
            yield Chart(heading, "lines", lines, "length", "", unit, sizes)
    for heading, name in outcome.curves.items():
        lines = {_line(cell, outcome): {} for cell in outcome.cells}
        for cell, means in outcome.curve_means(name).items():
            if outcome.lengths.get(cell.setting, 1) == longest:
                path = f"metrics.{name}"
                lines[_line(cell, outcome)] = {at: _whole(path, [m]) for at, m in means.items()}
        yield Chart(heading, "lines", lines, "round", "", panels.unit_of(name))


def _whole(path: str, values: list[float]) -> Spread:
    """Return the spread of values as charts have them: a percentage is a part of one there."""
    return spread_of([value / unit_of(path)[0] for value in values])


def _line(cell: Cell, outcome: Outcome) -> str:
    """Return what a chart calls the cells that differ in their length alone."""
    lengths = len(set(outcome.lengths.values())) > 1
    setting = cell.setting.rpartition(", ")[0] if lengths else cell.setting
    return Cell(setting, cell.row).title
