"""What one client does with an order: the client half of a method on its own data."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.stream import TaskStream, Validation
from fedcli.runtime.client_log import Spare, tell, tell_scored, tell_trained
from fedcli.runtime.drift import DriftMeter, without_summaries
from fedcli.runtime.floor import FloorLedger, charge_of_client
from fedcli.runtime.kept_models import Deployment, FinalModel, LastStored
from fedcli.runtime.secure_client import SecureClient
from fedcli.runtime.secure_peers import SecurePeers
from fedcli.runtime.setups import SetUp, SetUps
from fedcli.runtime.spending import Spending, cut_of
from fedcli.runtime.state import StateDirectory
from fedmodels.commands import end_if_signalled
from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import settings_digest
from fedmodels.errors import ArchiveError, ConfigError, FedtideError, OrderDeclined, PayloadError
from fedmodels.machine import peak_rss_bytes
from fedmodels.methods import make
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.metrics import VALIDATION, Probabilities
from fedmodels.printable import without_places
from fedmodels.privacy.accounting import fewest_summed
from fedmodels.privacy.ledger import Charge
from fedmodels.shortages import is_passing, lacks_memory
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, state_digest
from fedmodels.training.contexts import ClientContext
from fedmodels.training.fault import fault_in, line_of
from fedmodels.training.hooks import init_client
from fedmodels.training.loop import ClientHalf, score, train_locally
from fedmodels.training.method import LocalResult
from fedmodels.training.position import Position
from fedmodels.training.private_state import local_view
from fedmodels.training.private_uploads import with_own_noise
from fedmodels.training.returned import check_upload
from fedmodels.training.run import RunFacts
from fedmodels.training.stack import begin_apart, end_apart, fit_together
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.v1 import coordinator_pb2 as rpc

OBJECTS_BYTES = 64 << 10
"""What the Python objects of an open client take, about."""
MEMORY_STEP = 64 << 20
"""A report gives peak memory in multiples of this: the exact figure tells of a client's data."""
UNTOLD = "it could not do the order; its own log says why"
"""What is told of a failure where noise hides a client: the error's text may tell of its data."""
log = logging.getLogger(__name__)


@dataclass
class Progress:
    """The progress of the training under way; the worker writes it, the heartbeat reads it."""

    interaction: int = -1
    epoch: int = -1
    batch: int = 0
    superseded: bool = False
    """Set by the heartbeat: nobody waits for this work any more."""


class Abandoned(Exception):
    """The work under way is no longer wanted."""


@dataclass(frozen=True)
class Result:
    """What goes back to the server for one order."""

    order: rpc.Order
    upload: Bundle
    report: rpc.Report
    failure: str = ""


@dataclass
class Worker:
    """One client of a run: its data, its private state, and a net to work with."""

    client: ClientId
    data: ClientData
    states: StateDirectory
    experiment: Experiment
    device: torch.device
    sibling: InitVar[Worker | None] = None
    """Another client of this process. The two train in turn, and share one net to work with."""
    keep_bytes: int = 256 << 20
    """A larger upload is not kept until its commit; the client computes it again if asked."""
    classes: Sequence[str] = ()
    """Names of the classes that the run began with; those of the client unless given."""
    floor: FloorLedger | None = None
    """What the site itself requires of privacy."""
    peers: SecurePeers | None = None
    """Signs for this client in secure sums; None without a certificate."""
    progress: Progress = field(default_factory=Progress)
    set_ups: SetUps = field(init=False)
    """Shared by the clients of a process."""
    set_up: SetUp = field(init=False)
    """That for the classes of the last order."""
    final_model: FinalModel = field(init=False)
    deployment: Deployment | None = field(init=False)
    """Puts this client's models live, where that is wanted."""

    def __post_init__(self, sibling: Worker | None) -> None:
        """Build the method, the net and the stream of tasks."""
        table = self.experiment.method
        self.method = make(table.name, **table.hyper_parameters())
        self.set_ups = sibling.set_ups if sibling else SetUps(
            self.method, self.experiment, self.data.problem,
            self.classes or self.data.file.classes, self.device,
        )  # fmt: skip
        self.is_open = self.experiment.schedule.open
        self._take(())
        self.stream = TaskStream(
            self.data,
            self.device,
            keep_history=self.method.trains_on == "history",
            accumulates=self.experiment.accumulates,
            validation=Validation.of(self.experiment.data),
        )
        self.drift = DriftMeter(self.stream) if self.experiment.evaluate.drift else None
        self.final_model = FinalModel(
            self.client, self.data, self.states, self.experiment, self.method,
            sibling.final_model.last if sibling else LastStored(),
        )  # fmt: skip
        self.deployment = Deployment.of(self.final_model, self.stream)
        self.spending = Spending(self.client, self.states.path, self.floor)
        self._held: Result | None = None
        self._committed = -1
        self._looked_at, self._peak = -math.inf, 0
        self._spare = Spare()

    @property
    def _cut(self) -> str:
        """How the client's examples were cut of files."""
        return cut_of(self.data.file.transform, self.data.file.input_shape)

    @property
    def run(self) -> RunFacts:
        """The facts of the run."""
        return self.set_up.run

    @property
    def net(self) -> SplitNet:
        """The net to work with."""
        return self.set_up.net

    @property
    def stateful(self) -> bool:
        """Whether the client has a private state on the disk."""
        return self.set_up.keeps or self.set_up.wire.keeps

    def _take(self, new_classes: Sequence[str]) -> None:
        """Work with the classes of an order: the first ones, and new ones."""
        found = self.set_ups.of(new_classes)
        if found is not self.__dict__.get("set_up"):
            self.set_up = found
            self.__dict__.pop("_fixed_state", None)
            self.states.classes = found.run.problem.num_classes if found.run.began_with else None
            if self.is_open:
                self.data.order_by(found.classes, len(self.set_ups.classes))

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
            if order.kind in WITHOUT_PAYLOAD:
                return self._answer(order)
            raise PayloadError(f"an order of an unknown kind, {order.kind}")
        except Exception as error:  # whatever the method's code raises
            return self.failed(order, error)

    def failed(self, order: rpc.Order, error: Exception) -> Result | None:
        """Return the result of an order that raised an error; call it in the ``except`` block."""
        end_if_signalled()
        if lacks_memory(error):
            raise error  # the process ends: others may need what it holds
        if is_passing(error):
            raise error  # who asked for it tries it again
        self.progress = Progress()  # it is no longer at work
        if isinstance(error, Abandoned):
            return None
        if isinstance(error, OrderDeclined):
            log.warning("client %s trains no more: %s", self.client, error)
            return Result(order, Bundle(), rpc.Report(), self._told(f"{error.SAID}{error}"))
        if isinstance(error, FedtideError):
            log.error("client %s, interaction %d: %s", self.client, order.interaction + 1, error)
            tells = not self._hides or isinstance(error, ConfigError | ArchiveError)
            told = self._told(str(error)) if tells else UNTOLD
            return Result(order, Bundle(), rpc.Report(), told)
        log.exception("client %s, interaction %d", self.client, order.interaction + 1)
        why = fault_in(self.method, error) or line_of(error)
        return Result(order, Bundle(), rpc.Report(), UNTOLD if self._hides else self._told(why))

    @property
    def _hides(self) -> bool:
        """Whether noise hides something of this client."""
        privacy = self.experiment.privacy
        return privacy is not None and privacy.level is not None

    def _told(self, why: str) -> str:
        """Return the reason of a failure as it leaves: without places on this machine."""
        return without_places(why, (self.data.directory.parent, self.states.path.parent))

    def close(self) -> None:
        """Free data, state and upload; for the next order the client is as after a restart."""
        self.stream.close()
        self.states.drop_cached()
        self.spending.close()
        self._held = None

    def held_bytes(self) -> int:
        """Return the memory that the client holds between orders: data, state and upload."""
        upload = self._held.upload.num_bytes() if self._held else 0
        return OBJECTS_BYTES + self.stream.held_bytes() + self.states.held_bytes() + upload

    def _follow(self, order: rpc.Order) -> None:
        """Take the classes of an order, and drop what it says is no longer needed."""
        self._take(order.new_classes)
        if self.is_open and isinstance(self.client, int):
            self._spare.tell(order)
        if self.stateful:
            self.states.settle(order.base, order.committed)
            self.states.prune(order.durable)
        rolled_back = order.committed < self._committed
        if rolled_back or (self._held and self._held.order.interaction <= order.committed):
            self._held = None
        self._committed = order.committed

    def _context(self, order: rpc.Order, net: SplitNet | None = None) -> ClientContext:
        self.progress = Progress(order.interaction)
        at = Position(order.interaction, order.round, order.task)
        return ClientContext(
            self.run, self.client, at, net or self.net, self.stream, self.device, self._tick,
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

    def _state(self, order: rpc.Order) -> Bundle:
        return without(self._stored(order), self.set_up.owed)

    def _stored(self, order: rpc.Order) -> Bundle:
        """Return the private state to start from, with the residual that the client keeps."""
        loaded = self._loaded(order)
        if not self.set_up.keeps:
            return self._fixed_state
        held, first = without_summaries(loaded), len(self.set_ups.classes)
        if order.base < 0:
            return held
        assert isinstance(self.client, int)
        return self.set_up.grown(self.client, held, self.states.classes_of(order.base) or first)

    def _loaded(self, order: rpc.Order) -> Bundle:
        """Return the private state as it is stored, with the summaries of earlier tasks."""
        if not isinstance(self.client, int):
            raise PayloadError("the evaluator has no private state to train with")
        if not self.stateful:
            return self._fixed_state
        return self.states.load(order.base, init_client(self.method, self.run, self.client))

    @cached_property
    def _fixed_state(self) -> Bundle:
        """The private state of a method that keeps none from one interaction to the next."""
        assert isinstance(self.client, int)
        return init_client(self.method, self.run, self.client)

    def _train(self, order: rpc.Order, payload: Bundle) -> Result:
        """Train in the net of this process."""
        half = self.begin(order, payload)
        if isinstance(half, Result):
            return half
        begun = time.monotonic()
        done = train_locally(self.method, half.ctx, half.payload, half.state)
        return self.end(order, half, done, time.monotonic() - begun)

    def begin(self, order: rpc.Order, payload: Bundle, place: int = 0) -> ClientHalf | Result:
        """Prepare a training; return the result instead if an earlier order has produced it.

        ``place`` is the index among the clients that train at the same time, each with its own net.
        """
        self._follow(order)
        held = self._held
        state_is_there = not self.stateful or order.interaction in self.states.versions()
        if held is not None and state_is_there and _same(held.order, order):
            return Result(order, held.upload, held.report)
        nets = self.set_up.nets
        while len(nets) <= place:
            nets.append(self.net.copy())
        payload, state = self.set_up.wire.received(payload), self._state(order)
        self.stream.open(order.task)
        ctx = self._context(order, nets[place])
        ctx.may_train = lambda hidden: self.spending.check(order, hidden, self._cut)
        if (charge := self._whole_charge(order, payload, state)) is not None:
            assert self.floor is not None, "it is charged there"
            self.floor.check(charge)
        self._deploy_received(order, ctx, payload, state)
        if self.drift is not None:
            self.method.load(ctx, payload, state)
            self.drift.measure(ctx, self._loaded(order))
        return ClientHalf(self.method, ctx, payload, state)

    def _deploy_received(
        self, order: rpc.Order, ctx: ClientContext, payload: Bundle, state: Bundle
    ) -> None:
        """Offer the model that a client holds before it trains, where that is its own model."""
        if self.deployment is None or local_view(self.method) == "after_local":
            return
        ctx.view = local_view(self.method)
        self.method.load(ctx, payload, state if ctx.view == "after_downlink" else Bundle())
        self.deployment.offer(order, ctx.net, ctx.view)
        ctx.view = ""

    def end(self, order: rpc.Order, half: ClientHalf, done: LocalResult, seconds: float) -> Result:
        """Save the private state, and keep the upload until it is committed."""
        check_upload(self.method, self.set_up.upload_spec, done.upload)
        report = rpc.Report(
            loss=done.loss if done.num_examples else 0.0,
            seconds=coarse(seconds) if self._hides else round(seconds, 2),
            num_examples=done.num_examples,
            skipped_examples=half.ctx.skipped,
            extra=half.ctx.metrics,
            peak_rss_bytes=self._peak_rss_bytes(),
        )
        if half.ctx.hidden is not None:
            report.extra.update(self.spending.note(order, half.ctx.hidden, self._cut))
        if "after_local" in order.views:
            self._add_counts(report, order, half.ctx, "after_local", half.payload, done.state)
            self.final_model.keep_scored(order, half.ctx.net)
        if (charge := self._whole_charge(order, half.payload, half.state)) is not None:
            assert self.floor is not None, "it is charged there"
            self.floor.note(charge)
        leaving = with_own_noise(
            self.method, self.run, done.upload, half.payload, self.states.secret, order.interaction
        )
        upload, residual = leaving, Bundle().weights
        if (compression := self.set_up.compression) is not None:
            kept = self._stored(order).weights if compression.feedback else {}
            upload, residual = compression.returned_by(leaving, half.payload, kept)
        if self.set_up.secure is not None:
            upload = self._secure_client.masked(order, upload, half.payload, self.set_up.secure)
        if self.stateful:
            after = replace(done.state, weights={**done.state.weights, **residual})
            if self.drift is not None:
                after = self.drift.with_summaries(after)
                report.extra.update(self.drift.figures)
            self.states.save(order.interaction, after)
        report.durable = self.states.durable
        self.progress = Progress()
        tell_trained(order, report, upload.num_bytes())
        if self.deployment is not None and local_view(self.method) == "after_local":
            self.deployment.offer(order, half.ctx.net, "after_local")
        result = Result(order, upload, report)
        self._held = result if upload.num_bytes() <= self.keep_bytes else None
        return result

    def _whole_charge(self, order: rpc.Order, payload: Bundle, state: Bundle) -> Charge | None:
        """Return what the floor is charged where noise hides the whole client; else None."""
        privacy = self.experiment.privacy
        if self.floor is None or privacy is None or not privacy.hides_clients:
            return None
        contents = self.stream.contents(order.task, up_to=self.method.trains_on == "history")
        secret = self.states.secret()
        return charge_of_client(self.method, self.run, order, (payload, state), contents, secret)

    def _answer(self, order: rpc.Order) -> Result:
        """Answer an order of a secure sum that is not to train."""
        report = rpc.Report(durable=self.states.durable)
        report.secure_sum.CopyFrom(self._secure_client.answer(order))
        return Result(order, Bundle(), report)

    @cached_property
    def _secure_client(self) -> SecureClient:
        rules = self.experiment.secure_sum
        if rules is None or not isinstance(self.client, int):
            raise PayloadError("an order of a secure sum, and this client takes part in none")
        privacy = self.experiment.privacy
        noisy = privacy is not None and privacy.noise_at_clients
        fewest = fewest_summed(self.experiment) if noisy else 0
        if self.floor is not None:
            fewest = max(fewest, self.floor.floor.min_cohort)
        key = self.states.secret().key
        settings = settings_digest(self.experiment)
        return SecureClient(self.client, self.states.path, key, rules, fewest, settings, self.peers)

    def _peak_rss_bytes(self) -> int:
        """Return the peak memory of this process, rounded up; measured once a second at most."""
        now = time.monotonic()
        if now - self._looked_at > 1.0:
            self._peak = -(-peak_rss_bytes() // MEMORY_STEP) * MEMORY_STEP
            self._looked_at = now
        return self._peak

    def _evaluate(self, order: rpc.Order, payload: Bundle) -> Result:
        """Score the models the order names."""
        self._follow(order)
        report = rpc.Report(durable=self.states.durable)
        ctx = self._scoring_context(order)
        payload = self.set_up.wire.received(payload)
        state = Bundle() if self.client == EVALUATOR else self._state(order)
        for view in order.views:
            ctx.view = view
            after = state
            if view == "global":
                self.method.load(ctx, payload, Bundle())
            elif self.client == EVALUATOR:
                continue
            elif view == "after_local":  # outside of the cohort: nothing of it is kept or sent
                if (privacy := self.experiment.privacy) is not None and privacy.hides_examples:
                    raise PayloadError("an order to train for a score, which nobody would charge")
                ctx.view = ""
                after = train_locally(self.method, ctx, payload, state).state
            else:
                self.method.load(ctx, payload, state)
            self._add_counts(report, order, ctx, view, payload, after)
            if self.deployment is not None and view == local_view(self.method) != "after_local":
                self.deployment.offer(order, ctx.net, view)
        self.progress = Progress()
        tell_scored(order, report)
        return Result(order, Bundle(), report)

    def _finish(self, order: rpc.Order, payload: Bundle) -> Result:
        """Store the final personal model and report the digest of the private state."""
        self._follow(order)
        if self.client == EVALUATOR:
            return Result(order, Bundle(), rpc.Report())
        payload, ctx = self.set_up.wire.received(payload), self._scoring_context(order)
        state = self._state(order)
        if local_view(self.method) == "global":
            ctx.view = "global"
            self.method.load(ctx, payload, Bundle())
        else:
            ctx.view = "after_downlink"
            self.method.load(ctx, payload, state)
        shared = ctx.view == "global" or not self.set_up.keeps
        self.final_model.store(order, self.net, ctx.view, shared=shared)
        if self.deployment is not None and ctx.view == local_view(self.method):
            self.deployment.offer(order, self.net, ctx.view)
        line = f": the run is over; its model is in {self.states.path}"
        tell("finished", self.client, line, order, path=str(self.states.path))
        if isinstance(self.client, int) and self.client < self.experiment.evaluate.pictures:
            try:
                self._draw(ctx, payload, state)
            except Exception as error:  # no reason to lose a run
                log.warning("client %s drew no picture: %s", self.client, error)
        digest = state_digest([("client", self._stored(order))])
        if self.experiment.privacy is not None and self.experiment.privacy.hides_clients:
            digest = self.states.secret().keyed(digest)  # a guess at the state cannot be checked
        return Result(order, Bundle(), rpc.Report(state_sha256=digest))

    def _draw(self, ctx: ClientContext, payload: Bundle, state: Bundle) -> None:
        """Draw the method's pictures into this client's state directory."""
        known = ctx.at.task + 1 if self.is_open else self.data.num_tasks
        self.stream.meet(known)
        tests = [self.stream.test(task) for task in range(known)]
        x, y = (torch.cat(parts) for parts in zip(*tests, strict=True))
        from fedmodels.parts.pictures import pictures_of

        self.net.eval()
        found = pictures_of(self.method, ctx, payload, state, x, y)
        if found:
            from fedcli.runtime.pictures import draw  # imports Pillow

            for name, picture in found.items():
                path = self.states.path / "pictures" / f"{name}.svg"
                draw(picture, path, self.data.class_names)

    def _add_counts(
        self,
        report: rpc.Report,
        order: rpc.Order,
        ctx: ClientContext,
        view: str,
        payload: Bundle,
        state: Bundle,
    ) -> None:
        """Score the model in the net on the test sets of the order."""
        ctx.view = view
        masks = self.experiment.evaluate.class_masks and self.client != EVALUATOR
        seen = self._seen(order) if masks else None
        sets = dict(self._sets(order, view))
        kept: dict[str, list[Tensor]] = {}
        keeps = kept if self.experiment.evaluate.probabilities else None
        found = score(self.method, ctx, payload, state, sets, seen, order.confusion, keeps)
        by_class = self.experiment.announced == "exact"
        for (rule, name), c in found.items():
            report.counts.append(
                rpc.Counts(
                    view=view,
                    rule=rule,
                    test_set=name,
                    loss_sum=c.loss_sum,
                    support=c.support if by_class else [c.support.sum()],
                    predicted=c.predicted if by_class else [c.predicted.sum()],
                    correct=c.correct if by_class else [c.correct.sum()],
                )
            )
        own = [c.confusion for (_, name), c in found.items() if name.startswith("task/")]
        if counted := [cells for cells in own if cells is not None]:
            cells = np.sum(counted, axis=0)
            report.confusions.append(rpc.Confusion(view=view, counts=cells.ravel()))
        own_scores = [(torch.cat(kept[n]), sets[n][1]) for n in kept if n.startswith("task/")]
        if sum(len(y) for _, y in own_scores):
            logits, y = (torch.cat(parts) for parts in zip(*own_scores, strict=True))
            told = Probabilities.of(logits, y)
            report.probabilities.add(view=view, auroc=told.auroc, ece=told.ece)

    def _seen(self, order: rpc.Order) -> Tensor:
        """Return the classes that the client has had training examples of by now, (K,) bool."""
        tasks = range(min(order.tasks_seen, self.data.num_tasks))
        counts = [self.data.counts(task, "train") for task in tasks]
        return torch.tensor(counts).sum(0) > 0

    def _sets(self, order: rpc.Order, view: str) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield the test sets of an order by name: those of the tasks, and the global one."""
        if self.client != EVALUATOR:
            self.stream.meet(order.tasks_seen, order.first_task)
            for task in range(order.first_task, min(order.tasks_seen, self.data.num_tasks)):
                yield f"task/{task}", self.stream.test(task)
                if (kept := self.stream.validation(task)) is not None:
                    yield f"{VALIDATION}/{task}", kept
        if self.client == EVALUATOR or (order.global_test and view != "global"):
            found = self.stream.global_test()
            if found is not None:
                yield "global-test", found


def without(stored: Bundle, sections: tuple[str, ...]) -> Bundle:
    """Return a stored private state without what is kept under these prefixes."""
    rest = {name: t for name, t in stored.weights.items() if not name.startswith(sections)}
    return replace(stored, weights=rest) if len(rest) < len(stored.weights) else stored


def coarse(seconds: float) -> float:
    """Return seconds as they leave where noise hides a client: up to a power of two, from 1 on."""
    return float(2 ** max(0, math.ceil(math.log2(max(seconds, 1.0)))))


def _same(one: rpc.Order, other: rpc.Order) -> bool:
    """Tell whether the result of one order to train answers another as well."""
    same_training = one.interaction == other.interaction and one.trip == other.trip
    return same_training and one.views == other.views


# --- clients of a process together ----------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """An order to train, its payload, and the worker of its client."""

    worker: Worker
    order: rpc.Order
    payload: Bundle


def execute_together(tasks: Sequence[Task]) -> list[Result]:
    """Train the clients of several orders of one interaction at the same time.

    A client that cannot begin or end fails alone; an error in the common steps fails all. Orders
    that were abandoned have no result.
    """
    found: list[Result | None] = []
    begun: list[tuple[Task, ClientHalf]] = []
    for place, task in enumerate(tasks):
        try:
            half = task.worker.begin(task.order, task.payload, place)
            if isinstance(half, Result):
                found.append(half)
                continue
            begin_apart(half)
            begun.append((task, half))
        except Exception as error:
            found.append(task.worker.failed(task.order, error))
    if begun:
        found += _trained(begun)
    return [result for result in found if result is not None]


def _trained(begun: Sequence[tuple[Task, ClientHalf]]) -> list[Result | None]:
    start = time.monotonic()
    try:
        losses = fit_together([half for _, half in begun])
    except Exception as error:
        return [task.worker.failed(task.order, error) for task, _ in begun]
    each = (time.monotonic() - start) / len(begun)
    return [_ended(*one, loss, each) for one, loss in zip(begun, losses, strict=True)]


def _ended(task: Task, half: ClientHalf, loss: float, seconds: float) -> Result | None:
    try:
        return task.worker.end(task.order, half, end_apart(half, loss), seconds)
    except Exception as error:
        return task.worker.failed(task.order, error)
