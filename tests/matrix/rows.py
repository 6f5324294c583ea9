"""The rows of the matrix: each part of the table with a small config that switches it on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedmodels.config import combinations
from fedmodels.config.combinations import Part
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import data_and_scenario
from fedsrv.parts import with_digests
from fedsrv.trained.begin_from import begun
from fedtide.inprocess import run_in_process
from fedtide.testing.trial import write_server_data
from tests.combinations import NET, SETTINGS, TARGETS, WITHOUT_KEY, needed_by, tables_of
from tests.conftest import tiny_experiment

VERBS = {"relays", "forgetting"}
"""Parts that no config switches on: they are verbs of the matrix."""
LACKS = (
    "the part {0!r} has no small config that switches it on: give its Part sample = {{...}}, the "
    "tables of one, or name it in tests/combinations.py (SETTINGS, or WITHOUT_KEY)"
)
IS_OFF = "the small config of the part {0!r} does not switch it on: {1}"


@dataclass(frozen=True)
class Row:
    """A part with what switches it on."""

    part: Part

    def tables(self, place: Path) -> dict[str, Any]:
        """Return the tables of a small config; its files are those of :func:`files_in`.

        Raises:
            LookupError: there is none, or it switches the part not on; the line says what to add.
        """
        name = self.part.name
        if self.part.sample:
            found = {**tables_of((), place), **self.part.sample}
        elif name in TARGETS:
            found = {**tables_of((), place), **table_of(name, place)}
        elif name in SETTINGS:
            found = tables_of(needed_by([name]), place)
        elif name in WITHOUT_KEY:
            found = {**tables_of((), place), **WITHOUT_KEY[name]}
        elif self.part.is_on(tiny_experiment()):
            found = tables_of((), place)
        else:
            raise LookupError(LACKS.format(name))
        if "begin_from" in found.get("net", {}):
            found["net"] = {**found["net"], "begin_from": str(place / "reference")}
        is_on = self.part.is_on(tiny_experiment(**found))
        if not is_on and name != "frozen parts":  # which the net's own code freezes
            raise LookupError(IS_OFF.format(name, self.part.sample or found))
        return found

    def experiment(self, place: Path, out: Path, **more: Mapping[str, Any]) -> Experiment:
        """Return the experiment as ``fedsrv launch`` would begin it in a directory."""
        found = tiny_experiment(**merged(self.tables(place), more))
        if found.net.begin_from is not None:
            found = begun(found, out)
        return with_digests(found)


def merged(tables: Mapping[str, Any], more: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return tables with further keys in them."""
    return {**tables, **{name: {**tables.get(name, {}), **keys} for name, keys in more.items()}}


def rows() -> list[Row]:
    """Return a row for each part of the table as it is now, also those that plugins brought."""
    return [Row(part) for part in combinations.LISTED if part.name not in VERBS]


def table_of(name: str, place: Path) -> dict[str, Any]:
    """Return the tables of a run that learns targets, of a file with six sites."""
    columns = {"features": ["a", "b"], "client": "site", **TARGETS[name]}
    return {
        "data": {"name": "table", "root": str(place / "table.csv"), "columns": columns},
        "scenario": {"kind": "natural"},
        "schedule": {"rounds": 2, "clients": 6},
    }


def files_in(root: Path) -> Path:
    """Make a directory with the files that small configs name, and runs to refer to; return it."""
    (root / "net.py").write_text(NET)
    lines = "".join(f"{client},0,10\n" for client in range(6))
    (root / "there.csv").write_text(f"client,from,until\n{lines}")
    x = np.random.default_rng(0).permutation(6 * 24 * 2).reshape(-1, 2)  # no number twice
    rows = (f"{a},{b},{n % 6},{a - b},{a % 2},{b % 2}\n" for n, (a, b) in enumerate(x))
    (root / "table.csv").write_text(f"a,b,site,price,fever,cough\n{''.join(rows)}")
    plain = tiny_experiment(**tables_of((), root))
    run_in_process(plain, dealt(plain, root), root / "reference", facts=True)
    return root


def dealt(experiment: Experiment, place: Path) -> Path:
    """Return clients' data of an experiment, dealt out where no experiment before had the same."""
    data, scenario = data_and_scenario(experiment)
    clients = experiment.schedule.clients
    told = json.dumps([data.model_dump(mode="json"), scenario.model_dump(mode="json"), clients])
    for number in range(100):
        out = place / f"data-{number}"
        known = out.with_suffix(".json")
        if not known.exists():
            run_partition(data, scenario, clients, experiment.seed, out, Console(quiet=True))
            write_server_data(out)
            known.write_text(told)
        if known.read_text() == told:
            return out
    raise AssertionError("too many partitions")
