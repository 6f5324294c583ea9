"""Whole runs in one process whose clients, or examples, are canaries (:mod:`.canaries`).

What the attacker sees is the model at the end alone. What is charged is what the run says.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fedtide
from benchmarks.privacy_audit.canaries import there
from benchmarks.privacy_audit.lower_bounds import epsilon_of_one_run
from fedmodels.tensors.bundle import Problem
from fedmodels.training.run import RunFacts

METHODS = Path(__file__).parent / "canaries.py"
BASE: dict[str, Any] = {
    "data": {"name": "digits", "max_test_per_class": 2},
    "scenario": {"kind": "iid"},
    "evaluate": {"every": 0, "views": [], "pictures": 0},
    "training": {"lr": 1.0},
}
DIGITS = Problem((1, 8, 8), 10)
ALLOW = ["announced", "examples", "loss"]


@dataclass(frozen=True)
class Scores:
    """What an attacker makes of one run."""

    ins: list[float]
    outs: list[float]
    charged: float
    """The epsilon that the run says."""


@dataclass(frozen=True)
class WholeRun:
    """A config whose clients, or examples, are canaries."""

    name: str
    method: str
    tables: Mapping[str, Any]
    delta: float = 1e-3
    is_gaussian: bool = True
    """Whether all of it is one Gaussian release."""
    privacy: Mapping[str, Any] = field(default_factory=dict)

    def play(self) -> Scores:
        """Run it once; higher scores say that a canary is there."""
        seed = int.from_bytes(os.urandom(4))
        method = {"name": f"{METHODS}:{self.method}", "canaries": seed}
        privacy = {"delta": self.delta, "allow": ALLOW, **self.privacy}
        tables = {**BASE, **self.tables, "method": method, "privacy": privacy}
        with TemporaryDirectory() as place:
            run = fedtide.run(tables, out=Path(place) / "run", backend="inprocess")
            end = run.global_model().net.head.weight.detach().flatten()
            begin = RunFacts(run.experiment, DIGITS).initial_weights["head/weight"].flatten()
            charged = float(run.summary["privacy"]["epsilon"])
            told = (Path(place) / "run" / "rounds.jsonl").read_text("utf-8").splitlines()[0]
        rows = json.loads(told)["clients"]
        if self.method == "CanaryClients":
            number, is_there, sign = len(rows), there(len(rows), seed), 1.0
        else:  # the only client's examples; a loss is gone down
            number, is_there, sign = int(rows["0"]["num_examples"]), there(len(end), seed), -1.0
        scores, is_there = sign * (end - begin)[:number], is_there[:number]
        return Scores(scores[is_there].tolist(), scores[~is_there].tolist(), charged)


def one_run(scores: Scores, delta: float, guesses: float = 0.3) -> float:
    """Return the bound of one run: guesses for the highest and the lowest scores, half of each."""
    both = [(s, True) for s in scores.ins] + [(s, False) for s in scores.outs]
    ordered = sorted(both, key=lambda one: one[0])
    each = max(1, int(guesses * len(ordered) / 2))
    right = sum(not truth for _, truth in ordered[:each])
    right += sum(truth for _, truth in ordered[-each:])
    return epsilon_of_one_run(right, 2 * each, len(ordered), delta)
