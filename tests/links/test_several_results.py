"""Results that a client brings, and what it makes of the answers; orders that come at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch

from fedcli.runtime.answers import SessionGone, Superseded, UploadRefused
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.worker import Result
from fedmodels.errors import LinkError, PayloadError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
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
def host(digits: Path, tmp_path: Path) -> Iterator[Any]:
    """A host of three clients; ``host.answers`` are what the next calls of each end with."""
    link: Any = Link("127.0.0.1:9", give_up_after_s=0.0)
    made: Any = Host(range(3), link, digits, tmp_path, torch.device("cpu"))
    made.enrolment.members = {c: result(c)[0] for c in range(3)}
    made.answers, made.pushed, made.renewed = {}, [], []

    def push(member: Membership, done: Result) -> None:
        made.pushed.append(member.client)
        if left := made.answers.get(member.client):
            raise left.pop(0)

    link.push, made.enrolment.rejoin = push, made.renewed.extend
    yield made
    link.close()


def brought(host: Any) -> list[int]:
    """Bring three results; return whose were sent, in turn."""
    host._results.put([result(c)[1] for c in range(3)])
    threading.Timer(0.01, host._results.put, [None]).start()
    host._push_forever()
    pushed: list[int] = host.pushed
    return pushed


def test_a_client_whose_session_is_gone_joins_again_and_brings_its_result(host):
    host.answers = {1: [SessionGone("join again")]}
    assert brought(host) == [0, 1, 1, 2]
    assert host.renewed == [1]


def test_refused_and_superseded_results_are_told_and_left(host, caplog):
    host.answers = {0: [Superseded("late")], 1: [UploadRefused("client 1, interaction 4: NaN")]}
    assert brought(host) == [0, 1, 2]
    assert [r.getMessage() for r in caplog.records] == [
        "client 0: late",
        "client 1, interaction 4: NaN",
    ]


def test_a_server_that_ends_the_run_ends_the_process(host):
    host.answers = {0: [LinkError("no")]}
    assert brought(host) == [0]
    assert isinstance(host._orders.failure, LinkError)


# --- orders that come at once ---------------------------------------------------------------------


def stream_of(header: rpc.PullHeader) -> Iterator[bytes]:
    return iter([rpc.PullResponse(header=header).SerializeToString()])


def specs(order: rpc.Order) -> dict[str, BundleSpec]:
    if order.client_id not in ("0", "1"):
        raise PayloadError(
            f"an order is for client {order.client_id}, which is not in this process"
        )
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
    with pytest.raises(PayloadError, match="client 7, which is not in this process"):
        read_order(stream_of(orders("1", "7")), specs, {b"known": Bundle()})


def test_several_orders_share_no_personal_part():
    with pytest.raises(PayloadError, match="orders of several clients share a personal part"):
        read_order(stream_of(orders("1", role="personal")), specs, {b"known": Bundle()})


def test_orders_that_came_at_once_are_done_one_after_another(host):
    host.workers.of = lambda client: SimpleNamespace(client=client)
    order = [(rpc.Order(client_id=str(c)), Bundle()) for c in range(3)]
    host._orders.put(order[:2])
    assert host._next_order().worker.client == 0
    host._orders.end(LinkError("gone"))
    with pytest.raises(LinkError, match="gone"):  # what is left is in vain
        host._next_order()


def test_many_clients_leave_in_few_calls(host, monkeypatch):
    """A call for each of 10,000 clients took ten seconds."""
    monkeypatch.setattr("fedcli.runtime.link.LEAVING", 3)
    calls = []

    def leave(passed, timeout):
        request = rpc.LeaveRequest.FromString(Passed.encoded(passed))
        calls.append([one.client_id for one in (request, *request.others)])
        assert {request.token, *(one.token for one in request.others)} == {b"token"}
        return rpc.LeaveResponse()

    host.link._leave = leave
    host.link.leave([Membership(client, "run", b"token") for client in range(7)], "finished")
    assert calls == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
