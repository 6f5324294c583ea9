"""The column of pages of results that says how long our runs were beside the paper's.

It is computed from the configs of the studies that a line names. Below a tenth of the paper's
steps nothing is refuted but "at this length", and the line has to say so.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import chain

from benchmarks.papers.page import experiments_of, percent
from benchmarks.papers.size import Size, share, size_of
from benchmarks.papers.table import HERE, Shown, tables_of

HEADING = "of the paper's steps, examples"
ENOUGH = 0.1
"""Part of the paper's steps that all runs of a line need, for it to refute without more words."""
STUDY = re.compile(r"\[`([\w-]+)`\]")
REFUTED = re.compile(r"\b([Rr]efuted)(?!\s+at\s+this\s+length)\b")


@cache
def papers_cells() -> dict[str, tuple[str, str, str]]:
    """Return by study the table, row and column of a paper that it stands beside."""
    found = tomllib.loads((HERE / "studies.toml").read_text("utf-8"))
    return {study: (one["table"], one["row"], one["column"]) for study, one in found.items()}


@cache
def _tables() -> dict[str, Shown]:
    return {f"{table.paper}/{table.name}": table for table in tables_of()}


def shares(study: str) -> tuple[list[float], list[float]]:
    """Return the parts of the paper's steps and examples in each setting of a study, ascending.

    Passes over a client's data stand for both where a client's windows are not known.
    """
    table, row, column = papers_cells()[study]
    theirs = size_of(_tables()[table].experiment(row, column))
    settings: dict[str, Size] = {}
    for cell, experiment in experiments_of(study).items():
        if not experiment.method.pools_data:
            settings.setdefault(cell.setting, size_of(experiment))
    steps, examples = [], []
    for ours in settings.values():
        passes = ours.passes / theirs.passes
        steps.append(share(ours.steps, theirs.steps) or passes)
        examples.append(share(ours.examples, theirs.examples) or passes)
    return sorted(steps), sorted(examples)


def in_a_cell(studies: list[str]) -> str:
    """Return what stands in the column for the studies that a line names."""
    both = zip(*map(shares, studies), strict=True)
    return ", ".join(_range(sorted(chain.from_iterable(parts))) for parts in both)


def _range(parts: list[float]) -> str:
    low, high = percent(parts[0]), percent(parts[-1])
    return high if low == high else f"{low.removesuffix(' %')} to {high}"


def rendered(text: str) -> str:
    """Return a page with the column made anew, and every verdict with its size."""
    return "\n".join(_lines(text.split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    place = -1
    for line in lines:
        cells = line.split("|")
        if not line.startswith("|"):
            place = -1
        elif any(cell.strip() == HEADING for cell in cells):
            place = [cell.strip() for cell in cells].index(HEADING)
        elif place > 0 and (named := STUDY.findall(line)):
            cells[place] = f" {in_a_cell(list(dict.fromkeys(named)))} "
            line = "|".join(cells)
            if min(shares(study)[0][0] for study in named) < ENOUGH:
                line = REFUTED.sub(r"\1 at this length", line)
        yield line
