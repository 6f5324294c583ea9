"""The types that travel: problems and bundles.

A :class:`Bundle` is the wire payload, a client's state, the core of the server's state and the
checkpoint. Codec, archive and digest use its one flat form, ``{key: tensor}`` with path-like
keys::

    weights/base/conv1.weight        a net's parameters and buffers, by role
    prototypes/class/vectors         (P, D) float, with labels (P,) and counts (P,), int32
    generators/3/version             () int64, beside the generator's tensors
    histogram/round                  (K,) int32, and total (K,)
    scalars/num_examples             () float64
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.facts.client_ids import EVALUATOR as EVALUATOR
from fedmodels.facts.client_ids import ClientId as ClientId
from fedmodels.tensors.packed_weights import UNKNOWN_TO_NUMPY, PackedWeights, flatten, num_bytes

Weights = Mapping[str, Tensor]
"""Tensors by name. Never change one in place: tensors are often views of one block."""

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""Every dtype that may travel, by the name it has on the wire and on disk."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
SCALAR_BYTES = 8
_SMALL = 1 << 16
"""Tensors of fewer elements are checked together."""


@dataclass(frozen=True)
class Problem:
    """The input shape and number of classes that all clients of a run share."""

    input_shape: tuple[int, ...]
    """Shape of one example without the batch axis, e.g. ``(3, 32, 32)`` or ``(128, 6)``."""
    num_classes: int


@dataclass(frozen=True)
class Prototypes:
    """Vectors standing for classes or clusters; row p stands for ``labels[p]``.

    Sets of a fixed size whose rows are known by their position have empty labels and counts.
    """

    vectors: Tensor  # (P, D) float32
    labels: Tensor  # (P,) int32: class or cluster index
    counts: Tensor  # (P,) int32: examples behind each row; (0,) where they are not told

    @classmethod
    def by_position(cls, vectors: Tensor) -> Prototypes:
        """Return rows (P, D) without labels and counts."""
        nothing = torch.zeros(0, dtype=torch.int32)
        return cls(vectors, nothing, nothing.clone())

    @classmethod
    def of(cls, rows: Mapping[int, tuple[Tensor, int]], width: int) -> Prototypes:
        """Build from ``{label: (vector (D,), count)}``, ordered by label; ``width`` is D."""
        labels = sorted(rows)
        vectors = [rows[k][0].detach().to("cpu", torch.float32) for k in labels]
        return cls(
            torch.stack(vectors) if vectors else torch.zeros(0, width),
            torch.tensor(labels, dtype=torch.int32),
            torch.tensor([rows[k][1] for k in labels], dtype=torch.int32),
        )

    def rows(self) -> dict[int, tuple[Tensor, int]]:
        """Return ``{label: (vector (D,), count)}``."""
        return {
            int(k): (v, int(c))
            for k, v, c in zip(self.labels, self.vectors, self.counts, strict=True)
        }


@dataclass(frozen=True)
class GeneratorState:
    """One generator's tensors and the version that tells whether a copy is stale."""

    version: int
    tensors: Weights


@dataclass(frozen=True)
class Histogram:
    """Examples per class: of this round, and of everything the client has met so far."""

    round: Tensor  # (K,) int32
    total: Tensor  # (K,) int32


@dataclass(frozen=True)
class Bundle:
    """Everything that may travel between a client and the server, or rest on a disk."""

    weights: Weights = field(default_factory=dict)
    """Role-prefixed: ``base/…``, ``head/…``; ``eval/…`` is sent for evaluation only."""
    prototypes: dict[str, Prototypes] = field(default_factory=dict)
    """By level: ``class``, ``semantic``, ``alp/3``."""
    generators: dict[str, GeneratorState] = field(default_factory=dict)
    """By class index, or by name; unchanged ones do not travel."""
    histogram: Histogram | None = None
    scalars: dict[str, float] = field(default_factory=dict)

    def by_key(self) -> dict[str, Tensor]:
        """Return every tensor under its path-like key, sorted by key."""
        out = {f"weights/{name}": tensor for name, tensor in self.weights.items()}
        for level, p in self.prototypes.items():
            out[f"prototypes/{level}/vectors"] = p.vectors
            out[f"prototypes/{level}/labels"] = p.labels
            out[f"prototypes/{level}/counts"] = p.counts
        for key, generator in self.generators.items():
            out[f"generators/{key}/version"] = torch.tensor(generator.version)
            for name, tensor in generator.tensors.items():
                out[f"generators/{key}/tensors/{name}"] = tensor
        if self.histogram is not None:
            out["histogram/round"] = self.histogram.round
            out["histogram/total"] = self.histogram.total
        for name, value in self.scalars.items():
            out[f"scalars/{name}"] = torch.tensor(value, dtype=torch.float64)
        return dict(sorted(out.items()))

    @classmethod
    def from_keys(cls, tensors: Mapping[str, Tensor]) -> Bundle:
        """Rebuild a bundle from its tensors by key; PayloadError if no field has such a key."""
        weights: dict[str, Tensor] = {}
        prototypes: dict[str, dict[str, Tensor]] = {}
        generators: dict[str, dict[str, Tensor]] = {}
        histogram: dict[str, Tensor] = {}
        scalars: dict[str, float] = {}
        for key, tensor in tensors.items():
            field_name, _, rest = key.partition("/")
            if field_name == "weights" and rest:
                weights[rest] = tensor
            elif field_name == "prototypes" and "/" in rest:
                level, _, part = rest.rpartition("/")
                prototypes.setdefault(level, {})[part] = tensor
            elif field_name == "generators" and "/" in rest:
                name, _, part = rest.partition("/")
                generators.setdefault(name, {})[part.removeprefix("tensors/")] = tensor
            elif field_name == "histogram":
                histogram[rest] = tensor
            elif field_name == "scalars":
                scalars[rest] = float(tensor)
            else:
                raise PayloadError(f"unknown key {key!r} in a bundle")
        try:
            return cls(
                weights,
                {level: Prototypes(**parts) for level, parts in prototypes.items()},
                {
                    name: GeneratorState(int(parts.pop("version")), parts)
                    for name, parts in generators.items()
                },
                Histogram(**histogram) if histogram else None,
                scalars,
            )
        except (TypeError, KeyError) as error:
            raise PayloadError(f"a bundle is incomplete: {error}") from None

    def num_bytes(self) -> int:
        """Return the logical size in bytes: the tensors alone, equal in every process layout.

        Tensors for evaluation only are no part of the method; :meth:`num_evaluation_bytes` counts
        them.
        """
        own = num_bytes(self.weights) - self.num_evaluation_bytes()
        if self.prototypes or self.generators or self.histogram is not None:
            own += sum(t.nbytes for t in replace(self, weights={}, scalars={}).by_key().values())
        return own + SCALAR_BYTES * len(self.scalars)

    def num_evaluation_bytes(self) -> int:
        """Return the bytes of ``eval/…`` weights, which only metrics need."""
        return num_bytes(self.weights, "eval/")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the little-endian bytes of a CPU tensor, without a copy where it is contiguous."""
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype in UNKNOWN_TO_NUMPY:
        plain = plain.reshape(-1).view(torch.uint8)
    return plain.numpy().data.cast("B")


def check_finite(bundle: Bundle) -> None:
    """Check that no floating-point tensor holds a NaN or an infinity.

    Raises:
        PayloadError: names the first tensor that does.
    """
    weights = bundle.weights
    if isinstance(weights, PackedWeights) and weights.is_plainly_finite():
        bundle = replace(bundle, weights={})  # no tensor is made of the block
    held = {k: t for k, t in bundle.by_key().items() if t.dtype.is_floating_point and t.numel()}
    small = [t for t in held.values() if t.numel() <= _SMALL]
    dtypes = {t.dtype for t in small}
    parts = [flatten([t for t in small if t.dtype == dtype]) for dtype in dtypes]
    parts += [t for t in held.values() if t.numel() > _SMALL]
    if all(map(_is_finite, parts)):
        return
    key = next(k for k, t in held.items() if not _is_finite(t))
    raise PayloadError(f"tensor {key!r} holds NaN or infinite values")


def _is_finite(tensor: Tensor) -> bool:
    low, high = torch.aminmax(tensor)  # one pass; a NaN shows in both
    return bool(torch.isfinite(low) & torch.isfinite(high))


def check_counts(bundle: Bundle) -> None:
    """Check that no count and no class number is below zero; PayloadError names the first."""
    counted = [("scalars/num_examples", bundle.scalars.get("num_examples", 0.0))]
    for level, rows in bundle.prototypes.items():
        counted += [
            (f"prototypes/{level}/{part}", int(values.min()))
            for part, values in (("labels", rows.labels), ("counts", rows.counts))
            if values.numel()
        ]
    if bundle.histogram is not None:
        counted += [
            (f"histogram/{part}", int(values.min()))
            for part, values in vars(bundle.histogram).items()
            if values.numel()
        ]
    for key, smallest in counted:
        if smallest < 0:
            raise PayloadError(f"tensor {key!r} counts below zero: {smallest:g}")


def state_digest(named: Sequence[tuple[str, Bundle]], further: Iterable[str] = ()) -> str:
    """Return the sha256 over (key, dtype, shape, bytes) of named bundles, each sorted by key."""
    sha = hashlib.sha256()
    for name, bundle in named:
        for key, tensor in bundle.by_key().items():
            head = f"{name}/{key}\0{DTYPE_NAMES[tensor.dtype]}\0{list(tensor.shape)}\0"
            sha.update(head.encode())
            sha.update(tensor_bytes(tensor))
    for digest in further:
        sha.update(digest.encode())
    return sha.hexdigest()
