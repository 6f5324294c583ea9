"""How the tensors of a run travel, what its clients keep, and what they tell: by its parts.

A part is one capability that a config can leave out. What both halves of a run know of it is a
:class:`SharedPart`. Its module is imported where the config asks for it, and not before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar, Self, TypeVar

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.memory_blocks import lease
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

Allocate = Callable[[int], memoryview]
P = TypeVar("P", bound="SharedPart")


def part_at(place: str) -> Any:
    """Return what stands at a place, ``module:name``; it is imported when it is first asked for.

    Raises:
        ConfigError: this installation has no such module.
    """
    module, _, name = place.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module lacks another one
        raise ConfigError(
            f"the config asks for a part that this installation lacks: {module}"
        ) from None


class SharedPart:
    """What both halves of a run know of one part; by default it changes and keeps nothing."""

    section: ClassVar[str] = ""
    """Prefix of what a client keeps of it, among the weights of its stored private state."""
    is_learnt: ClassVar[bool] = False
    """Whether that belongs to the digest of a private state, and grows by a class as states do."""

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return the part of a run that asks for it; raise ConfigError if the method cannot."""
        return cls()

    @property
    def keeps(self) -> bool:
        """Whether clients keep its section from one interaction to the next."""
        return bool(self.section)

    @property
    def changes_uploads(self) -> bool:
        """Whether an upload is another one once it is restored: a sum of them is of no use."""
        return False

    def payload_spec(self, common: BundleSpec) -> BundleSpec:
        """Return the specification of a common part as it travels, from that of the part itself."""
        return common

    def upload_spec(self, upload: BundleSpec) -> BundleSpec:
        """Return the specification of an upload as it travels, from that of the upload itself."""
        return upload

    def sent(self, common: Bundle) -> Bundle:
        """Return a common part as it travels; raise PayloadError if it does not fit."""
        return common

    def received(self, payload: Bundle) -> Bundle:
        """Return a payload as a method gets it; raise PayloadError for impossible values."""
        return payload

    def restored(self, sent: Bundle, common: Bundle, allocate: Allocate) -> Bundle:
        """Return an upload as a method gets it; raise PayloadError for impossible values."""
        return sent

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check what a client tells of this part after a training; raise PayloadError."""


@dataclass(frozen=True)
class Entry:
    """One line of the list of parts."""

    place: str
    """Module and class of what both halves know."""
    is_on: Callable[[Experiment], bool]
    tells: tuple[str, ...] = ()
    """The figures that clients may report of a training; a method's own have other names."""
    comes_and_goes: bool = False
    """Whether an open run may switch it on and off."""


PARTS: Sequence[Entry] = (
    Entry(
        "fedmodels.parts.drift:Drift",
        lambda e: e.evaluate.drift,
        ("input_drift", "input_drift_p", "prediction_drift", "prediction_drift_p"),
        comes_and_goes=True,
    ),
    Entry(
        "fedmodels.training.private_steps:SpentPrivacy",
        lambda e: e.privacy is not None and e.privacy.hides_examples,
        ("epsilon", "epsilon_next"),
    ),
    Entry(
        "fedmodels.training.private_uploads:NoiseOfClients",
        lambda e: e.privacy is not None and e.privacy.noise_at_clients,
    ),
    Entry(
        "fedmodels.training.compression:Compression",
        lambda e: e.compression is not None and e.compression.changes_tensors,
    ),
    Entry("fedmodels.training.secure_upload:SecureUpload", lambda e: e.secure_sum is not None),
)
"""The order is that on the way out; what arrives meets the parts in the opposite order."""
TOLD = frozenset(name for entry in PARTS for name in entry.tells)
"""The figures of all parts."""


def sections_off(experiment: Experiment) -> tuple[str, ...]:
    """Return the prefixes of what clients may have kept of parts that are off by now."""
    off = (e for e in PARTS if e.comes_and_goes and not e.is_on(experiment))
    return tuple(part_at(entry.place).section for entry in off)


@dataclass(frozen=True)
class Wire:
    """The parts of a run as both halves know them; without parts everything travels as it is."""

    parts: Sequence[SharedPart] = ()
    tells: frozenset[str] = frozenset()
    """The figures that clients may report of a training, beside the method's own."""
    zstd: bool = False
    """Whether frames are compressed as well, without loss."""

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Wire:
        """Return what the config of a run asks for; raise ConfigError if the method cannot."""
        entries = [entry for entry in PARTS if entry.is_on(run.experiment)]
        tells = frozenset(name for entry in entries for name in entry.tells)
        parts = [part_at(entry.place).of(method, run) for entry in entries]
        return cls(parts, tells, run.experiment.zstd)

    def part(self, kind: type[P]) -> P:
        """Return the part of a kind, which the config asks for."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def changes_uploads(self) -> bool:
        """Whether an upload is another one once it is restored."""
        return any(part.changes_uploads for part in self.parts)

    @property
    def keeps(self) -> bool:
        """Whether clients keep something beside the private state of the method."""
        return any(part.keeps for part in self.parts)

    def sections(self, *, learnt: bool) -> tuple[str, ...]:
        """Return the prefixes of what clients keep of parts, learnt or not."""
        return tuple(p.section for p in self.parts if p.keeps and p.is_learnt == learnt)

    def payload_spec(self, common: BundleSpec) -> BundleSpec:
        """Return the specification of a common part as it travels, from that of the part itself."""
        return reduce(lambda spec, part: part.payload_spec(spec), self.parts, common)

    def upload_spec(self, upload: BundleSpec) -> BundleSpec:
        """Return the specification of an upload as it travels, from that of the upload itself."""
        return reduce(lambda spec, part: part.upload_spec(spec), self.parts, upload)

    def sent(self, common: Bundle) -> Bundle:
        """Return a common part as it travels; raise PayloadError if it does not fit."""
        return reduce(lambda bundle, part: part.sent(bundle), self.parts, common)

    def received(self, payload: Bundle) -> Bundle:
        """Return a payload as a method gets it; raise PayloadError for impossible values."""
        return reduce(lambda bundle, part: part.received(bundle), self.parts[::-1], payload)

    def restored(self, sent: Bundle, common: Bundle, allocate: Allocate = lease) -> Bundle:
        """Return an upload as a method gets it; raise PayloadError for impossible values."""
        return reduce(lambda it, part: part.restored(it, common, allocate), self.parts[::-1], sent)
