"""The gate of a site: what its rules hold back does not become bytes, whoever asks for it.

What a coordinator has said itself is an echo and tells it nothing: names of classes, mean and
deviation. What may be left out is left out, and named in ``Report.withheld``; any other message is
refused whole, in a line that names the option which would allow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from fedcli.gate.rules import Rules
from fedmodels.errors import ConfigError
from fedmodels.facts.class_names import composed
from fedpb.tables import values_of
from fedpb.told import HELD_BACK, NOT_OURS, OF_OWN, Door, classes, figures, without_number
from fedpb.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from fedmodels.tensors.bundle import Bundle
    from fedpb.v1.table_pb2 import Table

NOISED, MASKED, TRUSTED = "noised", "masked", "trusted"
"""What hides numbers of an upload: noise of the client, masks that only a sum loses, or noise that
the coordinator is trusted to add."""
LEFT_OUT = {"loss", "timing", "metrics", "text", "failure"}
"""Classes that a message can do without."""
COUNTS = ("scalars/num_examples", "weights/counts")
"""Keys of an upload that count examples, as the description does."""
AS_IT_IS = {"mean": (0.0,), "std": (1.0,)}
"""Mean and deviation of inputs that are taken as they are."""
OF_TARGETS = ("target_mean", "target_std")
"""Mean and deviation of numbers to predict."""


def held_back(rules: Rules) -> frozenset[str]:
    """Return the classes of fields that a site's conditions hold back."""
    found = set[str]()
    if rules.floor is not None:
        found.update(HELD_BACK)
    if rules.columns:
        found.add("labels")
    if rules.scores == 0:
        found.add("scores")
    elif rules.scores is not None:
        found.discard("scores")
    return frozenset(found - rules.told)


@dataclass
class Gate(Door):
    """What a site's rules let leave; the threads of a process share one, and names only come."""

    rules: Rules = field(default_factory=Rules)
    _names: set[str] = field(default_factory=set, init=False)
    """Names of classes that the coordinator has said."""
    _has_held_names: bool = field(default=False, init=False)
    """Whether a message was refused for a name that it had not said."""
    _moments: dict[str, tuple[float, ...]] = field(default_factory=dict, init=False)
    """Means and deviations that it has said, by name."""

    _declared: set[str] = field(default_factory=set, init=False)
    """Figures that the run's method and its parts declare."""
    _has_heard: bool = field(default=False, init=False)
    """Whether it has shown its config."""
    _fields: dict[str, Sequence[tuple[str, str, bool]]] = field(default_factory=dict, init=False)
    """By name of a message: the fields that are looked at."""

    def __post_init__(self) -> None:
        """Find out what is held back."""
        self._held = held_back(self.rules)
        if self._held:
            self._held |= {NOT_OURS}
        floor = self.rules.floor
        self._noise = {NOISED} if floor is None or floor.where != "server" else {NOISED, TRUSTED}

    def tells(self, of: str) -> bool:
        """Tell whether fields of a class leave."""
        return of not in self._held

    # --- what the coordinator says ----------------------------------------------------------------

    def heard(self, experiment: Mapping[str, Any]) -> None:
        """Take the config that the coordinator shows: what of it comes back is an echo.

        It is the first one. Another one later on would be a guess, after data have been read.
        """
        if self._has_heard:
            return
        self._has_heard = True
        data = experiment.get("data") or {}
        columns = data.get("columns") or {}
        for table in (data, columns):
            self.heard_names(table.get("classes") or ())
        for key in ("target", "labels"):
            named = columns.get(key) or ()
            named = [named] if isinstance(named, str) else named
            self.heard_names(named)
            shares = columns.get("quantiles") or ()
            self.heard_names(f"{name} q{share:g}" for name in named for share in shares)
        self._moments.update(_moments_of(data))

    def heard_names(self, names: Iterable[str]) -> None:
        """Take names of classes that the coordinator says.

        Once names were held back it has learnt that bit, and further names would be guesses: by
        one after the other it would find out which ones a site has.
        """
        if not self._has_held_names:
            self._names.update(map(composed, names))

    def holds_back(self, names: Iterable[str]) -> bool:
        """Tell whether names of classes are held back: the coordinator did not say them all."""
        if "labels" in self._held and any(composed(name) not in self._names for name in names):
            self._has_held_names = True
            return True
        return False

    # --- what leaves ------------------------------------------------------------------------------

    def look(self, message: Message) -> None:
        """Leave out what is held back; ConfigError for a message that cannot do without it."""
        if isinstance(message, rpc.PushHeader) and message.report.extra:
            self._look_at_figures(message.report)
        if self._held:
            self._walk(message)

    def look_at_upload(
        self, upload: Bundle, covers: Mapping[str, str], inside: Collection[str]
    ) -> None:
        """Look at the keys of an upload; ConfigError for one that nothing hides.

        Masks fall in a sum, and so they stand for no noise: under a floor, noise has to cover what
        is ``inside`` them as well.
        """
        for key in upload.by_key():
            is_masked = covers.get(key) == MASKED
            if self.rules.min_cohort and not is_masked:
                self._check_told(key, "mask", "--min-cohort")
            if self.rules.floor is not None:
                for one in (inside or [key]) if is_masked else [key]:
                    if covers.get(one) not in self._noise:
                        self._check_told(one, "noise", "--require-privacy")

    def _check_told(self, key: str, what: str, option: str) -> None:
        """Raise ConfigError for a key that nothing allows to leave bare."""
        if key not in COUNTS and not self.rules.tells(key):
            raise ConfigError(
                f"the upload has {key}, which no {what} covers: {option}; --tell {group_of(key)} "
                "would allow it"
            )

    def _walk(self, message: Message) -> None:
        for name, of, is_repeated in self._looked_at(message.DESCRIPTOR):
            value = getattr(message, name)
            if of == "parts":
                held = message.HasField(name) if not is_repeated else True
                for inner in (value if is_repeated else [value]) if held else ():
                    self._walk(inner)
            elif of == "metrics":
                continue  # each figure has its own class
            elif _is_set(message, name, value) and not self._is_echo(name, value, message):
                self._hold_back(message, name, of)

    def _looked_at(self, kind: Descriptor) -> Sequence[tuple[str, str, bool]]:
        """Return the fields of a message that are held back, or may hold such ones.

        Each is its name, its class, and whether there are several of it.
        """
        if kind.full_name not in self._fields:
            # another thread may come meanwhile, so it is whole before it is there
            self._fields[kind.full_name] = self._found_in(kind, ())
        return self._fields[kind.full_name]

    def _found_in(
        self, kind: Descriptor, outer: tuple[str, ...]
    ) -> tuple[tuple[str, str, bool], ...]:
        """Find the fields of :meth:`_looked_at`; of an outer message all fields are looked at."""
        if kind.full_name in outer:  # tables hold tables
            return ()
        found = []
        for one in kind.fields:
            of = classes()[f"{kind.name}.{one.name}"]
            inner = one.message_type if of == "parts" else None
            is_held = of in self._held
            if is_held or (inner is not None and self._found_in(inner, (*outer, kind.full_name))):
                found.append((one.name, of, one.is_repeated))
        return tuple(found)

    def declare(self, names: Iterable[str]) -> None:
        """Take what a method or a part says that clients report: other figures do not leave."""
        self._declared.update(map(without_number, names))

    def _look_at_figures(self, report: rpc.Report) -> None:
        """Leave out the figures of a report that are held back; ConfigError for one of no class."""
        held = set(self._held)
        if self.rules.scores is not None:  # a figure is no model that anybody counts
            held |= {"scores"} - self.rules.told
        keys = list[str]()
        for key in report.extra:
            name = without_number(key)
            of = figures().get(name, OF_OWN if name in self._declared else None)
            if of is None:
                raise ConfigError(
                    f"the report has {key}, which has no class in fedpb/told.py and is no figure "
                    "that the method's function reported, or a part, names"
                )
            if of in held:
                keys.append(key)
        for key in keys:
            del report.extra[key]
        if keys:
            report.withheld.append("extra")

    def _hold_back(self, message: Any, name: str, of: str) -> None:
        if of not in LEFT_OUT:
            allowed = "--scores N" if of == "scores" else f"--tell {of}"
            raise ConfigError(
                f"{message.DESCRIPTOR.name} has {name}, which this site does not send: "
                f"{allowed} would allow it"
            )
        message.ClearField(name)
        if of in ("loss", "timing"):
            message.withheld.append(name)

    def _is_echo(self, name: str, value: Any, message: Any) -> bool:
        """Tell whether a field of a description is what the coordinator said, or may know anyway.

        Anybody knows the moments and the names of a published data set.
        """
        if message.DESCRIPTOR.name != "ClientDescription":
            return False
        if name == "partition":
            return all(said == self._moments.get(key) for key, said in _moments_in(value))
        if message.HasField("partition") and _is_published(message.partition, name):
            return True
        if name == "class_names":
            return not self.holds_back(value)
        return tuple(value) in (self._moments.get(name), AS_IT_IS.get(name))


def _moments_of(data: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield the means and deviations that a table of how data are read has, by name."""
    for table, keys in ((data, AS_IT_IS), (data.get("columns") or {}, OF_TARGETS)):
        for key in keys:
            if (said := table.get(key)) is not None:
                yield key, tuple(map(float, said))


def _moments_in(partition: Table) -> list[tuple[str, tuple[float, ...]]]:
    """Return the means and deviations in a table of how data were dealt out."""
    data = values_of(partition).get("data") or {}
    try:
        return [*_moments_of(data)]
    except (AttributeError, TypeError, ValueError):
        raise ConfigError("the partition of client.json is malformed: its [data]") from None


def _is_published(partition: Table, name: str) -> bool:
    """Tell whether a field follows from a published data set alone, and not from a client's part.

    Moments do where clients' inputs are not normalised apart.
    """
    from fedcli.data.sets.registry import comes_along  # knows all loaders

    made = values_of(partition)
    try:
        how, data = made["scenario"], made["data"]
        is_apart = "zscore" in how or ":" in how["kind"]  # a user's function may do it as well
        return comes_along(data["name"]) and (name == "class_names" or not is_apart)
    except (AttributeError, KeyError, TypeError):
        return False


def _is_set(message: Any, name: str, value: Any) -> bool:
    """Tell whether a field says anything: what is sent as 0 without ``optional`` says nothing."""
    known = message.DESCRIPTOR.fields_by_name[name]
    return bool(message.HasField(name)) if known.has_presence else bool(value)


def group_of(key: str) -> str:
    """Return what a key is allowed by, with others of its kind: its first two parts."""
    return "/".join(key.split("/")[:2])
