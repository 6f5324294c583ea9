"""Orders on their way from the thread that pulls them to the one that does them, and their end."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from fedcli.runtime.answers import RunOver
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.bundle import Bundle
from fedmodels.times import IDLE_TOLD_S, WAKE_S
from fedpb.v1 import coordinator_pb2 as rpc

OrderWithPayload: TypeAlias = tuple[rpc.Order, Bundle]
log = logging.getLogger(__name__)


class OrderQueue:
    """Hands over the orders of one message, in their order; any thread may end the queue."""

    _waiting: Guarded[deque[OrderWithPayload]] = Guarded("_changed")
    _over: Guarded[bool] = Guarded("_changed")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.failure: BaseException | None = None
        """Why this process has to end, if it has."""
        self._changed = threading.Condition()
        self._waiting, self._over = deque(), False

    def put(self, orders: Sequence[OrderWithPayload]) -> None:
        """Add the orders of a message, once those of the message before are taken."""
        with self._changed:
            while self._waiting and not self._over:
                self._changed.wait()
            self._waiting.extend(orders)
            self._changed.notify_all()

    def end(self, failure: BaseException | None = None) -> None:
        """End every wait: the run is over, or this process has to end.

        If several failures are given, the first one counts.
        """
        with self._changed:
            self.failure = self.failure or failure
            self._over = True
            self._changed.notify_all()

    def take(self) -> OrderWithPayload:
        """Wait for the next order and its payload; log one line if none comes for a minute.

        Raises:
            RunOver: the run is over, and no client has to store its final model.
            BaseException: the failure.
        """
        begun, is_told = self._clock(), False
        with self._changed:
            while True:
                if self.failure is not None:
                    raise self.failure
                if self._over:
                    finishing = rpc.ORDER_KIND_FINISH
                    self._waiting = deque(o for o in self._waiting if o[0].kind == finishing)
                if self._waiting:
                    found = self._waiting.popleft()
                    self._changed.notify_all()
                    return found
                if self._over:
                    raise RunOver
                now = self._clock()
                if now >= begun + IDLE_TOLD_S and not is_told:
                    is_told = True
                    waits = "no order for %.0f s: the run waits for others, or for new data"
                    log.info(waits, now - begun)
                self._changed.wait(WAKE_S)
