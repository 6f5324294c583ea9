"""What a sweep came to: the numbers of its finished runs, and what its tables show of them.

The outcome as small JSON, from which tables and pictures can be made again::

    {"format": 1, "columns": …, "curves": …, "against": …, "seeds": …, "lengths": …,
     "beside": …, "selected": …, "cells": [[setting, row], …], "environments": [{…}, …],
     "runs": [{"setting", "row", "seed", "environment", "values": {…}, "curves": {…}}, …]}

A run names its environment (versions and commit) by its place in the list. Numbers have six digits.
A curve has an entry for each round, null where a round was not scored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from fedmodels.errors import ArchiveError, ConfigError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.numerics.metric_tables import metric, with_population
from fedplugins.studies.fairness import fairness
from fedplugins.studies.plan import Cell, PlannedRun, Sweep
from fedsrv.report.comparison import who_chooses, why_missing
from fedsrv.report.frame import (
    Difference,
    RunNumbers,
    column,
    difference,
    kept_up_to,
    known,
    spread_of,
    winner,
)
from fedsrv.report.table import Name, Table
from fedsrv.state.run_record import RunRecord, read_run

UNITS = {
    "bytes": (1e-6, "{:.1f}"),
    "compute": (1e-6, "{:.0f}"),
    "seconds": (1, "{:.0f}"),
    "metrics": (100, "{:.2f}"),
    "clients": (1, "{:.1f}"),
}
"""Factor and format of a column, by the table it is read from."""


_Rows = Mapping[Cell, Mapping[Any, float | None]]


def unit_of(path: str) -> tuple[float, str]:
    """Return factor and format of a column."""
    table, _, name = path.partition(".")
    if table == "metrics" and not metric(name).unit:
        return 1, "{:.3f}"
    if table == "clients" and metric(name).unit:
        return UNITS["metrics"]
    return UNITS.get(table, (1, "{:.3f}"))


def values_of(path: str, runs: Sequence[RunNumbers]) -> Mapping[Any, Mapping[Any, float | None]]:
    """Return one column by cell and seed, in the unit that tables show."""
    return column(runs, path, unit_of(path)[0])


def read_numbers(run: PlannedRun, columns: Sequence[str], curves: Sequence[str]) -> RunNumbers:
    """Read what tables show of a finished run; ArchiveError if one of its files is damaged."""
    record = read_run(run.directory)
    if not record.rows:
        raise ArchiveError(f"{run.directory / 'rounds.jsonl'} holds no interaction")
    tables = tables_of(record)
    return RunNumbers(
        run.cell,
        run.seed,
        {path: _number(tables, path) for path in columns},
        {name: _curve(record, name) for name in curves},
        record.environment(),
    )


def tables_of(run: RunRecord) -> dict[str, Mapping[str, Any]]:
    """Return the tables of a run's summary, and the means over its clients in the last row."""
    found = {key: value for key, value in run.summary.items() if isinstance(value, Mapping)}
    rows = [row for client, row in run.rows[-1].get("clients", {}).items() if client.isdigit()]
    names = {key for row in rows for key, value in row.items() if isinstance(value, int | float)}
    means = {name: fmean(row[name] for row in rows if name in row) for name in names}
    return {**found, "clients": means}


def _number(tables: Mapping[str, Mapping[str, Any]], path: str) -> float | None:
    table, _, name = path.partition(".")
    value = tables.get(table, {}).get(name)
    return value if isinstance(value, int | float) else None


def _curve(run: RunRecord, name: str) -> list[float | None]:
    """Return a metric after each round, up to the last one that has it."""
    found = run.curve(lambda row: row.get("metrics", {}).get(name))
    return [found.get(at) for at in range(1, 1 + max(found, default=0))]


@dataclass(frozen=True)
class ForPapers:
    """What the tables of a sweep's directory say beyond those that a record gives again."""

    extent: str
    """Seeds and rounds, in words."""
    least: Mapping[tuple[Cell, str], float]
    """By cell and path: what an accuracy has to be better than, in the unit of tables."""

    @property
    def caption(self) -> str:
        """Return what stands with the table."""
        what, best = "Mean ± sample standard deviation over", "best mean"
        if self.extent.startswith("1 seed "):
            what, best = "Values of", "best value"
        return (
            f"{what} {self.extent}. Bold: the {best} of its "
            "setting, unless it is an accuracy no better than chance or the most frequent class. "
            "Whether a difference may be chance: differences.csv."
        )


@dataclass(frozen=True)
class Outcome:
    """The finished runs of a sweep, and what its tables show of them."""

    runs: Sequence[RunNumbers]
    cells: Sequence[Cell]
    columns: Mapping[str, str]
    against: str
    seeds: int
    """How many runs of each row were planned."""
    curves: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    """The length of each setting; 1 where a sweep has no lengths."""
    selected: str = ""
    """How many clients a cohort's metric is a mean over, in words; empty if all clients."""
    fairness: str = ""
    """In what rows differ beside their methods, and why; empty where a sweep does not say."""
    among: str = ""
    """Among which classes rows choose; empty where their runs do not say."""
    paper: ForPapers | None = None
    beside: Sequence[str] = ()
    """Further rows that others are compared with."""

    def titled(self, heading: str, path: str) -> str:
        """Return a column's heading, with its clients where they are not all."""
        table, _, name = path.partition(".")
        return with_population(name, self.selected, heading) if table == "metrics" else heading

    @property
    def headings(self) -> list[str]:
        """Return the columns' headings, with the clients of those that are not of all."""
        return [self.titled(heading, path) for heading, path in self.columns.items()]

    @cached_property
    def values(self) -> Mapping[str, Mapping[Any, Mapping[Any, float | None]]]:
        """Every column by heading, cell and seed, in the unit that tables show."""
        return {heading: values_of(path, self.runs) for heading, path in self.columns.items()}

    @cached_property
    def differences(self) -> Mapping[str, Mapping[str, Mapping[Cell, Difference]]]:
        """By row that others are compared with and heading: each cell minus that row.

        Both are of one setting. Of two such rows, the later one's table has no line for the other.
        """
        bases = [self.against, *self.beside]
        return {
            base: {
                heading: dict(self._minus(base, values, bases[: place + 1]))
                for heading, values in self.values.items()
            }
            for place, base in enumerate(bases)
        }

    def _minus(
        self, base: str, values: _Rows, without: Sequence[str]
    ) -> Iterator[tuple[Cell, Difference]]:
        for cell in self.cells:
            of_base = values.get(Cell(cell.setting, base))
            found = difference(values.get(cell, {}), of_base) if of_base else None
            if found and cell.row not in without:
                yield cell, found

    @cached_property
    def compared(self) -> list[Difference]:
        """Every difference of a score that has an interval; a column named twice counts once."""
        headings = {path: name for name, path in self.columns.items() if _is_score(path)}
        found = (
            one
            for by_heading in self.differences.values()
            for name in headings.values()
            for one in by_heading[name].values()
        )
        return [each for each in found if each.pairs > 1]

    @cached_property
    def kept_up_to(self) -> float:
        """The largest p-value of a score's difference that stays after correction."""
        return kept_up_to(each.p for each in self.compared)

    @cached_property
    def winners(self) -> set[tuple[str, Cell]]:
        """Heading and cell of each metric that beats every other row of its setting.

        For papers, the best means; of equal ones each.
        """
        firsts_of = _alone if self.paper is None else _best
        return {
            (heading, first)
            for heading, path in self.columns.items()
            if _is_score(path)
            for setting in {cell.setting for cell in self.cells}
            for rivals in [[cell for cell in self.cells if cell.setting == setting]]
            for rows in [{cell: self.values[heading].get(cell, {}) for cell in rivals}]
            for first in firsts_of(rows, metric(path.partition(".")[2]).better)
            if self.paper is None or not self._is_guessing(heading, first)
        }

    def _is_guessing(self, heading: str, cell: Cell) -> bool:
        """Tell whether a mean is no better than an answer without a model."""
        least = self.paper.least.get((cell, self.columns[heading])) if self.paper else None
        mean = fmean(known(self.values[heading][cell]).values())
        return least is not None and mean <= least

    def table(self) -> Table:
        """Return mean ± sample standard deviation over seeds of every cell."""
        counts = [sum(run.row == cell for run in self.runs) for cell in self.cells]
        notes = ["" if n == self.seeds else f" ({n} of {self.seeds} seeds)" for n in counts]
        names = [f"{cell.title}{note}" for cell, note in zip(self.cells, notes, strict=True)]
        places = [[(heading, cell) for heading in self.columns] for cell in self.cells]
        return self._table(names, self.headings, places)

    def ladders(self) -> Iterator[Table]:
        """Yield a table per metric: every row against the length of its runs."""
        if len(set(self.lengths.values())) < 2:
            return
        rows = list(dict.fromkeys(cell.row for cell in self.cells))
        for heading, path in self.columns.items():
            if _is_score(path):
                places = [[(heading, Cell(s, row)) for s in self.lengths] for row in rows]
                yield self._table(rows, list(self.lengths), places, self.titled(heading, path))

    def _table(
        self,
        rows: Sequence[str],
        columns: Sequence[str],
        places: Sequence[Sequence[tuple[str, Cell]]],
        corner: str = "",
    ) -> Table:
        """Return the table that has these headings and cells in its places."""
        texts = [[self._text(*place) for place in row] for row in places]
        bold = {
            (down, at)
            for down, row in enumerate(places)
            for at, place in enumerate(row)
            if place in self.winners
        }
        captions = [self.paper.caption] if self.paper else []
        return Table([*map(Name, columns)], [*map(Name, rows)], texts, bold, captions, corner)

    def why_missing(self) -> list[str]:
        """Return a caption that says why a column has nothing but dashes; none where none has."""
        lacking = {
            path.partition(".")[2]: heading
            for heading, path in self.columns.items()
            if self.runs and all(self._text(heading, cell) == "–" for cell in self.cells)
        }
        return why_missing(lacking)

    def _text(self, heading: str, cell: Cell) -> str:
        seeds = self.values[heading].get(cell, {})
        if not seeds or len(found := list(known(seeds).values())) < len(seeds):
            return "–"
        path = self.columns[heading]
        form, spread = unit_of(path)[1], spread_of(found)
        mean = form.format(spread.mean)
        has_deviation = spread.n > 1 and _is_score(path)
        return f"{mean} ± {form.format(spread.std)}" if has_deviation else mean

    def difference_table(self, base: str, *, clear: bool = False) -> Table:
        """Return the differences to a row of every row that was compared with it.

        With ``clear``, of scores alone, and rows of which no interval leaves out zero are named in
        the caption.
        """
        differences = self.differences[base]
        rows = [c for c in self.cells if any(c in d for d in differences.values())]
        shown, captions = dict(self.columns), []
        if clear and any(map(_is_score, shown.values())):
            shown = {name: path for name, path in shown.items() if _is_score(path)}
            marks = {cell: [self._star(base, name, cell) for name in shown] for cell in rows}
            undecided = [cell for cell in rows if not any(marks[cell])]
            rows = [cell for cell in rows if cell not in undecided]
            if undecided:
                captions = [f"Open in every score: {'; '.join(c.title for c in undecided)}."]
        texts = [
            [
                _interval(
                    differences[heading].get(cell),
                    unit_of(path)[1],
                    self._star(base, heading, cell),
                )
                for heading, path in shown.items()
            ]
            for cell in rows
        ]
        heads = dict(zip(self.columns, self.headings, strict=True))
        columns = [Name(heads[name]) for name in shown]
        return Table(columns, [Name(cell.title) for cell in rows], texts, captions=captions)

    def _star(self, base: str, heading: str, cell: Cell) -> str:
        """Return how a difference is marked; bytes and seconds are no claims, and are not."""
        found = self.differences[base][heading].get(cell)
        if not found or not found.is_clear or not _is_score(self.columns[heading]):
            return ""
        return " *" if found.p <= self.kept_up_to else " (*)"

    def curve_means(self, name: str) -> dict[Cell, dict[int, float]]:
        """Return a metric by round, counted from 1, in the unit of tables: means over all seeds.

        A row is left out where its runs were not scored after the same rounds.
        """
        factor, _ = unit_of(f"metrics.{name}")
        series = {
            cell: [_by_round(run.curves.get(name, ())) for run in self.runs if run.row == cell]
            for cell in self.cells
        }
        return {
            cell: {at: factor * fmean(one[at] for one in found) for at in found[0]}
            for cell, found in series.items()
            if found and found[0] and all(one.keys() == found[0].keys() for one in found)
        }

    def curve_tables(self) -> Iterator[Table]:
        """Yield a table per curve: means over seeds after each scored round, and over these."""
        for heading, name in self.curves.items():
            means = self.curve_means(name)
            each, whole = ("{:.0f}", "{:.1f}") if metric(name).unit else ("{:.3f}", "{:.3f}")
            corner = self.titled(heading, f"metrics.{name}")
            for rounds in sorted({tuple(line) for line in means.values()}):
                lines = {cell: line for cell, line in means.items() if tuple(line) == rounds}
                texts = [
                    [*map(each.format, line.values()), whole.format(fmean(line.values()))]
                    for line in lines.values()
                ]
                columns = [*(Name(str(at)) for at in rounds), Name("mean")]
                yield Table(columns, [Name(c.title) for c in lines], texts, corner=corner)


def _alone(rows: _Rows, better: int) -> list[Cell]:
    """Return the row that beats every other one; none where there is no such row."""
    first = winner(rows, better)
    return [] if first is None else [first]


def _best(rows: _Rows, better: int) -> list[Cell]:
    """Return the rows with the best mean of several; none where neither more nor less is better.

    A row that lacks a value shows no mean, and has none here.
    """
    means = {
        cell: fmean(found.values())
        for cell, each in rows.items()
        if (found := known(each)) and len(found) == len(each)
    }
    if not better or len(means) < 2:
        return []
    best = max(better * mean for mean in means.values())
    return [cell for cell, mean in means.items() if math.isclose(better * mean, best)]


def _by_round(curve: Sequence[float | None]) -> dict[int, float]:
    return {at: value for at, value in enumerate(curve, 1) if value is not None}


def _is_score(path: str) -> bool:
    return path.startswith("metrics.")


def _interval(found: Difference | None, form: str, star: str) -> str:
    """Return a difference with its interval and its mark."""
    if found is None:
        return "–"
    signed = form.replace("{:", "{:+z")
    mean = signed.format(found.mean)
    if math.isinf(found.low):
        return mean
    low, high = signed.format(found.low), signed.format(found.high)
    return f"{mean} [{low}, {high}]{star}"


FORMAT = 1


def outcome_of(
    sweep: Sweep, runs: Iterable[PlannedRun], seeds: int, damaged: Collection[PlannedRun] = ()
) -> Outcome:
    """Return what the finished ones of a sweep's runs came to.

    Damaged runs are left out; of each row there are to be so many ``seeds``.

    Raises:
        ArchiveError: a file of another run is damaged.
    """
    planned = list(runs)
    columns, curves = [*sweep.columns.values()], [*sweep.curves.values()]
    sound = [run for run in planned if run.is_finished and run not in damaged]
    ended = [read_numbers(run, columns, curves) for run in sound]
    cells = list(dict.fromkeys(run.cell for run in planned))
    against = sweep.against or next(iter(sweep.methods))
    lengths = {name: rung.length for name, rung in sweep.rungs().items()}
    cohorts = {parse_experiment(run.config).selected for run in planned}
    selected = cohorts.pop() if len(cohorts) == 1 else "the cohort"
    return Outcome(
        ended,
        cells,
        sweep.columns,
        against,
        seeds,
        sweep.curves,
        lengths,
        selected,
        fairness(sweep, planned),
        who_chooses(
            [*{run.cell.row: read_run(run.directory).chooses_among for run in sound}.items()]
        ),
        beside=sweep.beside,
    )


def to_json(outcome: Outcome) -> str:
    """Return an outcome as text, a run a line."""
    environments = list({json.dumps(dict(run.environment)): None for run in outcome.runs})
    runs = [
        {
            "setting": cell.setting,
            "row": cell.row,
            "seed": run.seed,
            "environment": environments.index(json.dumps(dict(run.environment))),
            "values": {k: _short(v) for k, v in run.values.items()},
            "curves": {k: list(map(_short, line)) for k, line in run.curves.items()},
        }
        for run in outcome.runs
        for cell in [cast(Cell, run.row)]
    ]
    head = {
        "format": FORMAT,
        "columns": dict(outcome.columns),
        "curves": dict(outcome.curves),
        "against": outcome.against,
        **({"beside": list(outcome.beside)} if outcome.beside else {}),
        "seeds": outcome.seeds,
        "lengths": dict(outcome.lengths),
        **({"selected": outcome.selected} if outcome.selected else {}),
        **({"fairness": outcome.fairness} if outcome.fairness else {}),
        **({"among": outcome.among} if outcome.among else {}),
        "cells": [[cell.setting, cell.row] for cell in outcome.cells],
        "environments": list(map(json.loads, environments)),
    }
    lines = ",\n  ".join(json.dumps(run, ensure_ascii=False) for run in runs)
    return (
        f'{json.dumps(head, ensure_ascii=False, indent=1)[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n'
    )


def read_record(path: Path) -> Outcome:
    """Read what :func:`to_json` wrote; ConfigError if the file is no such record."""
    try:
        found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if found["format"] != FORMAT:
            raise ConfigError(f"{path} has format {found['format']}; this version reads {FORMAT}")
        runs = [
            RunNumbers(
                Cell(run["setting"], run["row"]),
                run["seed"],
                run["values"],
                run["curves"],
                found["environments"][run["environment"]],
            )
            for run in found["runs"]
        ]
        cells = [Cell(*cell) for cell in found["cells"]]
        return Outcome(
            runs, cells, found["columns"], found["against"], found["seeds"], found["curves"],
            found["lengths"], found.get("selected", ""), found.get("fairness", ""),
            found.get("among", ""),
            beside=tuple(found.get("beside", ())),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is no record of a sweep: {error!r}") from None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
