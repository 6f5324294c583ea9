"""The tables of docs/results/attacks.md, made from the records of the studies of attacks.

A figure is the mean over the seeds, in percent, of the honest clients. With three pairs or more it
is compared with the first row of its table, paired by seed: brackets hold the 95 % confidence
interval of the difference by Student's t where that leaves out zero. Intervals are not corrected
for multiple comparisons.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
            yield title + "\n\n" + _table(record, rows, honest)


def _of_defences(record: Record) -> Iterator[str]:
    """Yield a table for each method: defences by attacks, beside the plain reduction.

    A figure is of everybody's model, or of what clients receive where there is none; a backdoor has
    its hits as well.
    """
    defended = [cell for cell in record.runs if cell.defence]
    for method in dict.fromkeys(cell.method for cell in defended):
        own = [cell for cell in defended if cell.method == method]
        rules = ["", *dict.fromkeys(cell.defence for cell in own)]
        attacks = dict.fromkeys((cell.attackers, cell.attack) for cell in own)
        runs = [run for cell in own for run in record.runs[cell].values()]
        view = "global" if any("global" in run for run in runs) else "received"
        columns = [
            (number, attack, column)
            for number, attack in attacks
            for column in (view, f"{view} hits")
            if column == view or "backdoor" in attack
        ]
        heads = [
            (f"{number}: {attack}" if number else "no attack") + ", hits" * column.endswith("hits")
            for number, attack, column in columns
        ]
        lines = [["", *heads], ["---"] * (len(heads) + 1)]
        for rule in rules:
            cells = [Cell(method, rule, attack, number) for number, attack, _ in columns]
            texts = [
                _defended(record, cell, column)
                for cell, (_, _, column) in zip(cells, columns, strict=True)
            ]
            lines.append([rule or "mean", *texts])
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        yield f"**{method}, {record.clients()} clients: {COLUMNS[view]}**\n\n{table}"


def _defended(record: Record, cell: Cell, column: str) -> str:
    """Return a figure beside that of the plain reduction under the same attack."""
    if cell not in record.runs:
        return "–"
    honest = record.clients() - (cell.attackers or min(_numbers(record), default=0))
    base = replace(cell, defence="")
    text, few = _text(record, cell, base, column, honest), len(record.runs[cell])
    return text if few >= MIN_SEEDS else f"{text} ({few})"


def _numbers(record: Record) -> set[int]:
    return {cell.attackers for cell in record.runs} - {0}


def _table(record: Record, rows: Sequence[Cell], honest: int) -> str:
    """Return a table of attacks beside the first row; columns without a figure are left out."""
    shown = {c: [record.values(row, c, honest) for row in rows] for c in COLUMNS}
    there = [c for c, found in shown.items() if any(found)]
    for ending in ("", " hits"):  # where clients hold no more than everybody's model
        if shown[f"received{ending}"] == shown[f"global{ending}"] and f"global{ending}" in there:
            there.remove(f"received{ending}")
    lines = [["", *(COLUMNS[c] for c in there), *TOLD.values()], ["---"] * (len(there) + 3)]
    for row in rows:
        if row not in record.runs:
            continue
        texts = [_text(record, row, rows[0], column, honest) for column in there]
        name = f"{row.attack}{_fewer(record, row, rows)}"
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
    """Return a mean, and the interval of the difference to another cell if it leaves out zero."""
    found = record.values(row, column, honest)
    if not found:
        return "stopped" if any("stopped" in run for run in record.runs[row].values()) else "–"
    mean = f"{fmean(found.values()):.1f}"
    apart = difference(found, record.values(base, column, honest)) if row != base else None
    if apart is None or apart.pairs < MIN_SEEDS or not apart.is_clear:
        return mean
    return f"{mean} [{apart.low:+.1f}, {apart.high:+.1f}]"


def _told(record: Record, row: Cell, column: str) -> str:
    """Return the share of attackers' uploads that the coordinator left out or named of itself."""
    found = [run[column] for run in record.runs[row].values() if column in run]
    return f"{100 * fmean(found):.0f} %" if found else ""
