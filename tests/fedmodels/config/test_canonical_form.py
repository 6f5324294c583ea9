"""A config is the same run in whatever order its keys stand, wherever two of them are compared."""

from __future__ import annotations

import json
import random
import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcli.data.store.partition_writer import digest_of as partition_digest
from fedmodels.config.bounds import canonical
from fedmodels.config.changes import difference, forbidden_changes
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import differences
from fedmodels.config.presets import preset_files
from fedmodels.config.sent import settings_digest
from fedmodels.facts.config_file import parse_experiment
from fedmodels.facts.resolution import experiment_of

OWN_NETS = """
[net]
name = "mlp"
hidden = [8]
[[net.by_client]]
name = "mlp"
hidden = [16, 8]
adapters = 2
[method]
name = "fedproto"
"""
COLUMNS = """
[net]
name = "mlp"
[method]
name = "fedavg"
[data]
name = "table"
root = "there"
columns.label = "ill"
columns.features = ["sex", "ward", "age"]
columns.categories.ward = ["b", "a"]
columns.categories.sex = ["f", "m"]
[scenario]
kind = "iid"
[training]
optimizer = "adam"
optimizer_options.eps = 1e-6
optimizer_options.betas = [0.8, 0.9]
"""
TABLES = [
    *(
        tomllib.loads(path.read_text())
        for path in preset_files().values()
        if path.parent.name != "sweeps"
    ),
    tomllib.loads(OWN_NETS),
    tomllib.loads(COLUMNS),
]


def reordered(value: Any, order: random.Random) -> Any:
    """Return tables, also those in lists, whose keys stand in another order."""
    if isinstance(value, list):
        return [reordered(each, order) for each in value]
    if not isinstance(value, dict):
        return value
    items = list(value.items())
    order.shuffle(items)
    return {key: reordered(each, order) for key, each in items}


def of_partition(experiment: Experiment) -> dict[str, Any]:
    """Return what ``fedcli partition`` writes beside the data that it deals out."""
    assert experiment.data is not None
    assert experiment.scenario is not None
    return {
        "data": experiment.data.identity(), "scenario": experiment.scenario.identity(),
        "clients": experiment.schedule.clients, "seed": experiment.seed,
    }  # fmt: skip


def check(tables: dict[str, Any], order: random.Random) -> None:
    """Check every comparison of a config with itself, whose keys stand in another order."""
    begun, now = experiment_of(tables), experiment_of(reordered(tables, order))
    stored = experiment_of(json.loads(json.dumps(begun.to_dict(), sort_keys=True)))  # in run.db
    written = parse_experiment(tomli_w.dumps(begun.to_dict()))  # config.toml, launch.toml
    for before in (begun, stored, written):
        assert difference(before, now) == forbidden_changes(before, now) == []
        assert settings_digest(before) == settings_digest(now)
        assert canonical(before.to_dict()) == canonical(now.to_dict())
        if before.data is not None and before.scenario is not None:
            made = json.loads(json.dumps(of_partition(before), sort_keys=True))
            assert differences(now, made) == []
            assert partition_digest(made) == partition_digest(of_partition(now))


@pytest.mark.parametrize("text", [OWN_NETS, COLUMNS])
def test_tables_in_lists_and_open_tables(text: str) -> None:
    for seed in range(10):
        check(tomllib.loads(text), random.Random(seed))


@settings(max_examples=40, deadline=None)
@given(tables=st.sampled_from(TABLES), order=st.randoms(use_true_random=False))
def test_any_config_in_any_order_of_keys(tables: dict[str, Any], order: random.Random) -> None:
    check(tables, order)
