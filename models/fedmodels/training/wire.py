"""How the tensors of a run travel, what its clients keep, and what they tell: by its parts.

A part is one capability that a config can leave out. What both halves of a run know of it is a
:class:`SharedPart`; :mod:`fedmodels.config.combinations` has the list.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from fedmodels.config.combinations import LISTED, part_at, parts_on
from fedmodels.config.experiment import Experiment
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.packed_weights import lease
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts

if TYPE_CHECKING:
    from fedmodels.training.loop import ClientHalf

Allocate = Callable[[int], memoryview]
P = TypeVar("P", bound="SharedPart")


class SharedPart:
    """What both halves of a run know of one part; by default it changes and keeps nothing."""

    section: ClassVar[str] = ""
    """Prefix of what a client keeps of it, among the weights of its stored private state."""
    is_learnt: ClassVar[bool] = False
    """Whether that belongs to the digest of a private state, and grows by a class as states do."""
    hides_draws: ClassVar[bool] = False
    """Whether what clients draw in training must stay their secret."""

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

    @property
    def hides_uploads(self) -> bool:
        """Whether an upload as it travels tells nothing of the model: it cannot be measured."""
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

    @classmethod
    def begins(cls, half: ClientHalf) -> None:
        """Look at a training whose net and data are there, before its first step."""

    @classmethod
    def ends(cls, half: ClientHalf, state: Bundle) -> None:
        """Look at a training and the private state after it; raise ConfigError to refuse it."""

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check what a client tells of this part after a training; raise PayloadError."""


def check_fits(method: Method, run: RunFacts) -> None:
    """Check that the parts of a run take its method; raise ConfigError."""
    for part in parts_on(run.experiment):
        if part.fits:
            part_at(part.at("fits"))(method, run)


def sections_off(experiment: Experiment) -> tuple[str, ...]:
    """Return the prefixes of what clients may have kept of parts that are off by now."""
    off = (part for part in LISTED if part.changes and part.shared and not part.is_on(experiment))
    return tuple(part_at(part.at("shared")).section for part in off)


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
        parts = [half.of(method, run) for half in run.parts]
        tells = frozenset(name for part in parts_on(run.experiment) for name in part.tells)
        return cls(parts, tells, run.experiment.zstd)

    def part(self, kind: type[P]) -> P:
        """Return the part of a kind, which the config asks for."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def changes_uploads(self) -> bool:
        """Whether an upload is another one once it is restored."""
        return any(part.changes_uploads for part in self.parts)

    @property
    def hides_uploads(self) -> bool:
        """Whether an upload as it travels tells nothing of the model."""
        return any(part.hides_uploads for part in self.parts)

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
