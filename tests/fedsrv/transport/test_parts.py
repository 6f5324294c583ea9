"""Uploads in parts: the service keeps what has come, and says where the next call begins."""

import itertools

import grpc
import pytest
import torch

from fedmodels.tensors.bundle import Bundle
from fedpb.frames import packed
from fedpb.headers import header_of
from fedpb.told import Door, Passed
from fedpb.v1 import coordinator_pb2 as rpc
from tests.fedsrv.transport.test_results_of_pushes import UPLOAD, Context, Refused, World

SIZE = header_of(UPLOAD).payload_bytes


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.open()
    yield made
    made.cohort.stop("the test is over")
    made.engine.shutdown()


def part(world, start, stop, upload=UPLOAD):
    header = world.header()
    header.bundle.CopyFrom(header_of(upload))
    pushed = Door().pushed(header, upload)
    return [*map(Passed.encoded, pushed.messages(start=start, stop=stop))]


def test_an_upload_in_parts_is_the_upload(world):
    cuts = [0, 1, 70_000, 1 << 20, (1 << 20) + 5, 2_100_000, SIZE]
    for start, stop in itertools.pairwise(cuts):
        reply = world.push(part(world, start, stop))
        assert reply.HasField("received") == (stop < SIZE)
        assert reply.received == (stop if stop < SIZE else 0)
    (answer,) = world.done.result(30).by_client.values()
    assert torch.equal(answer.upload.weights["w"], UPLOAD.weights["w"])
    assert answer.wire_up > SIZE, "the bytes of all calls count"


def test_its_digest_in_the_log_is_that_of_one_that_came_whole(tmp_path, monkeypatch):
    digests = []
    for number, cuts in enumerate(([0, SIZE], [0, 100_000, 1_500_000, SIZE])):
        world = World(tmp_path / str(number))
        sent = lambda *given: digests.append(given[-1])  # noqa: E731
        monkeypatch.setattr(world.service.journal, "sent", sent)
        world.open()
        for start, stop in itertools.pairwise(cuts):
            world.push(part(world, start, stop))
        world.done.result(30)
        world.engine.shutdown()
    assert len(digests) == 2, "a part that is not the last is no result"
    assert digests[0] == digests[1] != b""


@pytest.mark.parametrize("start", [0, 50_000, 200_000])
def test_a_call_that_begins_elsewhere_is_told_where_to_go_on(world, start):
    world.push(part(world, 0, 100_000))
    assert world.push(part(world, start, start + 60_000)).received == 100_000
    assert not world.push(part(world, 100_000, SIZE)).HasField("received")
    assert len(world.done.result(30).by_client) == 1


def test_a_call_that_breaks_costs_what_had_not_come(world):
    chunks = part(world, 0, 2_500_000)
    assert world.push(chunks[:2]).received == 2 << 20, "the answer is lost"
    assert world.push(part(world, 0, 10)).received == 2 << 20
    assert not world.push(part(world, 2 << 20, SIZE)).HasField("received")


def test_another_upload_begins_anew(world):
    world.push(part(world, 0, 100_000))
    other = Bundle(weights={"w": UPLOAD.weights["w"] + 1})
    assert header_of(other) == header_of(UPLOAD), "as after a restart, with other noise"
    assert world.push(part(world, 100_000, SIZE, other)).received == 0
    world.push(part(world, 0, SIZE - 64, other))
    world.push(part(world, SIZE - 64, SIZE, other))
    (answer,) = world.done.result(30).by_client.values()
    assert torch.equal(answer.upload.weights["w"], other.weights["w"])


def test_parts_that_are_not_of_the_upload_that_they_name(world):
    world.push(part(world, 0, SIZE - 64))
    other = Bundle(weights={"w": UPLOAD.weights["w"] + 1})
    (chunk,) = part(world, SIZE - 64, SIZE, other)
    request = rpc.PushRequest.FromString(chunk)
    request.header.part_of = rpc.PushRequest.FromString(part(world, 0, 64)[0]).header.part_of
    with pytest.raises(Refused, match="its parts are not those of one upload"):
        world.push([request.SerializeToString()])
    assert "failed" in world.told()


def test_the_later_of_two_calls_brings_the_rest(world):
    first, second = part(world, 0, 2_500_000), part(world, 1 << 20, SIZE)

    def halted():
        yield first[0]
        reply = world.push(second)  # in the middle of the first call
        assert not reply.HasField("received")
        yield first[1]

    with pytest.raises(Refused, match="arrived through another call; send it again") as refused:
        world.service.push(halted(), Context())
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE, "its sender tries again, and hears"
    assert not world.push(first).HasField("received"), "that it was taken"
    assert len(world.done.result(30).by_client) == 1


def test_a_part_has_a_push_of_its_own(world):
    response = world.service.push_several(packed([b"".join(part(world, 0, 1000))]), Context())
    assert response.outcomes[0].code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_a_damaged_part_is_refused_as_a_whole_upload_is(world):
    (chunk,) = part(world, 0, 1000)
    request = rpc.PushRequest.FromString(chunk)
    request.frame.crc32 ^= 1
    with pytest.raises(Refused) as refused:
        world.push([request.SerializeToString()])
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_a_part_is_a_sign_of_life_and_is_told_of(world):
    session = world.cohort.sessions[0]
    chunks = part(world, 0, 2_500_000)

    def later():
        yield chunks[0]
        session.seen = 0.0
        yield chunks[1]

    assert world.service.push(later(), Context()).received == 2 << 20
    assert session.seen > 0.0
    begun = world.cohort._trips.current.intake._begun["0", False]
    begun._since -= 12
    with world.cohort.changed:
        assert world.cohort._slow(0) == "slow link: 2.1 of 2.8 MB in 12 s"
