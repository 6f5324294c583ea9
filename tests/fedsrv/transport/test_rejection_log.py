"""What bad calls leave in the log: a line a minute, and no traceback."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from fedpb import PROTOCOL, SERVICE
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.progress.events import EventLog
from fedsrv.transport.gate import REFUSALS_EVERY_S, RejectionLog
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service
from fedsrv.transport.sessions import client_id_of
from fedsrv.transport.spool import Spool

PROFILE = json.dumps({"format": 1, "input_shape": [4], "num_classes": 2, "tasks": []})
LONG = "9" * 5000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# --- counting -------------------------------------------------------------------------------------


def test_the_first_of_a_minute_is_told_and_the_others_are_counted(caplog):
    clock = Clock()
    complaints = RejectionLog(logging.getLogger("fedsrv.test"), clock)
    for _ in range(1000):
        complaints.tell("ABORTED", "no longer wanted")
    complaints.tell("UNAUTHENTICATED", "join again\r\n\x1b[2J")
    clock.now = REFUSALS_EVERY_S
    complaints.tell("ABORTED", "still not wanted")
    complaints.tell("ABORTED", "nor this")
    complaints.close()
    assert messages(caplog) == [
        "ABORTED: no longer wanted",
        "UNAUTHENTICATED: join again\\r\\n\\x1b[2J",
        "ABORTED: still not wanted (and 999 more such calls since the last line)",
        "ABORTED: 1 more such calls",
    ]


# --- a server in this process ---------------------------------------------------------------------


class Served:
    """A service without an engine, and a channel to it that sends whatever it is told."""

    def __init__(self, directory: Path) -> None:
        self.events = EventLog()
        spool = Spool(directory, 1 << 20)
        self.cohort = RemoteCohort(2, spool, self.events, admission=Admission({}))
        self.service = Service("run", {}, self.cohort, self.events)
        address = f"unix:{directory}/s"
        self.server, _ = start_server(self.service, address, None)
        self.channel = grpc.insecure_channel(address)

    def call(self, method: str, *messages: bytes, service: str = SERVICE) -> grpc.RpcError | bytes:
        """Send messages as they are; return the first answer, or what went wrong."""
        call = self.channel.stream_stream(f"/{service}/{method}", None, None)
        try:
            for answer in call(iter(messages), timeout=10):
                return bytes(answer)
        except grpc.RpcError as error:
            return error
        return b""

    def close(self) -> None:
        self.channel.close()
        self.cohort.stop("the test is over")
        self.events.close()
        stop_server(self.server, 0)
        self.service.complaints.close()


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("s"))  # a socket's path must be short
    yield made
    made.close()


NONSENSE = b"\xff\xff\xff\xff"


@pytest.mark.parametrize("method", ["Join", "Pull", "Push", "Beat", "Leave", "Watch"])
def test_a_message_that_does_not_parse_is_an_invalid_argument(served, method, caplog):
    for _ in range(20):
        error = served.call(method, NONSENSE)
        assert isinstance(error, grpc.RpcError)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "parsed" in error.details()
    assert len(caplog.records) == 1
    assert caplog.records[0].exc_info is None
    served.service.complaints.close()
    assert "19 more such calls" in messages(caplog)[-1]


def test_services_of_others_leave_no_traceback_either(served, caplog):
    for _ in range(20):
        error = served.call("Check", NONSENSE, service="grpc.health.v1.Health")
        assert isinstance(error, grpc.RpcError)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        served.call("Nothing", NONSENSE)
        served.call("Join", NONSENSE, service="no.such.Service")
    assert caplog.records == []
    asked = health_pb2.HealthCheckRequest().SerializeToString()
    assert isinstance(served.call("Check", asked, service="grpc.health.v1.Health"), bytes)


def test_a_fault_of_ours_is_told_with_its_traceback_once(served, caplog, monkeypatch):
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(served.cohort, "join", broken)
    request = rpc.JoinRequest(client_id="0", description=description_of(PROFILE), protocol=PROTOCOL)
    for _ in range(5):
        error = served.call("Join", request.SerializeToString())
        assert isinstance(error, grpc.RpcError)
        assert error.code() == grpc.StatusCode.UNKNOWN
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


# --- what clients call themselves -----------------------------------------------------------------


@pytest.mark.parametrize("text", [LONG, "0" * 5000, "00", "01", "1" * 10, "", "-1", "²", "1\n"])
def test_strange_ids_are_refused_with_a_line(served, text):
    request = rpc.JoinRequest(
        client_id=text, description=description_of(PROFILE), protocol=PROTOCOL
    )
    error = served.call("Join", request.SerializeToString())
    assert isinstance(error, grpc.RpcError)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "is none of this run's: 0 to 1" in error.details()
    assert error.details().isprintable()


def test_ids_are_written_in_one_way():
    assert [client_id_of(text, 12) for text in ("0", "7", "11", "evaluator")] == [
        0, 7, 11, "evaluator",
    ]  # fmt: skip


def test_several_leave_in_one_call_and_one_that_is_refused_keeps_no_other(served):
    tokens = {client: served.cohort.join(client, PROFILE, b"", ()) for client in range(2)}
    leaving = [rpc.Leaving(client_id=str(c), token=token) for c, token in tokens.items()]
    wrong = rpc.Leaving(client_id="1", token=b"another's")
    request = rpc.LeaveRequest(
        client_id="0", token=b"old", reason="finished", others=[leaving[0], wrong, leaving[1]]
    )
    error = served.call("Leave", request.SerializeToString())
    assert isinstance(error, grpc.RpcError)
    assert error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert not any(map(served.cohort.presence.is_there, range(2)))


def test_controls_of_clients_are_escaped_wherever_they_go(served, caplog):
    wild = "\x1b[2J\r\nerror: forged"
    request = rpc.JoinRequest(
        client_id="0", description=description_of(PROFILE), protocol=PROTOCOL, run_id=wild
    )
    error = served.call("Join", request.SerializeToString())
    assert isinstance(error, grpc.RpcError)
    assert error.details().isprintable()
    request.run_id = ""
    reply = rpc.JoinResponse.FromString(served.call("Join", request.SerializeToString()))
    leave = rpc.LeaveRequest(client_id="0", token=reply.token, reason=wild)
    assert served.call("Leave", leave.SerializeToString()) == b""
    served.events.close()
    said = [e.detail["reason"] for e in served.events.listen(from_start=True) if e.detail]
    assert said == ["\\x1b[2J\\r\\nerror: forged"]
    assert all(message.isprintable() for message in messages(caplog))
