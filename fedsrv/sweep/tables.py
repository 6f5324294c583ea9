"""What a sweep came to: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, pstdev

from fedmodels.files import replacing
from fedmodels.numerics.metric_names import metric, with_population
from fedsrv.sweep.figures import (
    Difference,
    Figures,
    Values,
    differences,
    unit_of,
    values_of,
    winners,
)
from fedsrv.sweep.plan import Cell

BOLD = "**{}**"
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}


@dataclass(frozen=True)
class Outcome:
    """The finished runs of a sweep, and what its tables show of them."""

    runs: Sequence[Figures]
    cells: Sequence[Cell]
    columns: Mapping[str, str]
    against: str
    seeds: int
    """How many there were meant to be of each row."""
    curves: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    """By setting; all of them 1 where a sweep has no lengths."""
    selected: str = ""
    """How many clients a cohort's figure is of; empty where that is all of them."""

    @cached_property
    def values(self) -> Mapping[str, Values]:
        """Every column by its heading."""
        return {heading: values_of(path, self.runs) for heading, path in self.columns.items()}

    @cached_property
    def differences(self) -> Mapping[str, Mapping[Cell, Difference]]:
        """Every column's differences to one row."""
        return {h: differences(v, self.against, self.cells) for h, v in self.values.items()}

    @cached_property
    def winners(self) -> Mapping[str, set[Cell]]:
        """The cells of each column that beat all others, where the column is a metric."""
        return {
            heading: winners(self.values[heading], self.cells, metric(name).better)
            for heading, path in self.columns.items()
            for table, _, name in [path.partition(".")]
            if table == "metrics"
        }

    @cached_property
    def headings(self) -> list[str]:
        """The columns' headings, with the clients of those that are not of all."""
        return [self.titled(heading, path) for heading, path in self.columns.items()]

    def titled(self, heading: str, path: str) -> str:
        """Return a column's heading, with its clients where they are not all."""
        table, _, name = path.partition(".")
        return with_population(name, self.selected, heading) if table == "metrics" else heading

    def rows(self, bold: str = "{}") -> Iterator[tuple[str, list[str]]]:
        """Yield title and cells of each row: mean ± population standard deviation over seeds.

        Args:
            bold: how a winner is written.
        """
        for cell in self.cells:
            count = sum(run.cell == cell for run in self.runs)
            note = "" if count == self.seeds else f" ({count} of {self.seeds} seeds)"
            yield f"{cell.title}{note}", [self.text(cell, h, bold) for h in self.columns]

    def text(self, cell: Cell, heading: str, bold: str = "{}") -> str:
        """Return one cell of the table."""
        found = list(self.values[heading].get(cell, {}).values())
        known = [value for value in found if value is not None]
        if not known or len(known) < len(found):
            return "–"
        path = self.columns[heading]
        mean, spread = (unit_of(path)[1].format(of(known)) for of in (fmean, pstdev))
        text = f"{mean} ± {spread}" if len(known) > 1 and path.startswith("metrics.") else mean
        return bold.format(text) if cell in self.winners.get(heading, ()) else text

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


def ladders(outcome: Outcome) -> Iterator[str]:
    """Yield a table per metric: every row against the length of its runs."""
    if len(set(outcome.lengths.values())) < 2:
        return
    rows = list(dict.fromkeys(cell.row for cell in outcome.cells))
    for heading, path in outcome.columns.items():
        if path.startswith("metrics."):
            lines = [
                (
                    row,
                    [
                        outcome.text(Cell(setting, row), heading, BOLD)
                        for setting in outcome.lengths
                    ],
                )
                for row in rows
            ]
            yield markdown(list(outcome.lengths), iter(lines), outcome.titled(heading, path))


def curve_means(outcome: Outcome, name: str) -> dict[Cell, dict[int, float]]:
    """Return a metric by round, counted from 1, in the unit of tables: means over all seeds.

    A row is left out where its runs were not scored after the same rounds.
    """
    factor, _ = unit_of(f"metrics.{name}")
    series = {
        cell: [_by_round(run.curves.get(name, ())) for run in outcome.runs if run.cell == cell]
        for cell in outcome.cells
    }
    return {
        cell: {at: factor * fmean(one[at] for one in found) for at in found[0]}
        for cell, found in series.items()
        if found and found[0] and all(one.keys() == found[0].keys() for one in found)
    }


def _by_round(curve: Sequence[float | None]) -> dict[int, float]:
    return {at: value for at, value in enumerate(curve, 1) if value is not None}


def curves(outcome: Outcome) -> Iterator[str]:
    """Yield a table per metric: means over seeds after each scored round, and over all these."""
    for heading, name in outcome.curves.items():
        means = curve_means(outcome, name)
        each, whole = ("{:.0f}", "{:.1f}") if metric(name).unit else ("{:.3f}", "{:.3f}")
        for rounds in sorted({tuple(line) for line in means.values()}):
            rows = [
                (cell.title, [*map(each.format, line.values()), whole.format(fmean(line.values()))])
                for cell, line in means.items()
                if tuple(line) == rounds
            ]
            corner = outcome.titled(heading, f"metrics.{name}")
            yield markdown([*map(str, rounds), "mean"], iter(rows), corner)


def page(outcome: Outcome) -> str:
    """Return all tables in Markdown: figures, ladders, differences, curves."""
    headings = outcome.headings
    parts = [markdown(headings, outcome.rows(BOLD)), *ladders(outcome)]
    compared = list(outcome.difference_rows())
    if any(outcome.winners.values()):
        parts.insert(1, "Bold: better than every other row of its setting; no interval has zero.\n")
    if compared:
        parts.append(
            f"Differences to {outcome.against} over the same seeds: mean [95 % interval by "
            "Student's t]. A star marks an interval without zero, uncorrected for many rows.\n"
        )
        parts.append(markdown(headings, iter(compared)))
    return "\n".join([*parts, *curves(outcome)])


def latex(outcome: Outcome) -> str:
    """Return the table of figures for LaTeX; it needs the package booktabs."""
    lines = [r"\begin{tabular}{l" + "r" * len(outcome.columns) + "}", r"\toprule"]
    lines.append(" & ".join(["", *map(_escaped, outcome.headings)]) + r" \\ \midrule")
    for title, cells in outcome.rows():
        lines.append(" & ".join(map(_escaped, [title, *cells])) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _escaped(text: str) -> str:
    escaped = "".join(LATEX.get(letter, letter) for letter in text)
    return escaped.replace("±", r"$\pm$").replace("–", "--")


def write_csv(outcome: Outcome, out: Path) -> None:
    """Write ``runs.csv``, a value a line, and ``differences.csv``, a comparison a line."""
    with replacing(out / "runs.csv") as path, path.open("w", encoding="utf-8", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["setting", "row", "seed", "column", "path", "value"])
        for heading, values in outcome.values.items():
            for cell, seeds in values.items():
                for seed, value in seeds.items():
                    facts = [cell.setting, cell.row, seed, heading, outcome.columns[heading]]
                    lines.writerow([*facts, "" if value is None else value])
    with (
        replacing(out / "differences.csv") as path,
        path.open("w", encoding="utf-8", newline="") as file,
    ):
        lines = csv.writer(file)
        lines.writerow(["setting", "row", "against", "column", "pairs", "mean", "low", "high"])
        for heading, found in outcome.differences.items():
            for cell, one in found.items():
                facts = [cell.setting, cell.row, outcome.against, heading, one.pairs]
                ends = ["" if math.isinf(one.low) else end for end in (one.low, one.high)]
                lines.writerow([*facts, one.mean, *ends])
