"""How a client waits for a server that is gone: finitely where told, ever longer, never in step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fedcli.runtime import link as module
from fedcli.runtime.link import Link
from fedmodels.errors import LinkError
from fedmodels.tensors.bundle import Bundle
from fedpb import PROTOCOL
from fedpb.unreachable import in_words
from fedpb.v1 import coordinator_pb2 as rpc


class Gone(grpc.RpcError):
    """What a call to a server that is not there ends with."""

    def __init__(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class EmptyStream:
    """A Pull that the server ended before any order."""

    def cancel(self) -> None: ...


class Clock:
    """A clock that only waiting moves; it stands in for the event that closes a link, too."""

    def __init__(self) -> None:
        self.now, self.waits, self.closes_after = 1000.0, list[float](), 10**9

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return self.is_set()

    def is_set(self) -> bool:
        return len(self.waits) >= self.closes_after

    def set(self) -> None:
        self.closes_after = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock, draw = Clock(), random.Random(0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(module, "random", SimpleNamespace(uniform=draw.uniform))
    return clock


@pytest.fixture
def patient(clock: Clock) -> Iterator[Any]:
    """Return a maker of links whose time is the clock's."""
    made: list[Link] = []

    def make(give_up_after_s: float | None) -> Link:
        made.append(Link("127.0.0.1:9", give_up_after_s=give_up_after_s))
        made[-1]._closed = clock  # type: ignore[assignment]
        return made[-1]

    yield make
    for link in made:
        link.close()


def failing(times: int, answer: str = "here") -> Any:
    """Return a call that fails so many times, and counts how often it was made."""
    made: list[int] = []

    def call() -> str:
        made.append(1)
        if len(made) <= times:
            raise Gone
        return answer

    call.made = made  # type: ignore[attr-defined]
    return call


def test_waits_grow_to_two_seconds_and_no_two_clients_keep_step(patient, clock):
    assert patient(None)._patiently("join", failing(40)) == "here"
    first, bounds = clock.waits, [min(0.1 * 2**n, 2.0) for n in range(40)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(first, bounds, strict=True))
    assert len(set(first)) == len(first)
    clock.waits = []
    patient(None)._patiently("join", failing(40))
    assert all(one != other for one, other in zip(first, clock.waits, strict=True))


@pytest.mark.parametrize("limit_s", [0.5, 10.0, 600.0])
def test_retries_end_when_they_are_told_to(limit_s, patient, clock):
    call, begun = failing(10**9), clock.now
    with pytest.raises(LinkError, match=f"gave up: .* was gone for {limit_s:g} s: nothing listens"):
        patient(limit_s)._patiently("push", call)
    assert limit_s < clock.now - begun <= limit_s + 2.0
    assert len(call.made) == len(clock.waits) + 1 <= 6 + limit_s


def test_ten_minutes_without_a_server_cost_little_and_are_told_each_minute(patient, clock, caplog):
    patient(None)._patiently("pull", failing(405))
    assert sum(clock.waits) > 600
    assert all(wait <= 2.0 for wait in clock.waits)
    told = [r for r in caplog.records if "waiting for the server at" in r.message]
    assert 10 <= len(told) <= sum(clock.waits) / 60 + 1


def test_patience_begins_anew_with_every_call(patient, clock):
    link = patient(5.0)
    for _ in range(4):  # each gone for about four seconds, sixteen in all
        link._patiently("push", failing(6))
    assert clock.now - 1000.0 > 5.0


def test_a_closed_link_waits_no_longer(patient, clock):
    link = patient(None)
    clock.closes_after = 3
    with pytest.raises(LinkError, match="the link is closed"):
        link._patiently("pull", failing(10**9))
    assert len(clock.waits) == 3


@pytest.mark.parametrize("code", ["FAILED_PRECONDITION", "PERMISSION_DENIED", "ALREADY_EXISTS"])
def test_what_cannot_succeed_is_not_tried_again(code, patient, clock):
    def call() -> None:
        raise Gone(grpc.StatusCode[code])

    with pytest.raises(LinkError, match=code):
        patient(None)._patiently("join", call)
    assert clock.waits == []


def test_a_server_of_an_earlier_protocol_is_refused_with_a_line(patient, clock):
    """It has no service of the present name, which gRPC answers for it."""

    def call() -> None:
        raise Gone(grpc.StatusCode.UNIMPLEMENTED)

    with pytest.raises(LinkError, match=f"join: the server does not speak protocol {PROTOCOL}: "):
        patient(None)._patiently("join", call)
    assert clock.waits == []


def test_sessions_that_end_at_once_are_renewed_ever_more_slowly(patient, clock):
    link = patient(None)
    link._join = lambda request: rpc.JoinResponse()
    for _ in range(8):
        link.join(rpc.JoinRequest(client_id="3"))
    assert len(clock.waits) == 7, "the first does not wait"
    assert all(wait <= 2.0 for wait in clock.waits)
    assert sum(clock.waits[-2:]) > 2.0
    clock.now, clock.waits = clock.now + 1.5, []
    link.join(rpc.JoinRequest(client_id="3"))
    assert clock.waits == [], "that session lasted"


def test_a_server_that_ends_each_pull_at_once_is_not_flooded(patient, clock, monkeypatch):
    link, made = patient(None), []
    link._pull = lambda request: made.append(clock.now) or EmptyStream()
    clock.closes_after = 30
    header, payload = rpc.PullHeader(order=rpc.Order(client_id="3")), Bundle()
    found = header, {"common": payload}
    monkeypatch.setattr(
        "fedcli.runtime.link.read_order", lambda *_: None if len(made) < 30 else found
    )
    assert link.pull(list, dict) == [(header.order, payload)]
    assert len(clock.waits) == 28
    assert made[-1] - made[0] > 20.0


def test_a_server_is_lost_only_if_it_was_there(patient, clock, caplog):
    """The first line of a client that was early said that it lost its server."""
    link = patient(None)
    link._patiently("join", failing(2))
    link._patiently("pull", failing(2))
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("waiting for the server at ")
    assert second.startswith("lost the server at ")
    assert first.endswith(": nothing listens there (connection refused)")


REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect "
    "to remote host: connect: Connection refused (111)"
)


@pytest.mark.parametrize(
    ("details", "words"),
    [
        (REFUSED, "nothing listens there (connection refused)"),
        ("DNS resolution failed for h:1: C-ares status is not ARES_SUCCESS", "its name is not"),
        ("Socket closed", "the connection was ended"),
        ("UNAVAILABLE: ipv6:[::1]:5: something new", "something new"),
        ("ipv4:10.0.0.1:5: FD Shutdown", "it does not answer"),
    ],
)
def test_a_caller_is_told_in_words(details, words):
    assert in_words(details).startswith(words)
    assert "ipv" not in in_words(details)
