"""What of an upload is summed under masks, and what the sum says.

Floating-point weights are summed. Integers and booleans of a net, such as the counters of batch
normalisation, stay what clients were given. Scalars travel as they are: a report says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmodels.config.privacy import FEWEST, SecureSum
from fedmodels.errors import ConfigError
from fedmodels.secure_sum.fixed_point import FixedPoint
from fedmodels.secure_sum.masks import Vector
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.bundle_spec import BundleSpec, TensorSpec
from fedmodels.training.method import Method
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
        spec = method.upload_spec(run)
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
        scalars = {k: s for k, s in spec.required.items() if not _is_weight(k)}
        return cls(rules, summed, tuple(given), BundleSpec(scalars), method.count)

    @property
    def length(self) -> int:
        """Return how many integers there are: one for each number, and that of 1."""
        return sum(form.numel() for form in self.summed.values()) + 1

    @property
    def spec(self) -> BundleSpec:
        """Return the specification of an upload as it travels."""
        dtype = torch.int32 if self.rules.bits == 32 else torch.int64
        masked = TensorSpec(dtype, (self.length,))
        return BundleSpec({_PREFIX + MASKED: masked}) | self.scalars

    def numbers(self, clients: int, most: float) -> FixedPoint:
        """Return how numbers become integers, for so many clients that count so much at most."""
        return FixedPoint(self.rules.bits, self.rules.largest, clients, most)

    def encoded(self, upload: Bundle, received: Weights, numbers: FixedPoint) -> Vector:
        """Return an upload's integers, before any mask.

        Args:
            upload: the result of ``uplink``.
            received: the weights that the client was given.
            numbers: how numbers become integers.

        Raises:
            PayloadError: a number does not fit.
        """
        weights: Weights = {name: upload.weights[name] for name in self.summed}
        if self.rules.clip is not None:
            weights = clipped(weights, received, self.rules.clip)
        return numbers.encode(weights, self.count(upload))

    def sent(self, upload: Bundle, masked: Vector) -> Bundle:
        """Return an upload as it travels: masked integers, and its scalars."""
        signed = masked.view(f"<i{masked.itemsize}").astype(masked.dtype.str.replace("u", "i"))
        return Bundle(weights={MASKED: torch.from_numpy(signed)}, scalars=upload.scalars)

    def integers(self, sent: Bundle) -> Vector:
        """Return the integers of an upload that travelled."""
        vector: Vector = sent.weights[MASKED].numpy().view(f"<u{self.rules.bits // 8}")
        return vector

    def mean(self, total: Vector, numbers: FixedPoint, given: Weights) -> Weights | None:
        """Return the mean behind a sum; None if nothing counts.

        Args:
            total: the sum of integers, without any mask.
            numbers: how numbers became integers.
            given: the weights that clients were given.
        """
        found = numbers.mean(total, self.summed)
        return None if found is None else {**found, **{name: given[name] for name in self.given}}


def clipped(weights: Weights, received: Weights, most: float) -> Weights:
    """Return weights whose change has a norm of at most ``most``.

    Weights without a counterpart among those received are not changed, and do not count.
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
        if smallest < FEWEST:
            raise ConfigError(
                f"[privacy] secure_sum: a group would have {smallest} clients, and a sum of fewer "
                f"than {FEWEST} tells one client of another; take fewer groups, or more clients"
            )
        secure.numbers(run.experiment.cohort_size, 1.0).scale  # noqa: B018 (it may be too coarse)


def _is_weight(key: str) -> bool:
    return key.startswith(_PREFIX)


def _unfit(method: Method, spec: BundleSpec) -> str:
    """Return why a method needs more than sums; nothing if it does not."""
    if method.reduction != "mean":
        return (
            "needs every upload by itself: its server half reads the weights of single clients, "
            "and a sum hides them"
        )
    keys = [*spec.required, *spec.optional]
    if not any(map(_is_weight, keys)):
        return "uploads no weights, so that there is nothing to sum"
    other = sorted({k.split("/")[0] for k in keys if not _is_weight(k)} - {"scalars"})
    if other or spec.optional:
        return f"uploads {' and '.join(other)} that its server half reads one by one"
    return ""
