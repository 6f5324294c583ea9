"""A sweep's outcome as small JSON: all that its tables and pictures are made from.

    {"format": 1, "columns": …, "curves": …, "against": …, "seeds": …, "lengths": …,
     "selected": …, "cells": [[setting, row], …], "environments": [{…}, …],
     "runs": [{"setting", "row", "seed", "environment", "values": {…}, "curves": {…}}, …]}

A run names its environment (versions and commit) by its place in the list. Numbers have six digits.
A curve has an entry for each round, null where a round was not scored.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, cast

from fedmodels.errors import ConfigError
from fedmodels.resolution import parse_experiment
from fedsrv.report.frame import RunNumbers
from fedsrv.sweep.outcome import Outcome, read_numbers
from fedsrv.sweep.plan import Cell, PlannedRun, Sweep

FORMAT = 1


def outcome_of(
    sweep: Sweep, runs: Iterable[PlannedRun], seeds: int, damaged: Collection[PlannedRun] = ()
) -> Outcome:
    """Return what the finished ones of a sweep's runs came to.

    Args:
        sweep: says what its tables show.
        runs: planned ones.
        seeds: how many there are to be of each row.
        damaged: finished runs that are left out.

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
    return Outcome(ended, cells, sweep.columns, against, seeds, sweep.curves, lengths, selected)


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
        "seeds": outcome.seeds,
        "lengths": dict(outcome.lengths),
        **({"selected": outcome.selected} if outcome.selected else {}),
        "cells": [[cell.setting, cell.row] for cell in outcome.cells],
        "environments": list(map(json.loads, environments)),
    }
    lines = ",\n  ".join(json.dumps(run, ensure_ascii=False) for run in runs)
    return (
        f'{json.dumps(head, ensure_ascii=False, indent=1)[:-2]},\n "runs": [\n  {lines}\n ]\n}}\n'
    )


def read_record(path: Path) -> Outcome:
    """Read what :func:`to_json` wrote.

    Raises:
        ConfigError: the file is no such record.
    """
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
            found["lengths"], found.get("selected", ""),
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{path} is no record of a sweep: {error!r}") from None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
