"""A server that strangers try to keep busy: whoever has a session is served all the same."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from fedmodels import times
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb import PROTOCOL
from fedpb.codec import encode
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import Answers, Trip, UploadForm
from fedsrv.progress.events import EventLog
from fedsrv.transport import inbox
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.integration.harness import environment, until

pytestmark = pytest.mark.loopback

FACTS = {"format": 1, "input_shape": [4], "num_classes": 2}
PROFILE = json.dumps({**FACTS, "tasks": [{"train": [1, 1], "test": [1, 1]}]})
UPLOAD = Bundle(weights={"w": torch.ones(2_000_000)})
STOPPED = """
import sys, grpc
from fedpb.v1 import coordinator_pb2 as rpc, coordinator_pb2_grpc
stub = coordinator_pb2_grpc.CoordinatorServiceStub(grpc.insecure_channel(sys.argv[1]))
waiting = rpc.Waiting(client_id="0", token=bytes.fromhex(sys.argv[2]))
for chunk in stub.Pull(rpc.PullRequest(waiting=[waiting])):
    pass
"""


class Served:
    """A coordinator's service in this process, with one client that has joined."""

    def __init__(self, directory: Path, keepalive_s: float = 20.0) -> None:
        self.events = EventLog()
        self.cohort = RemoteCohort(
            1, Spool(directory, 1 << 26), self.events, admission=Admission({})
        )
        self.service = Service("run", {}, self.cohort, self.events)
        self.server, port = start_server(self.service, "127.0.0.1:0", None, keepalive_s)
        self.address = f"127.0.0.1:{port}"
        self.engine = ThreadPoolExecutor(1)
        self.channels: list[grpc.Channel] = []
        self.stub = coordinator_pb2_grpc.CoordinatorServiceStub(self.channel())

    def channel(self) -> grpc.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        self.channels.append(grpc.insecure_channel(self.address, options))
        return self.channels[-1]

    def join(self) -> bytes:
        request = rpc.JoinRequest(
            client_id="0", description=description_of(PROFILE), protocol=PROTOCOL
        )
        self.token: bytes = self.stub.Join(request, timeout=10).token
        return self.token

    def send_and_receive(self) -> Future[Answers]:
        order = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id="0", trip=9)
        trip = Trip({0: order}, Bundle(), form=UploadForm(BundleSpec.of(UPLOAD)))
        future = self.engine.submit(self.cohort.send_and_receive, trip)
        until(lambda: self.cohort._trips.current, "the trip did not open")
        return future

    def pull(self) -> rpc.Order:
        """Return the next order; a Pull whose place another one took is made again."""
        waiting = rpc.Waiting(client_id="0", token=self.token)
        for _ in range(100):
            call = self.stub.Pull(rpc.PullRequest(waiting=[waiting]), timeout=10)
            try:
                chunk = next(call, None)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.CANCELLED:
                    raise
                continue
            if chunk is not None:
                call.cancel()
                return chunk.header.order
        raise AssertionError("no order came")

    def chunks(self) -> list[rpc.PushRequest]:
        encoded = encode(UPLOAD)
        facts = {"client_id": "0", "token": self.token, "kind": rpc.ORDER_KIND_TRAIN, "trip": 9}
        header = rpc.PushHeader(**facts, bundle=encoded.header)
        frames = [rpc.PushRequest.FromString(chunk) for chunk in encoded.chunks()]
        return [rpc.PushRequest(header=header), *frames]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.cohort.stop("the test is over")
        self.service.gate.close()
        stop_server(self.server, 0.0)
        self.service.complaints.close()
        self.engine.shutdown()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.close()


def silent(ended: threading.Event) -> Iterator[Any]:
    """Send nothing, and do not end."""
    ended.wait()
    yield from ()


def listening(channel: grpc.Channel, call: str, ended: threading.Event) -> Any:
    """Open a stream that says nothing, or one that only listens."""
    if call == "Health.Watch":
        return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    if call == "Reflection":
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        return stub.ServerReflectionInfo(silent(ended))
    raw = channel.stream_unary(f"/fedpb.v1.CoordinatorService/{call}", lambda b: b, None)
    return raw.future(silent(ended))


@pytest.mark.parametrize("call", ["Push", "Pull", "Join", "Watch", "Health.Watch", "Reflection"])
def test_streams_without_a_session_keep_nobody_out(served, call):
    ended = threading.Event()
    try:
        channels = [served.channel() for _ in range(6)]
        open_calls = [listening(channels[n % 6], call, ended) for n in range(240)]
        served.join()
        trip = served.send_and_receive()
        assert served.pull().client_id == "0"
        assert not served.stub.Push(iter(served.chunks()), timeout=30).repeated_upload
        assert list(trip.result(10).by_client) == [0]
        health = health_pb2_grpc.HealthStub(served.channel())
        assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
    finally:
        ended.set()
        for one in open_calls:
            one.cancel()


def test_streams_of_a_session_keep_nobody_out(served):
    """Its Pulls that are not read, and its Pushes that do not go on, take one another's place."""
    served.join()
    trip = served.send_and_receive()
    ended, chunks = threading.Event(), served.chunks()

    def halted() -> Iterator[rpc.PushRequest]:
        yield from chunks[:2]
        ended.wait()

    stub = coordinator_pb2_grpc.CoordinatorServiceStub(served.channel())
    waiting = rpc.Waiting(client_id="0", token=served.token)
    calls = [stub.Push.future(halted()) for _ in range(60)]
    calls += [stub.Pull(rpc.PullRequest(waiting=[waiting])) for _ in range(30)]
    try:
        assert served.pull().client_id == "0"
        served.stub.Push(iter(chunks), timeout=30)
        assert list(trip.result(10).by_client) == [0]
    finally:
        ended.set()
        for call in calls:
            call.cancel()


def test_an_upload_has_its_time(served, monkeypatch):
    monkeypatch.setattr(inbox, "PUSH_S", 0.2)
    monkeypatch.setattr(times, "SLOWEST_BYTES_PER_S", 1 << 30)
    served.join()
    trip = served.send_and_receive()
    ended, chunks = threading.Event(), served.chunks()

    def halted() -> Iterator[rpc.PushRequest]:
        yield from chunks[:3]
        ended.wait()

    call = served.stub.Push.future(halted())
    try:
        assert call.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    finally:
        ended.set()
    assert "failed" not in [e.kind for e in list(served.events._kept)], "it has no outcome"
    monkeypatch.setattr(inbox, "PUSH_S", 60.0)
    served.stub.Push(iter(chunks), timeout=30)
    assert list(trip.result(10).by_client) == [0]


def test_a_cancelled_upload_is_no_outcome(served):
    served.join()
    trip = served.send_and_receive()
    chunks = served.chunks()
    for _ in range(10):
        under_way, ended = threading.Event(), threading.Event()

        def some(under_way: Any = under_way, ended: Any = ended) -> Iterator[rpc.PushRequest]:
            yield from chunks[:4]
            under_way.set()
            ended.wait()

        call = served.stub.Push.future(some())
        assert under_way.wait(10)
        call.cancel()
        ended.set()
    served.stub.Push(iter(chunks), timeout=30)
    assert list(trip.result(10).by_client) == [0]
    assert "failed" not in [e.kind for e in list(served.events._kept)]


def test_a_stopped_client_is_noticed(tmp_path):
    served = Served(tmp_path, keepalive_s=1.0)
    token = served.join()
    command = [sys.executable, "-c", STOPPED, served.address, token.hex()]
    client = subprocess.Popen(command, env=environment())
    try:
        member, look = served.cohort.sessions[0], threading.Event()
        while not member.is_waiting:
            look.wait(0.02)
        client.send_signal(signal.SIGSTOP)
        for _ in range(1000):
            if not member.is_waiting:
                break
            look.wait(0.02)
        assert not member.is_waiting
    finally:
        client.kill()
        client.wait()
        served.close()
