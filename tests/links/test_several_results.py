"""A client that brings several results at once: who is told what, and what is brought again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from fedcli.runtime.answers import NotTaken, SessionGone, Superseded, UploadRefused
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.worker import Result
from fedmodels.errors import LinkError, PayloadError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.codec import read_chunk
from fedpb.frames import unpacked
from fedpb.orders import read_order
from fedpb.told import Passed
from fedpb.v1 import coordinator_pb2 as rpc

SMALL = Bundle(weights={"w": torch.ones(4)})


def code(of: grpc.StatusCode) -> int:
    return int(of.value[0])


def result(client: int, upload: Bundle = SMALL) -> tuple[Membership, Result]:
    order = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=str(client), interaction=3)
    return Membership(client, "run", b"token"), Result(order, upload, rpc.Report())


@pytest.fixture
def link() -> Iterator[Any]:
    """A link whose calls are noted; ``answers`` are the outcomes of the next ones."""
    made: Any = Link("127.0.0.1:9", give_up_after_s=0.0)
    made.sent, made.answers, made.alone = [], [], []

    def several(passed: Passed) -> rpc.PushSeveralResponse:
        data = Passed.encoded(passed)
        headers = [read_chunk(one, rpc.PushHeader)[0] for one in unpacked(data, 99)]
        made.sent.append([header.client_id for header in headers if header])
        given = made.answers.pop(0) if made.answers else [{}] * len(headers)
        if isinstance(given, Exception):
            raise given
        return rpc.PushSeveralResponse(outcomes=[rpc.Outcome(**each) for each in given])

    made._push_several = several
    made.push = lambda member, result: made.alone.append(member.client)
    yield made
    made.close()


def test_small_results_share_a_message(link):
    assert list(link.push_several([result(c) for c in range(5)])) == [None] * 5
    assert link.sent == [["0", "1", "2", "3", "4"]]


def test_a_message_has_three_mebibytes_at_most(link):
    quarter = Bundle(weights={"w": torch.ones(200_000)})  # 0.8 MB
    assert list(link.push_several([result(c, quarter) for c in range(5)])) == [None] * 5
    assert link.sent == [["0", "1", "2"], ["3", "4"]]


def test_a_large_result_comes_alone_in_its_turn(link):
    large = Bundle(weights={"w": torch.ones(600_000)})
    outcomes = list(link.push_several([result(0), result(1, large), result(2)]))
    assert [outcomes[0], type(outcomes[1]), outcomes[2]] == [None, NotTaken, None]
    assert link.sent == [["0"], ["2"]]


def test_each_outcome_means_what_a_push_would_have_meant(link):
    link.answers = [
        [
            {},
            {"code": code(grpc.StatusCode.UNAUTHENTICATED), "line": "join again"},
            {"code": code(grpc.StatusCode.ABORTED), "line": "no longer wanted"},
            {"code": code(grpc.StatusCode.INVALID_ARGUMENT), "line": "w is \x1b[2J"},
            {"code": code(grpc.StatusCode.UNAVAILABLE), "line": "in a moment"},
            {"code": 99, "line": "?"},
        ]
    ]
    found = list(link.push_several([result(c) for c in range(7)]))
    kinds = [None, SessionGone, Superseded, UploadRefused, NotTaken, LinkError, NotTaken]
    assert [one if one is None else type(one) for one in found] == kinds
    assert str(found[3]) == r"client 3, interaction 4: w is \x1b[2J (INVALID_ARGUMENT)"


@pytest.fixture
def host(link: Any, digits: Path, tmp_path: Path) -> Any:
    made: Any = Host(range(3), link, digits, tmp_path, torch.device("cpu"))
    made.enrolment.members = {c: result(c)[0] for c in range(3)}
    made.renewed = []
    made.enrolment.rejoin = made.renewed.extend
    return made


def brought(host: Any) -> list[int]:
    """Bring three results; return the clients whose results then came alone."""
    host._push_all([result(c)[1] for c in range(3)])
    alone: list[int] = host.link.alone
    return alone


def test_what_was_not_taken_is_brought_alone(host):
    away = {"code": code(grpc.StatusCode.UNAVAILABLE)}
    host.link.answers = [[away, {}, away]]
    assert brought(host) == [0, 2]


def test_a_client_whose_session_is_gone_joins_again_and_brings_its_result(host):
    host.link.answers = [[{}, {"code": code(grpc.StatusCode.UNAUTHENTICATED)}, {}]]
    assert brought(host) == [1]
    assert host.renewed == [1]


def test_refused_and_superseded_results_are_told_and_left(host, caplog):
    gone = code(grpc.StatusCode.ABORTED), code(grpc.StatusCode.INVALID_ARGUMENT)
    host.link.answers = [[{"code": gone[0], "line": "late"}, {"code": gone[1], "line": "NaN"}, {}]]
    assert brought(host) == []
    assert [r.getMessage() for r in caplog.records] == [
        "client 0: late",
        "client 1, interaction 4: NaN (INVALID_ARGUMENT)",
    ]


class Answer(grpc.RpcError):  # type: ignore[misc]
    """What a call ends with that the server refuses as a whole."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self.code, self.details = lambda: code, lambda: "no"
        self.trailing_metadata = tuple


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
    ],
)
def test_where_all_are_refused_each_is_brought_alone(code, host):
    host.link.answers = [Answer(code)]
    assert brought(host) == [0, 1, 2]


def test_a_server_that_ends_the_run_ends_the_process(host):
    host.link.answers = [Answer(grpc.StatusCode.FAILED_PRECONDITION)]
    host._results.put([result(c)[1] for c in range(3)])
    threading.Timer(0.01, host._results.put, [None]).start()
    host._push_forever()
    assert host.link.alone == []
    assert isinstance(host._orders.failure, LinkError)


# --- orders that come at once ---------------------------------------------------------------------


def stream_of(header: rpc.PullHeader) -> Iterator[bytes]:
    return iter([rpc.PullResponse(header=header).SerializeToString()])


def specs(order: rpc.Order) -> dict[str, BundleSpec]:
    if order.client_id not in ("0", "1"):
        raise PayloadError(f"an order is for client {order.client_id}, who is not of this process")
    return {"common": BundleSpec(), "personal": BundleSpec()}


def orders(*more: str, role: str = "common") -> rpc.PullHeader:
    header = rpc.PullHeader(order=rpc.Order(client_id="0"))
    header.more.extend(rpc.Order(client_id=client) for client in more)
    header.parts.add(role=role, digest=b"known", held=True)
    return header


def test_orders_of_one_payload():
    found = read_order(stream_of(orders("1")), specs, {b"known": Bundle()})
    assert found is not None
    assert [o.client_id for o in (found[0].order, *found[0].more)] == ["0", "1"]


def test_an_order_for_somebody_else_among_others():
    with pytest.raises(PayloadError, match="client 7, who is not of this process"):
        read_order(stream_of(orders("1", "7")), specs, {b"known": Bundle()})


def test_several_orders_share_no_personal_part():
    with pytest.raises(PayloadError, match="orders of several clients share a personal part"):
        read_order(stream_of(orders("1", role="personal")), specs, {b"known": Bundle()})


def test_orders_that_came_at_once_are_done_one_after_another(host):
    host.workers.of = lambda client: SimpleNamespace(client=client)
    order = [(rpc.Order(client_id=str(c)), Bundle()) for c in range(3)]
    host._orders.put(order[:2])
    assert [task.worker.client for task in host._next_orders()] == [0]
    host._orders.end(LinkError("gone"))
    with pytest.raises(LinkError, match="gone"):  # what is left is in vain
        host._next_orders()


def test_many_clients_leave_in_few_calls(link, monkeypatch):
    """A call for each of 10,000 clients took ten seconds."""
    monkeypatch.setattr("fedcli.runtime.link.LEAVING", 3)
    calls = []

    def leave(passed, timeout):
        request = rpc.LeaveRequest.FromString(Passed.encoded(passed))
        calls.append([one.client_id for one in (request, *request.others)])
        assert {request.token, *(one.token for one in request.others)} == {b"token"}
        return rpc.LeaveResponse()

    link._leave = leave
    link.leave([Membership(client, "run", b"token") for client in range(7)], "finished")
    assert calls == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
