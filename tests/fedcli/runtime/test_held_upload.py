"""The upload that a client holds until its interaction is committed."""

from pathlib import Path

import pytest
import torch

from fedcli.data.store.opened_data import open_data
from fedcli.runtime.state import StateDirectory
from fedcli.runtime.worker import Worker
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment


@pytest.fixture
def worker(tmp_path: Path, digits: Path) -> Worker:
    states = StateDirectory(tmp_path / "states")
    return Worker(0, open_data(digits, 0), states, tiny_experiment(), torch.device("cpu"))


def order(**more: int) -> rpc.Order:
    facts = {"interaction": 3, "committed": 1, "durable": -1, "base": -1, **more}
    return rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id="0", **facts)


def test_an_order_that_comes_again_gets_the_same_upload(worker):
    payload = Bundle(weights=dict(worker.run.initial_weights))
    first = worker.execute(order(trip=5, issue=1), payload)
    again = worker.execute(order(trip=5, issue=2, committed=2), payload)
    assert first is not None
    assert again is not None
    assert again.upload is first.upload


def test_an_order_that_begins_elsewhere_is_trained_anew(worker):
    """The coordinator died, and computed what came before without somebody."""
    begun = dict(worker.run.initial_weights)
    moved = {key: t + 0.5 if t.is_floating_point() else t for key, t in begun.items()}
    stale = worker.execute(order(trip=5, issue=1), Bundle(weights=begun))
    found = worker.execute(order(trip=6, issue=2, committed=2), Bundle(weights=moved))
    assert stale is not None
    assert found is not None
    worker.close()
    alone = worker.execute(order(trip=6, issue=3, committed=2), Bundle(weights=moved))
    assert alone is not None
    for key, tensor in found.upload.weights.items():
        assert torch.equal(tensor, alone.upload.weights[key])
    assert any(not torch.equal(t, stale.upload.weights[k]) for k, t in found.upload.weights.items())
