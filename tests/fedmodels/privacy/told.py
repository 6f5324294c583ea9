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

from fedmodels.numerics.metric_tables import OF_PLUGINS, REPORTED, is_known
from fedpb.told import classes

COVERS = (
    "noise", "server", "config", "random", "place", "answer", "words", "parts",
)  # fmt: skip
"""What a field may be, beside the names of ``allow``."""
_MESSAGES = """
parts:
  PrepareResponse.known PushSeveralRequest.results Event.refused Refused.line JoinResponse.refused
  AnnounceResponse.refused Order.class_changes SteerRequest.class_changes SteerResponse.classes
  JoinResponse.history JoinSeveralResponse.joined LeaveResponse.history BeatResponse.history
  History.head PullHeader.order PullHeader.parts PullResponse.header SecureSum.peers
  Order.secure_sum PushSeveralResponse.outcomes WatchResponse.event WatchResponse.head
  Event.joined Event.left Event.order Event.beat Event.upload Event.failed Event.commit
  Event.scores Event.finished Event.waiting Event.server Event.rollback Event.started_over
  Event.missed Event.listening Event.draining Event.dashboard Event.metrics Event.ended Event.note
  Event.gone Event.back Event.present Event.resting Event.growth Event.resumed Event.forecast
  Grown.line Resting.line OrderSent.order PartHeader.bundle Noted.line ListRunsResponse.runs
  QueuedRun.line
config:
  JoinResponse.run_id PrepareResponse.data PrepareResponse.seed PrepareResponse.announce
  PrepareResponse.run_id PrepareResponse.experiment JoinResponse.beat_every_s
  JoinResponse.experiment SecureSum.threshold SecureSum.clients Order.kind Order.views
  Order.global_test Order.confusion WatchRequest.from_start Listening.address Listening.clients
  Listening.needed Dashboard.url MetricsPage.url Committed.of Committed.open Forecast.line
  Forecast.clients Forecast.interactions Forecast.down Forecast.up Forecast.all
  Forecast.server_disk Forecast.client_disk Order.settings Committed.privacy
  SubmitRunRequest.config
random:
  JoinResponse.token SecureSum.attempt SecurePeer.channel_key SecurePeer.mask_key SecurePeer.share
  SecurePeer.signature SecurePeer.agreed SecurePeer.certificates EnrolResponse.certificate
place:
  PrepareResponse.places QueuedRun.place QueuedRun.state
  Order.client_id Event.client_id SecurePeer.client SecureSum.counted PullHeader.group Head.number
  History.digests JoinResponse.committed Order.interaction Order.round Order.task Order.committed
  Order.durable Order.tasks_seen Order.trip Order.issue Order.following Order.base
  Order.task_began Order.first_task Order.set_aside TaskOf.client_id TaskOf.task PartHeader.role
  PartHeader.digest SecureSum.payload PartHeader.held PullHeader.more PushResponse.repeated_upload
  PartHeader.offset PushResponse.received
  Outcome.code Outcome.repeated_upload BeatResponse.superseded Event.interaction Event.round
  Committed.task Missed.events Frame.offset Resumed.task
answer:
  Outcome.line Event.unix_time Committed.failed Committed.seconds Failed.reason WaitingFor.line
  WaitingFor.clients WaitingFor.seconds RolledBack.reason Ended.reason Gone.line Gone.clients
  Back.line Back.clients Present.clients Resting.clients Present.roster Standing.state
  Standing.since Standing.why Standing.refused Scored.scored Scored.unscored
  Scored.means Scored.changed Resumed.scored Resumed.unscored Resumed.means Resumed.changed
words:
  Left.reason Draining.line SteerRequest.retire SteerRequest.forget SteerRequest.close
  SteerRequest.now SteerRequest.exclude SteerRequest.set_aside SteerRequest.list_classes
  SteerRequest.merge ClassChange.old ClassChange.now ClassChange.after SubmitRunRequest.name
  SubmitRunResponse.name WithdrawRunRequest.name QueuedRun.name
announced:
  TaskOf.why JoinResponse.class_names ClassOf.name ClassOf.earlier ClassOf.examples
  ClassOf.clients ClassOf.part_of Order.new_classes SecureSum.most Frame.raw_bytes Committed.bytes
examples:
  Progress.epoch Progress.batch
loss:
  Committed.loss Resumed.loss
scores:
  Scored.metrics Finished.metrics Resumed.metrics
server:
  Frame.payload Frame.crc32
noise:
  PullResponse.frame ServerWork.work ServerWork.step ServerWork.of ServerWork.loss
  Finished.state_sha256 Head.link
"""
COVER_OF = {
    "timing": "examples", "labels": "announced", "moments": "config", "text": "announced",
    "failure": "answer", "tensors": "server", "relay": "place",
}  # fmt: skip
"""What covers the fields of a class of :mod:`fedpb.told`, where it is called otherwise."""
_RELAYED = {
    "PushHeader.members": "parts", "PushHeader.distance": "parts", "Member.token": "random",
    "Member.cosine": "server", "Distance.weights": "server", "Distance.statistics": "server",
}  # fmt: skip
"""What covers the fields of a relay that are no place."""
_RUNS = """
place:
  record.round record.interaction record.task record.cohort record.growths.*
  record.secure_sum.* record.clients.*.task record.clients.*.aggregation_weight
  record.clients.*.trained
  record.clients.*.views summary.rounds summary.clients_missing summary.clients_set_aside
  summary.growths.*
  summary.clients_started_over
  event.interaction event.round event.client event.order.* event.upload event.joined event.left
  event.rollback.* event.commit.interaction event.commit.round event.commit.task event.commit.of
  audit.what audit.client audit.clients audit.interaction audit.kind audit.summed
  event.joined.* event.started-over event.scores.interaction event.scores.round
  event.scores.scored event.scores.unscored event.scores.unscored.* record.unscored.*
  event.scores.means.* event.scores.changed summary.means_over.* summary.means_changed.*
config:
  record.privacy.delta record.privacy.releases record.privacy.clip *.metrics.epsilon
  record.privacy.epsilon_renyi
  record.privacy.epsilon summary.privacy.* summary.format summary.method summary.data
  summary.scenario summary.seed summary.chooses_among summary.compute.*
  event.listening.* event.commit.privacy.*
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
  record.clients.*.error_drift *.metrics.error_drift
  record.clients.*.prequential* *.metrics.prequential*
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
    if (
        is_metric
        and is_known(name)
        and name not in {metric.name for metric in (*REPORTED, *OF_PLUGINS)}
    ):
        return "scores"
    raise KeyError(path)


@cache
def fields() -> Mapping[str, str]:
    """Return what covers each field of each message: of a client's, what follows from its class."""
    own = {name: _RELAYED.get(name) or COVER_OF.get(of, of) for name, of in classes().items()}
    return MappingProxyType({**_patterns(_MESSAGES), **own})


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
