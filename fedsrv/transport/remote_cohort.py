"""Clients that join over the network, as the engine's cohort.

One lock guards the sessions, the trip under way and its results. The engine's thread waits here for
clients; the service's threads bring their calls. This module knows nothing of gRPC.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from fedmodels.errors import FedtideError, PayloadError, RunFailed
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import Answer, Answers, HoldsState, StateLost, Trip
from fedsrv.events import EventLog
from fedsrv.transport.holdings import Holdings
from fedsrv.transport.open_trip import OpenTrip, answers, by_id, what_for, why_failed
from fedsrv.transport.sessions import (
    AlreadyConnected,
    Caller,
    ClientSession,
    NotReady,
    RunHasFailed,
    RunOver,
    Sessions,
    Superseded,
    UnknownSession,
)
from fedsrv.transport.spool import Spool
from fedsrv.transport.waiting import LOOK_EVERY_S, Notice, Patience

MOST_TOKEN_BYTES = 64
FAILED_S = 5.0  # for clients to leave a run that failed


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
        min_clients: int | None = None,
        admission: Admission,
        expects_evaluator: bool = False,
        together: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_clients = num_clients
        self._together, self._most_ahead = together, max(self.MOST_AHEAD, 2 * together)
        self.spool, self.events = spool, events
        self.admission = admission
        self._min_clients = min_clients or num_clients
        self._clock, self._begun = clock, clock()
        self._expected: list[ClientId] = [*range(num_clients)]
        if expects_evaluator:
            self._expected.append(EVALUATOR)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Wakes the engine. Each Pull has a condition of its own, or a result would wake all."""
        self._callers: set[Caller] = set()
        self._sessions: dict[ClientId, ClientSession] = {}
        self._replaced = 0
        """How often a session may have been replaced or removed."""
        self._open: OpenTrip | None = None
        self._has_opened = False
        """Whether this process has opened a trip yet."""
        self._over: RunOver | RunHasFailed | None = None
        self._holdings = Holdings(self._sessions)
        there, may_come = self._is_there, self._may_come
        self._patience = Patience(self._changed, there, may_come, deadline_s, clock)
        self._gathering = Notice("gathering the run's clients", events, clock)
        self.committed = self.watermark = -1

    # --- for the engine ---------------------------------------------------------------------------

    def require(self, holds: HoldsState, last_trained: Mapping[int, int], safe: int) -> None:
        with self._changed:
            self._holdings.require(holds, last_trained, safe)
            self._replaced += 1
            self.wake()

    def starting_over(self) -> Sequence[int]:
        with self._changed:
            return self._holdings.starting_over()

    def gather(self) -> Mapping[int, str]:
        with self._changed:
            self._wait_to_join()
            while self._turn_away(self.admission.settle()):
                self._wait_to_join()
            return self._descriptions()

    def _wait_to_join(self) -> None:
        joined, needed = self._sessions, self._min_clients
        self._patience.wait_to_join(self._gathering, self._expected, joined, needed)

    def meet(self, clients: Sequence[int], needed: int) -> Mapping[int, str]:
        notice = Notice("gathering a round's clients", self.events, self._clock)
        with self._changed:
            joined = self._sessions
            self._patience.wait_to_join(notice, clients, joined, needed, enough_will_do=True)
            return self._descriptions()

    def _descriptions(self) -> Mapping[int, str]:
        found = {c: s.client_json for c, s in self._sessions.items() if isinstance(c, int)}
        return dict(sorted(found.items()))

    def has_evaluator(self) -> bool:
        with self._changed:
            return EVALUATOR in self._sessions

    def versions(self) -> Mapping[int, Sequence[int]]:
        with self._changed:
            return self._holdings.versions()

    def exchange(self, trip: Trip) -> Answers:
        """Give the orders, and wait until all clients answer or the deadline closes the trip.

        Raises:
            RunFailed: too few clients can answer; names the failed clients.
            StateLost: a client came back without its required state.
        """
        open_trip = OpenTrip.of(trip, self.spool.budget)
        needed = open_trip.needed
        with self._changed:
            if trip.sample.kind == rpc.ORDER_KIND_TRAIN:
                self._patience.check_begin()
            self._open, self._has_opened = open_trip, True
            self.wake()
            self._patience.wait(
                Notice(what_for(trip), self.events, self._clock),
                lambda: [c for c in trip.orders if not open_trip.answered(c)],
                lambda: (
                    open_trip.is_complete()
                    or len(trip.orders) - len(open_trip.failed) < needed
                    or self._holdings.lost is not None
                ),
                lambda: len(open_trip.results) >= needed,
                for_the_living=True,
            )
            self._open = None
            lost = self._holdings.lost
            if lost is not None:
                raise StateLost(lost, self._sessions[lost].versions)
            results = dict(sorted(open_trip.results.items(), key=by_id))
            failed = dict(sorted(open_trip.failed.items(), key=by_id))
        if len(results) < needed:
            raise RunFailed(why_failed(trip, failed))
        mean = open_trip.folding.finish(open_trip.results)
        wire_up = sum(r.wire_up for r in results.values())
        return Answers(results, failed, open_trip.wire_down, wire_up, mean)

    def _is_there(self, client: ClientId) -> bool:
        return client in self._sessions and self._is_connected(self._sessions[client])

    def _may_come(self, client: ClientId) -> bool:
        """Tell whether a missing client still has time to join: a lease from the start."""
        return client not in self._sessions and self._clock() - self._begun < self.LEASE_S

    def commit(self, interaction: int, watermark: int) -> None:
        with self._changed:
            self.committed, self.watermark = interaction, watermark
            self._holdings.went_on(interaction)

    def durable(self) -> int | None:
        with self._changed:
            return self._holdings.durable(self.committed)

    def stop(self, reason: str, kind: type[FedtideError] = RunFailed, grace_s: float = 0.0) -> None:
        """End the run with an error; a trip under way may still end within ``grace_s``."""
        with self._changed:
            self._patience.stop(kind(reason), grace_s if self._open else 0.0)

    def end(self, failure: str = "", *, returning: bool = False) -> None:
        """Tell every client that the run is over; wait until all left, for a lease at most.

        ``returning``: an earlier process reached this end, and may not have told every client.
        """
        with self._changed:
            self._over = RunHasFailed(failure) if failure else RunOver("the run is over")
            self.wake()
            until = self._clock() + (FAILED_S if failure else self.LEASE_S)
            while self._is_expected(returning) and (left := until - self._clock()) > 0:
                self._changed.wait(min(left, LOOK_EVERY_S))

    def _is_expected(self, returning: bool) -> bool:
        """Tell whether a client still has to learn that the run is over."""
        missing = returning and any(c not in self._sessions for c in self._expected)
        return missing or any(map(self._is_connected, self._sessions.values()))

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
            LossTooLarge: the client lost states, and the run may not go back so far.
        """
        if len(token) > MOST_TOKEN_BYTES:
            raise PayloadError(f"a session token has {MOST_TOKEN_BYTES} bytes at most")
        self.admission.check(client, client_json)
        with self._changed:
            known = self._sessions.get(client)
            takes_over = known is not None and secrets.compare_digest(token, known.token)
            if known and not takes_over and self._is_connected(known):
                raise AlreadyConnected(f"client {client} is connected already")
            trained = known.trained if known else self._holdings.trained(client)
            if self._holdings.lacks(client, versions, start_over, trained):
                self._holdings.lose(client)
            session = ClientSession(
                token or secrets.token_bytes(16),
                client_json,
                tuple(versions),
                self._clock(),
                trained=trained,
                start_over=start_over,
            )
            self._sessions[client] = session
            self._replaced += known is not None
            self._turn_away(self.admission.admit(client, client_json))
            self._changed.notify_all()
            if known:
                self.wake()  # ends the Pull of the client's former session
        self.events.tell("joined", client)
        return session.token

    def _turn_away(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """End the sessions of clients with another problem; they cannot join again."""
        for client in clients:
            self._sessions.pop(client, None)
            if self._holdings.lost == client:
                self._holdings.lost = None  # whose states do not matter any more
            reason = "turned away: most clients describe another problem"
            self.events.tell("failed", client, reason=reason)
        if clients:
            self._replaced += 1
            self.wake()
        return clients

    def _is_connected(self, session: ClientSession) -> bool:
        return session.is_waiting or self._clock() - session.heard < self.LEASE_S

    def session(self, client: ClientId, token: bytes) -> ClientSession:
        """Return the session a token belongs to.

        Raises:
            UnknownSession: there is none.
        """
        session = self._sessions.get(client)
        if session is None or not secrets.compare_digest(session.token, token):
            raise UnknownSession(f"client {client} has no session with this token; join again")
        session.seen = self._clock()
        return session

    def caller(self, clients: Sessions, issues: Mapping[ClientId, int]) -> Caller:
        """Return a Pull for these clients; it replaces their earlier Pulls.

        Args:
            clients: the sessions that the Pull waits for.
            issues: the issue of the last order of each client.
        """
        with self._lock:
            caller = Caller(clients, threading.Condition(self._lock))
            for client, session in clients.items():
                session.end_pull()
                session.caller, session.issue = caller, issues[client]
        return caller

    def next_order(
        self, caller: Caller, is_active: Callable[[], bool]
    ) -> tuple[rpc.Order, OpenTrip] | None:
        """Wait for an order of a caller's clients; None when the caller is gone, or replaced."""
        with self._lock:
            self._callers.add(caller)
            caller.is_waiting = True
            try:
                while is_active() and not caller.is_replaced:
                    found = self._order_for(caller)
                    if found is not None:
                        return found
                    caller.changed.wait()
                return None
            finally:
                self._callers.discard(caller)
                caller.is_waiting, caller.seen = False, self._clock()

    def _order_for(self, caller: Caller) -> tuple[rpc.Order, OpenTrip] | None:
        trip = self._open
        caller.check(self._sessions, self._replaced)
        if self._over:
            raise self._over
        if trip is None:
            return None
        orders, answered = trip.trip.orders, trip.answered
        client = caller.next_client(trip.issue, orders, answered, self._most_ahead)
        if client is None:
            return None
        order = rpc.Order()
        order.CopyFrom(orders[client])
        order.committed, order.durable, order.issue = self.committed, self.watermark, trip.issue
        if self._together > 1:
            order.following = caller.following(answered)
        return order, trip

    def is_superseded(self, interaction: int) -> bool:
        """Tell whether an interaction is committed, so that training for it is useless."""
        with self._changed:
            return 0 <= interaction <= self.committed

    def count_down(self, trip: OpenTrip, num_bytes: int) -> None:
        """Count bytes that were sent to a client."""
        with self._changed:
            trip.wire_down += num_bytes

    def wake(self, caller: Caller | None = None) -> None:
        """Wake one caller, or all callers, to look for orders again."""
        with self._lock:
            for waiting in [caller] if caller else self._callers:
                waiting.changed.notify()

    def begin_result(self, client: ClientId, header: rpc.PushHeader) -> OpenTrip | None:
        """Return the trip of a result; None when the result had arrived before.

        Raises:
            Superseded: the order is no longer wanted.
            NotReady: this process has not taken the run up yet.
        """
        with self._changed:
            if self._over:
                return None
            trip = self._open
            if not self._has_opened:
                raise NotReady("the run is being taken up; bring the result again")
            order = trip.trip.orders.get(client) if trip else None
            if trip is None or order is None or not answers(header, order):
                counted = min(self.committed, self._sessions[client].trained)
                if header.kind == rpc.ORDER_KIND_TRAIN and header.interaction <= counted:
                    return None
                raise Superseded(f"interaction {header.interaction} is no longer wanted")
            if trip.answered(client):
                return None
            return trip

    def end_result(self, client: ClientId, trip: OpenTrip, result: Answer | str) -> bool:
        """Store a result, or the reason of a failure; False when another answer came first."""
        with self._changed:
            first = not trip.answered(client) and self._open is trip
            if first and isinstance(result, str):
                trip.failed[client] = result
            elif first and isinstance(result, Answer):
                trip.keep(client, result)
                if trip.trip.sample.kind == rpc.ORDER_KIND_TRAIN:
                    self._sessions[client].add_version(trip.trip.sample.interaction)
            if len(trip.results) >= trip.needed or isinstance(result, str):
                self._changed.notify_all()
            if (caller := self._sessions[client].caller) and caller.is_full:
                caller.changed.notify()
        if first:
            kind = "failed" if isinstance(result, str) else "upload"
            facts = {"reason": result} if isinstance(result, str) else {}
            sample = trip.trip.sample
            self.events.tell(
                kind, client, interaction=sample.interaction, round=sample.round, **facts
            )
        return first

    def leave(self, client: ClientId, reason: str) -> None:
        """End a session; another process may take the id at once."""
        with self._changed:
            session = self._sessions.get(client)
            if session is not None:
                session.end_pull()
                session.caller, session.seen = None, -math.inf
            self._changed.notify_all()
        self.events.tell("left", client, reason=reason)
