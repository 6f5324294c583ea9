"""Bundles to frames and back.

A payload is the bytes of a bundle's tensors, each at a multiple of 64, in the order of the header.
It travels in frames of about 1 MiB (:mod:`fedpb.frames`).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.types import (
    DTYPE_NAMES,
    DTYPES,
    Bundle,
    BundleSpec,
    check_counts,
    check_finite,
    tensor_bytes,
)
from fedpb import bundle_pb2 as pb
from fedpb.frames import FRAME_BYTES, RawFrame, chunk_of, read_chunk

ALIGNMENT = 64
MAX_DIMS = 16
MAX_VERSION = 2**63 - 1
_PAD = bytes(ALIGNMENT)
_DTYPE_OF = {
    number: DTYPES[name.removeprefix("DTYPE_").lower()]
    for name, number in pb.DType.items()
    if number
}

__all__ = ["Encoded", "RawFrame", "Receiver", "encode", "header_of", "merged", "read_chunk"]

Facts = dict[str, tuple[torch.dtype, tuple[int, ...]]]


# --- headers ------------------------------------------------------------------------------------


def header_of(bundle: Bundle) -> pb.BundleHeader:
    """State every tensor of a bundle: key, dtype, shape and place in the payload."""
    header = pb.BundleHeader()
    place = 0

    def state(target: pb.TensorHeader, name: str, tensor: Tensor) -> None:
        nonlocal place
        target.name = name
        target.dtype = pb.DType.Value(f"DTYPE_{DTYPE_NAMES[tensor.dtype].upper()}")
        target.shape.extend(tensor.shape)
        target.offset = place
        place += aligned(tensor.numel() * tensor.element_size())

    for name in sorted(bundle.weights):
        state(header.weights.tensors.add(), name, bundle.weights[name])
    for level in sorted(bundle.prototypes):
        rows, target = bundle.prototypes[level], header.prototypes.add(level=level)
        state(target.vectors, "vectors", rows.vectors)
        state(target.labels, "labels", rows.labels)
        state(target.counts, "counts", rows.counts)
    for key in sorted(bundle.generators):
        generator = bundle.generators[key]
        update = header.generators.add(key=key, version=generator.version)
        for name in sorted(generator.tensors):
            state(update.tensors.add(), name, generator.tensors[name])
    if bundle.histogram is not None:
        state(header.histogram.round, "round", bundle.histogram.round)
        state(header.histogram.total, "total", bundle.histogram.total)
    for name, value in bundle.scalars.items():
        header.scalars[name] = value
    header.payload_bytes = place
    return header


def _stated(header: pb.BundleHeader) -> Iterator[tuple[str, pb.TensorHeader]]:
    """Yield (flat key, tensor header) in the order of the payload."""
    for tensor in header.weights.tensors:
        yield f"weights/{tensor.name}", tensor
    for rows in header.prototypes:
        yield f"prototypes/{rows.level}/vectors", rows.vectors
        yield f"prototypes/{rows.level}/labels", rows.labels
        yield f"prototypes/{rows.level}/counts", rows.counts
    for generator in header.generators:
        for tensor in generator.tensors:
            yield f"generators/{generator.key}/tensors/{tensor.name}", tensor
    if header.HasField("histogram"):
        yield "histogram/round", header.histogram.round
        yield "histogram/total", header.histogram.total


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in a payload."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def places_of(header: pb.BundleHeader) -> list[Place]:
    """Read what a header states, and check that it states one payload without gaps or overlaps.

    Raises:
        PayloadError: an unknown dtype, a key twice, or places that do not fit.
    """
    places: list[Place] = []
    seen: set[str] = set()
    end = 0
    for key, stated in _stated(header):
        dtype = _DTYPE_OF.get(stated.dtype)
        if dtype is None:
            raise PayloadError(f"tensor {key!r} has an unknown dtype")
        if key in seen:
            raise PayloadError(f"tensor {key!r} is stated twice")
        if len(stated.shape) > MAX_DIMS:
            raise PayloadError(f"tensor {key!r} has {len(stated.shape)} axes")
        if stated.offset != end:
            raise PayloadError(f"tensor {key!r} lies at {stated.offset}, expected {end}")
        count = dtype.itemsize
        for size in stated.shape:
            count *= size
        seen.add(key)
        places.append(Place(key, dtype, tuple(stated.shape), end, count))
        end += aligned(count)
    if header.payload_bytes != end:
        raise PayloadError(
            f"the header claims {header.payload_bytes} bytes, its tensors need {end}"
        )
    return places


def checked_places(header: pb.BundleHeader, spec: BundleSpec) -> list[Place]:
    """Check a header against what its receiver expects, before anything is allocated.

    Raises:
        PayloadTooLarge: it claims more bytes than the spec can hold.
        PayloadError: it states anything else that is not expected.
    """
    limit = spec.max_bytes() + ALIGNMENT * (len(spec.required) + len(spec.optional))
    if header.payload_bytes > limit:
        raise PayloadTooLarge(
            f"the header claims {header.payload_bytes} bytes; at most {limit} are expected"
        )
    places = places_of(header)
    facts: Facts = {place.key: (place.dtype, place.shape) for place in places}
    facts |= {f"scalars/{name}": (torch.float64, ()) for name in header.scalars}
    for generator in header.generators:
        key = f"generators/{generator.key}/version"
        if key in facts:
            raise PayloadError(f"tensor {key!r} is stated twice")
        if generator.version > MAX_VERSION:
            raise PayloadError(f"tensor {key!r} is {generator.version}, beyond {MAX_VERSION}")
        facts[key] = (torch.int64, ())
    spec.check(facts)
    for rows in header.prototypes:
        sizes = [list(t.shape)[:1] for t in (rows.vectors, rows.labels, rows.counts)]
        label_spec = spec.required.get(f"prototypes/{rows.level}/labels")
        if label_spec is not None and label_spec.shape == (0,):
            continue  # rows known by their position alone: the spec has fixed how many there are
        count_spec = spec.required.get(f"prototypes/{rows.level}/counts")
        told = count_spec is None or count_spec.shape != (0,)
        if sizes[0] != sizes[1] or (told and sizes[0] != sizes[2]):
            raise PayloadError(f"prototypes {rows.level!r} have unequal rows: {sizes}")
    return places


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# --- sending ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A bundle ready to travel: its header, and its frames as chunks any stream can send."""

    header: pb.BundleHeader
    chunks: list[bytes]
    digest: bytes
    """Identifies the content: sha256 over the header and the frames' checksums."""
    num_bytes: int
    """Logical size: what the tensors hold, without padding and framing."""


def encode(bundle: Bundle) -> Encoded:
    """Encode a bundle once; the chunks may be sent to any number of receivers."""
    header = header_of(bundle)
    sha = hashlib.sha256(header.SerializeToString(deterministic=True))
    chunks = []
    for chunk, checksum in _frames(bundle):
        chunks.append(chunk)
        sha.update(checksum.to_bytes(4, "little"))
    return Encoded(header, chunks, sha.digest(), bundle.num_bytes())


def _frames(bundle: Bundle) -> Iterator[tuple[bytes, int]]:
    """Yield (chunk, crc32) for every frame of the payload."""
    pieces: list[memoryview | bytes] = []
    size = offset = 0
    for view in _payload(bundle):
        while len(view):
            take = min(len(view), FRAME_BYTES - size)
            pieces.append(view[:take])
            view = view[take:]
            size += take
            if size == FRAME_BYTES:
                yield chunk_of(offset, pieces)
                offset += size
                pieces, size = [], 0
    if size:
        yield chunk_of(offset, pieces)


def _payload(bundle: Bundle) -> Iterator[memoryview]:
    """Yield the bytes of every tensor, in the header's order, each followed by its padding."""
    tensors = [bundle.weights[name] for name in sorted(bundle.weights)]
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
        yield memoryview(_PAD)[: aligned(len(view)) - len(view)]


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
            allocate: gives a writable buffer of so many bytes; plain memory unless given.
        """
        self.places = checked_places(header, spec)
        self.header = header
        self.received = 0
        self._sha = hashlib.sha256(header.SerializeToString(deterministic=True))
        size = header.payload_bytes
        self.buffer = allocate(size) if allocate else memoryview(bytearray(size))

    def feed(self, frame: RawFrame) -> None:
        """Take the next frame.

        Raises:
            PayloadError: it is out of place or damaged.
            PayloadTooLarge: it goes beyond what the header claimed.
        """
        if frame.offset != self.received:
            raise PayloadError(f"a frame begins at {frame.offset}, expected {self.received}")
        end = frame.offset + len(frame.payload)
        if end > self.header.payload_bytes:
            raise PayloadTooLarge(f"frames go beyond the {self.header.payload_bytes} bytes claimed")
        if zlib.crc32(frame.payload) != frame.crc32:
            raise PayloadError(f"the frame at {frame.offset} is damaged (checksum)")
        self.buffer[frame.offset : end] = frame.payload
        self._sha.update(frame.crc32.to_bytes(4, "little"))
        self.received = end

    def finish(self) -> Bundle:
        """Return the bundle; its tensors are views of the buffer.

        Raises:
            PayloadError: bytes are missing, or a tensor holds what it must not: NaN or infinite
                values, counts below zero, or booleans that are none.
        """
        if self.received != self.header.payload_bytes:
            raise PayloadError(
                f"the stream ended after {self.received} of {self.header.payload_bytes} bytes"
            )
        for place in self.places:
            held = self.buffer[place.offset : place.offset + place.num_bytes]
            if place.dtype == torch.bool and max(held, default=0) > 1:
                raise PayloadError(f"tensor {place.key!r} holds booleans that are neither 0 nor 1")
        bundle = bundle_of(self.header, self.places, self.buffer)
        check_finite(bundle)
        check_counts(bundle)
        return bundle

    @property
    def digest(self) -> bytes:
        """Return the digest of what arrived so far."""
        return self._sha.digest()


def bundle_of(header: pb.BundleHeader, places: list[Place], buffer: memoryview) -> Bundle:
    """Return the bundle whose tensors lie in ``buffer``, without copying them."""
    flat: dict[str, Tensor] = {place.key: _view(buffer, place) for place in places}
    flat |= {
        f"scalars/{name}": torch.tensor(value, dtype=torch.float64)
        for name, value in header.scalars.items()
    }
    flat |= {f"generators/{g.key}/version": torch.tensor(g.version) for g in header.generators}
    return Bundle.from_flat(flat)


def _view(buffer: memoryview, place: Place) -> Tensor:
    if not place.num_bytes:
        return torch.empty(place.shape, dtype=place.dtype)
    count = place.num_bytes // place.dtype.itemsize
    flat = torch.frombuffer(buffer, dtype=place.dtype, count=count, offset=place.offset)
    return flat.reshape(place.shape)


def merged(parts: Mapping[str, Bundle]) -> Bundle:
    """Return one payload of the common and the personal part; the personal one wins."""
    flat: dict[str, Tensor] = {}
    for role in ("common", "personal"):
        if role in parts:
            flat |= parts[role].flat()
    return Bundle.from_flat(flat)
