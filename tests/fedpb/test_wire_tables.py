"""Tables keep their types on the way, and what is too much of anything is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from fedcli.data.store.client_data import ClientData
from fedmodels.errors import PayloadError
from fedmodels.facts.resolution import experiment_of
from fedpb.tables import MAX_DEPTH, MAX_VALUES, client_json_of, description_of, table_of, values_of
from fedpb.v1.description_pb2 import ClientDescription
from fedpb.v1.table_pb2 import Entry, Table, Value
from fedsrv.engine.client_profile import Profile
from fedtide.testing.trial import TABLES


def crossed(values: dict[str, Any]) -> dict[str, Any]:
    return values_of(Table.FromString(table_of(values).SerializeToString()))


def nested(depth: int) -> Table:
    table = Table()
    for _ in range(depth - 1):
        table = Table(entries=[Entry(key="a", value=Value(table=table))])
    return table


def test_whole_numbers_and_numbers_stay_apart():
    values = {
        "seed": 2**62 + 1, "lr": 1.0, "one": 1, "on": True, "none": None, "name": "mlp",
        "hidden": [1, 2.0, [], {"x": {}}], "low": -(2**63),
    }  # fmt: skip
    found = crossed(values)
    assert json.dumps(found) == json.dumps(values)  # which also tells 1 from 1.0 and from true
    assert found["seed"] != int(float(found["seed"])), "a double would not have held it"


def test_an_experiment_is_the_same_at_the_client():
    experiment = experiment_of(TABLES)
    assert json.dumps(crossed(experiment.to_dict())) == json.dumps(experiment.to_dict())


@pytest.mark.parametrize("value", [2**63, math.nan, math.inf, object(), {"b": b"bytes"}])
def test_what_no_message_can_hold_is_not_sent(value):
    with pytest.raises(PayloadError, match="cannot be sent"):
        table_of({"a": value})


@pytest.mark.parametrize(
    ("table", "line"),
    [
        (Table(entries=[Entry(key="a"), Entry(key="a")]), "'a' comes twice"),
        (Table(entries=[Entry(key="a", value=Value(number=math.inf))]), "not finite"),
        (nested(MAX_DEPTH + 1), "nests deeper"),
        (Table(entries=[Entry(key=str(n)) for n in range(MAX_VALUES + 1)]), "more than"),
        (table_of({"a": [[None] * (MAX_VALUES // 2)] * 2}), "more than"),
    ],
)
def test_what_is_too_much_is_refused(table, line):
    with pytest.raises(PayloadError, match=line):
        values_of(table)


def test_as_much_as_may_be_is_read():
    assert values_of(nested(MAX_DEPTH))
    assert len(values_of(Table(entries=[Entry(key=str(n)) for n in range(MAX_VALUES)])))


def test_a_description_is_the_same_at_the_coordinator(digits):
    """An earlier part of the run may have stored it, and then the same must come again."""
    announced = ClientData(digits / "1").announcement()
    message = ClientDescription.FromString(description_of(announced).SerializeToString())
    assert json.loads(client_json_of(message)) == json.loads(announced)
    assert json.loads(announced)["partition"]["scenario"]


def test_what_a_description_leaves_out_has_defaults():
    least = {"format": 1, "input_shape": [4], "num_classes": 2, "scale": None}
    assert json.loads(client_json_of(description_of(json.dumps(least)))) == {
        **least, "dataset": "own", "scale": 1.0, "mean": [0.0], "std": [1.0], "class_names": [],
        "partition": None, "tasks": [],
    }  # fmt: skip


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_a_scale_is_a_number_above_0(scale):
    text = client_json_of(ClientDescription(format=1, input_shape=[4], num_classes=2, scale=scale))
    with pytest.raises(PayloadError, match=r"client 3: client.json is malformed: scale: "):
        Profile.parse(3, text)
