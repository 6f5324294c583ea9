"""Peers and run directories of an earlier release with the same protocol."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

import fedtide
from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import tables_in
from fedpb.v1 import coordinator_pb2 as rpc
from tests.integration.conftest import tables
from tests.integration.old_wire import OldWire

HERE = Path(__file__).parent / "earlier"
LATER = {"Prepare": rpc.PrepareResponse, "Join": rpc.JoinResponse}


def with_later_keys(name: str, answer: bytes) -> bytes:
    """Add what a later release adds to every config: keys at their defaults."""
    if name not in LATER:
        return answer
    message = LATER[name].FromString(answer)
    (schedule,) = (each for each in message.experiment.entries if each.key == "schedule")
    for table in (message.experiment, schedule.value.table):
        table.entries.add(key="later", usual=True).value.integer = 7
    return message.SerializeToString()


def fields_below(table):
    """Yield the fields of a table of the config, and of the tables in it."""
    for key, field in table.model_fields.items():
        yield f"{table.__name__}.{key}", field
        for inner in tables_in(field.annotation):
            yield from fields_below(inner)


@pytest.mark.loopback
def test_peers_with_the_same_protocol_understand_one_another(loopback):
    """Client 0 has an earlier release's wire, client 1 a later coordinator; bits stay equal."""
    run = loopback(tables("fedper", schedule={"rounds": 1, "clients": 3}, net={"name": "mlp"}))
    coordinator = run.serve()
    wires = [
        OldWire(HERE / "fedpb.v1.binpb", run.port, lambda name, answer: answer),
        OldWire(HERE.parents[2] / "proto" / "fedpb.v1.binpb", run.port, with_later_keys),
    ]
    try:
        others = [run.join(str(client), port=wire.port) for client, wire in enumerate(wires)]
        run.finish_as_alone(coordinator, *others, run.join("2"))
    finally:
        for wire in wires:
            wire.close()
    assert all({"Join", "Pull", "Push"} <= wire.passed for wire in wires)


def test_a_key_that_was_unset_by_default_still_is():
    """Such a key is not sent: whoever has another default for it would compute something else."""
    then = set((HERE / "unset.txt").read_text().split())
    fields = dict(fields_below(Experiment))
    assert len(then) > 100
    assert not {key for key in then & fields.keys() if fields[key].get_default() is not None}


def test_a_run_of_an_earlier_release_is_read_and_goes_on(tmp_path):
    with tarfile.open(HERE / "run.tar.gz") as archive:
        archive.extractall(tmp_path / "run", filter="data")
    run = fedtide.open(tmp_path / "run")
    known = run.summary["state_sha256"]
    assert known.startswith("dbcc3950")
    assert run.personal_model(1).predict(np.zeros((3, 1, 8, 8), np.float32)).shape == (3,)
    assert len(run.metrics()) == 4
    longer = run.extend(rounds=1, backend="inprocess")
    assert len(longer.metrics()) == 6
    assert longer.summary["state_sha256"] != known
