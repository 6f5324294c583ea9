"""A paper's table as text: the paper's figure, ours or nothing, and how long our runs were.

Means of one line are over the seeds that all its cells have; their number stands behind each.
A difference is over the seeds that its two cells have: where these are more, theirs does, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from statistics import fmean

from benchmarks.papers.size import Size, counted, share, size_of
from benchmarks.papers.table import ROOT, Beside, Shown
from benchmarks.papers.table import Cell as PapersCell
from fedmodels.config.experiment import Experiment
from fedmodels.facts.config_file import parse_experiment
from fedplugins.studies.outcome import Outcome, read_record, values_of
from fedplugins.studies.plan import Cell, Sweep, plan
from fedsrv.report.frame import Difference, Seeds, difference, known

RECORDS, STUDIES = ROOT / "benchmarks" / "records", ROOT / "benchmarks" / "studies"
NONE, PICTURE, UNSCORED = "–", "picture", "no such model"


@cache
def record_of(study: str) -> Outcome | None:
    """Return a study's record; None where it has none yet."""
    file = RECORDS / f"{study}.json"
    return read_record(file) if file.exists() else None


@cache
def experiments_of(study: str) -> dict[Cell, Experiment]:
    """Return the experiments of a study's first seed by setting and row."""
    sweep = Sweep.read(STUDIES / f"{study}.toml")
    preset = sweep.preset if sweep.preset.exists() else ROOT / sweep.preset
    sweep = sweep.model_copy(update={"preset": preset})
    runs = plan(sweep, Path("runs"), list(sweep.methods), sweep.seeds[:1])
    return {run.cell: parse_experiment(run.config, run.cell.row) for run in runs}


def size_beside(shown: Shown, one: Beside) -> tuple[Size, Size]:
    """Return how much a client trained in recorded runs, and in those of the paper's column."""
    row, recorded = next(iter(one.rows.items()))
    ours = experiments_of(one.study)[Cell(one.setting, recorded)]
    return size_of(ours), size_of(shown.experiment(row, one.of))


def in_words(ours: Size, theirs: Size) -> str:
    """Return the part of the paper's steps and examples in a few words."""
    steps, examples = share(ours.steps, theirs.steps), share(ours.examples, theirs.examples)
    if steps is None or examples is None:
        return f"{percent(ours.passes / theirs.passes)} of the paper's passes over a client's data"
    return f"{percent(steps)} of the paper's steps, {percent(examples)} of its examples"


def percent(part: float) -> str:
    """Return a part with two digits at most, ``0.37 %``."""
    value = 100 * part
    places = 0 if value >= 1 else min(4, 1 - math.floor(math.log10(value))) if value else 0
    return f"{value:.{places}f} %"


def ours(one: Beside, shown: Shown, row: str, score: str) -> dict[int, float]:
    """Return a recorded figure by seed; nothing where there is none."""
    outcome = record_of(one.study)
    if outcome is None or row not in one.rows:
        return {}
    path = one.scores.get(score) or shown.table.scores[score].path(row)
    if path not in outcome.columns.values():
        return {}
    return known(values_of(path, outcome.runs).get(Cell(one.setting, one.rows[row]), {}))


def mean_of(found: Seeds[int], common: Set[int]) -> str:
    """Return the mean over these seeds and their number, ``90.19 (1)``."""
    values = [value for seed, value in known(found).items() if seed in common]
    return f"{fmean(values):.2f} ({len(values)})" if values else NONE


def interval(found: Difference | None) -> str:
    """Return a difference and its interval with one digit, ``+3.4 [+0.8, +5.9]``."""
    if found is None:
        return NONE
    mean, low, high = (f"{v:+.1f}".replace("-", "−") for v in (found.mean, found.low, found.high))
    return mean if found.pairs < 2 else f"{mean} [{low}, {high}]"


def text_of(shown: Shown) -> str:
    """Return a table: the paper's cells, ours where they ran, then the runs beside them."""
    table = shown.table
    lines = [f"{shown.paper}, {shown.name.replace('-', ' ')}: {table.title}", table.shows]
    if table.command:
        lines.append(f"Shown by: {table.command}")
    if table.curve:
        lines.append(f"By round: {table.curve} of rounds.jsonl; below is its last value.")
    if len(cells := list(_cells(shown))) > 1:
        lines += ["", "paper | here", *_grid(iter(cells))]
    if missing := not_run(shown):
        lines += ["", in_short(missing, f"{shown.paper}/{shown.name}")]
    for one in table.beside:
        if seeds_of(one):
            lines += ["", f"{one.heading}: {_about(shown, one)}", *_grid(_beside(shown, one))]
    return "\n".join([*lines, ""])


def _about(shown: Shown, one: Beside) -> str:
    share = in_words(*size_beside(shown, one))
    return f"study {one.study}, {seeds_of(one)}, {share} ({one.of})"


def seeds_of(one: Beside) -> str:
    """Return the seeds of the recorded rows, or how many a row has where they differ.

    Empty where no row was run.
    """
    outcome = record_of(one.study)
    shown = {Cell(one.setting, row) for row in one.rows.values()}
    seeds: dict[Cell, list[str]] = {}
    for run in outcome.runs if outcome else ():
        if run.row in shown:
            seeds.setdefault(run.row, []).append(str(run.seed))
    counts = sorted({len(found) for found in seeds.values()})
    if len(counts) > 1:
        return f"{counts[0]} to {counts[-1]} seeds"
    return next((f"seeds {', '.join(found)}" for found in seeds.values()), "")


def not_run(shown: Shown) -> int:
    """Return how many cells have neither a run nor a count here."""
    found = (_here(shown, one.row, one.setting, one.score) for one in shown.cells())
    return sum(here is None for here in found)


def in_short(missing: int, name: str) -> str:
    """Return how many cells were not run, and the command that writes their configs."""
    how = f"python -m benchmarks.papers {name} --configs DIR".replace("  ", " ")
    return f"{missing} cells not run; `{how}` writes their configs, `fedsrv launch` runs one"


def _cells(shown: Shown) -> Iterator[list[str]]:
    """Yield the lines of the paper's grid: a line for each column of the paper.

    A cell that was not run has the paper's figure alone; a line of pictures that were not is left
    out.
    """
    table, cells = shown.table, {(c.row, c.setting, c.score): c for c in shown.cells()}
    yield ["", *table.rows]
    for setting in table.settings:
        for score in table.scores:
            line = [f"{setting}, {score}" if len(table.scores) > 1 else setting]
            for row in table.rows:
                if (row, setting, score) not in cells:
                    line.append(NONE)
                    continue
                said = _said(cells[row, setting, score])
                here = _here(shown, row, setting, score)
                line.append(said if here is None else f"{said} | {here}")
            if {*line[1:]} - {PICTURE, NONE}:
                yield line


def _here(shown: Shown, row: str, setting: str, score: str) -> str | None:
    """Return our figure of a cell: a mean over seeds, or a count; None where it was not run."""
    if score in shown.table.unscored.get(row, ()):
        return UNSCORED
    own = {one.of: one for one in shown.table.beside if one.is_cell}
    if setting in own and (found := ours(own[setting], shown, row, score)):
        return mean_of(found, found.keys())
    return _counted(shown, row, setting, score)


def _counted(shown: Shown, row: str, setting: str, score: str) -> str | None:
    """Return a count of a cell that was not run, relative to a row where the paper's is."""
    what, of = shown.table.scores[score].counted, shown.table.scores[score].of
    if not what:
        return None
    count = counted(shown.experiment(row, setting), what)
    if of in ("", row):
        return f"{count:,} counted"
    return f"{count / counted(shown.experiment(of, setting), what):.2f} counted"


def _said(cell: PapersCell) -> str:
    if cell.paper is None or math.isnan(cell.paper):
        return PICTURE if cell.paper is None else NONE
    return f"{cell.paper:.2f} ± {cell.spread}" if cell.spread else f"{cell.paper:.2f}"


def _beside(shown: Shown, one: Beside) -> Iterator[list[str]]:
    """Yield a line of means for each score, and one of differences to the study's own row."""
    table, outcome = shown.table, record_of(one.study)
    rows = [row for row in table.rows if row in one.rows]
    against = outcome.against if outcome else ""
    base = next((row for row in rows if one.rows[row] == against), rows[0])
    yield ["", *rows]
    for score in table.scores:
        found = {row: ours(one, shown, row, score) for row in rows}
        run = [seeds.keys() for seeds in found.values() if seeds]
        if not run:
            continue
        common = set(run[0]).intersection(*run[1:])
        yield [score, *(mean_of(found[row], common) for row in rows)]
        if len(run) > 1 and found[base]:
            apart = {row: difference(found[row], found[base]) for row in rows if row != base}
            yield [f"− {base}", *(_pairs(apart.get(row), len(common)) for row in rows)]


def _pairs(found: Difference | None, seeds: int) -> str:
    """Return a difference, and the number of its pairs where means are over another one."""
    text = interval(found)
    return text if found is None or found.pairs == seeds else f"{text} ({found.pairs})"


def _grid(lines: Iterator[list[str]]) -> list[str]:
    """Return lines of cells in columns."""
    listed = list(lines)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in listed
    ]
