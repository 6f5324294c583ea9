"""Keys that a client of an earlier release does not know."""

from __future__ import annotations

import pytest

from fedmodels.config.sent import without_places
from fedmodels.errors import ConfigError
from fedmodels.resolution import received_experiment
from fedmodels.usual import usual_keys
from fedpb.tables import table_of, usual_of, values_of
from fedpb.v1.table_pb2 import Table
from tests.conftest import tiny_experiment

LATER = [("schedule", "later"), ("method", "later"), ("server", "later"), ("later",)]


def sent():
    experiment = tiny_experiment(method={"name": "ditto", "lam": 0.3})
    table = table_of(without_places(experiment.to_dict()), usual_keys(experiment))
    table = Table.FromString(table.SerializeToString())
    return experiment, values_of(table), usual_of(table)


def test_defaults_are_marked_and_what_was_set_is_not():
    _, values, usual = sent()
    assert {("server",), ("server", "max_rollback"), ("schedule", "order")} <= set(usual)
    assert not {("method", "lam"), ("method", "name"), ("net", "name")} & set(usual)
    assert values["method"]["lam"] == 0.3


def with_later(values):
    values["later"] = {"key": 1}
    for table in ("schedule", "method", "server"):
        values[table]["later"] = 7
    return values


def test_an_unknown_key_at_its_default_is_left_out():
    experiment, values, usual = sent()
    usual += [*LATER, ("later", "key"), ("nowhere", "key"), ("seed", "key"), ("seed",)]
    found = received_experiment(with_later(values), "the server's experiment", (), (), usual)
    assert found == experiment


@pytest.mark.parametrize("used", LATER)
def test_an_unknown_key_with_another_value_is_refused(used):
    _, values, usual = sent()
    usual += [path for path in LATER if path != used]
    with pytest.raises(ConfigError, match="later"):
        received_experiment(with_later(values), "the server's experiment", (), (), usual)
