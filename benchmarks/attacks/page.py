"""The tables of docs/results/attacks.md, made from the records of the studies of attacks.

A figure is the mean over the seeds, in percent, of the honest clients. Brackets hold the 95 %
confidence interval, by Student's t, of the difference to the table's first row, paired by seed,
where there are three pairs or more. A star marks an interval without zero. Intervals are not
corrected for multiple comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.attacks.study import NONE, Cell
from fedsrv.report.frame import MIN_SEEDS, difference

RECORDS = Path(__file__).resolve().parents[1] / "records" / "attacks"
COLUMNS = {
    "global": "model of all",
    "received": "clients', received",
    "trained": "clients', trained",
    "global hits": "hits, model of all",
    "received hits": "hits, clients'",
}
"""Column of a record -> its heading; ``trained hits`` stay out of tables."""
TOLD = {"aside": "left out", "named": "named"}
"""Column of a record that is about attackers' uploads -> its heading."""


@dataclass(frozen=True)
class Record:
    """The results of a study's runs."""

    environment: Mapping[str, str]
    runs: Mapping[Cell, Mapping[int, Mapping[str, Any]]]
    """By cell and seed."""

    @classmethod
    def read(cls, study: str) -> Record:
        """Read the record of a study."""
        found = json.loads((RECORDS / f"{study}.json").read_text("utf-8"))
        runs: dict[Cell, dict[int, Mapping[str, Any]]] = {}
        for run in found["runs"]:
            runs.setdefault(Cell(**run["cell"]), {})[run["seed"]] = run
        return cls(found["environment"], runs)

    def beside(self, base: Record) -> Record:
        """Return this record, with those runs of another record that have no defence."""
        plain = {cell: runs for cell, runs in base.runs.items() if not cell.defence}
        return replace(self, runs={**plain, **self.runs})

    def values(self, cell: Cell, column: str, honest: int) -> dict[int, float]:
        """Return by seed the mean of a column over the first ``honest`` clients, in percent."""
        return {
            seed: 100 * fmean(known)
            for seed, run in self.runs.get(cell, {}).items()
            if (known := [v for v in run.get(column, [])[:honest] if v is not None])
        }

    def clients(self) -> int:
        """Return how many clients a run has."""
        runs = (run for seeds in self.runs.values() for run in seeds.values())
        return next(len(run["trained"]) for run in runs if "trained" in run)


def page(study: str) -> str:
    """Return the tables of a study as Markdown.

    A study of defences, ``STUDY-defences``, stands beside the runs of ``STUDY`` without any.
    """
    record = Record.read(study)
    seeds = sorted({seed for runs in record.runs.values() for seed in runs})
    count = sum(len(runs) for runs in record.runs.values())
    facts = ", ".join(f"{name} {value}" for name, value in record.environment.items())
    parts = [f"Of {count} runs with seeds {', '.join(map(str, seeds))}; {facts}."]
    if study.endswith("-optimised"):
        return "\n\n".join([*parts, *_matrices(record)]) + "\n"
    base = study.removesuffix("-defences")
    if base != study:
        record = record.beside(Record.read(base))
    else:
        parts += _of_methods(record)
    parts += _of_defences(record)
    return "\n\n".join(parts) + "\n"


def _matrices(record: Record) -> Iterator[str]:
    """Yield a table for each method: rules by attacks, and each rule's worst beside the mean.

    A figure is of everybody's model, or of what clients receive where there is none. Where a cell
    has fewer seeds than three, they stand behind it.
    """
    for method in dict.fromkeys(cell.method for cell in record.runs):
        own = [cell for cell in record.runs if cell.method == method]
        attacks = [*dict.fromkeys(cell.attack for cell in own)]
        honest = record.clients() - max(cell.attackers for cell in own)
        results = [run for cell in own for run in record.runs[cell].values()]
        column = "global" if any("global" in run for run in results) else "received"
        head = ["", *(attack if attack != NONE else "no attack" for attack in attacks)]
        lines = [[*head, "worst, less the mean's"], ["---"] * (len(head) + 1)]
        for defence in dict.fromkeys(cell.defence for cell in own):
            cells = {c.attack: c for c in own if c.defence == defence}
            texts = [
                _figure(record, cells[attack], column, honest) if attack in cells else "–"
                for attack in attacks
            ]
            lines.append([defence or "mean", *texts, _beside_mean(record, cells, column, honest)])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        yield f"**{method}, 3 of {record.clients()} attack: {COLUMNS[column]}**\n\n{table}"


def _figure(record: Record, cell: Cell, column: str, honest: int) -> str:
    found, runs = record.values(cell, column, honest), record.runs[cell]
    text = f"{fmean(found.values()):.1f}" if found else "stopped"
    return text if len(runs) >= MIN_SEEDS else f"{text} ({len(runs)})"


def _beside_mean(record: Record, cells: Mapping[str, Cell], column: str, honest: int) -> str:
    """Return the interval of a rule under its worst attack less the mean under the same attack."""
    found = {a: record.values(c, column, honest) for a, c in cells.items() if a != NONE}
    known = {attack: values for attack, values in found.items() if values}
    if not known or not next(iter(cells.values())).defence:
        return ""
    worst = min(known, key=lambda attack: fmean(known[attack].values()))
    base = record.values(replace(cells[worst], defence=""), column, honest)
    if not base and replace(cells[worst], defence="") in record.runs:
        return f"{worst}: the mean's runs stopped"
    apart = difference(known[worst], base)
    if apart is None or apart.pairs < MIN_SEEDS:
        return f"{worst}: too few pairs"
    star = " *" if apart.is_clear else ""
    return f"{worst}: {apart.low:+.1f}, {apart.high:+.1f}{star}"


def _of_methods(record: Record) -> Iterator[str]:
    """Yield a table for each method: attacks beside no attack, with the plain reduction."""
    plain = [cell for cell in record.runs if not cell.defence]
    for method in dict.fromkeys(cell.method for cell in plain):
        own = [cell for cell in plain if cell.method == method]
        attacks = dict.fromkeys(cell.attack for cell in own if cell.attack != NONE)
        for attackers in sorted({cell.attackers for cell in own} - {0}):
            honest = record.clients() - attackers
            base = Cell(method, "", NONE, 0)
            rows = [base, *(Cell(method, "", attack, attackers) for attack in attacks)]
            title = f"**{method}, {attackers} of {record.clients()} attack**"
            against = dict.fromkeys(rows, base)
            yield title + "\n\n" + _table(record, rows, against, honest, lambda cell: cell.attack)


def _of_defences(record: Record) -> Iterator[str]:
    """Yield a table for each method and attack: defences beside the plain reduction."""
    defended = [cell for cell in record.runs if cell.defence]
    groups = dict.fromkeys((c.method, c.attackers, c.attack) for c in defended)
    for method, attackers, attack in groups:
        honest = record.clients() - (attackers or min(_numbers(record), default=0))
        base = Cell(method, "", attack, attackers)
        rows = [
            base,
            *(
                c
                for c in defended
                if (c.method, c.attackers, c.attack) == (method, attackers, attack)
            ),
        ]
        what = f"{attackers} of {record.clients()}: {attack}" if attackers else "no attack"
        named = lambda cell: cell.defence or "mean"  # noqa: E731
        yield f"**{method}, {what}**\n\n" + _table(
            record, rows, dict.fromkeys(rows, base), honest, named
        )


def _numbers(record: Record) -> set[int]:
    return {cell.attackers for cell in record.runs} - {0}


def _table(
    record: Record,
    rows: Sequence[Cell],
    against: Mapping[Cell, Cell],
    honest: int,
    named: Callable[[Cell], str],
) -> str:
    """Return a table of these cells; columns that none of them has are left out."""
    shown = {c: [record.values(row, c, honest) for row in rows] for c in COLUMNS}
    there = [c for c, found in shown.items() if any(found)]
    for ending in ("", " hits"):  # where clients hold no more than everybody's model
        if shown[f"received{ending}"] == shown[f"global{ending}"] and f"global{ending}" in there:
            there.remove(f"received{ending}")
    lines = [["", *(COLUMNS[c] for c in there), *TOLD.values()], ["---"] * (len(there) + 3)]
    for row in rows:
        if row not in record.runs:
            continue
        texts = [_text(record, row, against[row], column, honest) for column in there]
        name = f"{named(row)}{_fewer(record, row, rows)}"
        lines.append([name, *texts, *(_told(record, row, column) for column in TOLD)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fewer(record: Record, row: Cell, rows: Sequence[Cell]) -> str:
    """Return a note on a row that has fewer seeds than another one of its table."""
    found = {each: len(record.runs.get(each, {})) for each in rows}
    return (
        ""
        if found[row] == max(found.values())
        else f" ({found[row]} of {max(found.values())} seeds)"
    )


def _text(record: Record, row: Cell, base: Cell, column: str, honest: int) -> str:
    """Return a mean, and the interval of the difference to another cell."""
    found = record.values(row, column, honest)
    if not found:
        return "stopped" if any("stopped" in run for run in record.runs[row].values()) else "–"
    mean = f"{fmean(found.values()):.1f}"
    apart = difference(found, record.values(base, column, honest)) if row != base else None
    if apart is None or apart.pairs < MIN_SEEDS:
        return mean
    return f"{mean} [{apart.low:+.1f}, {apart.high:+.1f}]{' *' if apart.is_clear else ''}"


def _told(record: Record, row: Cell, column: str) -> str:
    """Return the share of attackers' uploads that the coordinator left out or named of itself."""
    found = [run[column] for run in record.runs[row].values() if column in run]
    return f"{100 * fmean(found):.0f} %" if found else ""
