"""When the training data of earlier tasks may be deleted: a line for the client's owner."""

from __future__ import annotations

import logging

from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)


class Spare:
    """Follows the orders of one client of a run that gets further tasks.

    A run goes back to its durable watermark at most. So once that lies behind all training on a
    task, nobody asks for the training data of that task again.
    """

    def __init__(self) -> None:
        self._task, self._first, self._told = -1, -1, 0

    def tell(self, order: rpc.Order) -> None:
        """Log a line when the training data of earlier tasks have become spare."""
        if order.kind == rpc.ORDER_KIND_TRAIN and order.task != self._task:
            self._task, self._first = order.task, order.interaction
        if self._task > self._told and order.durable >= self._first - 1:
            self._told = self._task
            tasks = "task 0" if self._task == 1 else f"tasks 0 to {self._task - 1}"
            log.info(
                "client %s: the run has gone on to task %d: the training data of %s are not needed "
                "any more", order.client_id, self._task, tasks,
            )  # fmt: skip
