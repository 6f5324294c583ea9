"""Bundles to frames and back.

A payload is the bytes of a bundle's tensors, each at a multiple of 64, in the order of the header.
It travels in frames of about 1 MiB (:mod:`fedpb.frames`).
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import torch
from torch import Tensor
from zlib_ng import zlib_ng

from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.types import (
    DTYPE_NAMES,
    DTYPES,
    Bundle,
    BundleSpec,
    check_counts,
    check_finite,
    tensor_at,
    tensor_bytes,
)
from fedpb import bundle_pb2 as pb
from fedpb.frames import FRAME_BYTES, WHOLE_BYTES, Frame, RawFrame, messages, read_chunk

ALIGNMENT = 64
MAX_DIMS = 16
MAX_VERSION = 2**63 - 1
_PAD = bytes(ALIGNMENT)
_HALF = frozenset({torch.float16, torch.bfloat16})
_DTYPE_OF = {
    number: DTYPES[name.removeprefix("DTYPE_").lower()]
    for name, number in pb.DType.items()
    if number
}

__all__ = [
    "Encoded", "RawFrame", "Receiver", "encode", "frames_of", "header_of", "merged", "messages",
    "read_chunk",
]  # fmt: skip

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
    limit = spec.max_bytes + ALIGNMENT * (len(spec.required) + len(spec.optional))
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


_checked: OrderedDict[bytes, tuple[BundleSpec, list[Place]]] = OrderedDict()
_CHECKED_MOST = 256
"""Headers that are remembered: a net of a hundred tensors takes longer to check than to receive."""


def _places_once(wire: bytes, header: pb.BundleHeader, spec: BundleSpec) -> list[Place]:
    """Return :func:`checked_places`; a header seen before with the same spec was checked then."""
    found = _checked.get(wire)
    if found is None or found[0] is not spec:
        found = (spec, checked_places(header, spec))
        _checked[wire] = found
        while len(_checked) > _CHECKED_MOST:
            _checked.popitem(last=False)
    return found[1]


def aligned(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


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
    _laid_out: list[bytes] = field(default_factory=list)
    _laying: Lock = field(default_factory=Lock)

    def chunks(self) -> Iterator[bytes]:
        """Yield the frames as messages; each is laid out once, when the first receiver needs it."""
        for number, frame in enumerate(self.frames):
            with self._laying:
                if number == len(self._laid_out):
                    self._laid_out.append(frame.laid_out())
            yield self._laid_out[number]


def encode(bundle: Bundle) -> Encoded:
    """Encode a bundle once; its tensors must not change while receivers still take it."""
    header = header_of(bundle)
    frames = list(frames_of(bundle, header.payload_bytes))
    sha = hashlib.sha256(header.SerializeToString(deterministic=True))
    for frame in frames:
        sha.update(frame.crc32.to_bytes(4, "little"))
    return Encoded(header, frames, sha.digest(), bundle.num_bytes())


def frames_of(bundle: Bundle, payload_bytes: int) -> Iterator[Frame]:
    """Yield the frames of the payload, which has as many bytes as its header states."""
    most = WHOLE_BYTES if payload_bytes <= WHOLE_BYTES else FRAME_BYTES
    pieces: list[memoryview] = []
    size = offset = 0
    for view in _payload(bundle):
        while len(view):
            take = min(len(view), most - size)
            pieces.append(view[:take])
            view = view[take:]
            size += take
            if size == most:
                yield Frame(offset, pieces)
                offset += size
                pieces, size = [], 0
    if size:
        yield Frame(offset, pieces)


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
        wire = header.SerializeToString(deterministic=True)
        self.places = _places_once(wire, header, spec)
        self.header = header
        self.received = 0
        self._sha = hashlib.sha256(wire)
        size = header.payload_bytes
        self.buffer = allocate(size) if allocate else np.empty(size, np.uint8).data
        self._bytes = np.frombuffer(self.buffer, np.uint8)  # copying lets other threads run
        self._words = torch.from_numpy(self._bytes[: size // 4 * 4].view("<f4"))
        half = any(place.dtype in _HALF for place in self.places)
        self._is_plain = not half and all(map(math.isfinite, header.scalars.values()))

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
        if zlib_ng.crc32(frame.payload) != frame.crc32:
            raise PayloadError(f"the frame at {frame.offset} is damaged (checksum)")
        self._bytes[frame.offset : end] = np.frombuffer(frame.payload, np.uint8)
        self._sha.update(frame.crc32.to_bytes(4, "little"))
        self._is_plain = self._is_plain and self._is_plainly_finite(frame.offset, end)
        self.received = end

    def finish(self) -> Bundle:
        """Return the bundle; its tensors are views of the buffer.

        Raises:
            PayloadError: bytes are missing, or a tensor holds what it must not: NaN or infinite
                values, counts below zero, or booleans that are none.
        """
        if not self.is_complete:
            raise PayloadError(
                f"the stream ended after {self.received} of {self.header.payload_bytes} bytes"
            )
        for place in self.places:
            if place.dtype != torch.bool:
                continue
            held = self.buffer[place.offset : place.offset + place.num_bytes]
            if max(held, default=0) > 1:
                raise PayloadError(f"tensor {place.key!r} holds booleans that are neither 0 nor 1")
        bundle = bundle_of(self.header, self.places, self.buffer)
        if not self._is_plain:
            check_finite(bundle)
        check_counts(bundle)
        return bundle

    def _is_plainly_finite(self, start: int, end: int) -> bool:
        """Tell of bytes that just came that they hold no float32 or float64 NaN or infinity.

        Read as float32, both halves of which a float64 consists, neither can hide; integers may
        look like NaN, so False says nothing.
        """
        if start % 8 or end % 8 or start == end:
            return False
        low, high = torch.aminmax(self._words[start // 4 : end // 4])
        return bool(torch.isfinite(low) & torch.isfinite(high))

    @property
    def is_complete(self) -> bool:
        """Tell whether all bytes arrived."""
        return self.received == self.header.payload_bytes

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
    return tensor_at(buffer, place.dtype, place.shape, place.offset)


def merged(parts: Mapping[str, Bundle]) -> Bundle:
    """Return one payload of the common and the personal part; the personal one wins."""
    flat: dict[str, Tensor] = {}
    for role in ("common", "personal"):
        if role in parts:
            flat |= parts[role].flat()
    return Bundle.from_flat(flat)
