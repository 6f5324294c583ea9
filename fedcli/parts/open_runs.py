"""A client in an open run: its data grow, classes come, and earlier tasks become spare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from fedcli.runtime.client_part import Client, ClientPart, Training
from fedcli.runtime.enrolment import Enrolment
from fedmodels.config.combinations import part_at
from fedmodels.errors import DataError, PayloadError, reason_of
from fedmodels.parts.class_growth import StateGrowth
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.wire import sections_off
from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)


class OpenRuns(ClientPart):
    """Follows what comes while a run goes on."""

    def __init__(self, client: Client) -> None:
        """Begin before the first order."""
        super().__init__(client)
        self._spare = Spare()
        self._off: tuple[str, ...] = ()
        """Prefixes of what parts kept that are off by now."""
        self._began: int | None = None
        """The task of the last training, whose validation part was looked after."""

    @classmethod
    def beside(cls, enrolment: Enrolment) -> Callable[[], None]:
        """Tell the server of tasks that were added to clients' data."""
        watched: Any = enrolment.workers.brought.get("watched")
        how = () if watched is None else (watched.incoming, watched.strict, watched.stays)
        kind = "fedcli.runtime.announcer:Announcer"  # reads files as sites have them
        news = cache(lambda: part_at(kind)(enrolment, *how))
        return lambda: news().look()

    def woken(self) -> None:
        """Read the client's description again if tasks were added to its data."""
        if not self.client.data.is_stale:
            return
        try:
            self.client.data.refresh()
        except DataError as error:
            name = self.client.client
            log.error("client %s continues with the data that it had: %s", name, error)

    def grown(self) -> None:
        """Take the order of the run's classes for labels; classes may have become one."""
        client, classes = self.client, self.client.set_up.classes
        if classes.merged != client.data.classes.merged:
            client.stream.close()  # what it holds has the labels of before
        client.data.order_by(classes)

    def loaded(self, state: Bundle, classes: int) -> Bundle:
        """Return a private state, stored with so many classes, for the classes of now.

        Raises:
            PayloadError: there were more than now.
        """
        left = {n: t for n, t in state.weights.items() if not n.startswith(self._off)}
        state = replace(state, weights=left) if self._off else state
        set_up, now = self.client.set_up, self.client.run.problem.num_classes
        if classes == now:
            return state
        if classes > now:
            raise PayloadError(
                f"the order is of {now} classes, and the private state that it names of {classes}"
            )
        assert isinstance(self.client.client, int), "the evaluator has no private state"
        kept = self.client.set_ups.shared.setdefault("growths", WeakKeyDictionary())
        growths: dict[int, StateGrowth] = kept.setdefault(set_up, {})
        if classes not in growths:
            before = set_up.run.for_classes(classes)
            growths[classes] = StateGrowth(set_up.method, before, set_up.run)
        return growths[classes].client(self.client.client, state, set_up.owed)

    def follows(self, order: rpc.Order) -> None:
        """Look at the parts of now, and say when training data of earlier tasks may go."""
        is_changed = order.HasField("settings")
        self._off = sections_off(self.client.experiment) if is_changed else ()
        if isinstance(self.client.client, int):
            self._spare.tell(order, self._keeps)

    def begins(self, half: Training) -> None:
        """Store the validation part of a task, which outlives its training data."""
        if (task := half.ctx.task) == self._began:
            return
        self._began = task
        self._keeps(task)

    def _keeps(self, task: int) -> bool:
        """Store the validation part of a task unless it is there; tell whether that went well."""
        try:
            if (kept := self.client.stream.kept) is not None:
                kept.store(self.client.data, task)
        except (DataError, OSError) as error:
            log.warning(
                "client %s: the validation part of task %d cannot be stored (%s): keep its "
                "training data", self.client.client, task,
                reason_of(error) if isinstance(error, OSError) else error,
            )  # fmt: skip
            return False
        return True


class Spare:
    """Says when the training data of earlier tasks may be deleted, in a run that gets new tasks.

    A run goes back to its durable watermark at most. So once that lies behind all training on a
    task, nobody asks for the training data of that task again.
    """

    def __init__(self) -> None:
        self._task, self._first, self._told = -1, -1, 0

    def tell(self, order: rpc.Order, keeps: Callable[[int], bool] = lambda task: True) -> None:
        """Log a line when the training data of earlier tasks have become spare.

        ``keeps`` stores what is needed of those of a task, and tells whether that went well.
        """
        if order.kind == rpc.ORDER_KIND_TRAIN and order.task != self._task:
            self._task, self._first = order.task, order.interaction
        if self._task > self._told and order.durable >= self._first - 1:
            self._told = self._task
            if [task for task in range(self._task) if not keeps(task)]:
                return
            tasks = "task 0" if self._task == 1 else f"tasks 0 to {self._task - 1}"
            log.info(
                "client %s: the run has gone on to task %d: the training data of %s are not needed "
                "any more", order.client_id, self._task, tasks,
            )  # fmt: skip
