"""Several results in one message: each has an outcome of its own, whatever the others are."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.codec import encode
from fedpb.frames import packed, unpacked
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import AllOf, Trip, UploadForm
from fedsrv.progress.events import EventLog
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.fedsrv.transport.test_results_of_pushes import PROFILE, Context, Refused

UPLOAD = Bundle(weights={"w": torch.ones(3)})
OK, ABORTED, INVALID = (
    0,
    grpc.StatusCode.ABORTED.value[0],
    grpc.StatusCode.INVALID_ARGUMENT.value[0],
)
AWAY, STRANGER = grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.UNAUTHENTICATED.value[0]


class World:
    """A service with three clients that have orders to train."""

    def __init__(self, directory: Path) -> None:
        events, spool = EventLog(), Spool(directory, 1 << 20)
        self.cohort = RemoteCohort(3, spool, events, admission=Admission({}), min_clients=1)
        self.service = Service("run", {}, self.cohort, events)
        self.tokens = {c: self.cohort.join(c, PROFILE, b"", ()) for c in range(3)}
        self.engine = ThreadPoolExecutor(1)

    def open(self) -> None:
        orders = {c: self.order(c) for c in range(3)}
        trip = Trip(orders, Bundle(), form=UploadForm(BundleSpec.of(UPLOAD)), until=AllOf(1))
        self.done = self.engine.submit(self.cohort.send_and_receive, trip)
        while self.cohort._trips.current is None:
            pass

    def order(self, client: int) -> rpc.Order:
        return rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=str(client), trip=9)

    def result(self, client: int, upload: Bundle = UPLOAD, **facts: Any) -> bytes:
        told = {"client_id": str(client), "token": self.tokens[client], "trip": 9, **facts}
        header = rpc.PushHeader(kind=rpc.ORDER_KIND_TRAIN, **told)
        encoded = encode(upload)
        header.bundle.CopyFrom(encoded.header)
        return b"".join([rpc.PushRequest(header=header).SerializeToString(), *encoded.chunks()])

    def push(self, *results: bytes) -> list[rpc.Outcome]:
        reply = self.service.push_several(packed(results), Context())  # type: ignore[arg-type]
        return list(reply.outcomes)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.cohort.stop("the test is over")
    made.engine.shutdown()


def test_all_are_taken(world):
    world.open()
    assert [o.code for o in world.push(*(world.result(c) for c in range(3)))] == [OK] * 3
    assert list(world.done.result(30).by_client) == [0, 1, 2]


def test_one_that_is_refused_leaves_the_others(world):
    """Its client fails for the trip, and the line is that of a Push of its own."""
    world.open()
    nan = Bundle(weights={"w": torch.tensor([1.0, float("nan"), 1.0])})
    first, second, third = world.push(world.result(0), world.result(1, nan), world.result(2))
    assert [first.code, second.code, third.code] == [OK, INVALID, OK]
    assert "'weights/w'" in second.line
    found = world.done.result(30)
    assert list(found.by_client) == [0, 2]
    assert "its upload was refused" in found.failed[1]


@pytest.mark.parametrize(
    ("lie", "code", "line"),
    [
        ({"token": b"somebody else's"}, STRANGER, "client 1 has no session with this token"),
        ({"client_id": "7"}, INVALID, "client id '7' is none of this run's"),
        ({"trip": 8}, ABORTED, "interaction 1 is no longer wanted"),
    ],
    ids=["token", "client", "trip"],
)
def test_a_result_of_somebody_else(world, lie, code, line):
    world.open()
    bad, good = world.push(world.result(1, **lie), world.result(0))
    assert (bad.code, good.code) == (code, OK)
    assert line in bad.line
    assert world.cohort._trips.current
    assert world.cohort._trips.current.failed == {}, "nobody fails for what others say"


def test_the_same_result_twice(world):
    world.open()
    first, again = world.push(world.result(0), world.result(0))
    assert (first.code, again.code) == (OK, OK)
    assert (first.repeated_upload, again.repeated_upload) == (False, True)


def test_a_result_that_is_cut_short_can_have_no_rest(world):
    world.open()
    short = rpc.PushRequest.FromString(world.result(1))
    short.ClearField("frame")
    cut, good = world.push(short.SerializeToString(), world.result(0))
    assert (cut.code, good.code) == (INVALID, OK)
    assert "the stream ended after 0 of 64 bytes" in cut.line


def test_the_sum_of_a_relay_comes_alone(world):
    world.open()
    member = rpc.Member(client_id="1", token=world.tokens[1])
    found, good = world.push(world.result(1, members=[member]), world.result(0))
    assert (found.code, good.code) == (INVALID, OK)
    assert found.line == "the sum of several clients has a Push of its own"


def test_results_before_the_run_is_taken_up_are_wanted_later(world):
    assert [o.code for o in world.push(world.result(0), world.result(1))] == [AWAY, AWAY]
    world.open()
    assert [o.code for o in world.push(world.result(0), world.result(1))] == [OK, OK]


@pytest.mark.parametrize(
    "data", [b"", b"\x0a", b"\x0a\x05abc", b"\x12\x00", b"\xff" * 20, b"\x08\x01"]
)
def test_what_is_no_message(world, data):
    with pytest.raises(PayloadError, match="must hold results, and nothing else"):
        unpacked(data, 3)
    with pytest.raises(Refused, match="must hold results") as refused:
        world.service.push_several(data, Context())  # type: ignore[arg-type]
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_more_results_than_clients(world):
    """Each of two bytes would cost an outcome with a line."""
    world.open()
    with pytest.raises(Refused, match="holds 4 results at most"):
        world.push(*[b""] * 5)
    outcomes = world.push(b"", b"", b"", world.result(0))
    assert [o.code for o in outcomes] == [INVALID, INVALID, INVALID, OK]


def test_results_are_a_message_of_the_schema():
    parts = [rpc.PushRequest(header=rpc.PushHeader(client_id=str(c))) for c in (0, 1, 200)]
    data = packed([part.SerializeToString() for part in parts])
    assert list(rpc.PushSeveralRequest.FromString(data).results) == parts
    assert [bytes(one) for one in unpacked(data, 3)] == [p.SerializeToString() for p in parts]


# --- orders of one payload ------------------------------------------------------------------------


def test_a_process_gets_its_orders_in_one_message(tmp_path):
    events = EventLog()
    cohort = RemoteCohort(4, Spool(tmp_path, 0), events, admission=Admission({}))
    cohort.MAX_AHEAD = 4
    tokens = {c: cohort.join(c, PROFILE, b"", ()) for c in range(4)}
    members = {c: cohort.session(c, tokens[c]) for c in range(4)}
    orders = {c: rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=str(c)) for c in range(4)}
    personal = {2: Bundle(weights={"w": torch.ones(1)})}
    cohort.send(Trip(orders, Bundle(), personal))
    caller = cohort.caller(members, dict.fromkeys(range(4), 0))
    alone, _ = cohort.next_orders(caller, lambda: True) or ([], None)
    assert [o.client_id for o in alone] == ["0"], "payloads of others may differ"
    cohort.recall()
    cohort.send(Trip(orders, Bundle()))
    again = cohort.caller(members, dict.fromkeys(range(4), 0))
    found, _ = cohort.next_orders(again, lambda: True) or ([], None)
    assert [(o.client_id, o.following) for o in found] == [("0", 3), ("1", 2), ("2", 1), ("3", 0)]
    cohort.stop("the test is over")
