"""A client whose server lies: one line and an end, or an order that fails; nothing hangs."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fedcli.runtime.host import Host
from fedcli.runtime.link import Link
from fedmodels.errors import FedtideError
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Problem
from fedmodels.training.run import RunFacts
from fedpb.codec import encode
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from tests.conftest import tiny_experiment

pytestmark = pytest.mark.loopback

EXPERIMENT = tiny_experiment(schedule={"rounds": 1, "clients": 3})


class Liar(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A server that gives one order, and may lie in it or in its answer to a Join."""

    def __init__(self, joined: dict[str, Any], order: dict[str, Any]) -> None:
        self.joined, self.order = joined, order
        self.failure = ""
        self.pushed = threading.Event()

    def Join(self, request: rpc.JoinRequest, context: Any) -> rpc.JoinResponse:  # noqa: N802
        facts = {"run_id": "abc", "beat_every_s": 2.0, **self.joined}
        return rpc.JoinResponse(**{"experiment": table_of(EXPERIMENT.to_dict()), **facts})

    def Pull(self, request: rpc.PullRequest, context: Any) -> Iterator[rpc.PullResponse]:  # noqa: N802
        if self.pushed.is_set():
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "the run is over")
        facts = {"kind": rpc.ORDER_KIND_TRAIN, "client_id": "0", "issue": 1, "base": -1}
        weights = RunFacts(EXPERIMENT, Problem((1, 8, 8), 10)).initial_weights
        encoded = encode(Bundle(weights=weights))
        header = rpc.PullHeader(order=rpc.Order(**{**facts, **self.order}))
        header.parts.add(role="common", digest=encoded.digest, bundle=encoded.header)
        yield rpc.PullResponse(header=header)
        yield from map(rpc.PullResponse.FromString, encoded.chunks())
        self.pushed.wait(60)

    def Push(self, requests: Iterator[rpc.PushRequest], context: Any) -> rpc.PushResponse:  # noqa: N802
        self.failure = next(requests).header.failure
        for _ in requests:
            pass
        self.pushed.set()
        return rpc.PushResponse()

    def Beat(self, request: rpc.BeatRequest, context: Any) -> rpc.BeatResponse:  # noqa: N802
        return rpc.BeatResponse()

    def Leave(self, request: rpc.LeaveRequest, context: Any) -> rpc.LeaveResponse:  # noqa: N802
        return rpc.LeaveResponse()


@pytest.fixture
def lied_to(digits: Path, tmp_path: Path) -> Iterator[Any]:
    """Return what runs a client whose server tells lies, and returns the server."""
    servers: list[tuple[grpc.Server, Liar]] = []

    def run(client: ClientId = 0, **lies: dict[str, Any]) -> Liar:
        liar = Liar(lies.get("joined", {}), lies.get("order", {}))
        server = grpc.server(ThreadPoolExecutor(4))
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(liar, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        servers.append((server, liar))
        states = tmp_path / "states"
        Host([client], Link(address), digits, states, torch.device("cpu")).run()
        return liar

    yield run
    for server, liar in servers:
        liar.pushed.set()
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("client", "line"),
    [
        ("1", "an order is for client 1, which is not in this process"),
        ("evaluator", "an order is for client evaluator, which is not in this process"),
        ("x\x1b[2J", r"an order is for client x\\x1b\[2J, which is not in this process"),
    ],
)
def test_an_order_for_somebody_else_ends_the_process_with_a_line(client, line, lied_to, tmp_path):
    with pytest.raises(FedtideError, match=line):
        lied_to(order={"client_id": client})
    assert not (tmp_path / "states" / "1").exists(), "client 1 was not offered"


def test_an_evaluator_that_is_told_to_train_does_not(lied_to):
    liar = lied_to(client=EVALUATOR, order={"client_id": EVALUATOR})
    assert liar.failure == "the evaluator has no private state to train with"


@pytest.mark.parametrize("kind", [rpc.ORDER_KIND_UNSPECIFIED, 99])
def test_an_order_of_an_unknown_kind_is_not_done(kind, lied_to, tmp_path):
    assert lied_to(order={"kind": kind}).failure == f"an order of an unknown kind, {kind}"
    assert not list((tmp_path / "states" / "0").glob("personal*")), "the run is not over"


@pytest.mark.parametrize("seconds", [math.inf, math.nan, -1.0, 0.0])
def test_signs_of_life_at_an_absurd_interval_are_refused(seconds, lied_to):
    with pytest.raises(FedtideError, match="the server asks for a sign of life every"):
        lied_to(joined={"beat_every_s": seconds})


@pytest.mark.parametrize("run_id", ["", "\x1b[2J\nclient 0 has finished", "a" * 65])
def test_a_run_with_a_malformed_id_is_not_joined(run_id, lied_to, tmp_path):
    with pytest.raises(FedtideError, match="the server's run has a malformed id: ") as caught:
        lied_to(joined={"run_id": run_id})
    assert str(caught.value).isprintable()


def test_a_file_of_weights_is_the_users_own_and_not_one_that_the_server_names(lied_to, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("what stays here")
    tables = {**EXPERIMENT.to_dict(), "method": {"name": "fedrep"}}
    tables["net"] |= {"weights": str(secret), "weights_sha256": "0" * 64}
    with pytest.raises(FedtideError, match="join with --weights FILE") as caught:
        lied_to(joined={"experiment": table_of(tables)})
    assert "secret" not in str(caught.value)


def test_an_honest_order_is_done(lied_to):
    assert lied_to().failure == ""
