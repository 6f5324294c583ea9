"""What one client does with an order: the client half of a method on its own data.

What a config can leave out is a part of the client (:mod:`fedcli.runtime.client_part`): it hangs on
the seams that are called here, and has no name here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor

from fedcli.runtime.client_part import Client, Training
from fedcli.runtime.reporting import add_score, tell, tell_scored, tell_trained, told_of
from fedcli.runtime.setups import SetUp
from fedmodels.errors import ConfigError, FedtideError, OrderDeclined, PayloadError
from fedmodels.facts.position import Interaction, Round
from fedmodels.host.machine import end_if_signalled, peak_rss_bytes
from fedmodels.host.shortages import is_passing, lacks_memory
from fedmodels.tensors.bundle import EVALUATOR, Bundle, Weights, state_digest
from fedmodels.training.asked import local_view, reads_history
from fedmodels.training.contexts import ClientContext, Position
from fedmodels.training.hooks import init_client
from fedmodels.training.loop import ClientHalf
from fedmodels.training.method import LocalResult
from fedmodels.training.returned import check_upload
from fedpb.v1 import coordinator_pb2 as rpc

if TYPE_CHECKING:
    from fedmodels.training.release import Release

OBJECTS_BYTES = 64 << 10
"""What the Python objects of an open client take, about."""
MEMORY_STEP = 64 << 20
"""A report gives peak memory in multiples of this: the exact figure tells of a client's data."""
log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of the order under way; the worker writes it, the heartbeat reads it."""

    interaction: int = -1
    epoch: int = -1
    batch: int = 0
    superseded: bool = False
    """Set by the heartbeat: nobody waits for this work any more."""
    for_a_score: bool = False
    """Whether the order is none to train: an interaction is scored after its commit."""

    @classmethod
    def of(cls, order: rpc.Order) -> Progress:
        """Return the progress of an order that begins."""
        return cls(order.interaction, for_a_score=order.kind != rpc.ORDER_KIND_TRAIN)


class Abandoned(Exception):
    """The work under way is no longer wanted."""


@dataclass(frozen=True)
class Result:
    """What goes back to the server for one order."""

    order: rpc.Order
    upload: Bundle
    report: rpc.Report
    failure: str = ""
    """Why it could not be done, in words."""
    reason: rpc.FailureReason = rpc.FAILURE_REASON_UNSPECIFIED
    """What kind of failure it is."""
    covers: Mapping[str, str] = field(default_factory=dict)
    """What hides each key of the upload, by key, and of what was put under masks."""
    inside: Sequence[str] = ()
    """The keys of what was put under masks."""
    release: Release | None = None
    """What the training follows from, where something hides the client."""

    def answers(self, order: rpc.Order) -> bool:
        """Tell whether this is what another order to train asks for, given the same payload."""
        return _asked(self.order) == _asked(order)


@dataclass
class Worker(Client):
    """One client of a run, which does orders."""

    progress: Progress = field(default_factory=Progress)

    def __post_init__(self, sibling: Client | None) -> None:
        """Begin before the first order."""
        super().__post_init__(sibling)
        self.private = PrivateState(self)
        self._held: Result | None = None
        self._begun: Training | None = None
        """The training under way."""
        self._committed = -1

    def execute(self, order: rpc.Order, payload: Bundle) -> Result | None:
        """Execute an order and return the result; None if the order was abandoned meanwhile.

        An error fails this client for this interaction, and the process goes on.
        """
        try:
            if order.kind == rpc.ORDER_KIND_TRAIN:
                return self._train(order, payload)
            if order.kind == rpc.ORDER_KIND_EVALUATE:
                return self._evaluate(order, payload)
            if order.kind == rpc.ORDER_KIND_FINISH:
                return self._finish(order, payload)
            for part in self.parts:
                if (report := part.answer(order)) is not None:
                    report.durable = self.states.durable
                    return Result(order, Bundle(), report)
            raise PayloadError(f"an order of an unknown kind, {order.kind}")
        except Exception as error:  # whatever the method's code raises
            return self.failed(order, error)

    def failed(self, order: rpc.Order, error: Exception) -> Result | None:
        """Return the result of an order that raised an error; call it in the ``except`` block."""
        end_if_signalled()
        if lacks_memory(error) or is_passing(error):
            raise error  # the process ends: others may need what it holds; or it is tried again
        self.progress = Progress()  # it is no longer at work
        if isinstance(error, Abandoned):
            return None
        half, self._begun = self._begun, None
        if half is not None and half.order is order and not isinstance(error, OrderDeclined):
            try:
                for part in self.parts:
                    part.fails(half)
            except FedtideError as other:
                error = other
        return Result(order, Bundle(), rpc.Report(), *told_of(self, order, error))

    def woken(self) -> None:
        """Make ready for an order."""
        for part in self.parts:
            part.woken()

    def close(self) -> None:
        """Free data, state and upload; for the next order the client is as after a restart."""
        self.stream.close()
        self.states.drop_cached()
        for part in self.parts:
            part.close()
        self._held = None

    def held_bytes(self) -> int:
        """Return the memory that the client holds between orders: data, state and upload."""
        upload = self._held.upload.num_bytes() if self._held else 0
        return OBJECTS_BYTES + self.stream.held_bytes() + self.states.held_bytes() + upload

    def _follow(self, order: rpc.Order) -> None:
        """Take the classes of an order, and drop what it says is no longer needed."""
        self.take(order)
        self.stream.pass_over(order.set_aside)
        for part in self.parts:
            part.follows(order)
        self.private.follow(order)
        rolled_back = order.committed < self._committed
        if rolled_back or (self._held and self._held.order.interaction <= order.committed):
            self._held = None
        self._committed = order.committed

    def _context(self, order: rpc.Order) -> ClientContext:
        self.progress = Progress.of(order)
        if not 0 <= order.task_began <= max(order.round, 0):
            raise PayloadError(f"a task cannot begin in round {order.task_began} of {order.round}")
        at = Position(
            Interaction(order.interaction), Round(order.round), order.task,
            began=Round(order.task_began),
        )  # fmt: skip
        return ClientContext(
            self.run, self.client, at, self.net, self.stream, self.device, self._tick,
            secret=self.states.secret,
        )  # fmt: skip

    def _scoring_context(self, order: rpc.Order) -> ClientContext:
        """Return a context in which the client's task is open.

        A client may have restarted since it trained, and may have had its last task before.
        """
        ctx = self._context(order)
        if self.client == EVALUATOR:
            return ctx
        task = min(order.task, self.data.num_tasks - 1)
        self.stream.open(task)
        ctx.at = replace(ctx.at, task=task)
        return ctx

    def _tick(self, epoch: int, batch: int, loss: Tensor) -> None:
        now = self.progress
        if now.superseded:
            raise Abandoned
        now.epoch, now.batch = epoch, batch

    # --- training ---------------------------------------------------------------------------------

    def _train(self, order: rpc.Order, payload: Bundle) -> Result:
        """Train in the net of this process."""
        half = self.begin(order, payload)
        if isinstance(half, Result):
            return half
        begun = time.monotonic()
        done = half.train()
        return self.end(half, done, time.monotonic() - begun)

    def begin(self, order: rpc.Order, payload: Bundle) -> Training | Result:
        """Prepare a training; return the result instead if an earlier order has produced it."""
        self._follow(order)
        held = self._held
        if held and not (self.private.has(Interaction(order.interaction)) and held.answers(order)):
            held = None
        payload, private = self.set_up.wire.received(payload), self.private.at(order)
        self.stream.open(order.task)
        ctx = self._context(order)
        half = Training(
            self.method, ctx, payload, private.state, order=order, kept=private.kept, data=self.data
        )
        if held and (not self.hides or held.release == half.release):
            return replace(held, order=order)
        self._begun = half
        for part in self.parts:
            part.begins(half)
        return half

    def end(self, half: Training, done: LocalResult, seconds: float) -> Result:
        """Save the private state, and keep the upload until it is committed."""
        order, upload = half.order, done.upload
        half.upload = upload
        check_upload(self.method, self.set_up.upload_spec, upload)
        self.private.check_names(done.state)
        report = half.report = rpc.Report(
            loss=done.loss if done.num_examples else 0.0,
            seconds=seconds,
            num_examples=done.num_examples,
            skipped_examples=half.ctx.skipped,
            extra=half.ctx.metrics,
            peak_rss_bytes=-(-peak_rss_bytes() // MEMORY_STEP) * MEMORY_STEP,
        )
        report.trained.extend(self._trained_on(order.task, done.num_examples))
        for part in self.parts:
            part.charges(half)
        report.extra.update(half.figures)
        if "after_local" in order.views:
            half.ctx.view = "after_local"
            add_score(self, order, half.ctx, half.payload, done.state, report)
        for part in self.parts:
            upload = part.leaves(half, upload)
            part.reports(order, report)
        report.seconds = round(report.seconds, 2)
        self.private.save(half.ctx.interaction, done.state, half.sections)
        report.durable = self.states.durable
        self.progress = Progress()
        tell_trained(order, report, upload.num_bytes())
        for part in self.parts:
            part.saved(half)
        covers = {
            key: how
            for seen in (half.upload, upload)
            for part in self.parts
            for key, how in part.covers(half, seen)
        }
        inside = [key for key in half.upload.by_key() if key not in upload.by_key()]
        kept = half.release if self.hides else None
        result = Result(order, upload, report, covers=covers, inside=inside, release=kept)
        self._held = result if upload.num_bytes() <= self.keep_bytes else None
        self._begun = None
        return result

    def _trained_on(self, task: int, examples: int) -> Iterator[rpc.TrainedOn]:
        """Yield what a training read, where it may be more than the order's task."""
        read = self.stream.read
        if self.run.experiment.privacy is not None:
            return  # it would tell more than its pages say
        if reads_history(self.method, self.run.experiment) or examples > read.get(task, 0):
            for each in sorted(each for each, rows in read.items() if rows):
                yield rpc.TrainedOn(task=each, rows=read[each])

    # --- other orders -----------------------------------------------------------------------------

    def _evaluate(self, order: rpc.Order, payload: Bundle) -> Result:
        """Score the models the order names."""
        self._follow(order)
        report = rpc.Report(durable=self.states.durable)
        ctx = self._scoring_context(order)
        payload = self.set_up.wire.received(payload)
        state = Bundle() if self.client == EVALUATOR else self.private.at(order).state
        for view in order.views:
            ctx.view, after = view, state
            if view == "global":
                self.method.load(ctx, payload, Bundle())
            elif self.client == EVALUATOR:
                continue
            elif view == "after_local":  # outside of the cohort: nothing of it is kept or sent
                for part in self.parts:
                    part.tries(order)
                ctx.view = ""
                after = ClientHalf(self.method, ctx, payload, state).train().state
                ctx.view = view
            else:
                self.method.load(ctx, payload, state)
            add_score(self, order, ctx, payload, after, report)
        self.progress = Progress()
        tell_scored(order, report)
        return Result(order, Bundle(), report)

    def _finish(self, order: rpc.Order, payload: Bundle) -> Result:
        """Look at the last model, and report the digest of the private state."""
        self._follow(order)
        if self.client == EVALUATOR:
            return Result(order, Bundle(), rpc.Report())
        payload, ctx = self.set_up.wire.received(payload), self._scoring_context(order)
        private = self.private.at(order)
        ctx.view = "global" if local_view(self.method) == "global" else "after_downlink"
        self.method.load(ctx, payload, Bundle() if ctx.view == "global" else private.state)
        for part in self.parts:
            part.final(order, ctx, payload, private.state)
        line = f": the run is over; its model is in {self.states.path}"
        tell("finished", self.client, line, order, path=str(self.states.path))
        report = rpc.Report(state_sha256=state_digest([("client", private.learnt)]))
        for part in self.parts:
            part.reports(order, report)
        return Result(order, Bundle(), report)


def _asked(order: rpc.Order) -> rpc.Order:
    """Return an order without what changes as it is issued again."""
    found = rpc.Order()
    found.CopyFrom(order)
    for name in ("issue", "following", "committed", "durable"):
        found.ClearField(name)
    return found


@dataclass(frozen=True)
class GivenOrder:
    """An order to train, its payload, and the worker of its client."""

    worker: Worker
    order: rpc.Order
    payload: Bundle


# --- the private state ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Private:
    """A client's private state as it is stored, by what it consists of."""

    state: Bundle
    """The method's own."""
    learnt: Bundle
    """That, with what parts keep and the run has learnt."""
    kept: Weights
    """What parts keep, by name with its prefix."""


class PrivateState:
    """The private state of one client, from one interaction to the next."""

    def __init__(self, client: Client) -> None:
        """Read nothing yet."""
        self.client = client
        self._fixed: tuple[SetUp, Bundle] | None = None

    def has(self, interaction: Interaction) -> bool:
        """Tell whether that of an interaction is on the disk, where one has to be."""
        return not self.client.set_up.stores or interaction in self.client.states.versions()

    def follow(self, order: rpc.Order) -> None:
        """Drop what an order says is no longer needed."""
        if self.client.set_up.stores:
            self.client.states.settle(order.base, order.committed)
            self.client.states.prune(order.durable)

    def at(self, order: rpc.Order) -> Private:
        """Return that to start from; PayloadError for the evaluator, who has none."""
        client, set_up = self.client, self.client.set_up
        if not isinstance(client.client, int):
            raise PayloadError("the evaluator has no private state to train with")
        if not self.client.set_up.stores:
            return Private(self._first, self._first, {})
        stored = client.states.load(order.base, self._first if order.base < 0 else Bundle())
        learnt, beside = _parted(stored, set_up.beside)
        if not set_up.keeps:
            return Private(self._first, self._first, beside)
        if order.base >= 0:
            classes = client.states.classes_of(order.base) or len(client.set_ups.classes)
            for part in client.parts:
                learnt = part.loaded(learnt, classes)
        state, owed = _parted(learnt, set_up.owed)
        return Private(state, learnt, {**owed, **beside})

    @property
    def _first(self) -> Bundle:
        """The one before the first order; kept in memory where it is that of all orders."""
        client, set_up = self.client, self.client.set_up
        if self._fixed is not None and self._fixed[0] is set_up:
            return self._fixed[1]
        assert isinstance(client.client, int)
        first = init_client(client.method, client.run, client.client)
        if not set_up.keeps:
            self._fixed = set_up, first
        return first

    def check_names(self, state: Bundle) -> None:
        """Check that no name of a method's private state is that of something a part keeps."""
        sections = self.client.set_up.owed + self.client.set_up.beside
        if taken := [name for name in state.weights if name.startswith(sections)]:
            raise ConfigError(
                f"after_local of {type(self.client.method).__name__} keeps {taken[0]!r}, and the "
                "run keeps something of its own under this name: give it another one"
            )

    def save(self, interaction: Interaction, state: Bundle, sections: Mapping[str, Tensor]) -> None:
        """Store a method's state, and what parts keep by name with its prefix."""
        if self.client.set_up.stores:
            stored = replace(state, weights={**state.weights, **sections}) if sections else state
            self.client.states.save(interaction, stored)


def _parted(stored: Bundle, sections: tuple[str, ...]) -> tuple[Bundle, Weights]:
    """Return a stored state without what is kept under these prefixes, and that by name."""
    apart = {name: t for name, t in stored.weights.items() if name.startswith(sections)}
    if not apart:
        return stored, {}
    rest = {name: t for name, t in stored.weights.items() if name not in apart}
    return replace(stored, weights=rest), apart
