"""Bundles to frames and back.

A payload is the bytes of a bundle's tensors, each at a multiple of 64, in the order of the header.
It travels in frames of about 1 MiB (:mod:`fedpb.frames`), which are cut for slow links. Its digest
is that of whole frames, however they are cut.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.tensors.bundle import Bundle, check_counts, check_finite, tensor_bytes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.packed_weights import (
    ALIGNMENT,
    PackedWeights,
    align,
    are_plainly_finite,
    lease,
    names_and_layout,
)
from fedpb.frames import FRAME_BYTES, WHOLE_BYTES, Frame, RawFrame, messages, read_chunk
from fedpb.headers import header_of, plan_of
from fedpb.v1 import bundle_pb2 as pb

MAX_LAID_OUT = 64
"""Frames of a payload that are kept as messages; a receiver far behind has others laid out anew.
Compressed ones are all kept: they took longer to make."""
_PAD = bytes(ALIGNMENT)

__all__ = [
    "Encoded", "RawFrame", "Receiver", "encode", "frames_of", "header_of", "merged", "messages",
    "read_chunk",
]  # fmt: skip

# --- sending ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A bundle ready to travel to any number of receivers."""

    header: pb.BundleHeader
    frames: list[Frame]
    digest: bytes
    """Identifies the content: sha256 over the header and the frames' checksums."""
    num_bytes: int
    """Logical size: what the tensors hold, without padding and framing."""
    _laid_out: dict[int, bytes] = field(default_factory=dict)
    _laying: Lock = field(default_factory=Lock)

    def chunks(self, start: int = 0, most: Callable[[], int] | None = None) -> Iterator[bytes]:
        """Yield the frames as messages; receivers at about the same place share them.

        Args:
            start: bytes of the payload that the receiver holds already.
            most: returns how many bytes the next message may have, by which frames are cut.
        """
        for number, frame in enumerate(self.frames):
            at, end = max(start, frame.offset), frame.offset + frame.size
            while at < end:
                stop = end if most is None else min(end, at + most())
                whole = stop - at == frame.size
                yield self._message(number) if whole else frame.cut(at, stop).laid_out()
                at = stop

    def _message(self, number: int) -> bytes:
        """Return a whole frame as a message."""
        frame = self.frames[number]
        with self._laying:
            if number not in self._laid_out:
                self._laid_out[number] = frame.laid_out()
                if len(self._laid_out) > MAX_LAID_OUT and not frame.zstd:
                    del self._laid_out[next(iter(self._laid_out))]  # the one laid out first
            return self._laid_out[number]


def encode(bundle: Bundle, *, zstd: bool = False) -> Encoded:
    """Encode a bundle once; its tensors must not change while receivers still take it.

    With ``zstd`` its frames are compressed where that is worth it; the digest does not change.
    """
    header = header_of(bundle)
    frames = list(frames_of(bundle, header.payload_bytes, zstd=zstd))
    return Encoded(header, frames, digest_of(header, frames), bundle.num_bytes())


def digest_of(header: pb.BundleHeader, frames: Iterable[Frame]) -> bytes:
    """Return what identifies the content of a bundle, by its whole frames."""
    sha = hashlib.sha256(header.SerializeToString(deterministic=True))
    for frame in frames:
        sha.update(frame.crc32.to_bytes(4, "little"))
    return sha.digest()


def frames_of(
    bundle: Bundle,
    payload_bytes: int,
    *,
    zstd: bool = False,
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Frame]:
    """Yield the frames of the payload, which has as many bytes as its header states.

    Where it is sent in parts, ``start`` and ``stop`` are the ends of one of them.
    """
    last = payload_bytes if stop is None else stop
    most, pieces = _whole_frame(payload_bytes), list[memoryview]()
    begin = at = start
    before = 0
    for view in _payload(bundle):
        while at < last and at - before < len(view):
            end = min(last, begin - begin % most + most)
            pieces.append(view[at - before : end - before])
            at += len(pieces[-1])
            if at == end:
                yield Frame(begin, pieces, zstd=zstd)
                pieces, begin = [], at
        before += len(view)


def _whole_frame(payload_bytes: int) -> int:
    """Return how many bytes a whole frame of a payload has, but for the last one."""
    return WHOLE_BYTES if payload_bytes <= WHOLE_BYTES else FRAME_BYTES


def _payload(bundle: Bundle) -> Iterator[memoryview]:
    """Yield the bytes of every tensor, in the header's order, each followed by its padding."""
    weights = bundle.weights
    names, layout = names_and_layout(weights)
    if isinstance(weights, PackedWeights) and layout.is_clear(weights.block):
        tensors = [weights.block]  # the block travels whole, so only zeros may lie between tensors
    else:
        tensors = [weights[name] for name in names]
    for level in sorted(bundle.prototypes):
        rows = bundle.prototypes[level]
        tensors += [rows.vectors, rows.labels, rows.counts]
    for key in sorted(bundle.generators):
        held = bundle.generators[key].tensors
        tensors += [held[name] for name in sorted(held)]
    if bundle.histogram is not None:
        tensors += [bundle.histogram.round, bundle.histogram.total]
    for tensor in tensors:
        view = tensor_bytes(tensor)
        yield view
        yield memoryview(_PAD)[: align(len(view)) - len(view)]


# --- receiving ----------------------------------------------------------------------------------


class Receiver:
    """Takes the frames of one bundle straight into a buffer that was checked for first."""

    def __init__(
        self,
        header: pb.BundleHeader,
        spec: BundleSpec,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        """Check the header, then allocate.

        Args:
            header: what the sender states.
            spec: what is expected.
            allocate: gives a writable buffer of so many bytes; by default plain memory.
        """
        wire = header.SerializeToString(deterministic=True)
        self._plan = plan_of(header, spec)
        self.header = header
        self.received = 0
        self._sha, self._crc32 = hashlib.sha256(wire), 0
        size = header.payload_bytes
        self._whole = _whole_frame(size)
        self.buffer = allocate(size) if allocate else lease(size)
        self._bytes = np.frombuffer(self.buffer, np.uint8)  # copying lets other threads run
        self._words = torch.from_numpy(self._bytes[: size // 4 * 4].view("<f4"))
        half = self._plan.has_half
        self._is_plain = not half and all(map(math.isfinite, header.scalars.values()))

    def feed(self, frame: RawFrame) -> None:
        """Take the next frame.

        Raises:
            PayloadError: it is out of place or damaged.
            PayloadTooLarge: it goes beyond what the header claimed.
        """
        if frame.offset != self.received:
            raise PayloadError(f"a frame begins at {frame.offset}, expected {self.received}")
        end = frame.offset + frame.size
        if end > self.header.payload_bytes:
            raise PayloadTooLarge(f"frames go beyond the {self.header.payload_bytes} bytes claimed")
        payload = frame.payload
        if frame.raw_bytes:
            payload = self.buffer[frame.offset : end]
            from fedpb.zstd import decompress_into

            decompress_into(frame.payload, payload)
        if zlib_ng.crc32(payload) != frame.crc32:
            raise PayloadError(f"the frame at {frame.offset} is damaged (checksum)")
        if not frame.raw_bytes:
            self._bytes[frame.offset : end] = np.frombuffer(payload, np.uint8)
        self._note(frame, end)
        self._is_plain = self._is_plain and self._is_plainly_finite(frame.offset, end)
        self.received = end

    def _note(self, frame: RawFrame, end: int) -> None:
        """Add a frame to the digest, which is over the checksums of whole frames."""
        start = frame.offset
        while start < end:
            border = min(start - start % self._whole + self._whole, self.header.payload_bytes)
            stop, is_begun = min(end, border), start % self._whole > 0
            if is_begun or stop < border or stop < end:
                self._crc32 = zlib_ng.crc32(self.buffer[start:stop], self._crc32)
            else:
                self._crc32 = frame.crc32
            if stop == border:
                self._sha.update(self._crc32.to_bytes(4, "little"))
                self._crc32 = 0
            start = stop

    def finish(self) -> Bundle:
        """Return the bundle; its tensors are views of the buffer.

        Raises:
            PayloadError: bytes are missing, or a tensor holds NaN, infinite values, counts below
                zero, or booleans other than 0 and 1.
        """
        if not self.is_complete:
            raise PayloadError(
                f"the stream ended after {self.received} of {self.header.payload_bytes} bytes"
            )
        for place in self._plan.booleans:
            held = self.buffer[place.offset : place.offset + place.num_bytes]
            if max(held, default=0) > 1:
                raise PayloadError(f"tensor {place.key!r} holds booleans that are neither 0 nor 1")
        bundle = self._bundle()
        if not self._is_plain:
            check_finite(bundle)
        check_counts(bundle)
        return bundle

    def _bundle(self) -> Bundle:
        """Return the bundle whose tensors lie in the buffer, without copying them."""
        plan, block = self._plan, torch.from_numpy(self._bytes)
        views = plan.rest.views(block[plan.weights.size :])
        tensors = dict(zip(plan.others, views, strict=True))
        tensors |= {
            f"scalars/{name}": torch.tensor(value, dtype=torch.float64)
            for name, value in self.header.scalars.items()
        }
        tensors |= {
            f"generators/{each.key}/version": torch.tensor(each.version)
            for each in self.header.generators
        }
        bundle = Bundle.from_keys(tensors)
        if not plan.names:
            return bundle
        return replace(
            bundle, weights=PackedWeights(plan.names, plan.weights, block[: plan.weights.size])
        )

    def _is_plainly_finite(self, start: int, end: int) -> bool:
        """Tell whether the bytes that just came surely hold no NaN and no infinity."""
        if start % 8 or end % 8 or start == end:
            return False
        return are_plainly_finite(self._words[start // 4 : end // 4])

    @property
    def is_complete(self) -> bool:
        """Tell whether all bytes arrived."""
        return self.received == self.header.payload_bytes

    @property
    def digest(self) -> bytes:
        """Return the digest of what arrived so far."""
        return self._sha.digest()


def merged(parts: Mapping[str, Bundle]) -> Bundle:
    """Return one payload of the common and the personal part; the personal one wins."""
    if len(parts) < 2:
        return next(iter(parts.values()), Bundle())
    tensors: dict[str, Tensor] = {}
    for role in ("common", "personal"):
        if role in parts:
            tensors |= parts[role].by_key()
    return Bundle.from_keys(tensors)
