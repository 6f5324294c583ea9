"""What of an upload is summed under masks, and what the sum says.

Floating-point weights are summed, and prototypes by class. A number is multiplied by what it
counts. What it counts travels without a mask: scalars, which the client's report holds as well, and
the count of each class's prototype, which the client has announced an upper bound of. So a client
counts for no more than it may, and the mean is the sum divided by the sum of what was declared.
Integers and booleans of a net, such as the counters of batch normalisation, stay what clients were
given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedmodels.config.experiment import Experiment
from fedmodels.config.privacy import MIN_GROUP, SecureSum, masks_of
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.secure_sum.fixed_point import CountedNumbers, FixedPoint, signed
from fedmodels.secure_sum.masks import Vector
from fedmodels.tensors.bundle import Bundle, Prototypes, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.tensors.declared_counts import DeclaredCounts, check_numbers, check_upload
from fedmodels.tensors.uploads import Summed
from fedmodels.training.asked import asked
from fedmodels.training.hooks import reads_singly
from fedmodels.training.method import Method
from fedmodels.training.private_uploads import contributions, count_of
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart

MASKED, COUNTS = "masked", "counts"
"""Names among the weights of an upload as it travels: of the masked integers, and of what the
prototypes of each level and class count."""
_PREFIX = "weights/"
WEIGHS = {"fedproto": lambda method: method.weighting == "examples"}
"""Methods whose mean of prototypes counts examples; a sum has to know before it adds them up."""


@dataclass(frozen=True)
class SecureUpload(SharedPart):
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
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return what the config of a run with a secure sum asks for.

        Raises:
            ConfigError: the method needs more than sums.
        """
        privacy = run.experiment.privacy
        assert privacy is not None, "secure_sum is a key of it"
        rules, noisy = privacy.secure_sum, privacy.noise_at_clients
        assert rules is not None, "the config asks for it"
        if noisy:  # noise is added to what is bounded already
            rules = rules.model_copy(update={"clip": 0.0})
        spec = contributions(method, run).sent_spec if noisy else method.upload_spec(run)
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
        told = asked(method, "weighs_prototypes", WEIGHS, False)
        by_examples = bool(told() if callable(told) else told)
        count = count_of(method, run)
        return cls(rules, summed, tuple(given), levels, by_examples, BundleSpec(scalars), count)

    @property
    def hides_uploads(self) -> bool:
        """Whether an upload as it travels tells nothing of the model: its numbers look random."""
        return True

    @property
    def length(self) -> int:
        """Return how many integers an upload has, one for each number."""
        rows = sum(classes * width for classes, width in self.levels.values())
        return sum(form.numel() for form in self.summed.values()) + rows

    def upload_spec(self, upload: BundleSpec) -> BundleSpec:
        """Return the specification of an upload as it travels."""
        return self.spec

    @property
    def spec(self) -> BundleSpec:
        """Return the specification of an upload as it travels."""
        dtype = torch.int32 if self.rules.bits == 32 else torch.int64
        found = {_PREFIX + MASKED: TensorSpec(dtype, (self.length,))}
        if self.levels:
            classes = sum(classes for classes, _ in self.levels.values())
            found[_PREFIX + COUNTS] = TensorSpec(torch.int32, (classes,))
        return BundleSpec(found) | self.scalars

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
        weights = clipped(weights, received, self.rules.bound(self._size(received)))
        declared = self.declared(self.travelling(upload, np.zeros(0, numbers.dtype)))
        count = self.count(declared)
        parts = [CountedNumbers(name, tensor, count) for name, tensor in weights.items()]
        for level, (classes, width) in self.levels.items():
            rows, counts = upload.prototypes[level].rows(), declared.prototypes[level].rows()
            nothing = torch.zeros(width), 0
            parts += [
                CountedNumbers(f"prototypes/{level}", rows.get(label, nothing)[0],
                               float(counts.get(label, nothing)[1]))
                for label in range(classes)
            ]  # fmt: skip
        return numbers.encode(parts)

    def _size(self, given: Weights) -> float:
        """Return the norm of the weights that clients were given and change."""
        return _norm([given[name].double() for name in self.summed if name in given])

    def travelling(self, upload: Bundle, masked: Vector) -> Bundle:
        """Return an upload as it travels: masked integers, and what it counts."""
        integers = masked.view(masked.dtype.str.replace("u", "i")).astype(f"i{masked.itemsize}")
        weights = {MASKED: torch.from_numpy(integers)}
        if self.levels:
            weights[COUNTS] = torch.cat([
                self._counts(upload.prototypes[level], classes)
                for level, (classes, _) in self.levels.items()
            ])  # fmt: skip
        return Bundle(weights, scalars=upload.scalars)

    def _counts(self, sent: Prototypes, classes: int) -> Tensor:
        """Return what the prototype of each class counts, (K,) int32."""
        found = torch.zeros(classes, dtype=torch.int32)
        found[sent.labels.long()] = (
            sent.counts if self.by_examples else torch.ones_like(sent.counts)
        )
        return found

    def declared(self, sent: Bundle) -> Bundle:
        """Return what an upload that travelled says that it counts.

        These are its scalars, and the counts of its prototypes, whose vectors have no coordinates.
        """
        prototypes, begin = dict[str, Prototypes](), 0
        for level, (classes, _) in self.levels.items():
            counts = sent.weights[COUNTS][begin : begin + classes].tolist()
            nothing = torch.zeros(0)
            rows = {label: (nothing, count) for label, count in enumerate(counts) if count}
            prototypes[level] = Prototypes.of(rows, 0)
            begin += classes
        return Bundle(prototypes=prototypes, scalars=sent.scalars)

    def check(self, sent: Bundle, announced: DeclaredCounts, most: int) -> None:
        """Check what an upload that travelled says that it counts; masks hide the rest.

        Args:
            sent: the upload.
            announced: the examples of its client.
            most: how many examples that client can have trained on.

        Raises:
            PayloadError: names the first impossible count.
        """
        if self.levels and bool((sent.weights[COUNTS] < 0).any()):
            raise PayloadError(f"tensor 'weights/{COUNTS}' counts below zero")
        check_upload(self.declared(sent), announced, most)

    def integers(self, sent: Bundle) -> Vector:
        """Return the integers of an upload that travelled."""
        vector: Vector = sent.weights[MASKED].numpy().view(f"<u{self.rules.bits // 8}")
        return vector

    def summed_up(
        self, total: Vector, numbers: FixedPoint, given: Weights, declared: Sequence[Bundle]
    ) -> Summed | None:
        """Return what uploads come to; None if nothing counts.

        Args:
            total: the sum of their integers.
            numbers: how numbers became integers.
            given: the weights that clients were given.
            declared: what each upload in the sum says that it counts.

        Raises:
            PayloadError: uploads of honest clients cannot come to this sum.
        """
        counts = [self.count(one) for one in declared]
        if not sum(counts):
            return None
        sums, weights, begin = signed(total), {name: given[name] for name in self.given}, 0
        for name, form in self.summed.items():
            part = numbers.mean(sums[begin : begin + form.numel()], counts, name)
            weights[name] = torch.from_numpy(part).to(form.dtype).reshape(form.shape)
            begin += form.numel()
        self._check_change(weights, given, numbers, counts)
        prototypes = dict[str, Prototypes]()
        for level, (classes, width) in self.levels.items():
            rows = dict[int, tuple[Tensor, int]]()
            for label in range(classes):
                each = [one.prototypes[level].rows().get(label, (None, 0))[1] for one in declared]
                if any(each):
                    part = numbers.mean(sums[begin : begin + width], each, f"prototypes/{level}")
                    rows[label] = torch.from_numpy(part), sum(each)
                begin += width
            prototypes[level] = Prototypes.of(rows, width)
        mean = Bundle(weights, prototypes)
        check_numbers(mean)
        return Summed(mean, sum(counts), self.by_examples)

    def _check_change(
        self, mean: Weights, given: Weights, numbers: FixedPoint, counts: Sequence[float]
    ) -> None:
        """Check that the mean is no farther from what clients were given than they may go.

        Raises:
            PayloadError: it is, beyond what rounding explains.
        """
        clip = self.rules.bound(self._size(given))
        if math.isinf(clip):
            return
        names = [name for name in self.summed if name in given]
        before = [given[name].double() for name in names]
        changes = [mean[name].double() - one for name, one in zip(names, before, strict=True)]
        # how far a sum of rounded numbers, and numbers of these dtypes, may be off
        size, unit = sum(one.numel() for one in before), math.ldexp(numbers.most, -numbers.scale)
        rounded = math.sqrt(size) * len(counts) / 2 * unit / sum(counts)
        digits = max((torch.finfo(self.summed[name].dtype).eps for name in names), default=0.0)
        rounded += digits * (_norm(before) + clip)
        if (norm := _norm(changes)) > clip + rounded:
            default = " (half the norm of the given weights)" if self.rules.clip is None else ""
            raise PayloadError(
                f"the mean of the weights changed by a norm of {norm:.4g}, beyond "
                f"[privacy.secure_sum] clip = {clip:.4g}{default}, so one of its clients did not "
                "clip"
            )


def _norm(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all numbers of some tensors."""
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))


def clipped(weights: Weights, received: Weights, most: float) -> Weights:
    """Return weights whose change has a norm of at most ``most``.

    Weights without a counterpart among those received stay as they are, and outside of the norm.
    """
    changes = {name: weights[name].double() - received[name].double()
               for name in weights if name in received}  # fmt: skip
    norm = _norm([*changes.values()])
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
    if masks_of(run.experiment.privacy) is not None:
        secure = SecureUpload.of(method, run)
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


def summed(experiment: Experiment, method: Method) -> Experiment:
    """Return an experiment with secure sums; ConfigError if the method needs more than sums."""
    if why := not_by_sums(method):
        raise ConfigError(f"[privacy] secure_sum: {method.name} {why}")
    return experiment


def not_by_sums(method: Method) -> str:
    """Return why a method needs more than sums, as far as its declaration says it."""
    if method.reduction == "mean":
        return ""
    why = reads_singly(method) or "its server half reads what single clients sent"
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
