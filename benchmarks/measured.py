"""Keep what a benchmark measured, and render it for the pages of ``docs/results/``.

A record is ``benchmarks/records/measured/NAME.json``: the command, the machine and the versions,
and the tables as they were measured. Exponents and ratios are not kept: they are computed from the
rows whenever a page is made, so that they cannot say anything else.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

RECORDS = Path(__file__).parent / "records" / "measured"
Row = Mapping[str, Any]
LABELS = {
    "run": "run",
    "net": "net",
    "what": "what",
    "sums": "rounds",
    "cosine": "cosine",
    "apart": "told apart, of 10",
    "read": "classes read, of 10",
    "lost": "rounds lost at 2 % drop-outs, %",
    "honest_accuracy": "accuracy, %",
    "counted": "rounds that counted",
    "ended": "runs that ended early",
    "reference": "reference",
    "sites": "sites",
    "data": "data",
    "comparisons": "comparisons",
    "streams": "streams",
    "years": "years",
    "p_small": "p < 0.01",
    "alarms": "at the alarm's level",
    "interval": "95 %",
    "alarms_before": "without spectra and single classes",
    "page_hinkley": "errors: Page-Hinkley",
    "adwin": "errors: ADWIN",
    "months": "months with an alarm, of 23",
    "first_month": "first alarm, month",
    "false_lines": "false lines a year",
    "ks_tests": "earlier tests",
    "hosts": "processes",
    "generators": "generators",
    "fid": "Fréchet distance",
    "epoch": "epoch",
    "block 1": "block 1",
    "block 2": "block 2",
    "block 3": "block 3",
    "size": "generators",
    "images": "images",
    "width": "width",
    "epochs": "epochs",
    "batch": "batch",
    "scored_batch": "batch of evaluation",
    "peak_mb": "at its peak, MB",
    "anonymous_mb": "of that anonymous, MB",
    "lr": "learning rate",
    "least": "worst class",
    "mean": "mean",
    "most": "best class",
    "method": "method",
    "trained": "clients that trained",
    "clients": "clients",
    "relays": "relays",
    "parameters": "parameters",
    "classes": "classes",
    "population": "clients",
    "cohort": "in a round",
    "round_s": "a round, s",
    "server_s": "its server half, s",
    "first_round_s": "first round after, s",
    "server_anon_mb": "coordinator, MB",
    "host_anon_mb": "largest host, MB",
    "anon_mb": "all processes, MB",
    "join_bytes": "sent to join, B",
    "state_bytes": "last state, B",
    "run_db_bytes": "`run.db`, B",
    "down_bytes": "down in a round, B",
    "up_bytes": "up in a round, B",
    "flower_round_s": "Flower, a round, s",
    "flower_first_round_s": "Flower, first round after, s",
    "flower_pss_mb": "Flower, all processes (PSS), MB",
    "pfl_round_s": "pfl, a round, s",
    "pfl_first_round_s": "pfl, first round after, s",
    "pfl_pss_mb": "pfl, its process (PSS), MB",
    "pss_mb": "all processes (PSS), MB",
    "examples": "examples of each",
    "side": "pixels of a side",
    "per_s": "clients a second",
    "step_ms": "a step by hand, ms",
    "repeatable_ratio": "repeatable, of that",
    "here_ratio": "here, of that",
    "eager_ms": "a step, eager, ms",
    "captured_of_eager": "captured, of that",
    "captured_ratio": "captured, of that",
    "in_turn_ms": "in turn, ms",
    "stacked": "together, of that",
    "mb": "MB",
    "to_ms": "to the GPU, ms",
    "from_ms": "from the GPU, ms",
    "plain_ms": "by hand, ms",
    "here_ms": "here, ms",
    "ratio": "ratio",
    "digest": "digest",
    "upload": "upload",
    "gone": "dropped out",
    "a_client_s": "a client, s",
    "coordinator_s": "the coordinator, s",
    "upload_bytes": "an upload, B",
    "key_bytes": "keys and shares of a client, B",
    "rounds": "rounds",
    "a_loc": "a_loc",
    "closed_a_loc": "a_loc, closed run",
    "plain_a_loc": "a_loc, plain loop",
    "a_glo": "a_glo",
    "closed_a_glo": "a_glo, closed run",
    "plain_a_glo": "a_glo, plain loop",
    "iaa": "iaa",
    "forgetting": "forgetting",
    "client_s_first": "a client in a round, s, first moments",
    "client_s_last": "last moments",
    "peak_mb_first": "peak memory, MB, first moments",
    "peak_mb_last": "last moments, MB",
    "set_aside": "tasks set aside",
    "killed": "processes killed",
    "wait": "wait",
    "weeks": "weeks",
    "strikes": "strikes",
    "tasks": "tasks",
    "rounds_alone": "rounds, undisturbed",
    "alone_a_loc": "a_loc, undisturbed",
    "alone_digest": "digest, undisturbed",
    "sent": "sent",
    "of": "of",
    "attack": "attack",
    "rebuilt": "images",
    "recognised": "recognised, %",
    "chance": "by chance, %",
    "likeness": "likeness",
    "auc": "AUC",
    "auc_least": "least of a client",
    "auc_most": "most",
    "found": "members found at 1 % false alarms, %",
    "game": "game",
    "plays": "plays",
    "charged": "epsilon charged",
    "any_bound": "least epsilon of any mechanism",
    "gaussian_bound": "of a Gaussian one",
    "one_run_bound": "by one run",
}
"""What columns of tables are called; others stay out of pages."""


def given_as(benchmark: str) -> str:
    """Return the command that started a benchmark."""
    return " ".join([f"python -m benchmarks.{benchmark}", *sys.argv[1:]])


def made_with(**others: str) -> dict[str, str]:
    """Return the versions behind what is measured now, and the commit of the main branch.

    A commit of another branch may be gone after it was rebased, so a plus follows that of the main
    branch where there is more.
    """
    known = {name: version(name) for name in ("fedtide", "torch")}
    return {**known, **others, "commit": commit_of(RECORDS.parent)}


def commit_of(tree: Path) -> str:
    """Return the last commit of the main branch behind a working tree; a plus says "and more"."""

    def git(*words: str) -> str:
        said = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True)
        return said.stdout.strip() if said.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    mains = filter(None, (git("merge-base", "HEAD", name) for name in ("main", "origin/main")))
    base = next(mains, head)
    has_more = base != head or bool(git("status", "--porcelain", "--untracked-files=no"))
    return base[:12] + "+" * has_more


def keep(
    name: str,
    command: str,
    tables: Mapping[str, Sequence[Row]],
    grows: Mapping[str, str | None] = MappingProxyType({}),
    **others: str,
) -> None:
    """Write the record of a benchmark, and say where.

    Args:
        name: of the record.
        command: that measured it.
        tables: the rows by the sentence over them.
        grows: the quantity that grows in a table, where one does.
        others: versions of other programs that were measured.
    """
    versions = made_with(**others)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine()}
    kept = {title: {"grows": grows.get(title), "rows": rows} for title, rows in tables.items()}
    facts = {"command": command, "machine": machine, "versions": versions, "tables": kept}
    file = RECORDS / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"kept {file}")


def page(name: str) -> str | None:
    """Return the tables of a record as Markdown; None where there is no such record."""
    file = RECORDS / f"{name}.json"
    if not file.exists():
        return None
    facts = json.loads(file.read_text())
    machine = "{cpus} cores ({machine})".format(**facts["machine"])
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    parts = [f"`{facts['command']}` with {versions}, on {machine}."]
    for title, table in facts["tables"].items():
        parts += [f"**{title}**", markdown(table["rows"], table["grows"])]
    return "\n\n".join(parts) + "\n"


def exponents(rows: Sequence[Row], quantity: str) -> dict[str, float]:
    """Return the slope of log(column) over log(quantity) for each column that grows with it.

    Rows with a smaller cohort than the others are left out: two things grow there.
    """
    largest = max((row.get("cohort", 0) for row in rows), default=0)
    kept = [row for row in rows if row.get("cohort", 0) == largest]
    if len(kept) < 2:
        return {}
    x = [math.log(row[quantity]) for row in kept]
    found: dict[str, float] = {}
    for column in (c for c in rows[0] if c not in (quantity, "cohort") and c in LABELS):
        y = [row[column] for row in kept]
        if all(y) and len({*y}) > 1:
            found[column] = float(np.polyfit(x, np.log(y), 1)[0])
    return found


def markdown(rows: Sequence[Row], grows: str | None = None) -> str:
    """Return rows as a table, with exponents where a quantity grows."""
    columns = [c for c in LABELS if c in rows[0]]
    lines = [[LABELS[c] for c in columns], ["---"] * len(columns)]
    lines += [[_text(row.get(c)) for c in columns] for row in rows]
    if grows is not None:
        slopes = exponents(rows, grows)
        last = [f"{slopes[c]:.2f}" if c in slopes else "" for c in columns]
        lines.append(["exponent", *last[1:]])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _text(value: float | str | None) -> str:
    """Return a number with three digits that count, or all of them where it is whole."""
    if value is None or isinstance(value, str):
        return value or "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}".rstrip(".")
