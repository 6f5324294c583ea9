"""How much is sent at once over a link, and uploads that travel in parts."""

import pytest
import torch

from fedmodels.errors import LinkError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.times import PART_S, PIECE_S
from fedpb.codec import Receiver, encode, read_chunk
from fedpb.headers import header_of
from fedpb.pace import (
    LEAST_BYTES,
    PART_BYTES,
    PIECE_BYTES,
    UNSEEN_BYTES,
    Pace,
    Parts,
)
from fedpb.told import Door, Passed
from fedpb.v1 import coordinator_pb2 as rpc

UPLOAD = Bundle(weights={"w": torch.arange(300_000, dtype=torch.float32)})
SIZE = 1_200_000


def test_a_part_takes_some_seconds_as_the_one_before_did():
    pace = Pace(PART_BYTES, PART_S)
    assert pace.most() == PART_BYTES
    pace.took(PART_BYTES, 5.0)
    assert pace.most() == int(PART_BYTES / 5.0 * PART_S)
    pace.begin()
    pace.took(100, 10.0)
    assert pace.most() == LEAST_BYTES
    pace.begin()
    pace.took(LEAST_BYTES, 0.0001)
    assert pace.most() > 100 << 20, "a fast link takes what there is"


def test_what_buffers_take_tells_nothing_of_an_order():
    pace = Pace(PIECE_BYTES, PIECE_S, UNSEEN_BYTES)
    for _ in range(UNSEEN_BYTES // PIECE_BYTES):
        pace.took(PIECE_BYTES, 0.0)
        assert pace.most() == PIECE_BYTES
    pace.took(PIECE_BYTES, 0.0)
    assert pace.most() == 2 * PIECE_BYTES, "any link looks fast while buffers fill"
    pace.took(PIECE_BYTES, 4.0)
    assert pace.most() == max(LEAST_BYTES, PIECE_BYTES // 2)


def test_small_orders_have_fewer_pieces_each_time():
    pace = Pace(PIECE_BYTES, PIECE_S, UNSEEN_BYTES)
    seen = []
    for _ in range(6):
        seen.append(pace.most())
        pace.took(100_000, 0.001)
        pace.begin()
    assert seen == [PIECE_BYTES << k for k in (0, 1, 2, 3, 3, 3)]


class Far:
    """A receiver over a link of so many bytes a second, which keeps parts."""

    def __init__(self, rate=12_500.0):
        self.rate, self.now, self.calls = rate, 0.0, []
        self.receiver = None

    def __call__(self, stream):
        crossed, start = 0, None
        for number, message in enumerate(map(Passed.encoded, stream)):
            header, frame = read_chunk(message, rpc.PushHeader)
            if number == 0:
                self.in_parts = bool(header.part_of)
                if self.receiver is None:
                    self.receiver = Receiver(header.bundle, BundleSpec.of(UPLOAD))
            crossed += len(message)
            if frame is not None:
                start = frame.offset if start is None else start
                if frame.offset == self.receiver.received:
                    self.receiver.feed(frame)
        self.calls.append((start, crossed))
        self.now += crossed / self.rate
        if self.receiver.is_complete:
            return rpc.PushResponse()
        return rpc.PushResponse(received=self.receiver.received)


def parts(far, pace=None):
    pushed = Door().pushed(rpc.PushHeader(bundle=header_of(UPLOAD)), UPLOAD)
    return Parts(pushed, pace or Pace(PART_BYTES, PART_S), clock=lambda: far.now)


def test_over_a_slow_link_an_upload_goes_in_parts_of_some_seconds():
    far = Far()
    sending = parts(far)
    while not sending.is_over(sending.send(far)):
        assert "of 1.2 MB" in sending.slow
    assert torch.equal(far.receiver.finish().weights["w"], UPLOAD.weights["w"])
    assert far.receiver.digest == encode(UPLOAD).digest, "as of one that came whole"
    longest = max(crossed for _, crossed in far.calls[1:]) / far.rate
    assert 20 < len(far.calls) < 30
    assert longest < 1.1 * PART_S


def test_over_a_fast_link_it_takes_one_call_once_the_link_is_known():
    far, pace = Far(1e9), Pace(PART_BYTES, PART_S)
    assert not parts(far, pace).is_over(parts(far, pace).send(far))
    far.receiver = None
    again = parts(far, pace)
    assert again.is_over(again.send(far))
    assert far.calls[-1][0] == 0
    assert not far.in_parts
    assert again.slow == ""


def test_what_the_receiver_lost_is_sent_again():
    far = Far()
    sending = parts(far)
    for _ in range(3):
        assert not sending.is_over(sending.send(far))
    far.receiver, before = None, sending.at
    assert not sending.is_over(sending.send(far))
    assert (before > 0, sending.at) == (True, 0)
    while not sending.is_over(sending.send(far)):
        pass
    assert far.receiver.digest == encode(UPLOAD).digest


@pytest.mark.parametrize("received", [SIZE, SIZE + 1, 1 << 60])
def test_an_answer_that_names_more_bytes_than_there_are(received):
    with pytest.raises(LinkError, match="more of an upload than there is"):
        parts(Far()).is_over(rpc.PushResponse(received=received))
