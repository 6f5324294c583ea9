"""A client that cannot do its last order says so, and does not look as if it had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.worker import GivenOrder
from fedmodels.errors import ArchiveError, ArchiveNotWritten
from fedmodels.tensors.bundle import Bundle
from fedpb.v1 import coordinator_pb2 as rpc
from tests.conftest import tiny_experiment

WHY = "personal.safetensors cannot be written: No space left on device"


class OneOrder(Host):
    """A host whose only order is its last one."""

    def join(self) -> None:
        self.workers.begin(tiny_experiment(method="local"))

    def orders(self) -> Iterator[GivenOrder]:
        self._pushing = threading.Thread(target=self._results.get)
        self._pushing.start()
        order = rpc.Order(
            kind=rpc.ORDER_KIND_FINISH, client_id="0", interaction=5, base=-1, committed=4
        )
        yield GivenOrder(self.workers.of(0), order, Bundle())


@pytest.fixture
def host(digits: Path, tmp_path: Path) -> Host:
    link: Any = SimpleNamespace(close=lambda: None, leave=lambda members, why: None)
    return OneOrder([0], link, digits, tmp_path / "states", torch.device("cpu"))


def test_a_final_model_that_is_not_stored_fails_the_client(host, monkeypatch, caplog):
    def full(*_: object) -> None:
        raise ArchiveNotWritten(WHY)

    monkeypatch.setattr("fedcli.runtime.state.StateDirectory.save_personal", full)
    with pytest.raises(ArchiveError, match="the run is over, but client 0 has no final model: per"):
        host.run()
    errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [f"client 0, interaction 6: {WHY}"]


def test_a_final_model_that_is_stored_ends_the_client_well(host, caplog):
    host.run()
    assert "ERROR" not in caplog.text
