"""What a sweep came to: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev

from fedmodels.numerics.metric_names import find
from fedsrv.sweep.figures import Difference, Values, differences, rounds_of, unit_of, values_of
from fedsrv.sweep.plan import Cell, PlannedRun

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


@dataclass(frozen=True)
class Outcome:
    """The finished runs of a sweep, and what its tables show of them."""

    runs: Sequence[PlannedRun]
    cells: Sequence[Cell]
    columns: Mapping[str, str]
    against: str
    seeds: int
    """How many there were meant to be of each row."""

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """Every column by its heading."""
        return {heading: values_of(path, self.runs) for heading, path in self.columns.items()}

    @cached_property
    def differences(self) -> Mapping[str, Mapping[Cell, Difference]]:
        """Every column's differences to one row."""
        return {h: differences(v, self.against, self.cells) for h, v in self.values.items()}

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """Yield title and cells of each row: mean ± population standard deviation over seeds."""
        for cell in self.cells:
            count = sum(run.cell == cell for run in self.runs)
            note = "" if count == self.seeds else f" ({count} of {self.seeds} seeds)"
            yield f"{cell.title}{note}", [self._spread(cell, heading) for heading in self.columns]

    def _spread(self, cell: Cell, heading: str) -> str:
        found = list(self.values[heading].get(cell, {}).values())
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return "–"
        path = self.columns[heading]
        mean, spread = (unit_of(path)[1].format(of(known)) for of in (fmean, pstdev))
        return f"{mean} ± {spread}" if len(known) > 1 and path.startswith("metrics.") else mean

    def difference_rows(self) -> Iterator[tuple[str, list[str]]]:
        """Yield title and cells of each row that was compared."""
        for cell in self.cells:
            found = [self.differences[heading].get(cell) for heading in self.columns]
            if any(found):
                forms = [unit_of(path)[1] for path in self.columns.values()]
                yield cell.title, list(map(_interval, found, forms))


def _interval(found: Difference | None, form: str) -> str:
    """Return a difference with its interval, marked where zero lies outside of it."""
    if found is None:
        return "–"
    signed = form.replace("{:", "{:+z")
    mean = signed.format(found.mean)
    if math.isinf(found.low):
        return mean
    low, high = signed.format(found.low), signed.format(found.high)
    return f"{mean} [{low}, {high}]{' *' if found.is_clear else ''}"


def markdown(
    headings: Sequence[str], rows: Iterator[tuple[str, list[str]]], corner: str = ""
) -> str:
    """Return a table in Markdown."""
    lines = [f"| {corner + ' ' if corner else ''}| " + " | ".join(headings) + " |"]
    lines.append("|---" * (len(headings) + 1) + "|")
    lines += [f"| {title} | " + " | ".join(cells) + " |" for title, cells in rows]
    return "\n".join(lines) + "\n"


def curves(headings: Mapping[str, str], outcome: Outcome) -> Iterator[str]:
    """Yield a table per metric: its means over seeds after each round, and over all rounds."""
    for heading, metric in headings.items():
        series = {
            cell: [[100 * value for r in rounds_of(run.directory)
                    if (value := find(r["metrics"], metric)) is not None]
                   for run in outcome.runs if run.cell == cell]
            for cell in outcome.cells
        }  # fmt: skip
        length = max((len(one) for found in series.values() for one in found), default=0)
        rows = list[tuple[str, list[str]]]()
        for cell, found in series.items():
            if found and all(len(one) == length for one in found):
                means = [fmean(values) for values in zip(*found, strict=True)]
                rows.append((cell.title, [*(f"{m:.0f}" for m in means), f"{fmean(means):.1f}"]))
        yield markdown([*map(str, range(1, length + 1)), "mean"], iter(rows), heading)


def page(outcome: Outcome, shown: Mapping[str, str]) -> str:
    """Return all tables in Markdown: figures, differences, curves."""
    headings = list(outcome.columns)
    parts = [markdown(headings, outcome.rows())]
    compared = list(outcome.difference_rows())
    if compared:
        parts.append(
            f"Differences to {outcome.against} over the same seeds: mean [95 % interval by "
            "Student's t]. A star marks an interval without zero, uncorrected for many rows.\n"
        )
        parts.append(markdown(headings, iter(compared)))
    return "\n".join([*parts, *curves(shown, outcome)])


def latex(outcome: Outcome) -> str:
    """Return the table of figures for LaTeX; it needs the package booktabs."""
    lines = [r"\begin{tabular}{l" + "r" * len(outcome.columns) + "}", r"\toprule"]
    lines.append(" & ".join(["", *map(_escaped, outcome.columns)]) + r" \\ \midrule")
    for title, cells in outcome.rows():
        lines.append(" & ".join(map(_escaped, [title, *cells])) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    escaped = "".join(LATEX.get(letter, letter) for letter in text)
    return escaped.replace("±", r"$\pm$").replace("–", "--")


def write_csv(outcome: Outcome, out: Path) -> None:
    """Write ``runs.csv``, a value a line, and ``differences.csv``, a comparison a line."""
    with (out / "runs.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["setting", "row", "seed", "column", "path", "value"])
        for heading, values in outcome.values.items():
            for cell, seeds in values.items():
                for seed, value in seeds.items():
                    facts = [cell.setting, cell.row, seed, heading, outcome.columns[heading]]
                    lines.writerow([*facts, "" if value is None else value])
    with (out / "differences.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["setting", "row", "against", "column", "pairs", "mean", "low", "high"])
        for heading, found in outcome.differences.items():
            for cell, one in found.items():
                facts = [cell.setting, cell.row, outcome.against, heading, one.pairs]
                ends = ["" if math.isinf(one.low) else end for end in (one.low, one.high)]
                lines.writerow([*facts, one.mean, *ends])
