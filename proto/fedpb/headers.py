"""The header of a payload: every tensor's key, dtype, shape and place, and whether it may come."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock

import torch
from torch import Tensor

from fedmodels.errors import PayloadError, PayloadTooLarge
from fedmodels.tensors.bundle import DTYPE_NAMES, DTYPES, Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.packed_weights import (
    ALIGNMENT,
    HALF,
    BlockLayout,
    align,
    layout_of,
    names_and_layout,
)
from fedpb.v1 import bundle_pb2 as pb

MAX_DIMS = 16
MAX_VERSION = 2**63 - 1
_DTYPE_OF = {
    number: DTYPES[name.removeprefix("DTYPE_").lower()]
    for name, number in pb.Dtype.items()
    if number
}


def header_of(bundle: Bundle) -> pb.BundleHeader:
    """State every tensor of a bundle: key, dtype, shape and place in the payload."""
    header = pb.BundleHeader()
    names, layout = names_and_layout(bundle.weights)
    if names:
        header.weights.CopyFrom(_shard(names, layout))
    place = layout.size

    def state(target: pb.TensorHeader, name: str, tensor: Tensor) -> None:
        nonlocal place
        _state(target, name, tensor.dtype, tensor.shape, place)
        place += align(tensor.nbytes)

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


def _state(
    target: pb.TensorHeader, name: str, dtype: torch.dtype, shape: Sequence[int], offset: int
) -> None:
    target.name = name
    target.dtype = pb.Dtype.Value(f"DTYPE_{DTYPE_NAMES[dtype].upper()}")
    target.shape.extend(shape)
    target.offset = offset


@lru_cache(maxsize=64)
def _shard(names: tuple[str, ...], layout: BlockLayout) -> pb.ModelShard:
    """State the tensors of a net once: it does not change from round to round."""
    shard = pb.ModelShard()
    for name, fact, offset in zip(names, layout.facts, layout.offsets, strict=True):
        _state(shard.tensors.add(), name, *fact, offset)
    return shard


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
class TensorPlace:
    """Where one tensor lies in a payload."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def places_of(header: pb.BundleHeader) -> list[TensorPlace]:
    """Read what a header states; PayloadError unless it is one payload without gaps or overlaps."""
    places: list[TensorPlace] = []
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
        places.append(TensorPlace(key, dtype, tuple(stated.shape), end, count))
        end += align(count)
    if header.payload_bytes != end:
        raise PayloadError(
            f"the header claims {header.payload_bytes} bytes, its tensors need {end}"
        )
    return places


def checked_places(header: pb.BundleHeader, spec: BundleSpec) -> list[TensorPlace]:
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
    facts = {place.key: (place.dtype, place.shape) for place in places}
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
        count, *told = (list(t.shape)[:1] for t in (rows.vectors, rows.labels, rows.counts))
        for part, size in zip(("labels", "counts"), told, strict=True):
            key = f"prototypes/{rows.level}/{part}"
            if key in spec.required and spec.required[key].shape == (0,):
                continue  # rows known by their position alone, or counts that are not told
            if size != count and not (size == [0] and key in spec.optional):
                raise PayloadError(f"prototypes {rows.level!r} have unequal rows: {[count, *told]}")
    return places


@dataclass(frozen=True)
class Plan:
    """A header that was checked, and how its tensors are made of the payload.

    Attributes:
        spec: the specification against which the header was checked.
        places: where all tensors lie.
        names: those of the weights, without their prefix.
        weights: how they lie, from the beginning of the payload.
        others: flat keys of all other tensors.
        rest: how those lie, behind the weights.
    """

    spec: BundleSpec
    places: list[TensorPlace]
    names: tuple[str, ...]
    weights: BlockLayout
    others: tuple[str, ...]
    rest: BlockLayout

    @classmethod
    def of(cls, header: pb.BundleHeader, spec: BundleSpec) -> Plan:
        """Check a header; raises as :func:`checked_places` does."""
        places = checked_places(header, spec)
        names = tuple(tensor.name for tensor in header.weights.tensors)
        facts = tuple((place.dtype, place.shape) for place in places)
        others = tuple(place.key for place in places[len(names) :])
        weights, rest = layout_of(facts[: len(names)]), layout_of(facts[len(names) :])
        return cls(spec, places, names, weights, others, rest)

    @cached_property
    def has_half(self) -> bool:
        """Whether a tensor has elements of two bytes, which read as float32 say nothing."""
        return any(place.dtype in HALF for place in self.places)

    @cached_property
    def booleans(self) -> list[TensorPlace]:
        """The tensors of booleans."""
        return [place for place in self.places if place.dtype == torch.bool]


MAX_BYTES = 16 << 20
_PLACE_BYTES = 600
"""Bytes that a plan takes for each tensor besides its name, about."""


class Plans:
    """Remembers the plans of the last headers; safe between threads."""

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: OrderedDict[bytes, tuple[Plan, int]] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, header: pb.BundleHeader, spec: BundleSpec) -> Plan:
        """Return the plan of a header; raises as :func:`fedpb.headers.checked_places` does."""
        meaning = pb.BundleHeader()
        meaning.CopyFrom(header)
        meaning.DiscardUnknownFields()
        for name in meaning.scalars:
            meaning.scalars[name] = 0.0
        wire = meaning.SerializeToString(deterministic=True)
        key = hashlib.sha256(wire).digest()
        with self._lock:
            found = self._held.get(key)
        if found is not None and found[0].spec is spec:
            return found[0]
        plan = Plan.of(header, spec)  # what is refused is not remembered
        self._keep(key, plan, 2 * len(wire) + _PLACE_BYTES * (1 + len(plan.places)))
        return plan

    def _keep(self, key: bytes, plan: Plan, size: int) -> None:
        with self._lock:
            if (before := self._held.pop(key, None)) is not None:
                self.num_bytes -= before[1]
            self._held[key] = plan, size
            self.num_bytes += size
            while self.num_bytes > self.most_bytes:
                _, (_, freed) = self._held.popitem(last=False)
                self.num_bytes -= freed


_PLANS = Plans()
plan_of = _PLANS.of
