"""Frames that zstd compressed: the same bundle comes out, and a lie takes no memory."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace

import pytest
import torch

from fedmodels.errors import ConfigError, PayloadError, PayloadTooLarge
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb import zstd
from fedpb.codec import Encoded, RawFrame, Receiver, encode, read_chunk
from fedpb.v1 import coordinator_pb2 as rpc

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("zstandard") is None, reason="the extra zstd is not installed"
)
EVEN = Bundle(weights={"base/w": torch.zeros(700_000)})
BYTES = torch.randint(256, (999,), generator=torch.Generator().manual_seed(0))
NOISE = Bundle(weights={"base/w": BYTES.to(torch.uint8)})


def frames_of(encoded: Encoded) -> list[RawFrame]:
    found = [read_chunk(chunk, rpc.PullHeader)[1] for chunk in encoded.chunks()]
    return [frame for frame in found if frame is not None]


@pytest.mark.parametrize("bundle", [EVEN, NOISE])
def test_the_same_bundle_comes_out_under_the_same_digest(bundle):
    plain, fewer = encode(bundle), encode(bundle, zstd=True)
    receiver = Receiver(fewer.header, BundleSpec.of(bundle))
    for frame in frames_of(fewer):
        receiver.feed(frame)
    assert torch.equal(receiver.finish().weights["base/w"], bundle.weights["base/w"])
    assert receiver.digest == fewer.digest == plain.digest
    crossed = sum(len(chunk) for chunk in fewer.chunks())
    assert crossed < 2000 or not any(frame.raw_bytes for frame in frames_of(fewer))


def test_noise_travels_as_it_is():
    assert [frame.raw_bytes for frame in frames_of(encode(NOISE, zstd=True))] == [0]


@pytest.mark.parametrize(
    ("lie", "line"),
    [
        ({"raw_bytes": 1 << 20}, "holds more bytes, not the 1048576 it states"),
        ({"raw_bytes": 2 << 20}, "holds 1048576 bytes, not the 2097152 it states"),
        ({"payload": memoryview(b"no zstd at all")}, "cannot be decompressed"),
        ({"payload": memoryview(b"")}, "holds 0 bytes"),
        ({"crc32": 1}, "damaged"),
    ],
)
def test_a_frame_that_lies_is_refused(lie, line):
    fewer = encode(EVEN, zstd=True)
    first = frames_of(fewer)[0]
    if lie.get("raw_bytes") == 1 << 20:  # the frame holds one byte more than it states
        lie = {**lie, "payload": memoryview(zstd.compressed(bytes((1 << 20) + 1)) or b"")}
    receiver = Receiver(fewer.header, BundleSpec.of(EVEN))
    with pytest.raises(PayloadError, match=line):
        receiver.feed(replace(first, **lie))  # type: ignore[arg-type]


def test_a_bomb_is_refused_before_it_is_opened():
    """A gigabyte of zeros in 30 kB: neither its stated size nor its content gets any memory."""
    bomb = memoryview(zstd.compressed(bytes(1 << 28)) or b"")
    fewer = encode(EVEN, zstd=True)
    receiver = Receiver(fewer.header, BundleSpec.of(EVEN))
    with pytest.raises(PayloadTooLarge, match="beyond the"):
        receiver.feed(RawFrame(0, 0, bomb, 1 << 28))
    with pytest.raises(PayloadError, match=r"window|memory|more bytes"):
        receiver.feed(RawFrame(0, 0, bomb, 1 << 20))


def test_a_sender_cannot_make_a_receiver_look_back_far():
    """The frame fits its place; only the window that it asks memory for is too large."""
    zstandard = importlib.import_module("zstandard")
    for window_log, fits in ((22, True), (23, False)):
        how = zstandard.ZstdCompressionParameters(window_log=window_log)
        stream = zstandard.ZstdCompressor(compression_params=how).compressobj()
        sent = stream.compress(bytes(1 << 20)) + stream.flush()
        place = memoryview(bytearray(b"x" * (1 << 20)))
        if fits:
            zstd.decompress_into(memoryview(sent), place)
            assert not any(place)
        else:
            with pytest.raises(PayloadError, match="cannot be decompressed"):
                zstd.decompress_into(memoryview(sent), place)


def test_a_missing_library_is_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install 'zstandard>="):
        zstd.check_installed()
