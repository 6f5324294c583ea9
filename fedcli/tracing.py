"""A host that tells its clients' work as spans of OpenTelemetry, if its own environment asks so."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedcli.runtime.enrolment import client_of
from fedcli.runtime.host import Host
from fedcli.runtime.worker import GivenOrder, Result
from fedmodels.host.spans import Spans, exported
from fedpb.failures import failed_by
from fedpb.v1 import coordinator_pb2 as rpc

log = logging.getLogger(__name__)


def traced_host() -> type[Host]:
    """Return a kind of host that tells spans; where that is not possible, a warning says why."""
    found, why = exported("fedcli")
    if found is None:
        log.warning("%s", why)
        return Host
    return type("TracedHost", (TracedHost,), {"spans": found})


class TracedHost(Host):
    """Tells what a client did for an order, and how long its result took to be brought."""

    spans: Spans
    """Where they are told."""
    _begun_s = 0.0

    @contextmanager
    def taking_part(self) -> Iterator[None]:
        """Take part, and send what is not sent yet at the end."""
        try:
            with super().taking_part():
                yield
        finally:
            self.spans.end()

    def orders(self) -> Iterator[GivenOrder]:
        """Yield what is to be done, and note when."""
        for given in super().orders():
            self._begun_s = time.time()
            yield given

    def hand_on(self, results: list[Result] | None) -> None:
        """Tell of work that is done, and give its results on."""
        ended_s = time.time()
        for one in results or ():
            kind = rpc.OrderKind.Name(one.order.kind).removeprefix("ORDER_KIND_").lower()
            self._tell(kind, one, self._begun_s, ended_s)
        super().hand_on(results)

    def _push(self, result: Result) -> None:
        begun_s = time.time()
        super()._push(result)
        self._tell("upload", result, begun_s, time.time(), bytes=result.upload.num_bytes())

    def _tell(
        self, name: str, result: Result, begun_s: float, ended_s: float, **facts: object
    ) -> None:
        order, gate = result.order, self.link.gate
        failed = failed_by(result.reason, result.failure if gate.tells("failure") else "")
        run = self.enrolment.members[client_of(order.client_id)].run_id
        way = ("order", f"{order.client_id} {order.kind}"), (name, "")
        more = {"client": order.client_id, "round": order.round, "task": order.task, **facts}
        self.spans.tell(way, run, order.interaction, begun_s, ended_s, failed, **more)
