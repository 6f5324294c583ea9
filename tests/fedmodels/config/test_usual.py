"""Keys that a client of an earlier release does not know."""

from __future__ import annotations

import pytest

from fedmodels.config.sent import without_places
from fedmodels.errors import ConfigError
from fedmodels.facts.resolution import received_experiment
from fedmodels.facts.usual import usual_keys
from fedpb.tables import table_of, usual_of, values_of
from fedpb.v1.table_pb2 import Table
from tests.conftest import tiny_experiment

LATER = [("schedule", "later"), ("method", "later"), ("server", "later"), ("later",)]


def sent(**tables):
    experiment = tiny_experiment(**{"method": {"name": "ditto", "lam": 0.3}, **tables})
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


def paths(table, above=()):
    for key, value in table.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


@pytest.mark.parametrize(
    "tables",
    [
        {"method": {"name": "gldp", "reading": {"heads": "round"}}},
        {"net": {"name": "mlp", "hidden": [3]}},
        {
            "privacy": {"level": "client", "clip": 0.5, "noise_multiplier": 2.0, "delta": 1e-5},
            "method": {"name": "fedavg"},
        },
        {"scenario": {"kind": "iid", "domains": {"show": ["plain", "turn 90"], "when": "sudden"}}},
    ],
    ids=lambda tables: next(iter(tables)),
)
def test_a_known_key_has_its_value_whatever_a_server_marks(tables):
    experiment, values, _ = sent(**tables)
    usual = [*paths(values), *paths({**values, "method": values["method"]["name"]})]
    assert received_experiment(values, "the server's experiment", (), (), usual) == experiment


MINE = """
from fedmodels.methods.fedprox import FedProx
print("ran")
class Mine(FedProx):
    must: float
    may: float = 1.0
"""


@pytest.fixture
def own(tmp_path):
    """A config with a method of a file, which has a setting without a default."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file, {"name": f"{file}:Mine", "must": 2.0}


def test_an_own_method_is_received_from_another_place(own, tmp_path, monkeypatch):
    file, method = own
    _, values, usual = sent(method=method)
    monkeypatch.chdir(tmp_path.parent)
    assert values["method"]["name"] == "mine.py:Mine"
    found = received_experiment(values, "the server's experiment", [file], (), usual)
    assert found.method.hyper_parameters()["must"] == 2.0


def test_no_file_runs_that_the_user_has_not_named(own, tmp_path, monkeypatch, capsys):
    _, values, _ = sent()
    monkeypatch.chdir(tmp_path)
    values["method"] = {"name": "mine.py:Mine", "must": 2.0, "later": 1}
    usual = [("method", "later"), ("method", "must")]
    with pytest.raises(ConfigError, match="join with --code FILE"):
        received_experiment(values, "the server's experiment", (), (), usual)
    assert not capsys.readouterr().out
