"""What each field of a client's messages is, and the only way from a message to bytes.

A field has one class, and a field without one does not leave: a :class:`Door` refuses its message.

- ``config``, ``random``, ``place``, ``answer``, ``words``: the program, the config, chance or a
  person gives it, whatever the data are;
- ``parts``: it holds other fields, which stand for themselves;
- ``announced``, ``examples``: how many examples there are, by class and in all;
- ``timing``: how long the work took, and how much memory;
- ``labels``: names of classes; ``moments``: mean and deviation of inputs, also where a table of how
  data were dealt out has them. Where they are what the coordinator itself has said, they tell it
  nothing;
- ``loss``, ``scores``, ``metrics``: what a model is found to be worth on a client's examples;
- ``text``: words of the program about data; ``failure``: words on what went wrong;
- ``tensors``: numbers of an upload, each under its own key;
- ``relay``: a relay alone fills it.

What covers each in a run with noise follows from these (tests/fedmodels/privacy/told.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from fedmodels.errors import ConfigError
from fedpb.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from fedmodels.tensors.bundle import Bundle

NOTHING: Mapping[str, str] = MappingProxyType({})
_FIELDS = """
parts:
  JoinRequest.description JoinSeveralRequest.descriptions JoinSeveralRequest.clients
  Joining.tasks ClientDescription.tasks
  PullRequest.waiting PullRequest.begun PushRequest.header PushHeader.report PushHeader.bundle
  Report.counts Report.confusions Report.probabilities Report.secure_sum Report.figures
  Report.refused_model Report.trained SecureAnswer.shares SecureAnswer.opened LeaveRequest.others
  AnnounceRequest.description BundleHeader.weights BundleHeader.prototypes
  BundleHeader.generators BundleHeader.histogram ModelShard.tensors PrototypeSet.vectors
  PrototypeSet.labels PrototypeSet.counts GeneratorUpdate.tensors LabelHistogram.round
  LabelHistogram.total Table.entries Entry.value Value.list Value.table ValueList.values
config:
  PrepareRequest.protocol PrepareRequest.has_cut PrepareRequest.wants_known
  JoinRequest.protocol JoinSeveralRequest.protocol
  JoinRequest.run_id JoinSeveralRequest.run_id ClientDescription.format
  ClientDescription.input_shape ClientDescription.num_classes ClientDescription.scale
  ClientDescription.counted Counts.view Counts.rule Counts.test_set Confusion.view
  Probabilities.view Figures.view Figures.test_set
  Entry.key Entry.usual Value.boolean Value.integer Value.number Value.text
random:
  JoinRequest.token Joining.token Waiting.token PushHeader.token BeatRequest.token
  LeaveRequest.token Leaving.token AnnounceRequest.token SecureAnswer.channel_key
  SecureAnswer.mask_key SecureAnswer.own_digest SealedShare.sealed SealedShare.pair_digest
  SealedShare.own_digest OpenedShare.pair OpenedShare.own SecureAnswer.signature
  SecureAnswer.certificates EnrolRequest.secret EnrolRequest.request Report.state_sha256
  PushHeader.part_of TaskCounts.digest
place:
  PrepareRequest.client_id JoinRequest.client_id Joining.client_id Waiting.client_id
  PushHeader.client_id BeatRequest.client_id LeaveRequest.client_id Leaving.client_id
  AnnounceRequest.client_id OpenedShare.client JoinRequest.versions Joining.versions
  Joining.description JoinRequest.known JoinSeveralRequest.known BeatRequest.known
  LeaveRequest.known Waiting.durable Waiting.issue PullRequest.held PushHeader.kind
  Begun.digest Begun.bytes
  PushHeader.interaction PushHeader.trip Report.durable BeatRequest.durable
  BeatRequest.interaction TrainedOn.task TensorHeader.name TensorHeader.dtype TensorHeader.offset
  PrototypeSet.level GeneratorUpdate.key GeneratorUpdate.version
answer:
  PushHeader.reason Report.withheld
failure:
  PushHeader.failure
words:
  JoinRequest.start_over JoinSeveralRequest.start_over Joining.name ClientDescription.name
  ClientDescription.recipe ClientDescription.dataset LeaveRequest.reason
announced:
  TaskCounts.train TaskCounts.test TaskCounts.set_aside TensorHeader.shape
  BundleHeader.payload_bytes
labels:
  ClientDescription.class_names
moments:
  ClientDescription.mean ClientDescription.std ClientDescription.partition
text:
  TaskCounts.why TaskCounts.unusual TaskCounts.drifted TaskCounts.again
examples:
  Report.num_examples Report.skipped_examples TrainedOn.rows BeatRequest.epoch BeatRequest.batch
timing:
  Report.seconds Report.peak_rss_bytes
loss:
  Report.loss
scores:
  Counts.support Counts.predicted Counts.correct Counts.loss_sum Confusion.counts
  RefusedModel.round RefusedModel.accuracy RefusedModel.live
  Probabilities.auroc Probabilities.ece Figures.values
metrics:
  Report.extra
tensors:
  BundleHeader.scalars PushRequest.frame
relay:
  JoinRequest.relay JoinRequest.relay_process JoinSeveralRequest.relay
  JoinSeveralRequest.relay_process PushHeader.issue PushHeader.summed PushHeader.members
  PushHeader.distance Member.client_id Member.token Member.cosine Distance.weights
  Distance.statistics
"""
FREE: Final = ("config", "random", "place", "answer", "words", "announced", "examples")
"""Classes that no condition of a site holds back: of data they tell numbers of examples at most.
``--announce`` makes these less exact."""
HELD_BACK: Final = (
    "timing", "labels", "moments", "loss", "scores", "metrics", "text", "failure",
)  # fmt: skip
"""Classes that a condition may hold back."""
NOT_OURS: Final = "relay"
"""The class of fields that no client fills."""
_FIGURES = """
examples:
  epsilon epsilon_next
loss:
  flow_loss generator_loss
scores:
  prequential prequential_mae prequential_auroc
metrics:
  alpha credibility error_drift flow_density generator_ratio generator_trainings generators_trained
  input_drift input_drift_p input_drift_number prediction_drift prediction_drift_p
  prediction_drift_number prototype_angle prototype_share replay_acceptance replay_examples
  replay_shortage
"""
"""Figures of ``Report.extra``, each without the number of a class or a block at its end."""
OF_OWN: Final = "metrics"
"""The class of a figure that a method of one's own declares: what a condition holds back first."""


@cache
def classes() -> MappingProxyType[str, str]:
    """Return the class of each field that a client or a relay may send: ``Message.field``."""
    return _by_word(_FIELDS)


@cache
def figures() -> MappingProxyType[str, str]:
    """Return the class of each figure that a method or a part puts into ``Report.extra``."""
    return _by_word(_FIGURES)


def without_number(figure: str) -> str:
    """Return the name of a figure without the number of a class or a block."""
    base, _, number = figure.rpartition("_")
    return base if base and number.isdecimal() else figure


def _by_word(text: str) -> MappingProxyType[str, str]:
    found, name = dict[str, str](), ""
    for word in text.split():
        if word.endswith(":"):
            name = word[:-1]
        elif found.setdefault(word, name) != name:
            raise ValueError(f"{word} is {found[word]} and {name}")
    return MappingProxyType(found)


@cache
def check_schema(message: Descriptor) -> None:
    """Check that each field that a message may hold has a class.

    Raises:
        ConfigError: one has none, so nobody has said where it may go.
    """
    pending, seen = [message], {message.full_name}
    while pending:
        one = pending.pop()
        for field in one.fields:
            if f"{one.name}.{field.name}" not in classes():
                raise ConfigError(
                    f"{one.name}.{field.name} has no class in fedpb/told.py, so no message of it "
                    "leaves: say there what it tells"
                )
            inner = field.message_type
            if inner is None or inner.GetOptions().map_entry or inner.full_name in seen:
                continue
            seen.add(inner.full_name)
            pending.append(inner)


_KEY = object()


class Passed:
    """Bytes that may leave; a :class:`Door` alone makes them, and every stub takes nothing else."""

    __slots__ = ("_bytes",)

    def __init__(self, key: object, data: bytes) -> None:
        """Hold bytes; TypeError for whoever is no door."""
        if key is not _KEY:
            raise TypeError("a message leaves by a door of fedpb.told, which looks at its fields")
        self._bytes = data

    @staticmethod
    def encoded(passed: Passed) -> bytes:
        """Return the bytes for a stub; TypeError for what has passed no door."""
        if type(passed) is not Passed:
            raise TypeError(f"a {type(passed).__name__} has passed no door of fedpb.told")
        return passed._bytes

    def __len__(self) -> int:
        """Return how many bytes they are."""
        return len(self._bytes)


class Pushed:
    """A result that may leave, made by a :class:`Door`; its messages are made when it is sent."""

    __slots__ = ("_digest", "header", "upload")

    def __init__(self, key: object, header: rpc.PushHeader, upload: Bundle) -> None:
        """Hold a result; TypeError for whoever is no door."""
        if key is not _KEY:
            raise TypeError("a result leaves by a door of fedpb.told, which looks at its fields")
        self.header, self.upload, self._digest = header, upload, b""

    def messages(
        self, *, zstd: bool = False, start: int = 0, stop: int | None = None
    ) -> Iterator[Passed]:
        """Yield the messages of a Push; a frame is laid out when it is asked for.

        ``start`` and ``stop`` are the ends of a part of the upload that travels by itself.
        """
        from fedpb.codec import digest_of, frames_of, messages  # imports torch

        size = self.header.bundle.payload_bytes
        is_part = start > 0 or stop not in (None, size)
        if is_part and not self._digest:
            self._digest = digest_of(self.header.bundle, frames_of(self.upload, size))
        self.header.part_of = self._digest if is_part else b""
        head = rpc.PushRequest(header=self.header).SerializeToString()
        frames = frames_of(self.upload, size, zstd=zstd, start=start, stop=stop)
        for piece in messages(head, (frame.laid_out() for frame in frames)):
            yield Passed(_KEY, piece)


class Door:
    """Where messages become bytes: those whose fields all have a class."""

    def passed(self, message: Message) -> Passed:
        """Return a message as bytes; ConfigError for one that does not leave."""
        check_schema(message.DESCRIPTOR)
        self.look(message)
        return Passed(_KEY, message.SerializeToString())

    def pushed(
        self,
        header: rpc.PushHeader,
        upload: Bundle,
        covers: Mapping[str, str] = NOTHING,
        inside: Collection[str] = (),
    ) -> Pushed:
        """Return a result as what may leave.

        Args:
            header: what it begins with.
            upload: what follows.
            covers: what hides each key of the upload, by key, and of what was put under masks.
            inside: the keys of what was put under masks.

        Raises:
            ConfigError: it does not leave.
        """
        check_schema(header.DESCRIPTOR)
        self.look(header)
        self.look_at_upload(upload, covers, inside)
        return Pushed(_KEY, header, upload)

    def look(self, message: Message) -> None:
        """Look at a message before it is made bytes; ConfigError for one that does not leave."""

    def look_at_upload(
        self, upload: Bundle, covers: Mapping[str, str], inside: Collection[str]
    ) -> None:
        """Look at the keys of an upload; ConfigError for one that does not leave."""
