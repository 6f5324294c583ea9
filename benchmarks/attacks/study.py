"""The cells of a study of attacks: which of them to run, how this process runs them, the results.

The tables count honest clients alone. A run without attackers, beside which an attack stands, is
counted over the same clients.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import records_of
from benchmarks.measured import made_with
from fedcli.data.store.opened_data import open_data
from fedmodels.errors import FedtideError
from fedmodels.facts.config_file import parse_experiment
from fedmodels.host.files import write_atomically
from fedplugins.studies.plan import PlannedRun, Sweep, plan
from fedsrv.state.run_directory import may_hold_a_run

NONE = "none"
VIEWS = {
    "global": ("global",),
    "received": ("after_downlink", "global"),
    "trained": ("after_local",),
}
"""Column -> the views that it may show; the first of them that a run has scored is taken."""
ATTACKS = {
    "FedProto": (
        "a little is enough", "inner product", "label flip", "backdoor", "prototypes flipped",
        "prototypes × 50", "prototypes of 1e5", "prototypes swapped",
    ),
    "FedMLP": (
        "sign flip", "reversed update × 10", "inner product", "label flip", "backdoor",
        "prototypes flipped", "prototypes × 50", "prototypes swapped",
    ),
    "FedAli": (
        "sign flip", "reversed update × 10", "inner product", "label flip", "backdoor",
        "prototypes flipped", "prototypes × 50", "prototypes of 1e5",
    ),
    "pFedGRP": ("sign flip", "inner product", "label flip"),
}  # fmt: skip
"""By method the attacks that it is put under; FedAvg and GLDP are put under all that fit."""
DEFENDED = {
    "FedAvg": (
        "sign flip", "reversed update × 10", "a little is enough", "inner product", "label flip",
        "backdoor",
    ),
    "FedProto": ("inner product", "label flip", "prototypes flipped", "prototypes swapped"),
    "GLDP": ("reversed update × 10", "inner product", "label flip", "prototypes flipped"),
}  # fmt: skip
"""By method the attacks that defences are tried on."""
SEARCHING = ("min-max", "min-max along the mean", "made for the rule")
"""Attacks that fit every method and every rule."""
LOUDEST = {
    "FedAvg": ("reversed update × 10", "min-sum"),
    "FedProto": ("prototypes × 50", "prototypes swapped"),
    "GLDP": ("reversed update × 10",),
}
"""By method the attacks that stand beside these."""
LONG = ("FedMLP", "FedAli", "pFedGRP")
"""Methods of which a run takes long; they come last."""


@dataclass(frozen=True)
class Cell:
    """One cell of the tables: a method, its defence, the attack, and the number of attackers."""

    method: str
    defence: str
    attack: str
    attackers: int

    @classmethod
    def of(cls, row: str, setting: str) -> Cell:
        """Read a row's name, "FedAvg, median", and a setting's, "2, sign flip"."""
        method, _, defence = row.partition(", ")
        number, _, attack = setting.partition(", ")
        return cls(method, defence, attack or NONE, int(number) if attack else 0)

    def means_something(self) -> bool:
        """Tell whether the attack changes what the method sends, and is worth its time."""
        if self.attack == NONE or self.attack in SEARCHING:
            return True
        if self.attackers == 3 and self.attack in LOUDEST.get(self.method, ()):
            return True
        if self.defence:  # noise for so few clients leaves nothing to attack
            return "ε" not in self.defence and self.attack in DEFENDED.get(self.method, ())
        if self.method == "FedAvg":
            return not self.attack.startswith("prototypes")
        return self.method not in ATTACKS or self.attack in ATTACKS[self.method]


def cells(study: Sweep, out: Path, seeds: Sequence[int]) -> dict[PlannedRun, Cell]:
    """Return the runs of a study to make: seed by seed, long ones and three attackers last."""
    runs = plan(study, out, list(study.methods), list(seeds))
    found = {run: Cell.of(run.cell.row, run.cell.setting) for run in runs}
    kept = {run: cell for run, cell in found.items() if cell.means_something()}

    def place(run: PlannedRun) -> tuple[Any, ...]:
        cell = kept[run]
        return run.seed, cell.method in LONG, cell.attackers == 3

    return {run: kept[run] for run in sorted(kept, key=place)}


def run_here(runs: Iterable[PlannedRun], seconds: float, say: Any = print) -> None:
    """Run what is not finished, each in this process, until the time is over.

    A run that an attack stops leaves a file that says why, and counts as finished.
    """
    from fedtide.inprocess import launch_in_process

    ends = time.monotonic() + seconds
    for run in runs:
        if run.is_finished or _stopped(run).exists():
            continue
        if time.monotonic() > ends:
            say("the time is over; the same command goes on")
            return
        begun = time.process_time()
        config = parse_experiment(run.config, run.cell.row, [f"seed={run.seed}"])
        write_atomically(run.config_file, run.config)
        try:
            launch_in_process(config, run.directory, resume=may_hold_a_run(run.directory))
        except FedtideError as error:
            write_atomically(_stopped(run), f"{error}\n")
        say(f"{run.directory.name}: {time.process_time() - begun:.1f} s of CPU", flush=True)


def _stopped(run: PlannedRun) -> Path:
    return run.directory.with_name(run.directory.name + ".stopped")


def results(runs: Mapping[PlannedRun, Cell]) -> Iterator[dict[str, Any]]:
    """Yield the results of each run that has ended, or the error that stopped it."""
    for run, cell in runs.items():
        facts = {"cell": vars(cell), "seed": run.seed}
        if run.is_finished:
            yield {**facts, **measured(run, cell)}
        elif _stopped(run).exists():
            yield {**facts, "stopped": _stopped(run).read_text().strip()}


def measured(run: PlannedRun, cell: Cell) -> dict[str, Any]:
    """Return each client's accuracies and hits after the last round, by column.

    ``aside`` is the share of the attackers' uploads that the coordinator left out, ``named`` the
    share that it warned of.
    """
    records = records_of(run.directory)
    rows = records[-1]["clients"]
    scored = [
        rows[client].get("views", {}) for client in sorted(filter(str.isdigit, rows), key=int)
    ]
    honest = scored[: len(scored) - cell.attackers]
    found: dict[str, Any] = {}
    for column, views in VIEWS.items():
        view = next((v for v in views if all(v in each for each in honest)), None)
        if view is None:
            continue
        found[column] = [_accuracy(each, view) for each in scored]  # None of one left out
        if all(f"{view}:backdoor" in each for each in honest):
            found[f"{column} hits"] = [
                _share(_accuracy(each, f"{view}:backdoor"), _test_counts(run.directory, client))
                for client, each in enumerate(scored)
            ]
    if cell.attackers:
        first, uploads = len(honest), len(records) * cell.attackers
        for column, key in (("aside", "failed"), ("named", "warned")):
            told = [c for record in records for c in record.get(key, {}) if int(c) >= first]
            found[column] = _short(len(told) / uploads)
    return found


def _test_counts(run: Path, client: int) -> list[int]:
    return open_data(run / "data", client).counts(0, "test")


def _accuracy(views: Mapping[str, Mapping[str, float]], view: str) -> float | None:
    return _short(views[view]["accuracy"]) if view in views else None


def _share(accuracy: float | None, counts: Sequence[int], target: int = 0) -> float | None:
    """Return the share of hits among the images of other classes; None without such images.

    Args:
        accuracy: the share of hits among all test images.
        counts: the test images of each class.
        target: the class that the patch stands for.
    """
    total = sum(counts)
    others = total - counts[target]
    return None if accuracy is None or not others else _short(accuracy * total / others)


def _short(value: float) -> float:
    return round(value, 5)


def to_json(found: Iterable[Mapping[str, Any]]) -> str:
    """Return a record as text, a run a line."""
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in found)
    return f'{{"environment": {json.dumps(made_with())},\n "runs": [\n  {lines}\n ]}}\n'
