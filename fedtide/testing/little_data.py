"""The checks of methods on clients that hold next to nothing."""

from __future__ import annotations

import json
import math
from typing import Any

from fedtide.testing.case import Case
from fedtide.testing.trial import TABLES, few_in


def clients_with_little_data_take_part(case: Case) -> None:
    """One class, one example, nothing at all: everybody still takes part and is scored."""
    _run_with_little(case, case.tables.get("net", "mlp"))


def one_example_makes_no_batch_statistics(case: Case) -> None:
    """Clients with so little train a net with batch normalisation, unless the net is given."""
    if "net" not in case.tables:
        _run_with_little(case, "resnet20")


def _run_with_little(case: Case, net: Any) -> None:
    training = {**TABLES["training"], "batch_size": 8}
    schedule = {"rounds": 1, "clients": 3}
    experiment = case.experiment(
        training=training, schedule=schedule, scenario={"tasks": 1}, net=net
    )
    made = case.run(experiment, data=few_in(case.fresh(), case.data))
    assert all(map(math.isfinite, made.summary["metrics"].values()))
    for line in (made.out / "rounds.jsonl").read_text("utf-8").splitlines():
        json.loads(line, parse_constant=_no_json)


def _no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
