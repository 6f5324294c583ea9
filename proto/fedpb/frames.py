"""Frames as they cross: laid out around a view of the payload, read back without a copy.

A frame is a valid message of the schema whose last field is the bytes; field 15 of both
PullResponse and PushRequest holds it, so that one layout serves both streams. A header (field 1)
and a frame in one message are the bytes of both, one behind the other. Whatever is laid out
otherwise goes through the generated parser.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError
from zlib_ng import zlib_ng

from fedmodels.errors import PayloadError
from fedpb.v1 import coordinator_pb2 as rpc

FRAME_BYTES = 1 << 20
WHOLE_BYTES = 2 << 20
"""A payload up to this size is one frame: a message more costs as much as sending it."""
MESSAGE_BYTES = 3 << 20
"""A header and a frame travel in one message up to this size; receivers take messages of 4 MiB."""
_HEADER_TAG = _RESULT_TAG = 0x0A
_CHUNK_TAG, _OFFSET_TAG, _CRC_TAG, _RAW_TAG, _PAYLOAD_TAG = 0x7A, 0x08, 0x15, 0x18, 0x7A
H = TypeVar("H", rpc.PullHeader, rpc.PushHeader)


def _compressed(pieces: Sequence[memoryview]) -> bytes | None:
    """Return fewer bytes for these; None where that is not worth it."""
    from fedpb.zstd import compressed  # asked for by a config

    return compressed(b"".join(pieces))


class Frame:
    """A frame before it is sent: where it belongs, and views of its bytes."""

    def __init__(self, offset: int, pieces: Sequence[memoryview], *, zstd: bool = False) -> None:
        self.offset, self.pieces, self.zstd = offset, pieces, zstd
        self.size = self.crc32 = 0
        for piece in pieces:
            self.crc32 = zlib_ng.crc32(piece, self.crc32)
            self.size += len(piece)

    def laid_out(self) -> bytes:
        """Return a message of either stream, with the frame as field 15; this copies the bytes."""
        head, pieces, size = bytearray(), self.pieces, self.size
        fewer = _compressed(pieces) if self.zstd else None
        if self.offset:
            head.append(_OFFSET_TAG)
            head += _varint(self.offset)
        if self.crc32:
            head.append(_CRC_TAG)
            head += self.crc32.to_bytes(4, "little")
        if fewer is not None:
            head.append(_RAW_TAG)
            head += _varint(self.size)
            pieces, size = [memoryview(fewer)], len(fewer)
        head.append(_PAYLOAD_TAG)
        head += _varint(size)
        outer = bytes([_CHUNK_TAG]) + _varint(len(head) + size)
        return b"".join([outer, head, *pieces])

    def cut(self, start: int, stop: int) -> Frame:
        """Return a frame of some of these bytes, from one offset in the payload to another."""
        pieces, at = list[memoryview](), self.offset
        for piece in self.pieces:
            pieces.append(piece[max(0, start - at) : max(0, stop - at)])
            at += len(piece)
        return Frame(start, [piece for piece in pieces if len(piece)], zstd=self.zstd)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


@dataclass(frozen=True)
class RawFrame:
    """A frame as it arrived; the payload is a view of the received message."""

    offset: int
    crc32: int
    payload: memoryview
    raw_bytes: int = 0
    """Size of the payload once it is decompressed; 0 where it is as it was."""

    @property
    def size(self) -> int:
        """Return how many bytes of the bundle the frame holds."""
        return self.raw_bytes or len(self.payload)


def messages(header: bytes, frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the messages of a stream: its header, with the first frame where both are small."""
    following = iter(frames)
    first = next(following, b"")
    fits = not first or len(header) + len(first) <= MESSAGE_BYTES
    yield header + first if fits else header
    if not fits:
        yield first
    yield from following


def packed(results: Iterable[bytes]) -> bytes:
    """Return a PushSeveralRequest of results, each the bytes of a PushRequest."""
    return b"".join(
        piece for one in results for piece in (bytes([_RESULT_TAG]) + _varint(len(one)), one)
    )


def unpacked(data: bytes, most: int) -> list[memoryview]:
    """Return the results of a PushSeveralRequest, each the bytes of a PushRequest, without a copy.

    Raises:
        PayloadError: the bytes are no message of the schema, or hold no result, or too many.
    """
    view, at, found = memoryview(data), 0, list[memoryview]()
    try:
        while at < len(view):
            if view[at] != _RESULT_TAG:
                raise IndexError
            size, start = _read_varint(view, at + 1)
            at = start + size
            if at > len(view):
                raise IndexError
            if len(found) == most:
                raise PayloadError(f"a PushSeveral of this run holds {most} results at most")
            found.append(view[start:at])
    except IndexError:
        found = []
    if not found:
        raise PayloadError("a PushSeveral must hold results, and nothing else")
    return found


def read_chunk(data: bytes | memoryview, header_type: type[H]) -> tuple[H | None, RawFrame | None]:
    """Read one message of a stream: its header, if any, and its frame, if any, without a copy.

    Args:
        data: a PullResponse or a PushRequest.
        header_type: PullHeader or PushHeader, which tells the one from the other.

    Raises:
        PayloadError: the bytes are no message of the schema.
    """
    view = memoryview(data)
    try:
        start, end = _header_place(view)
        frame = _read_frame(view[end:])
        if frame is not None:
            return header_type.FromString(data[start:end]) if end else None, frame
        chunk = (rpc.PullResponse if header_type is rpc.PullHeader else rpc.PushRequest).FromString(
            data
        )
    except DecodeError as error:
        raise PayloadError(f"a message of the stream cannot be parsed: {error}") from None
    found = chunk.frame
    frame = RawFrame(found.offset, found.crc32, memoryview(found.payload), found.raw_bytes)
    header = chunk.header if chunk.HasField("header") else None
    return header, frame if chunk.HasField("frame") else None


def _header_place(view: memoryview) -> tuple[int, int]:
    """Return where the header at the beginning of a message starts and ends; (0, 0) for none."""
    try:
        if view[0] == _HEADER_TAG:
            size, start = _read_varint(view, 1)
            return start, start + size
    except IndexError:
        pass
    return 0, 0


def _read_frame(view: memoryview) -> RawFrame | None:
    """Read the layout that :class:`Frame` writes; None for every other one."""
    try:
        if view[0] != _CHUNK_TAG:
            return None
        size, at = _read_varint(view, 1)
        if at + size != len(view):
            return None
        offset = checksum = raw = 0
        if view[at] == _OFFSET_TAG:
            offset, at = _read_varint(view, at + 1)
        if view[at] == _CRC_TAG:
            checksum = int.from_bytes(view[at + 1 : at + 5], "little")
            at += 5
        if view[at] == _RAW_TAG:
            raw, at = _read_varint(view, at + 1)
        if view[at] != _PAYLOAD_TAG:
            return None
        size, at = _read_varint(view, at + 1)
        return RawFrame(offset, checksum, view[at:], raw) if at + size == len(view) else None
    except IndexError:
        return None


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = view[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise IndexError("a number has at most ten bytes")
