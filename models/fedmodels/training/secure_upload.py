"""What of an upload is summed under masks, and what the sum says.

Floating-point weights are summed, and prototypes by class. A number is multiplied by what it
counts, and that count is summed beside it: the mean is the quotient of the two sums. Integers and
booleans of a net, such as the counters of batch normalisation, stay what clients were given.
Scalars travel without a mask, as the client's report holds the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmodels.config.privacy import MIN_GROUP, SecureSum
from fedmodels.errors import ConfigError
from fedmodels.secure_sum.fixed_point import CountedNumbers, FixedPoint, signed
from fedmodels.secure_sum.masks import Vector
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.uploads import Summed
from fedmodels.training.compression import Compression
from fedmodels.training.method import Method
from fedmodels.training.private_uploads import count_of, spec_as_sent
from fedmodels.training.run import RunFacts

MASKED = "masked"
"""Name of the masked integers among the weights of an upload as it travels."""
_PREFIX = "weights/"


@dataclass(frozen=True)
class SecureUpload:
    """How the uploads of a run become vectors of integers."""

    rules: SecureSum
    summed: Mapping[str, Tensor]
    """The floating-point weights of an upload, as tensors without values, in their order."""
    given: tuple[str, ...]
    """Weights that stay what clients were given."""
    levels: Mapping[str, tuple[int, int]]
    """Classes and width of each level of prototypes, in their order."""
    by_examples: bool
    """Whether prototypes count by their examples; else clients count alike."""
    scalars: BundleSpec
    count: Callable[[Bundle], float]

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> SecureUpload | None:
        """Return what the config of a run asks for; None where it asks for no secure sum.

        Raises:
            ConfigError: the method needs more than sums.
        """
        rules = run.experiment.secure_sum
        if rules is None:
            return None
        spec = spec_as_sent(method, run, Compression())
        classes = run.problem.num_classes
        if why := _unfit(method, spec):
            raise ConfigError(f"[privacy] secure_sum: {method.name} {why}")
        weights = {k.removeprefix(_PREFIX): s for k, s in spec.required.items() if _is_weight(k)}
        summed, given = dict[str, Tensor](), []
        for name in sorted(weights):
            if weights[name].dtype.is_floating_point:
                shape = [size or 0 for size in weights[name].shape]
                summed[name] = torch.empty(shape, dtype=weights[name].dtype, device="meta")
            else:
                given.append(name)
        common, _ = method.payload_spec(run)
        for name in given:
            if _PREFIX + name not in common.required:
                raise ConfigError(
                    f"[privacy] secure_sum: {method.name} uploads {name!r}, which is no "
                    "floating-point number and has no sum"
                )
        rows = {k.split("/")[1]: s.shape for k, s in sorted(spec.required.items()) if _is_rows(k)}
        levels = {level: (classes, shape[1] or 0) for level, shape in rows.items()}
        scalars = {k: s for k, s in spec.required.items() if k.startswith("scalars/")}
        by_examples = method.weighs_prototypes
        count = count_of(method, run)
        return cls(rules, summed, tuple(given), levels, by_examples, BundleSpec(scalars), count)

    @property
    def length(self) -> int:
        """Return how many integers an upload has: one for each number, and one for each count."""
        rows = sum(classes * (width + 1) for classes, width in self.levels.values())
        return sum(form.numel() for form in self.summed.values()) + rows + 1

    @property
    def spec(self) -> BundleSpec:
        """Return the specification of an upload as it travels."""
        dtype = torch.int32 if self.rules.bits == 32 else torch.int64
        masked = TensorSpec(dtype, (self.length,))
        return BundleSpec({_PREFIX + MASKED: masked}) | self.scalars

    def numbers(self, clients: int, examples: int) -> FixedPoint:
        """Return how numbers become integers."""
        row = {0: (torch.zeros(1), examples)}
        shown = {level: Prototypes.of(row, 1) for level in self.levels}
        sample = Bundle(prototypes=shown, scalars={"num_examples": float(examples)})
        most = max(1.0, self.count(sample), self.by_examples * float(examples))
        return FixedPoint(self.rules.bits, self.rules.largest, clients, most)

    def encoded(self, upload: Bundle, received: Weights, numbers: FixedPoint) -> Vector:
        """Return an upload's integers, before any mask.

        Raises:
            PayloadError: a number does not fit.
        """
        weights: Weights = {name: upload.weights[name] for name in self.summed}
        if self.rules.clip is not None:
            weights = clipped(weights, received, self.rules.clip)
        count, one = self.count(upload), torch.ones(1)
        parts = [CountedNumbers(name, tensor, count) for name, tensor in weights.items()]
        for level, (classes, width) in self.levels.items():
            rows, nothing = upload.prototypes[level].rows(), (torch.zeros(width), 0)
            for label in range(classes):
                vector, examples = rows.get(label, nothing)
                counts = float(examples if self.by_examples else label in rows)
                name = f"prototypes/{level}"
                parts += [CountedNumbers(name, vector, counts), CountedNumbers(name, one, counts)]
        return numbers.encode([*parts, CountedNumbers("", one, count)])

    def sent(self, upload: Bundle, masked: Vector) -> Bundle:
        """Return an upload as it travels: masked integers, and its scalars."""
        integers = masked.view(masked.dtype.str.replace("u", "i")).astype(f"i{masked.itemsize}")
        return Bundle(weights={MASKED: torch.from_numpy(integers)}, scalars=upload.scalars)

    def integers(self, sent: Bundle) -> Vector:
        """Return the integers of an upload that travelled."""
        vector: Vector = sent.weights[MASKED].numpy().view(f"<u{self.rules.bits // 8}")
        return vector

    def summed_up(self, total: Vector, numbers: FixedPoint, given: Weights) -> Summed | None:
        """Return what uploads come to; None if nothing counts."""
        sums = signed(total)
        if sums[-1] <= 0:
            return None
        weights, begin = {name: given[name] for name in self.given}, 0
        for name, form in self.summed.items():
            part = sums[begin : begin + form.numel()] / sums[-1]
            weights[name] = torch.from_numpy(part).to(form.dtype).reshape(form.shape)
            begin += form.numel()
        prototypes = dict[str, Prototypes]()
        for level, (classes, width) in self.levels.items():
            end = begin + classes * (width + 1)
            table = sums[begin:end].reshape(classes, width + 1)
            counts = [round(numbers.counted(row[-1])) for row in table]
            prototypes[level] = Prototypes.of(
                {label: (torch.from_numpy(row[:-1] / row[-1]), counts[label])
                 for label, row in enumerate(table) if row[-1] > 0}, width,
            )  # fmt: skip
            begin = end
        count = numbers.counted(sums[-1])
        return Summed(Bundle(weights, prototypes), count, self.by_examples)


def clipped(weights: Weights, received: Weights, most: float) -> Weights:
    """Return weights whose change has a norm of at most ``most``.

    Weights without a counterpart among those received stay as they are, and outside of the norm.
    """
    changes = {name: weights[name].double() - received[name].double()
               for name in weights if name in received}  # fmt: skip
    norm = float(np.sqrt(sum(float(change.square().sum()) for change in changes.values())))
    if norm <= most:
        return weights
    near = {name: (received[name].double() + change * (most / norm)).to(weights[name].dtype)
            for name, change in changes.items()}  # fmt: skip
    return {name: near.get(name, weights[name]) for name in weights}


def check_secure_sum(method: Method, run: RunFacts) -> None:
    """Check that a run's method can do with sums, and its cohorts are large enough.

    Raises:
        ConfigError: says why not.
    """
    secure = SecureUpload.of(method, run)
    if secure is not None:
        smallest = run.experiment.cohort_size // secure.rules.groups
        if smallest < MIN_GROUP:
            raise ConfigError(
                f"[privacy] secure_sum: a group would have {smallest} clients, and a sum of fewer "
                f"than {MIN_GROUP} tells one client of another; take fewer groups, or more clients"
            )
        secure.numbers(run.experiment.cohort_size, 1).scale  # noqa: B018 (it may be too coarse)


def _is_weight(key: str) -> bool:
    return key.startswith(_PREFIX)


def _is_rows(key: str) -> bool:
    return key.startswith("prototypes/") and key.endswith("/vectors")


def not_by_sums(method: Method) -> str:
    """Return why a method needs more than sums, as far as its declaration says it."""
    if method.reduction == "mean":
        return ""
    why = method.reads_singly or "its server half reads what single clients sent"
    return f"needs every upload by itself: {why}; a sum hides single ones"


def _unfit(method: Method, spec: BundleSpec) -> str:
    """Return why a method needs more than sums; nothing if it does not."""
    if why := not_by_sums(method):
        return why
    keys = [*spec.required, *spec.optional]
    if not any(map(_is_weight, keys)) and not any(map(_is_rows, keys)):
        return "uploads neither weights nor prototypes, so that there is nothing to sum"
    other = {k.split("/")[0] for k in keys if not _is_weight(k)} - {"scalars", "prototypes"}
    if other or spec.optional:
        return f"uploads {' and '.join(sorted(other))} that its server half reads one by one"
    if any(spec.required[k].shape == (0,) for k in keys if k.endswith("/labels")):
        return "uploads prototypes without classes, of which no mean by class is taken"
    return ""
