"""Everything that leaves a process of a run with ``[privacy] level``, and what covers each of it.

A field of a message is ``Message.field``; what a run writes and tells is a path such as
``record.clients.*.loss``. Each has one cover:

- ``noise``: it holds what the noise covers, or follows from that alone, or is a hash of what
  stands for itself;
- ``server``: it reaches the coordinator, which adds the noise, and nobody else (with
  ``where = "server"``; with ``level = "example"`` and ``where = "clients"`` it has the noise);
- ``config``: the config or the program gives it, whatever the data are;
- ``random``: a key, a token or a sealed secret, drawn by chance;
- ``place``: numbers of clients, orders, rounds and tasks, and sizes that follow from the method;
- ``answer``: whether and when a client answers, which noise on uploads does not hide;
- ``words``: what somebody typed in by hand;
- ``parts``: it holds other fields, or says them in a line; these stand for themselves;
- else a name of ``[privacy] allow`` (:data:`fedmodels.privacy.coverage.BESIDE`): it follows from
  data, and a run that sends it is refused until the config names it. A metric of the tables that
  no method reports is one of ``scores``.

A test walks all messages, and the records of runs of each level: what is not here fails it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from fedmodels.numerics.metric_tables import REPORTED, is_known

COVERS = (
    "noise", "server", "config", "random", "place", "answer", "words", "parts",
)  # fmt: skip
"""What a field may be, beside the names of ``allow``."""
_MESSAGES = """
parts:
  JoinRequest.description JoinSeveralRequest.descriptions JoinSeveralRequest.clients
  Joining.tasks ClientDescription.tasks
  PullRequest.waiting PushRequest.header PushSeveralRequest.results PushHeader.report
  PushHeader.members Report.counts Report.confusions Report.probabilities Report.secure_sum
  Report.figures
  Report.refused_model Event.refused Refused.line
  SecureAnswer.shares SecureAnswer.opened LeaveRequest.others AnnounceRequest.description
  JoinResponse.refused AnnounceResponse.refused Order.class_changes
  SteerRequest.class_changes SteerResponse.classes
  JoinResponse.history JoinSeveralResponse.joined LeaveResponse.history BeatResponse.history
  History.head PullHeader.order PullHeader.parts PullResponse.header SecureSum.peers
  Order.secure_sum PushSeveralResponse.outcomes WatchResponse.event WatchResponse.head
  Event.joined Event.left Event.order Event.beat Event.upload Event.failed Event.commit Event.scores
  Event.finished Event.waiting Event.server Event.rollback Event.started_over Event.missed
  Event.listening Event.draining Event.dashboard Event.metrics Event.ended Event.note Event.gone
  Event.back Event.present Event.resting Event.growth Event.resumed Event.forecast Grown.line
  Resting.line
  OrderSent.order PartHeader.bundle BundleHeader.weights BundleHeader.prototypes
  BundleHeader.generators BundleHeader.histogram ModelShard.tensors PrototypeSet.vectors
  PrototypeSet.labels PrototypeSet.counts GeneratorUpdate.tensors LabelHistogram.round
  LabelHistogram.total Table.entries Entry.value Value.list Value.table ValueList.values
  PushHeader.distance PushHeader.bundle Noted.line
config:
  PrepareRequest.protocol JoinRequest.protocol JoinSeveralRequest.protocol
  JoinRequest.run_id JoinSeveralRequest.run_id JoinResponse.run_id
  ClientDescription.format ClientDescription.input_shape ClientDescription.num_classes
  ClientDescription.scale ClientDescription.mean ClientDescription.std
  ClientDescription.partition ClientDescription.counted
  PrepareRequest.has_cut PrepareResponse.data PrepareResponse.seed PrepareResponse.announce
  PrepareResponse.run_id PrepareResponse.experiment
  JoinResponse.beat_every_s JoinResponse.experiment SecureSum.threshold SecureSum.clients
  Order.kind Order.views Order.global_test Order.confusion Counts.view Counts.rule Counts.test_set
  Confusion.view Probabilities.view Figures.view Figures.test_set
  WatchRequest.from_start Listening.address Listening.clients
  Listening.needed Dashboard.url MetricsPage.url Committed.of Committed.open
  Forecast.line Forecast.clients Forecast.interactions Forecast.down Forecast.up Forecast.all
  Forecast.server_disk Forecast.client_disk
  Order.settings Committed.privacy Entry.key Entry.usual Value.boolean Value.integer
  Value.number Value.text
random:
  JoinRequest.token JoinResponse.token Joining.token Waiting.token PushHeader.token Member.token
  BeatRequest.token LeaveRequest.token Leaving.token AnnounceRequest.token
  SecureAnswer.channel_key SecureAnswer.mask_key SecureAnswer.own_digest SealedShare.sealed
  SealedShare.pair_digest SealedShare.own_digest OpenedShare.pair OpenedShare.own
  SecureSum.attempt SecurePeer.channel_key SecurePeer.mask_key SecurePeer.share
  SecureAnswer.signature SecureAnswer.certificates SecurePeer.signature SecurePeer.agreed
  SecurePeer.certificates
  EnrolRequest.secret EnrolRequest.request EnrolResponse.certificate Report.state_sha256
place:
  PrepareRequest.client_id JoinRequest.client_id Joining.client_id Waiting.client_id
  PushHeader.client_id Member.client_id BeatRequest.client_id LeaveRequest.client_id
  Leaving.client_id AnnounceRequest.client_id Order.client_id Event.client_id SecurePeer.client
  OpenedShare.client SecureSum.counted PullHeader.group
  JoinRequest.relay JoinSeveralRequest.relay JoinRequest.versions Joining.versions
  Joining.description JoinRequest.known JoinSeveralRequest.known BeatRequest.known
  LeaveRequest.known Head.number History.digests JoinResponse.committed
  Waiting.durable Waiting.issue PullRequest.held PushHeader.kind PushHeader.interaction
  PushHeader.trip PushHeader.summed Report.durable BeatRequest.durable BeatRequest.interaction
  Order.interaction Order.round Order.task Order.committed Order.durable Order.tasks_seen Order.trip
  Order.issue Order.following Order.base Order.task_began Order.first_task
  Order.set_aside TaskOf.client_id TaskOf.task PartHeader.role
  PartHeader.digest SecureSum.payload
  PartHeader.held PullHeader.more PushResponse.repeated_upload Outcome.code
  Outcome.repeated_upload BeatResponse.superseded Event.interaction Event.round Committed.task
  Missed.events TensorHeader.name TensorHeader.dtype TensorHeader.offset
  PrototypeSet.level GeneratorUpdate.key GeneratorUpdate.version Frame.offset Resumed.task
answer:
  PushHeader.failure PushHeader.reason Report.withheld
  Outcome.line Event.unix_time Committed.failed Committed.seconds
  Failed.reason WaitingFor.line WaitingFor.clients WaitingFor.seconds RolledBack.reason
  Ended.reason Gone.line Gone.clients Back.line Back.clients Present.clients Resting.clients
words:
  JoinRequest.start_over JoinSeveralRequest.start_over Joining.name ClientDescription.name
  ClientDescription.recipe ClientDescription.dataset LeaveRequest.reason Left.reason Draining.line
  SteerRequest.retire SteerRequest.forget SteerRequest.close SteerRequest.now SteerRequest.exclude
  SteerRequest.set_aside SteerRequest.list_classes SteerRequest.merge ClassChange.old
  ClassChange.now ClassChange.after
announced:
  TaskCounts.train TaskCounts.test TaskCounts.set_aside TaskCounts.why TaskOf.why
  TaskCounts.again TaskCounts.unusual TaskCounts.drifted
  ClientDescription.class_names JoinResponse.class_names
  ClassOf.name ClassOf.earlier ClassOf.examples ClassOf.clients ClassOf.part_of
  Order.new_classes SecureSum.most TensorHeader.shape BundleHeader.payload_bytes Frame.raw_bytes
  Committed.bytes
examples:
  Report.num_examples Report.skipped_examples Report.seconds Report.peak_rss_bytes
  BeatRequest.epoch BeatRequest.batch Progress.epoch Progress.batch
loss:
  Report.loss Committed.loss Resumed.loss
scores:
  Counts.support Counts.predicted Counts.correct Counts.loss_sum Confusion.counts
  RefusedModel.round RefusedModel.accuracy RefusedModel.live
  Probabilities.auroc Probabilities.ece Figures.values
  Scored.metrics Finished.metrics Resumed.metrics
metrics:
  Report.extra
server:
  PushRequest.frame BundleHeader.scalars Distance.weights Distance.statistics Member.cosine
  Frame.payload Frame.crc32
noise:
  PullResponse.frame ServerWork.work ServerWork.step ServerWork.of ServerWork.loss
  Finished.state_sha256 Head.link
"""
_RUNS = """
place:
  record.round record.interaction record.task record.cohort record.growths.*
  record.secure_sum.* record.clients.*.task record.clients.*.aggregation_weight
  record.clients.*.views summary.rounds summary.clients_missing summary.clients_set_aside
  summary.growths.*
  summary.clients_started_over
  event.interaction event.round event.client event.order.* event.upload event.joined event.left
  event.rollback.* event.commit.interaction event.commit.round event.commit.task event.commit.of
  audit.what audit.client audit.clients audit.interaction audit.kind audit.summed
  event.joined.* event.started-over event.scores.interaction event.scores.round
config:
  record.privacy.delta record.privacy.releases record.privacy.clip *.metrics.epsilon
  record.privacy.epsilon_renyi
  record.privacy.epsilon summary.privacy.* summary.format summary.method summary.data
  summary.scenario summary.seed summary.compute.* event.listening.* event.commit.privacy.*
  event.forecast.*
  summary.figures_missing.* record.definitions summary.definitions
answer:
  record.withheld.* summary.withheld.*
  record.failed.* record.seconds.server record.seconds.wall summary.seconds.* event.failed.*
  event.commit.failed event.commit.failed.* event.commit.seconds event.waiting.* event.ended.*
  event.unix_time audit.failure
random:
  audit.sha256
words:
  audit.at audit.by event.left.* event.draining.*
parts:
  event.note.* event.refused.*
announced:
  record.unusual.* record.drifted.* audit.bytes record.bytes.* summary.bytes.* event.commit.bytes.*
examples:
  record.seconds.train record.clients.*.seconds record.clients.*.num_examples
  record.clients.*.skipped_examples record.clients.*.peak_rss_bytes record.clients.*.epsilon
  record.clients.*.epsilon_next event.beat.* summary.skipped_examples
loss:
  *.metrics.loss record.clients.*.loss event.commit.loss
scores:
  record.clients.*.views.* record.confusions.*
metrics:
  record.drift.* record.clients.*.input_drift* record.clients.*.prediction_drift*
  *.metrics.input_drift *.metrics.prediction_drift
  record.clients.*.prequential *.metrics.prequential
noise:
  *.metrics.prototype_drift *.metrics.weights_* record.series.* record.privacy.clip_next
  summary.state_sha256 event.finished.state_sha256 event.server.*
  record.clients.*.difference_norm record.clients.*.difference_cosine
  record.clients.*.given_norm record.clients.*.prototype_norm record.warned.* record.agreed*
  record.warned_relays.* record.rare_classes*
"""
_OF_EXAMPLES = """
examples:
  record.privacy.epsilon *.metrics.epsilon summary.privacy.epsilon event.commit.privacy.epsilon
noise:
  Report.state_sha256 PushRequest.frame Distance.weights Distance.statistics Member.cosine
  BundleHeader.scalars Frame.payload Frame.crc32
"""
"""What is another one with ``level = "example"``: the noise is in what clients train."""


def cover_of(path: str, level: str) -> str:
    """Return what covers a field of a message, or a path of what a run writes and tells.

    A longer pattern goes before a shorter one, and one of the level before one of both.

    Raises:
        KeyError: nobody has thought about it.
    """
    tables = [_patterns(_OF_EXAMPLES)] if level == "example" else []
    for table in (*tables, fields(), _patterns(_RUNS)):
        for pattern in sorted(table, key=len, reverse=True):
            if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), path):
                return table[pattern]
    _, is_metric, name = path.rpartition(".metrics.")
    if is_metric and is_known(name) and name not in {metric.name for metric in REPORTED}:
        return "scores"
    raise KeyError(path)


@cache
def fields() -> Mapping[str, str]:
    """Return what covers each field of each message."""
    return _patterns(_MESSAGES)


@cache
def _patterns(text: str) -> Mapping[str, str]:
    """Return the paths of a text, and the cover that they stand under."""
    found, cover = dict[str, str](), ""
    for word in text.split():
        if word.endswith(":"):
            cover = word[:-1]
        elif found.setdefault(word, cover) != cover:
            raise ValueError(f"{word} stands under {found[word]} and {cover}")
    return MappingProxyType(found)
