"""Forms of float32 weights that take fewer bytes, and the way back to float32.

A form turns named tensors into other named tensors. It says which ones, so that a receiver can
refuse all others before it takes memory. Names that begin with ``compact/`` are no tensors of a
net: they hold what several tensors of the net share.

Shapes: P tensors, n elements in all of them, k of these that travel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import DTYPE_NAMES, Weights
from fedmodels.tensors.bundle_spec import TensorSpec
from fedmodels.tensors.declared_counts import MAX_WEIGHT
from fedmodels.tensors.packed_weights import flatten, unflatten

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each tensor by name; its order is that of the elements in ``TopK``."""
SCALES, INDICES, VALUES = "compact/scales", "compact/indices", "compact/values"
LEVELS = 127
"""Steps of ``Int8`` on each side of zero."""


class Form(Protocol):
    """One way to write float32 tensors."""

    @property
    def most(self) -> float:
        """Return the largest size of an element that it can write."""
        ...

    @property
    def is_coarse(self) -> bool:
        """Tell whether a sender should remember what the form left out, and send it later."""
        ...

    def specs(self, shapes: Shapes) -> dict[str, TensorSpec]:
        """Return what travels for tensors of these shapes."""
        ...

    def packed(self, tensors: Weights) -> dict[str, Tensor]:
        """Return what travels for these tensors.

        Raises:
            PayloadError: a tensor holds a value that the form cannot hold.
        """
        ...

    def unpacked(self, sent: Weights, shapes: Shapes) -> dict[str, Tensor]:
        """Return float32 tensors of these shapes, from tensors that ``specs`` admits.

        Raises:
            PayloadError: the sent tensors hold values that ``packed`` never writes.
        """
        ...


@dataclass(frozen=True)
class Floats:
    """Every element, in a floating-point type."""

    dtype: torch.dtype
    is_coarse: bool = False

    @property
    def most(self) -> float:
        return torch.finfo(self.dtype).max

    def specs(self, shapes: Shapes) -> dict[str, TensorSpec]:
        return {name: TensorSpec(self.dtype, shape) for name, shape in shapes.items()}

    def packed(self, tensors: Weights) -> dict[str, Tensor]:
        if self.dtype == torch.float32:
            return dict(tensors)
        found = {name: tensor.to(self.dtype) for name, tensor in tensors.items()}
        for name, tensor in found.items():
            if not tensor.isfinite().all():
                kind = DTYPE_NAMES[self.dtype]
                raise PayloadError(f"tensor {name!r} holds values that {kind} cannot hold")
        return found

    def unpacked(self, sent: Weights, shapes: Shapes) -> dict[str, Tensor]:
        return {name: sent[name].float() for name in shapes}


@dataclass(frozen=True)
class Int8:
    """Every element as one of 255 steps between -a and a, where a is its tensor's largest size."""

    most: float = MAX_WEIGHT
    is_coarse: bool = True

    def specs(self, shapes: Shapes) -> dict[str, TensorSpec]:
        steps = {name: TensorSpec(torch.int8, shape) for name, shape in shapes.items()}
        return {**steps, SCALES: TensorSpec(torch.float32, (len(shapes),))}

    def packed(self, tensors: Weights) -> dict[str, Tensor]:
        largest = [t.abs().max() if t.numel() else torch.zeros(()) for t in tensors.values()]
        scales = torch.stack(largest) / LEVELS  # (P,)
        if not scales.isfinite().all():
            name = next(n for n, s in zip(tensors, scales, strict=True) if not s.isfinite())
            raise PayloadError(f"tensor {name!r} holds NaN or infinite values")
        divisors = torch.where(scales > 0, scales, 1.0)
        found = {
            name: (tensor / divisor).round_().clamp_(-LEVELS, LEVELS).to(torch.int8)
            for (name, tensor), divisor in zip(tensors.items(), divisors, strict=True)
        }
        return {**found, SCALES: scales}

    def unpacked(self, sent: Weights, shapes: Shapes) -> dict[str, Tensor]:
        scales = sent[SCALES]
        wrong = (~((scales >= 0) & (scales <= MAX_WEIGHT))).nonzero()  # a NaN is wrong as well
        if len(wrong):
            at = int(wrong[0])
            raise PayloadError(
                f"tensor 'weights/{SCALES}' says {float(scales[at]):g} at {at}; a scale lies "
                f"between 0 and {MAX_WEIGHT:g}"
            )
        return {name: sent[name] * scale for name, scale in zip(shapes, scales, strict=True)}


@dataclass(frozen=True)
class TopK:
    """The largest elements over all tensors, with their places; all others are zero."""

    share: float
    """Part of the elements that travels, in (0, 1]."""
    most: float = MAX_WEIGHT
    is_coarse: bool = True

    def count(self, shapes: Shapes) -> int:
        """Return k for tensors of these shapes."""
        return math.ceil(self.share * _count(shapes))

    def specs(self, shapes: Shapes) -> dict[str, TensorSpec]:
        k = self.count(shapes)
        return {INDICES: TensorSpec(torch.int32, (k,)), VALUES: TensorSpec(torch.float32, (k,))}

    def packed(self, tensors: Weights) -> dict[str, Tensor]:
        vector = flatten(list(tensors.values()))  # (n,)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        places = vector.abs().topk(self.count(shapes), sorted=False).indices.sort().values
        return {INDICES: places.int(), VALUES: vector[places]}

    def unpacked(self, sent: Weights, shapes: Shapes) -> dict[str, Tensor]:
        places, count = sent[INDICES].long(), _count(shapes)
        rising = bool((places[1:] > places[:-1]).all())
        if not rising or int(places[0]) < 0 or int(places[-1]) >= count:
            raise PayloadError(
                f"tensor 'weights/{INDICES}' must hold rising places between 0 and {count - 1}"
            )
        vector = torch.zeros(count)
        vector[places] = sent[VALUES]
        like = [torch.empty(shape, device="meta") for shape in shapes.values()]
        return dict(zip(shapes, unflatten(vector, like), strict=True))


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def form_of(name: str, share: float) -> Form:
    """Return the form that a config names; ``share`` is that of ``top-k``."""
    if name == "int8":
        return Int8()
    if name == "top-k":
        return TopK(share)
    return Floats(getattr(torch, name))
