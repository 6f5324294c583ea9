"""What many tests start from: a small partition of real data, and a tiny experiment on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from rich.console import Console

from fedcli.data.commands import run_partition
from fedmodels.config import Experiment, experiment_of

settings.register_profile("fedtide", deadline=None, max_examples=50)
settings.load_profile("fedtide")

TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "digits", "max_per_class": 20},
    "scenario": {"kind": "per_class_shards", "shards": 5, "tasks": 2},
    "net": {"name": "mlp", "hidden": [16]},
    "method": {"name": "fedavg"},
    "schedule": {"rounds": 2, "clients": 3},
    "training": {"batch_size": 16, "lr": 0.05},
}
"""Three clients, two tasks, about 33 training examples of at most five classes in each."""


def tiny_experiment(**overrides: Any) -> Experiment:
    """Return the tiny experiment with whole tables or single keys of them replaced.

    A mapping is merged into its table, but ``net``, ``scenario`` and ``method`` are replaced when
    they name another; a string is a table's ``name``; anything else is a key of the top level.
    """
    tables: dict[str, Any] = {name: dict(table) for name, table in TABLES.items()}
    for name, given in overrides.items():
        given = {"name": given} if isinstance(given, str) else given
        if isinstance(given, Mapping) and not {"name", "kind"} & given.keys():
            tables[name] = {**tables.get(name, {}), **given}
        else:
            tables[name] = given
    return experiment_of(tables)


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a small partition of the digits, made once; it fits ``experiment()``."""
    root: Path = tmp_path_factory.mktemp("digits") / "data"
    made = tiny_experiment()
    run_partition(
        made.data, made.scenario, made.schedule.clients, made.seed, root, Console(quiet=True)
    )
    return root


@pytest.fixture
def experiment() -> Callable[..., Experiment]:
    """A factory of tiny experiments: ``experiment(method={"name": "fedprox", "mu": 0.1})``."""
    return tiny_experiment
