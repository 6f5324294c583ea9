"""What a receiver expects of a bundle: the dtype and the shape of each tensor.

A header is checked against a specification before memory is taken for what it announces.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedmodels.errors import PayloadError, PayloadTooLarge, suggestion
from fedmodels.tensors.bundle import DTYPE_NAMES, Bundle
from fedmodels.tensors.packed_weights import names_and_layout

MAX_FITTING = 16
"""Forms of bundles that a spec remembers: uploads of a run differ in their prototypes at most."""


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of one tensor; ``None`` in a shape stands for any size up to ``max_rows``."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]
    max_rows: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """Return the exact spec of ``tensor``."""
        return cls(tensor.dtype, tuple(tensor.shape))

    def growing(self, rows: int) -> TensorSpec:
        """Return the spec of tensors with up to so many rows of this shape."""
        return TensorSpec(self.dtype, (None, *self.shape[1:]), rows)

    def admits(self, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Tell whether a tensor of this dtype and shape fits."""
        if shape == self.shape:
            return dtype == self.dtype
        return (
            dtype == self.dtype
            and len(shape) == len(self.shape)
            and all(
                (n == want) if want is not None else n <= self.max_rows
                for n, want in zip(shape, self.shape, strict=True)
            )
        )

    def max_bytes(self) -> int:
        """Return the most bytes a tensor of this spec can have."""
        count = 1
        for n in self.shape:
            count *= self.max_rows if n is None else n
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class BundleSpec:
    """The tensors that a receiver expects, by the flat keys of a bundle.

    Keys of ``required`` must be present, keys of ``optional`` may be; others may not. A generator
    is whole or absent.
    """

    required: Mapping[str, TensorSpec] = field(default_factory=dict)
    optional: Mapping[str, TensorSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle) -> BundleSpec:
        """Return the spec that admits exactly bundles shaped like this one."""
        return cls({key: TensorSpec.of(tensor) for key, tensor in bundle.by_key().items()})

    @classmethod
    def growing(cls, bundle: Bundle, rows: int) -> BundleSpec:
        """Return the spec of bundles like this one whose empty tensors may come to have rows.

        A set of prototypes without a row may come to have labels and counts, of all rows or of
        none: these are optional in a spec.
        """
        found = cls.of(bundle).required
        empty = {k: each.growing(rows) for k, each in found.items() if 0 in each.shape[:1]}
        optional = dict[str, TensorSpec]()
        for level, held in bundle.prototypes.items():
            for key in (f"prototypes/{level}/labels", f"prototypes/{level}/counts"):
                if key in empty and len(held.vectors):
                    del empty[key]  # rows by position: they get no labels
                elif key in empty:
                    optional[key] = empty.pop(key)
        required = {key: spec for key, spec in {**found, **empty}.items() if key not in optional}
        return cls(required, optional)

    def __or__(self, other: BundleSpec) -> BundleSpec:
        """Return the spec of a bundle with the keys of both specs."""
        return BundleSpec({**self.required, **other.required}, {**self.optional, **other.optional})

    @cached_property
    def max_bytes(self) -> int:
        """The most bytes a bundle of this spec can have."""
        specs = (*self.required.values(), *self.optional.values())
        return sum(spec.max_bytes() for spec in specs)

    def check_bundle(self, bundle: Bundle) -> None:
        """Check a bundle, as :meth:`check` does; the same names and shapes are compared once.

        Raises:
            PayloadError, PayloadTooLarge: as :meth:`check` says.
        """
        weights = bundle.weights
        names, layout = names_and_layout(weights)
        others = replace(bundle, weights={}).by_key()
        form = names, layout, tuple((key, t.dtype, t.shape) for key, t in others.items())
        if form in self._fitting:
            return
        named = zip(names, layout.facts, strict=True)
        facts = {key: (t.dtype, tuple(t.shape)) for key, t in others.items()}
        facts |= {f"weights/{name}": (dtype, tuple(shape)) for name, (dtype, shape) in named}
        self.check(facts)
        if len(self._fitting) >= MAX_FITTING:
            self._fitting.clear()
        self._fitting.add(form)

    @cached_property
    def _fitting(self) -> set[Any]:
        """Names, dtypes and shapes of bundles that were found to fit."""
        return set()

    def check(self, facts: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Check header facts, ``{key: (dtype, shape)}``, before memory is allocated for them.

        Raises:
            PayloadError: a key is unknown or missing, or a dtype or shape is not the expected one.
            PayloadTooLarge: the tensors together exceed what this spec can hold.
        """
        known = {**self.required, **self.optional}
        total = 0
        for key, (dtype, shape) in facts.items():
            spec = known.get(key)
            if spec is None:
                raise PayloadError(f"unexpected tensor {key!r}.{suggestion(key, known)}")
            count = dtype.itemsize
            for n in shape:
                count *= n
            total += count
            if total > self.max_bytes:
                raise PayloadTooLarge(
                    f"tensor {key!r} brings the payload to {total} bytes; "
                    f"at most {self.max_bytes} are expected"
                )
            if not spec.admits(dtype, shape):
                raise PayloadError(
                    f"tensor {key!r} is {DTYPE_NAMES.get(dtype, dtype)} {list(shape)}; "
                    f"expected {DTYPE_NAMES[spec.dtype]} {list(spec.shape)}"
                )
        begun = {_generator_of(key) for key in facts} - {""}
        for key in (*self.required, *(k for k in self.optional if _generator_of(k) in begun)):
            if key not in facts:
                raise PayloadError(f"tensor {key!r} is missing")


def _generator_of(key: str) -> str:
    return "/".join(key.split("/", 2)[:2]) if key.startswith("generators/") else ""


def prototype_spec(level: str, width: int, max_rows: int, *, counted: bool = True) -> BundleSpec:
    """Return the spec of a prototype set of up to ``max_rows`` rows of ``width`` coordinates.

    Counts are an empty tensor unless ``counted``.
    """
    prefix = f"prototypes/{level}"
    shape = (None,) if counted else (0,)
    counts = TensorSpec(torch.int32, shape, max_rows if counted else 0)
    return BundleSpec(
        {
            f"{prefix}/vectors": TensorSpec(torch.float32, (None, width), max_rows),
            f"{prefix}/labels": TensorSpec(torch.int32, (None,), max_rows),
            f"{prefix}/counts": counts,
        }
    )


def scalar_spec(*names: str) -> BundleSpec:
    """Return the spec of a bundle that carries these scalars."""
    return BundleSpec({f"scalars/{name}": TensorSpec(torch.float64, ()) for name in names})
