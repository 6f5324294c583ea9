"""What a client contributes to a private sum: its upload as vectors of bounded norm, and back.

An upload has up to three parts that noise can cover. Each is a vector, and each has a bound:

- ``weights``: the difference of all shared weights to what the client was given, bound ``clip``;
- ``prototypes/LEVEL``: a row for every class, the prototype and a mark that says that there is one,
  bound ``prototype_clip`` for all rows together;
- ``histogram``: the counts of both histograms, bound ``histogram_clip``.

A vector beyond its bound is scaled to it. The mark of a class is scaled with its prototype, so the
mean prototype (the sum of rows over the sum of marks) has no bias towards 0: a scaled client counts
less. A mean of vectors becomes one upload again, which a method reduces like any other.

Shapes: K classes, d coordinates of a prototype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmodels.config.privacy import Privacy
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.tensors.bundle import Bundle, Histogram, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.compact_forms import INDICES, SCALES, VALUES
from fedmodels.tensors.declared_counts import STATISTICS
from fedmodels.tensors.packed_weights import unflatten

WEIGHTS, PROTOTYPES, HISTOGRAM = "weights", "prototypes/", "histogram"
PRIVATE = "private/"
"""Prefix of prototypes and histograms that a client has added noise to: they travel as weights."""
EXAMPLES = "scalars/num_examples"
"""Not in an upload whose client adds the noise: all clients count alike in a private sum."""
Vectors = Mapping[str, Tensor]
"""Vectors in float64 by part."""


@dataclass(frozen=True)
class Contributions:
    """The parts of a method's uploads that noise covers, and how they become vectors."""

    privacy: Privacy
    spec: BundleSpec
    """Of an upload as the method makes it."""
    num_classes: int

    # --- what is covered --------------------------------------------------------------------------

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights that are covered, ascending."""
        found = (k for k, one in self.spec.required.items() if _is_parameter(k, one))
        return tuple(sorted(key.partition("/")[2] for key in found))

    @property
    def levels(self) -> tuple[str, ...]:
        """The levels of class prototypes that are covered, ascending."""
        ends = "/vectors"
        found = [k[len(PROTOTYPES) : -len(ends)] for k in self.spec.required if k.endswith(ends)]
        return tuple(sorted(level for level in found if self._is_by_class(level)))

    def _is_by_class(self, level: str) -> bool:
        vectors = self.spec.required.get(f"{PROTOTYPES}{level}/vectors")
        labels = self.spec.required.get(f"{PROTOTYPES}{level}/labels")
        if vectors is None or labels is None or len(vectors.shape) != 2:
            return False
        return labels.shape == (None,) and vectors.shape[0] is None and vectors.shape[1] is not None

    @property
    def clips(self) -> dict[str, float]:
        """The bound of each part, by part.

        Raises:
            ConfigError: ``[privacy]`` gives no bound for a part.
        """
        found = {WEIGHTS: self.privacy.clip} if self.weights else {}
        for level in self.levels:
            found[f"{PROTOTYPES}{level}"] = _given(self.privacy, "prototype_clip", "prototypes")
        if "histogram/round" in self.spec.required:
            found[HISTOGRAM] = _given(self.privacy, "histogram_clip", "histograms")
        return found

    @property
    def uncovered(self) -> list[str]:
        """The names of what an upload holds beside the covered parts, ascending."""
        covered = {EXAMPLES, *(f"{WEIGHTS}/{name}" for name in self.weights)}
        levels = tuple(f"{PROTOTYPES}{level}/" for level in self.levels)
        found = set[str]()
        for key in (*self.spec.required, *self.spec.optional):
            first, _, rest = key.partition("/")
            if first == "generators":
                found.add(first)
            elif first == "prototypes" and not key.startswith(levels):
                found.add(f"{PROTOTYPES}{rest.rpartition('/')[0]}")
            elif first in ("weights", "scalars") and key not in covered:
                found.add(key)
        return sorted(found)

    @property
    def covered_keys(self) -> frozenset[str]:
        """The keys that are covered, of an upload as the method makes it and as a client sends it.

        The number of examples is not among them. A compact form is of parameters, and all
        parameters are covered.
        """
        sent = [key for key in self.sent_spec.required if key.startswith(f"weights/{PRIVATE}")]
        compact = [f"weights/{name}" for name in (SCALES, INDICES, VALUES)]
        return frozenset({*self._covered_keys(), *sent, *compact} - {EXAMPLES})

    # --- from uploads to vectors ------------------------------------------------------------------

    def vectors(self, upload: Bundle, given: Weights) -> dict[str, Tensor]:
        """Return an upload's covered parts as vectors, not scaled yet.

        Weights that the client was not given count from 0.
        """
        found = self._difference(upload.weights, given)
        for level in self.levels:
            found[f"{PROTOTYPES}{level}"] = self._rows(level, upload.prototypes[level])
        if upload.histogram is not None:
            counts = [upload.histogram.round, upload.histogram.total]
            found[HISTOGRAM] = torch.cat([c.double().flatten() for c in counts])
        return found

    def zeros(self) -> dict[str, Tensor]:
        """Return the vectors of a client that contributes nothing."""
        sizes = {
            name.removeprefix(PRIVATE): math.prod(n or 0 for n in one.shape)
            for key, one in self.sent_spec.required.items()
            if (name := key.removeprefix("weights/")).startswith(PRIVATE)
        }
        if self.weights:
            sizes = {WEIGHTS: sum(form.numel() for form in self._forms), **sizes}
        return {part: torch.zeros(size, dtype=torch.float64) for part, size in sizes.items()}

    def _difference(self, weights: Weights, given: Weights) -> dict[str, Tensor]:
        """Return the difference of the covered weights to those given; empty without weights."""
        held = {name: weights[name].double() for name in self.weights}
        parts = [w - given[n].double() if n in given else w for n, w in held.items()]
        return {WEIGHTS: torch.cat([part.flatten() for part in parts])} if parts else {}

    def _moved(self, mean: Vectors, given: Weights) -> dict[str, Tensor]:
        """Return the weights given, moved by a difference."""
        parts = unflatten(mean[WEIGHTS], self._forms) if self.weights else []
        return {
            name: ((given[name].double() if name in given else 0.0) + moved).float()
            for name, moved in zip(self.weights, parts, strict=True)
        }

    @property
    def _forms(self) -> list[Tensor]:
        """The covered weights, as tensors without values."""
        shapes = (self.spec.required[f"weights/{name}"].shape for name in self.weights)
        return [torch.empty([n or 0 for n in shape], device="meta") for shape in shapes]

    def _rows(self, level: str, prototypes: Prototypes) -> Tensor:
        rows = torch.zeros(self.num_classes, self._width(level) + 1, dtype=torch.float64)
        labels = prototypes.labels.long()
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.num_classes:
            raise PayloadError(f"prototypes of level {level!r} name a class that does not exist")
        rows[labels, :-1] = prototypes.vectors.double()
        rows[labels, -1] = self._mark(level)
        return rows.flatten()

    def _width(self, level: str) -> int:
        width = self.spec.required[f"{PROTOTYPES}{level}/vectors"].shape[1]
        assert width is not None, "levels are by class"
        return width

    def _mark(self, level: str) -> float:
        """Return the mark of a class that a client has: small beside a prototype at its bound."""
        return self.clips[f"{PROTOTYPES}{level}"] / (2 * math.sqrt(self.num_classes))

    # --- from vectors to an upload ----------------------------------------------------------------

    def upload(self, mean: Vectors, given: Weights, stds: Mapping[str, float]) -> Bundle:
        """Return the upload that stands for a mean of clients' vectors.

        Args:
            mean: by part.
            given: what clients were given.
            stds: the standard deviation of the noise in each part's mean. A class whose mean mark
                is not above it is left out.
        """
        prototypes = {
            level: self._prototypes(level, mean[f"{PROTOTYPES}{level}"], stds)
            for level in self.levels
        }
        histogram = None
        if HISTOGRAM in mean:
            counts = mean[HISTOGRAM].round().clamp(min=0).int()
            sizes = [self.spec.required[f"histogram/{part}"].shape[0] for part in _HISTOGRAMS]
            both = torch.split(counts, [n or 0 for n in sizes])
            histogram = Histogram(**dict(zip(_HISTOGRAMS, both, strict=True)))
        scalars = {"num_examples": 1.0} if EXAMPLES in self.spec.required else {}
        return Bundle(self._moved(mean, given), prototypes, {}, histogram, scalars)

    def _prototypes(self, level: str, mean: Tensor, stds: Mapping[str, float]) -> Prototypes:
        part, mark = f"{PROTOTYPES}{level}", self._mark(level)
        rows = mean.reshape(self.num_classes, -1)
        least = max(stds.get(part, 0.0), 1e-9 * mark)
        found = {
            label: ((row[:-1] / (row[-1] / mark)).float(), 1)
            for label, row in enumerate(rows)
            if float(row[-1]) > least
        }
        return Prototypes.of(found, self._width(level))

    def rest(self, upload: Bundle) -> Bundle:
        """Return what an upload holds beside the covered parts, as it is."""
        tensors, covered = upload.by_key(), self._covered_keys()
        private = f"{WEIGHTS}/{PRIVATE}"
        return Bundle.from_keys(
            {k: t for k, t in tensors.items() if k not in covered and not k.startswith(private)}
        )

    def joined(self, covered: Bundle, rest: Bundle) -> Bundle:
        """Return an upload of covered parts and of a rest."""
        return Bundle(
            {**covered.weights, **rest.weights},
            {**covered.prototypes, **rest.prototypes},
            rest.generators,
            covered.histogram,
            {**covered.scalars, **rest.scalars},
        )

    # --- on the wire, where clients add the noise -------------------------------------------------

    @property
    def sent_spec(self) -> BundleSpec:
        """The specification of an upload whose client has added noise: all parts are weights."""
        found = {f"weights/{n}": self.spec.required[f"weights/{n}"] for n in self.weights}
        for level in self.levels:
            shape = (self.num_classes * (self._width(level) + 1),)
            found[f"weights/{PRIVATE}{PROTOTYPES}{level}"] = TensorSpec(torch.float32, shape)
        if HISTOGRAM in self.clips:
            sizes = [self.spec.required[f"histogram/{part}"].shape[0] for part in _HISTOGRAMS]
            shape = (sum(n or 0 for n in sizes),)
            found[f"weights/{PRIVATE}{HISTOGRAM}"] = TensorSpec(torch.float32, shape)
        whole = self._covered_keys()
        kept = {k: one for k, one in self.spec.required.items() if k not in whole}
        optional = {k: one for k, one in self.spec.optional.items() if k not in whole}
        return BundleSpec({**kept, **found}, optional)

    def _covered_keys(self) -> set[str]:
        levels = tuple(f"{PROTOTYPES}{level}/" for level in self.levels)
        keys = {*self.spec.required, *self.spec.optional}
        named = {f"weights/{name}" for name in self.weights}
        parts = {k for k in keys if (levels and k.startswith(levels)) or k.startswith("histogram/")}
        return {EXAMPLES, *named, *parts}

    def sent(self, vectors: Vectors, given: Weights, rest: Bundle) -> Bundle:
        """Return vectors with noise as a client sends them."""
        weights = self._moved(vectors, given)
        for part, vector in vectors.items():
            if part != WEIGHTS:
                weights[f"{PRIVATE}{part}"] = vector.float()
        return self.joined(Bundle(weights), rest)

    def received(self, sent: Bundle, given: Weights) -> dict[str, Tensor]:
        """Return the vectors with noise that a client, or a mean of clients, sent."""
        found = self._difference(sent.weights, given)
        for name, vector in sent.weights.items():
            if name.startswith(PRIVATE):
                found[name[len(PRIVATE) :]] = vector.double()
        return found


_HISTOGRAMS = ("round", "total")


def scaled(vector: Tensor, clip: float) -> Tensor:
    """Return a vector, scaled to a norm of ``clip`` if it is longer.

    Raises:
        PayloadError: the vector holds NaN or infinity: no factor bounds it.
    """
    norm = float(vector.norm())
    if not math.isfinite(norm):
        raise PayloadError("a part of an upload holds NaN or infinite values")
    return vector if norm <= clip else vector * (clip / norm)


def _is_parameter(key: str, one: TensorSpec) -> bool:
    is_statistic = key.rpartition(".")[2] in STATISTICS
    known = None not in one.shape and one.dtype == torch.float32
    return key.startswith("weights/") and known and not is_statistic


def _given(privacy: Privacy, key: str, what: str) -> float:
    value: float | None = getattr(privacy, key)
    if value is None:
        raise ConfigError(
            f"[privacy] {key} is needed: the method sends {what}, and nothing bounds them"
        )
    return value
