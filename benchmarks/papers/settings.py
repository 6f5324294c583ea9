"""What the papers say of every cell's setting, line by line, and where a cell's config differs.

``PAPER/settings.toml`` has the lines. One says which keys have which values, in which tables, rows
and columns (regular expressions), in which words of the paper, or why we chose. Of two lines about
the same key of a cell the later one holds.

    python -m benchmarks.papers.settings > docs/results/settings.md    # our readings and choices
    python -m benchmarks.papers.settings --all                         # every line, with its words
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, model_validator

from benchmarks.papers.size import shape_of
from benchmarks.papers.table import HERE, PAPERS, Shown, Strict, tables_of
from fedmodels.config.data import Data
from fedmodels.config.evaluate import Evaluate
from fedmodels.config.experiment import Experiment
from fedmodels.config.schedule import Schedule
from fedmodels.config.training import Training
from fedmodels.methods import make, settings_of
from fedmodels.nets import check_net

NEEDED = (
    "data.name", "scenario.kind", "net.name", "net.*", "method.*", "rounds", "schedule.clients",
    "cohort", "training.local_epochs", "training.batch_size", "training.optimizer", "training.lr",
    "training.momentum", "training.weight_decay", "training.augment", "evaluate.last_rounds",
)  # fmt: skip
"""Keys about which each cell needs a line, though they be at the product's default."""
COUNTED = ("method.name", "schedule.rounds", "schedule.per_round")
"""Keys that need none: a row's name says the method; ``rounds`` and ``cohort`` say the others."""
TABLES = {"data": Data, "schedule": Schedule, "training": Training, "evaluate": Evaluate}
OTHERS = "default"
"""Value of ``net.*`` and ``method.*``: keys without a line are at the product's default."""


class Line(Strict):
    """One line of a listing."""

    keys: Mapping[str, Any]
    """Key of a config -> value; ``rounds`` are all of a run, ``cohort`` the clients of a round."""
    tables: str = ""
    rows: str = ""
    columns: str = ""
    quote: str = ""
    """The paper's own words."""
    where: str = ""
    """Where they stand."""
    why: str = ""
    """How we read these words, or what we chose without any, and why."""

    @model_validator(mode="after")
    def _has_a_reason(self) -> Line:
        if bool(self.quote) != bool(self.where) or not (self.quote or self.why):
            raise ValueError(f"{self.keys}: quote and say where, or say why")
        return self

    def is_of(self, table: str, row: str, column: str) -> bool:
        """Tell whether it is about a cell."""
        both = ((self.tables, table), (self.rows, row), (self.columns, column))
        return all(re.search(pattern, name) for pattern, name in both)


@cache
def lines_of(paper: str) -> tuple[Line, ...]:
    """Return the lines of a paper."""
    found = tomllib.loads((HERE / paper / "settings.toml").read_text("utf-8"))
    return tuple(Line.model_validate(one) for one in found["line"])


def said_of(shown: Shown, row: str, column: str) -> dict[str, tuple[Any, Line]]:
    """Return by key the value that the listing has for a cell, and the line that says so."""
    held = {}
    for line in lines_of(shown.paper):
        if line.is_of(shown.name, row, column):
            held.update({key: (value, line) for key, value in line.keys.items()})
    return held


def values_of(experiment: Experiment) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Return what a cell's config has by key, and the product's defaults."""
    assert experiment.data is not None
    assert experiment.scenario is not None
    in_turn = experiment.schedule.order == "tasks_outer"
    clients, classes = experiment.schedule.clients, len(shape_of(experiment.data).train)
    tasks = experiment.scenario.tasks_per_client(clients, classes)[0] if in_turn else 1
    defaults = _defaults(type(experiment.scenario), experiment.net.name, experiment.method.name)
    here = experiment.to_dict()
    values = {key: value for key, value in defaults.items() if key.startswith("net.")}
    for table in (*TABLES, "scenario", "net", "method"):
        values.update(_flat({f"{table}.{key}": value for key, value in here[table].items()}))
    values["rounds"] = experiment.schedule.rounds * tasks
    values["cohort"] = experiment.cohort_size
    values["net.*"] = values["method.*"] = OTHERS
    return values, defaults


@cache
def _defaults(scenario: type[BaseModel], net: str, method: str) -> Mapping[str, Any]:
    models = {**TABLES, "scenario": scenario}
    takes = inspect.signature(check_net(net, ())).parameters
    found = {
        **{
            f"{name}.{k}": f.default
            for name, m in models.items()
            for k, f in m.model_fields.items()
        },
        **{f"method.{key}": value for key, value in settings_of(make(method)).items()},
        **{f"net.{key}": p.default for key, p in takes.items() if p.default is not p.empty},
    }
    return dict(_flat(found))


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, tables in tables by their paths; nothing for empty ones."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat({f"{key}.{name}": one for name, one in value.items()})
        elif value is not None:
            yield key, list(value) if isinstance(value, tuple) else value


def faults(shown: Shown) -> Iterator[str]:
    """Yield where a table's configs and the listing differ, in a line each."""
    for row, column in shown.runs():
        values, defaults = values_of(shown.experiment(row, column))
        said = said_of(shown, row, column)
        place = f"{shown.paper} {shown.name}, {row}, {column}"
        for key, (value, _) in said.items():
            if values.get(key) != value:
                yield f"{place}: {key} = {values.get(key)!r}, and the listing has {value!r}"
        moved = [key for key, value in values.items() if value != defaults.get(key, value)]
        for key in sorted({*NEEDED, *moved} - said.keys() - {*COUNTED}):
            yield f"{place}: no line about {key} = {values.get(key)!r}"


HEAD = """# The papers' settings: what we read into them

For readers who ask where the configs of the papers' own tables come from. `make paper-tables`
prints every table and figure of the four papers; each cell has a config, and each key of a config
is either quoted from the paper or chosen by us. A test holds every config to these lines.

Below are the lines in which the paper is silent or its words allow more than one reading.
`python -m benchmarks.papers.settings --all` prints every line with the paper's words. Where two
lines set the same key of a cell, the later one holds; keys without a line are at the product's
defaults. `rounds` counts all rounds of a run, `cohort` the clients of a round, `net.*` and
`method.*` the remaining keys of a net and a method. These are the papers' own sizes; the smaller
runs that we made are described with [the results](../results.md).

This page is generated: `python -m benchmarks.papers.settings > docs/results/settings.md`.
"""
NAMES = {"gldp": "GLDP", "fedmlp": "FedMLP", "pfedgrp": "pFedGRP", "fedali": "FedAli"}


@cache
def decided(paper: str) -> dict[int, list[tuple[str, str, str]]]:
    """Return by a line's place the table, row and column of each config in which it decides."""
    places = {id(line): place for place, line in enumerate(lines_of(paper))}
    found: dict[int, list[tuple[str, str, str]]] = {place: [] for place in places.values()}
    for shown in tables_of([paper]):
        for row, column in shown.runs():
            for line in {id(line): line for _, line in said_of(shown, row, column).values()}:
                found[places[line]].append((shown.name, row, column))
    return found


def page(*, every: bool = False) -> str:
    """Return the page: lines with a reading or a choice of ours, or every line."""
    return "\n".join([HEAD, *(_section(paper, every=every) for paper in PAPERS)])


def _section(paper: str, *, every: bool) -> str:
    tables = {shown.name: shown for shown in tables_of([paper])}
    lines = lines_of(paper)
    heads = ["keys", "cells", "the paper", "how read, or why chosen", "configs"]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line, configs in zip(lines, decided(paper).values(), strict=True):
        if not (line.why or every):
            continue
        said = f"“{line.quote}”, {line.where}" if every and line.quote else line.where
        cells = [
            "<br>".join(f"`{key}` = {json.dumps(value)}" for key, value in line.keys.items()),
            _cells(configs, tables),
            said or "silent",
            line.why or "–",
            str(len(configs)),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    quoted = sum(not line.why for line in lines)
    told = "" if every else f"{quoted} of {len(lines)} lines are the paper's own words.\n\n"
    return f"## {NAMES[paper]}\n\n{told}" + "\n".join(rows) + "\n"


def _cells(configs: Sequence[tuple[str, str, str]], tables: Mapping[str, Shown]) -> str:
    """Return in a few words which cells these configs are of."""
    in_tables, of_rows, of_columns = map(_once, zip(*configs, strict=True))
    there = [run for name in in_tables for run in tables[name].runs()]
    named = {
        _names(in_tables, list(tables)),
        _names(of_rows, _once(row for row, _ in there)),
        _names(of_columns, _once(column for _, column in there)),
    } - {"all"}
    return "; ".join(sorted(named)) or "all"


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _names(some: Sequence[str], every: Sequence[str]) -> str:
    """Return names in a few words: all of them, all but few, or the first ones."""
    others = [name for name in every if name not in some]
    if not others:
        return "all"
    if len(others) < min(4, len(some)):
        return f"all but {'; '.join(others)}"
    return "; ".join(some if len(some) < 6 else [*some[:4], f"and {len(some) - 4} more"])


if __name__ == "__main__":
    print(page(every="--all" in sys.argv[1:]), end="")
