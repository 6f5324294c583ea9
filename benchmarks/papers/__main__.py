"""Print every table and figure of the four papers: the paper's figures and ours, from records.

    python -m benchmarks.papers                      # all
    python -m benchmarks.papers gldp                 # one paper's
    python -m benchmarks.papers gldp/table-3         # one table
    python -m benchmarks.papers gldp --configs DIR   # write the config of every cell as well
    python -m benchmarks.papers --check              # build every cell, and deal its partition

A cell that was not run has its config all the same. Records alone are read; nothing is trained.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from benchmarks.measure import parser_of
from benchmarks.papers.page import in_short, not_run, text_of
from benchmarks.papers.size import dealt, problem_of
from benchmarks.papers.table import PAPERS, Shown, tables_of
from fedmodels.config.experiment import Experiment, NetTable
from fedmodels.errors import FedtideError
from fedmodels.nets import make_net
from fedmodels.tensors.bundle import Problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line asks for; return the exit status."""
    parser = parser_of("papers", __doc__)
    parser.add_argument("name", nargs="?", default="", help=", ".join(PAPERS))
    parser.add_argument("--configs", type=Path, help="a directory for every cell's config")
    parser.add_argument("--check", action="store_true", help="build and deal every cell")
    options = parser.parse_args(arguments)
    paper, _, name = options.name.partition("/")
    known = tables_of()
    tables = [t for t in known if paper in ("", t.paper) and name in ("", t.name)]
    if not tables:
        names = ", ".join((*PAPERS, *(f"{t.paper}/{t.name}" for t in known if t.paper == paper)))
        print(f"error: {options.name!r} is no paper or table; known: {names}", file=sys.stderr)
        return 2
    try:
        for table in tables:
            if options.configs:
                write_configs(table, options.configs)
            if options.check:
                for experiment in experiments_of(table):
                    check(experiment)
            else:
                print(text_of(table))
    except FedtideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    cells = sum(len(list(table.cells())) for table in tables)
    print(f"{len(tables)} tables and figures, {cells} cells")
    if missing := sum(map(not_run, tables)):
        print(in_short(missing, options.name))
    return 0


def experiments_of(table: Shown) -> Iterator[Experiment]:
    """Yield the experiment of each row in each column."""
    for row, setting in table.runs():
        yield table.experiment(row, setting)


def check(experiment: Experiment) -> None:
    """Build a cell's net, and deal its partition; equal ones are built and dealt once.

    Raises:
        FedtideError: one of them cannot be.
    """
    assert experiment.data is not None
    net = experiment.net.model_copy(update={"weights": None})  # a file that pre-training writes
    _build(net.model_dump_json(), problem_of(experiment.data))
    dealt(experiment)


@cache
def _build(net: str, problem: Problem) -> None:
    table = NetTable.model_validate_json(net)
    facts = {"num_classes": problem.num_classes, "input_shape": problem.input_shape}
    make_net(table.name, **facts, **table.options())


def write_configs(table: Shown, out: Path) -> None:
    """Write the config of each row in each column, ``PAPER/TABLE/COLUMN--ROW.toml``."""
    place = out / table.paper / table.name
    place.mkdir(parents=True, exist_ok=True)
    for row, setting in table.runs():
        name = "--".join(_slug(word) for word in (setting, row))
        (place / f"{name}.toml").write_text(table.config(row, setting))


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
