"""One relay: it pulls its clients' orders, gives them out, and sends the sums of their weights up.

It needs nothing that was on disk. A client's session is that of the coordinator above, and a client
keeps its upload until the interaction is committed. So a relay that is killed and started again
goes on: its clients join again, get the order under way once more, and bring the same upload.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, LinkError, PayloadError
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.bundle import Bundle, ClientId
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.times import LOOK_EVERY_S, MAX_WAIT_S, PAUSE_S, QUIET_S, SITE_LOOK_S, transfer_s
from fedpb.codec import Receiver
from fedpb.frames import MESSAGE_BYTES
from fedpb.orders import WITHOUT_PAYLOAD, read_order
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.kept_log import kept_log
from fedplugins.relays.service import RelayService
from fedplugins.relays.trips import ClientGroup, Delivery, RelayedTrips
from fedplugins.relays.uplink import REFUSALS, CallFailed, Uplink, meaning_of
from fedsrv.coordinator import open_server, telling_the_end
from fedsrv.identity.listen import Listen
from fedsrv.identity.tls import ChannelCredentials
from fedsrv.progress.event_lines import EventPrinter
from fedsrv.progress.events import HAS_FAILED, EventLog
from fedsrv.transport.refusals import NotReady, RunOver, Superseded, UnknownSession
from fedsrv.transport.sessions import client_id_of
from fedsrv.transport.spool import Spool

MEMORY_MB = 256
"""Uploads of a group beyond it are added up as they come."""
log = logging.getLogger("fedsrv")


class RunGone(LinkError):
    """The run is there no more: it has failed, or another one is served in its place."""


@dataclass(frozen=True)
class Upstream:
    """The coordinator above a relay."""

    address: str
    credentials: ChannelCredentials | None = None
    check: Callable[[], None] = lambda: None
    """Raises a LinkError if the coordinator's certificate was revoked."""
    is_served: Callable[[], bool] = lambda: True
    """Whether the front of a queue still serves a run there; asked now and then."""


def serve_relay(
    clients: range,
    above: Upstream,
    listen: Listen,
    telling: EventPrinter,
    code: Sequence[Path] = (),
    log_place: Path | None = None,
    on_ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Pass a run's orders and results on, until it is over.

    The run is that of the client that joins first. None of what is known of it is left for another.

    Args:
        clients: who may join.
        above: the coordinator.
        listen: where and how to listen.
        telling: says what happens.
        code: custom files whose code may run, if the run's config names them.
        log_place: the directory of a log of calls; none is kept without it.
        on_ready: told the address, once clients can join.

    Raises:
        ConfigError: an argument is no good.
        RunGone: the run failed, or another one is served in its place; the clients were told.
        LinkError: the coordinator above refused; the clients were told.
    """
    listen.check()
    above.check()
    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="fedtide-relay-"))
        events = EventLog()
        journal = stack.enter_context(kept_log(log_place, events))
        trips = RelayedTrips(clients, Spool(Path(scratch), MEMORY_MB << 20), events)
        uplink = Uplink(above.address, above.credentials)
        stack.callback(uplink.close)
        if away := uplink.check():
            log.warning("no coordinator at %s yet: clients wait here (%s)", above.address, away)
        relaying = Relaying(trips, uplink, above.check)
        stack.callback(relaying.stop)
        asks = partial(relaying.leave_unless, above.is_served)
        threading.Thread(target=asks, name="front", daemon=True).start()
        service = RelayService(
            clients, trips, events, uplink,
            guard=listen.guard(), code=code, journal=journal, on_other_run=relaying.leave,
        )  # fmt: skip
        address = listen.at(open_server(stack, service, listen))
        count = len(clients)
        events.tell("listening", address=address, clients=count, needed=count)
        for line in listen.caveats():
            events.tell("note", line=line)
        telling.begin(address, events)
        on_ready(address)
        with telling_the_end(events):
            relaying.run()
        events.tell("finished", metrics={}, state_sha256="")  # the coordinator's watchers know more


class Relaying:
    """The work of a relay: one thread pulls orders, this one sends sums."""

    _ended: Guarded[Exception | None] = Guarded("_lock")
    """Why the relay has to end, if it has."""
    _call: Guarded[Any] = Guarded("_lock")
    """The Pull under way."""
    _pulled: Guarded[dict[ClientId, bytes]] = Guarded("_lock")
    """The tokens of the clients for whom the Pull under way waits."""
    _issues: Guarded[dict[ClientId, int]] = Guarded("_lock")
    """The issue of each client's last order that was given out."""
    _delivery: Guarded[Delivery] = Guarded("_lock")
    """The orders that came half-way."""
    _heard: Guarded[float] = Guarded("_lock")
    """When the last message of the Pull under way came."""
    _seen: Guarded[tuple[int, float]] = Guarded("_lock")
    """What the last look after the Pull saw, and when that was."""

    def __init__(
        self, trips: RelayedTrips, uplink: Uplink, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self.trips, self.below, self.uplink = trips, trips.below, uplink
        self._lock = trips.changed
        self._ended, self._call, self._delivery = None, None, Delivery()
        self._pulled, self._issues = {}, {}
        self._heard, self._seen = 0.0, (-1, 0.0)
        self._held: dict[bytes, Bundle] = {}
        """Parts of payloads by digest, of the thread that pulls."""
        self._begun: dict[bytes, Receiver] = {}
        """The part that is coming, or whose beginning had come when the link broke, likewise."""

    def run(self) -> None:
        """Relay until the run is over.

        Raises:
            RunGone: the run failed, or another one is served.
            LinkError: the coordinator above refused.
        """
        threading.Thread(target=self._pull_forever, name="pull", daemon=True).start()
        while (group := self._next_group()) is not None:
            self._send(group)
        over = self._why_ended()
        if isinstance(over, RunOver):
            self.below.end()
            return log.info("the run is over")
        failure = str(over).removeprefix(HAS_FAILED)
        self.below.end(f"{HAS_FAILED}{failure}")
        is_gone = isinstance(over, RunGone) or str(over).startswith(HAS_FAILED)
        raise RunGone(failure) if is_gone else LinkError(failure)

    def stop(self) -> None:
        """End the thread that pulls; a Pull that is cancelled from now on is no loss."""
        self._end(LinkError("the relay stops"))

    def leave(self, run: str, other: str) -> None:
        """End, since another run is served in the place of the one that clients have joined."""
        now, before = printable(other[:8]), printable(run[:8])
        if not other:
            return self._end(RunGone("the runs of a queue are served behind its front"))
        self._end(RunGone(f"run {before} is not served any more, and run {now} is"))

    def leave_unless(self, is_served: Callable[[], bool]) -> None:
        """Look now and then whether the run is served, and end once it is not."""
        while self._why_ended() is None:
            if not is_served():
                self._end(RunGone("the queue serves no run there any more"))
            self._pause(SITE_LOOK_S)

    def _end(self, why: Exception) -> None:
        with self.trips.changed:
            self._ended = self._ended or why
            self.trips.changed.notify_all()

    def _why_ended(self) -> Exception | None:
        """Return why the relay has to end, if it has."""
        with self._lock:
            return self._ended

    # --- sums -------------------------------------------------------------------------------------

    def _next_group(self) -> ClientGroup | None:
        """Wait for a group whose sum can go up; None once the run is over."""
        with self.trips.changed:
            while self._ended is None:
                self._look_after_the_pull()
                if group := self.trips.ready_group():
                    return group
                self.trips.changed.wait(self.trips.due_in(LOOK_EVERY_S))
        return None

    def _live_tokens(self) -> dict[ClientId, bytes]:
        """Return the tokens of the clients that are connected; the caller holds the lock."""
        return {client: session.token for client, session in self.below.live().items()}

    def _look_after_the_pull(self) -> None:
        """Begin another Pull when other clients are there, or orders stopped half-way."""
        now, moves = time.monotonic(), self.below.moves + self.trips.joins
        if moves == self._seen[0] and now < self._seen[1] + LOOK_EVERY_S:
            return
        self._seen = moves, now
        live = self._live_tokens()
        half_way = self._delivery.orders and now - self._heard > QUIET_S + transfer_s(MESSAGE_BYTES)
        if self._call is not None and (live != self._pulled or half_way):
            self._call.cancel()

    def _send(self, group: ClientGroup) -> None:
        """Send a sum until the coordinator above has it, or nobody wants it any more."""
        order, cosines, sums = group.order, group.cosines(), group.sums()
        clients = sorted(c for c in group.results if isinstance(c, int))
        if not clients:
            return
        header = rpc.PushHeader(
            kind=order.kind, interaction=order.interaction, trip=order.trip, issue=order.issue
        )
        for client in clients:
            token, cosine = group.tokens[client], cosines.get(client)
            header.members.add(client_id=str(client), token=token, cosine=cosine)
        wait_s = PAUSE_S
        while self._is_wanted(group):
            try:
                self.uplink.push(header, Bundle(weights=sums or {}))
                return
            except REFUSALS as refused:
                why = refused
            if not isinstance(why, NotReady | UnknownSession):
                log.error("interaction %d: the sum was refused: %s", order.interaction + 1, why)
            if isinstance(why, UnknownSession):
                self._forget()
            elif isinstance(why, Superseded):
                self._ask_again(group)
            elif not isinstance(why, NotReady):
                return
            with self.trips.changed:
                self.trips.changed.wait(wait_s)
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    def _is_wanted(self, group: ClientGroup) -> bool:
        """Tell whether a group's sum is still due here.

        Its orders may be issued anew while the sum is on its way: the coordinator above tells by
        the issue in the header that it is one of before.
        """
        with self.trips.changed:
            return self._ended is None and self.trips.group is group

    def _forget(self) -> None:
        """Have all clients join again: orders that they had come once more."""
        with self.trips.changed:
            self.trips.forget()
            self._issues.clear()

    def _ask_again(self, group: ClientGroup | None) -> None:
        """Take a group's orders back and ask for them again: they say who is left of it.

        The clients keep their sessions. One of them may have brought its whole upload past the
        relay, and could otherwise have all of them join again in each interaction.
        """
        with self.trips.changed:
            if self.trips.group is not group:  # other orders have come meanwhile
                return
            self.trips.recall()
            self._issues.clear()
            self._pulled, self._seen = {}, (-1, 0.0)  # ends the Pull under way

    # --- orders -----------------------------------------------------------------------------------

    def _pull_forever(self) -> None:
        try:
            self._pull_until_the_end()
        except Exception as error:  # else clients would wait for ever for this thread
            log.exception("the relay cannot continue")
            self._end(LinkError(f"the relay cannot continue: {error}"))

    def _pull_until_the_end(self) -> None:
        wait_s = PAUSE_S
        while (asked := self._request()) is not None:
            joins, request = asked
            try:
                self._check()
                call = self.uplink.pull(request)
                with self._lock:
                    self._call = call
                self._read(call)
                self._pause(PAUSE_S)  # the call ended without an error: another took its place
                wait_s = PAUSE_S
            except (ConfigError, PayloadError) as error:
                self._end(LinkError(f"the coordinator above sent what does not fit: {error}"))
            except LinkError as error:
                self._end(error)
            except CallFailed as error:
                wait_s = self._judge(error, joins, wait_s)
            finally:
                with self._lock:
                    self._call, self._delivery = None, Delivery()

    def _request(self) -> tuple[int, rpc.PullRequest] | None:
        """Wait until a client is there; return how many have joined, and a request for all.

        None at the end.
        """
        with self.trips.changed:
            while self._ended is None and not (live := self.below.live()):
                self.trips.changed.wait(LOOK_EVERY_S)
            if self._ended is not None:
                return None
            self._pulled = self._live_tokens()
            begun = [rpc.Begun(digest=d, bytes=r.received) for d, r in self._begun.items()]
            request = rpc.PullRequest(held=list(self._held), begun=begun)
            for client, session in live.items():
                request.waiting.add(
                    client_id=str(client), token=session.token, durable=session.durable,
                    issue=self._issues.get(client, 0),
                )  # fmt: skip
            return self.trips.joins, request

    def _read(self, call: Any) -> None:
        """Give out orders as they come, those that came together at a time."""
        messages = self._noting(call)
        while found := read_order(messages, self._parts_of, self._held, self._begun):
            header, parts = found
            if "common" not in parts and header.order.kind not in WITHOUT_PAYLOAD:
                raise PayloadError("an order has no common part")
            for order in (header.order, *header.more):
                self._add(order, parts, tuple(header.group))

    def _noting(self, call: Any) -> Iterator[bytes]:
        """Yield the messages of a Pull, and note when they come."""
        for message in call:
            with self._lock:
                self._heard = time.monotonic()
            yield message

    def _add(self, order: rpc.Order, parts: Mapping[str, Bundle], group: tuple[int, ...]) -> None:
        """Add an order to those that came with it; give them out with the last one."""
        client = client_id_of(order.client_id, self.below.num_clients)
        with self._lock:
            delivery = self._delivery
            if order.issue != delivery.issue:
                common = parts.get("common", Bundle())
                delivery = self._delivery = Delivery(order.issue, common=common)
            delivery.orders[client] = order
            delivery.group = delivery.group or group
            if "personal" in parts:
                delivery.personal[client] = parts["personal"]
            if order.following:
                return
            self._issues |= dict.fromkeys(delivery.orders, delivery.issue)
            self._delivery = Delivery()
        self.trips.begin(delivery)

    def _parts_of(self, order: rpc.Order) -> Mapping[str, BundleSpec]:
        """Return what the parts of an order's payload must hold, by role."""
        client = client_id_of(order.client_id, self.below.num_clients)
        return (
            {} if order.kind in WITHOUT_PAYLOAD else self.trips.run_of(client, order).payload_spec
        )

    def _judge(self, error: CallFailed, joins: int, wait_s: float) -> float:
        """Act on the end of a Pull, and wait before the next one; return how long to wait then."""
        why = meaning_of(error)
        if self._why_ended() is not None:
            return wait_s
        if isinstance(why, UnknownSession):
            if not self.trips.joined_since(joins):  # else a client's new session ended the Pull
                self._forget()
        elif isinstance(why, Superseded):
            with self.trips.changed:
                self._ask_again(self.trips.group)
        elif not isinstance(why, NotReady):
            self._end(why)
        elif self._is_current():
            if wait_s == PAUSE_S:
                log.warning("lost %s, trying again: %s", self.uplink.address, why)
            self._pause(wait_s)
            return min(2 * wait_s, MAX_WAIT_S)
        return PAUSE_S

    def _pause(self, seconds: float) -> None:
        """Wait so long, or until the run is over."""
        with self.trips.changed:
            self.trips.changed.wait_for(lambda: self._ended is not None, seconds)

    def _is_current(self) -> bool:
        """Tell whether the Pull that ended was for those who are there now."""
        with self.trips.changed:
            return self._live_tokens() == self._pulled
