"""Clients that join over the network, as the engine's cohort.

Holds sessions, the trip under way and its results behind one lock; knows nothing of gRPC. The
engine's thread waits in it for the clients, the service's threads bring what they say.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from fedmodels.errors import PayloadError, RunFailed
from fedmodels.printable import printable
from fedmodels.types import EVALUATOR, ClientId
from fedpb import coordinator_pb2 as rpc
from fedsrv.admission import Admission
from fedsrv.cohort import HoldsState, LossTooLarge, Result, Results, StateLost, Trip
from fedsrv.events import EventLog
from fedsrv.open_trip import OpenTrip, answers, by_id, why_failed
from fedsrv.sessions import AlreadyConnected, Caller, Member, UnknownSession
from fedsrv.spool import Spool

MOST_TOKEN_BYTES = 64


class RemoteCohort:
    """Clients that join over the network; its methods are called from many threads."""

    LEASE_S = 15.0
    """A client neither waiting nor heard of for this long is no longer connected."""
    MOST_AHEAD = 3
    """Orders a process may have: one its client trains for, one it holds, one on its way; and
    twice as many as train together, if that is more."""

    def __init__(
        self,
        num_clients: int,
        spool: Spool,
        events: EventLog,
        *,
        deadline_s: float | None = None,
        admission: Admission,
        expects_evaluator: bool = False,
        together: int = 1,
    ) -> None:
        self.num_clients = num_clients
        self._most_ahead = max(self.MOST_AHEAD, 2 * together)
        self.spool, self.events = spool, events
        self.admission = admission
        self._deadline_s = deadline_s
        self._expected: list[ClientId] = [*range(num_clients)]
        if expects_evaluator:
            self._expected.append(EVALUATOR)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Tells the engine; every Pull has a condition of its own, or one result would wake all."""
        self._callers: set[Caller] = set()
        self._members: dict[ClientId, Member] = {}
        self._open: OpenTrip | None = None
        self._lost: int | None = None
        self._starting_over: set[int] = set()
        self._required: HoldsState = lambda client, versions: True
        self._stateful = False
        self._stopped: str | None = None
        self.committed = self.watermark = -1

    # --- for the engine ---------------------------------------------------------------------------

    def require(self, holds: HoldsState, last_trained: Mapping[int, int]) -> None:
        with self._changed:
            self._required, self._stateful = holds, True
            for client, member in list(self._members.items()):
                member.trained = last_trained.get(client, -1) if isinstance(client, int) else -1
                try:
                    self._lacks_state(client, member.versions, member.start_over)
                except LossTooLarge:  # it is told so when it joins again
                    del self._members[client]
            self.wake()

    def starting_over(self) -> Sequence[int]:
        with self._changed:
            found, self._starting_over = sorted(self._starting_over), set()
        return found

    def _lacks_state(self, client: ClientId, versions: Sequence[int], start_over: bool) -> bool:
        """Tell whether a client's states do not suffice; one that may, starts over.

        Raises:
            LossTooLarge: the run may not go back to what it has.
        """
        if not isinstance(client, int):
            return False
        try:
            return not self._required(client, versions)
        except LossTooLarge:
            if not start_over:
                raise
            self._starting_over.add(client)
            return True

    def gather(self) -> Mapping[int, str]:
        with self._changed:
            self._wait(lambda: all(c in self._members for c in self._expected))
            while self._turn_away(self.admission.settle()):
                self._wait(lambda: all(c in self._members for c in self._expected))
            found = {c: m.client_json for c, m in self._members.items() if isinstance(c, int)}
        return dict(sorted(found.items()))

    def has_evaluator(self) -> bool:
        with self._changed:
            return EVALUATOR in self._members

    def versions(self) -> Mapping[int, Sequence[int]]:
        with self._changed:
            self._lost = None
            return {c: m.versions for c, m in self._members.items() if isinstance(c, int)}

    def exchange(self, trip: Trip) -> Results:
        """Give the orders and wait until all answered, or the deadline closes the trip.

        Raises:
            RunFailed: fewer clients than needed can answer; names those that failed.
            StateLost: a client came back without the state it must hold.
        """
        open_trip = OpenTrip.of(trip, self.spool.budget)
        needed = open_trip.needed
        with self._changed:
            self._open = open_trip
            self.wake()
            self._wait(
                lambda: (
                    open_trip.is_complete()
                    or len(trip.orders) - len(open_trip.failed) < needed
                    or self._lost is not None
                ),
                lambda: len(open_trip.results) >= needed,
            )
            self._open = None
            if self._lost is not None:
                raise StateLost(self._lost, self._members[self._lost].versions)
            results = dict(sorted(open_trip.results.items(), key=by_id))
            failed = dict(sorted(open_trip.failed.items(), key=by_id))
        if len(results) < needed:
            raise RunFailed(why_failed(trip, failed))
        mean = open_trip.folding.finish(open_trip.results)
        wire_up = sum(r.wire_up for r in results.values())
        return Results(results, failed, open_trip.wire_down, wire_up, mean)

    def _wait(self, done: Callable[[], bool], enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for ``done``; after the deadline ``enough`` will do."""
        begun = time.monotonic()
        while not done():
            if self._stopped is not None:
                raise RunFailed(self._stopped)
            left = None
            if self._deadline_s is not None:
                left = begun + self._deadline_s - time.monotonic()
                if left <= 0:
                    if enough():
                        return
                    left = 1.0
            self._changed.wait(left)

    def commit(self, interaction: int, watermark: int) -> None:
        with self._changed:
            self.committed, self.watermark = interaction, watermark

    def durable(self) -> int | None:
        with self._changed:
            if not self._stateful:
                return None
            late = [
                m.durable
                for c, m in self._members.items()
                if isinstance(c, int) and m.durable < min(m.trained, self.committed)
            ]
            return min(late, default=None)

    def stop(self, reason: str) -> None:
        """Make the engine's waiting end with an error."""
        with self._changed:
            self._stopped = self._stopped or reason
            self._changed.notify_all()

    # --- for the service --------------------------------------------------------------------------

    def join(
        self,
        client: ClientId,
        client_json: str,
        token: bytes,
        versions: Sequence[int],
        start_over: bool = False,
    ) -> bytes:
        """Admit a client and return its session token.

        Raises:
            AlreadyConnected: the id is connected, and the token is not its session's.
            PayloadError: its description does not fit the run, or its token is too long.
            LossTooLarge: it lost states, and the run may not go back so far.
        """
        if len(token) > MOST_TOKEN_BYTES:
            raise PayloadError(f"a session token has {MOST_TOKEN_BYTES} bytes at most")
        self.admission.check(client, client_json)
        with self._changed:
            known = self._members.get(client)
            takes_over = known is not None and secrets.compare_digest(token, known.token)
            if known and not takes_over and self._is_connected(known):
                raise AlreadyConnected(f"client {client} is connected already")
            lost = self._lacks_state(client, versions, start_over)
            member = Member(
                token or secrets.token_bytes(16),
                client_json,
                tuple(versions),
                time.monotonic(),
                trained=known.trained if known else -1,
                start_over=start_over,
            )
            self._members[client] = member
            self._turn_away(self.admission.admit(client, client_json))
            if lost and isinstance(client, int):
                self._lost = client
            self._changed.notify_all()
            if known:
                self.wake()  # whoever waited for this client does so no longer
        self.events.tell("joined", client)
        return member.token

    def _turn_away(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """End the sessions of clients whose problem is not the run's: joining again is refused."""
        for client in clients:
            self._members.pop(client, None)
            reason = "turned away: most clients describe another problem"
            self.events.tell("failed", client, reason=reason)
        if clients:
            self.wake()
        return clients

    def _is_connected(self, member: Member) -> bool:
        return member.waiting > 0 or time.monotonic() - member.seen < self.LEASE_S

    def member(self, client: ClientId, token: bytes) -> Member:
        """Return the session a token belongs to.

        Raises:
            UnknownSession: there is none.
        """
        member = self._members.get(client)
        if member is None or not secrets.compare_digest(member.token, token):
            raise UnknownSession(f"client {client} has no session with this token; join again")
        member.seen = time.monotonic()
        return member

    def caller(self, clients: Mapping[ClientId, Member], issues: Mapping[ClientId, int]) -> Caller:
        """Return a Pull for these clients, in place of those there were.

        Args:
            clients: the sessions it waits for.
            issues: the issue of the last order each of them has got.
        """
        with self._lock:
            caller = Caller(clients, threading.Condition(self._lock))
            for client, member in clients.items():
                if member.caller is not None:
                    member.caller.told.notify()
                member.caller, member.issue = caller, issues[client]
        return caller

    def next_order(
        self, caller: Caller, is_active: Callable[[], bool]
    ) -> tuple[rpc.Order, OpenTrip] | None:
        """Wait until a caller's client has an order; None when the caller is gone, or replaced."""
        with self._lock:
            self._callers.add(caller)
            for member in caller.clients.values():
                member.waiting += 1
            try:
                while is_active() and all(m.caller is caller for m in caller.clients.values()):
                    found = self._order_for(caller)
                    if found is not None:
                        return found
                    caller.told.wait()
                return None
            finally:
                self._callers.discard(caller)
                for member in caller.clients.values():
                    member.waiting -= 1
                    member.seen = time.monotonic()

    def _order_for(self, caller: Caller) -> tuple[rpc.Order, OpenTrip] | None:
        trip = self._open
        for client, member in caller.clients.items():
            if self._members.get(client) is not member:
                raise UnknownSession(f"another session took over client {client}")
        if trip is None:
            return None
        due = [c for c in caller.clients if c in trip.trip.orders and not trip.answered(c)]
        fresh = [c for c in due if caller.clients[c].issue != trip.issue]
        caller.is_full = len(due) - len(fresh) >= self._most_ahead
        if caller.is_full or not fresh:
            return None
        order = rpc.Order()
        order.CopyFrom(trip.trip.orders[fresh[0]])
        order.issue = caller.clients[fresh[0]].issue = trip.issue
        order.committed, order.durable = self.committed, self.watermark
        order.following = len(fresh) - 1
        return order, trip

    def is_superseded(self, interaction: int) -> bool:
        """Tell whether training for an interaction has become pointless."""
        with self._changed:
            return 0 <= interaction <= self.committed

    def count_down(self, trip: OpenTrip, num_bytes: int) -> None:
        """Count what crossed to a client."""
        with self._changed:
            trip.wire_down += num_bytes

    def wake(self, caller: Caller | None = None) -> None:
        """Let one caller, or all of them, look again what there is and whether it is wanted."""
        with self._lock:
            for waiting in [caller] if caller else self._callers:
                waiting.told.notify()

    def begin_result(self, client: ClientId, header: rpc.PushHeader) -> OpenTrip | None:
        """Return the trip a result belongs to; None when it had arrived before.

        Raises:
            Superseded: its order is no longer wanted.
        """
        with self._changed:
            trip = self._open
            order = trip.trip.orders.get(client) if trip else None
            if trip is None or order is None or not answers(header, order):
                counted = min(self.committed, self._members[client].trained)
                if header.kind == rpc.ORDER_TRAIN and header.interaction <= counted:
                    return None
                raise Superseded(f"interaction {header.interaction} is no longer wanted")
            if trip.answered(client):
                return None
            return trip

    def end_result(self, client: ClientId, trip: OpenTrip, result: Result | str) -> bool:
        """Take a result, or the reason why there is none; False when another came first."""
        with self._changed:
            first = not trip.answered(client) and self._open is trip
            if first and isinstance(result, str):
                trip.failed[client] = result
            elif first and isinstance(result, Result):
                encoded = trip.personal.get(client)
                result.logical_down = trip.common.num_bytes + (encoded.num_bytes if encoded else 0)
                trip.results[client] = result
                trip.folding.came(result, trip.results, trip.failed)
                if trip.trip.sample.kind == rpc.ORDER_TRAIN:
                    member = self._members[client]
                    member.trained = trip.trip.sample.interaction
                    member.versions = (*member.versions, member.trained)
            if len(trip.results) >= trip.needed or isinstance(result, str):
                self._changed.notify_all()
            caller = self._members[client].caller
            if caller is not None and caller.is_full:
                caller.told.notify()
        if first:
            kind = "failed" if isinstance(result, str) else "upload"
            facts = {"reason": result} if isinstance(result, str) else {}
            sample = trip.trip.sample
            self.events.tell(
                kind, client, interaction=sample.interaction, round=sample.round, **facts
            )
        return first

    def leave(self, client: ClientId, reason: str) -> None:
        """Forget a session; the id may be taken by another process at once."""
        with self._changed:
            member = self._members.get(client)
            if member is not None:
                member.seen = -self.LEASE_S
        self.events.tell("left", client, reason=reason)


class Superseded(Exception):
    """The order a result answers is no longer wanted."""


def client_id_of(text: str, num_clients: int) -> ClientId:
    """Read a client id off the wire.

    Raises:
        PayloadError: it is neither the evaluator nor one of the run's clients.
    """
    if text == EVALUATOR:
        return EVALUATOR
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and int(text) < num_clients:
        return int(text)
    said = printable(text, 60)
    raise PayloadError(f"client id {said!r} is none of this run's: 0 to {num_clients - 1}")
