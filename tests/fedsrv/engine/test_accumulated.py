"""``[scenario] training_data = "accumulated"``: a task's data are those of all tasks up to it."""

import json

import pytest

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.resolution import experiment_of
from fedmodels.methods import method_class, names
from fedtide.inprocess import run_in_process
from tests.conftest import TABLES, records_of
from tests.fedmodels.methods.test_conformance import experiment_for

ACCUMULATED = {"training_data": "accumulated"}


def trained_on(run):
    """Return how many examples each client trained on in each interaction."""
    return [
        {int(c): row["num_examples"] for c, row in r["clients"].items() if "num_examples" in row}
        for r in records_of(run)
    ]


def test_the_stream_adds_up_what_came_and_shows_nothing_else(digits):
    data = ClientData(digits / "1")
    alone, grown = (TaskStream(data, accumulates=each) for each in (False, True))
    for stream in (alone, grown):
        stream.open(0)
    assert grown.train(0)[1].tolist() == alone.train(0)[1].tolist()
    before = alone.train(0)[1].tolist()
    for stream in (alone, grown):
        stream.open(1)
    assert grown.train(1)[1].tolist() == before + alone.train(1)[1].tolist()
    with pytest.raises(DataError, match="out of reach"):
        grown.train(0)
    with pytest.raises(DataError, match="out of reach"):
        grown.train_up_to(1)


@pytest.mark.parametrize("method", ["fedavg", "gldp", "fedmlp", "fedproto"])
def test_a_round_begins_with_the_first_task_alone(method, digits, tmp_path, whole_run):
    """Counts of uploads are checked against what a client has: honest ones must pass."""
    tables = [json.loads((digits / str(c) / "client.json").read_text())["tasks"] for c in range(3)]
    sizes = [[sum(task["train"]) for task in tasks] for tasks in tables]
    one_round = experiment_for((method, {}), schedule={"rounds": 1})
    run_in_process(
        experiment_for((method, {}), scenario=ACCUMULATED), digits, tmp_path / "accumulated"
    )
    first, second = ({c: sizes[c][t] for c in range(3)} for t in (0, 1))
    both = {c: first[c] + second[c] for c in range(3)}
    assert trained_on(whole_run(one_round, digits).out) == [first, second]
    assert trained_on(tmp_path / "accumulated") == [first, both] * 2


def test_what_makes_up_for_old_data_refuses_them():
    for name in names():
        tables = {**TABLES, "method": {"name": name}}
        tables["scenario"] = {**tables["scenario"], **ACCUMULATED}
        if method_class(name).trains_on in ("memory", "replay"):
            with pytest.raises(ConfigError, match="is about their loss"):
                experiment_of(tables)
        else:
            assert experiment_of(tables).accumulates
    replacing = {n for n in names() if method_class(n).trains_on in ("memory", "replay")}
    assert replacing == {
        "af-fcl", "fedavg-replay", "fedcil", "mfcl", "pfedgraph-replay", "pfedgrp", "target",
    }  # fmt: skip
