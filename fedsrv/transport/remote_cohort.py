"""Clients that join over the network, as the engine's cohort.

One lock guards the sessions, the trip under way and its results. The engine's thread waits here for
clients; the service's threads bring their calls. This module knows nothing of gRPC.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedmodels.errors import FedtideError, PayloadError, RunFailed
from fedmodels.facts.position import NONE_YET, Interaction
from fedmodels.facts.run_classes import RunClasses
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedmodels.times import FAILED_S, LEASE_S, LINE_EVERY_S, LOOK_EVERY_S, SLOW_S
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.pace import slow_text
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.client_profile import Profile, clients_text
from fedsrv.engine.cohort import (
    Answer,
    Answers,
    AnyOf,
    HoldsState,
    News,
    TooFewOrders,
    Trip,
)
from fedsrv.progress.events import EventLog
from fedsrv.transport.intake import Through
from fedsrv.transport.open_trips import (
    ISSUED_ANEW,
    OpenTrip,
    OpenTrips,
    check_enough,
    what_for,
)
from fedsrv.transport.refusals import (
    AlreadyConnected,
    NotReady,
    RunHasFailed,
    RunOver,
    SetOut,
    Superseded,
    UnknownSession,
)
from fedsrv.transport.sessions import (
    Caller,
    ClientSession,
    Presence,
    Sessions,
    StateInventory,
    through_whom,
)
from fedsrv.transport.spool import Spool
from fedsrv.transport.waiting import NOBODY, Attendance, ClientWait, WaitNotice

if TYPE_CHECKING:
    from fedpb.peer_certificates import PeerCertificates

MAX_TOKEN_BYTES = 64


class RemoteCohort:
    """Clients that join over the network; its methods are called from many threads."""

    sessions: Guarded[dict[ClientId, ClientSession]] = Guarded("_lock")
    _trips: Guarded[OpenTrips] = Guarded("_lock")

    lease_s = LEASE_S
    """A client neither waiting nor heard of for this long is no longer connected."""
    MAX_AHEAD = 3
    """Orders a process may have: one its client trains for, one it holds, one on its way."""
    MAX_AT_ONCE = 1000
    """Orders in one message."""

    committed: Guarded[Interaction] = Guarded("_lock")
    watermark: Guarded[Interaction] = Guarded("_lock")
    moves: Guarded[int] = Guarded("_lock")
    """How many times a client came or left, as far as calls tell."""
    _replaced: Guarded[int] = Guarded("_lock")
    """How often a session may have been replaced or removed."""
    _callers: Guarded[set[Caller]] = Guarded("_lock")
    _out: Guarded[dict[int, str]] = Guarded("_lock")
    """Why clients take no part any more."""
    _over: Guarded[RunOver | RunHasFailed | None] = Guarded("_lock")
    _awaited: Guarded[set[int]] = Guarded("_lock")
    """The clients of an open run that were away at the last news."""
    _forgotten: Guarded[set[ClientId]] = Guarded("_lock")
    """Clients that were there when all sessions ended: they come again."""
    _taken_out: Guarded[set[int]] = Guarded("_lock")
    """Clients that an operator has taken out: while away, nobody waits for their results."""
    _said: Guarded[int] = Guarded("_lock")
    """Counts what clients and the operator of an open run said."""

    def __init__(
        self,
        num_clients: int,
        spool: Spool,
        events: EventLog,
        *,
        deadline_s: float | None = None,
        min_clients: int | None = None,
        admission: Admission | None,
        most_present: int | None = None,
        expects_evaluator: bool = False,
        out: Mapping[int, str] | None = None,
        beginners: Collection[int] = (),
        peers: PeerCertificates | None = None,
        known: Mapping[int, Mapping[str, Any]] = NOBODY,
        keep: Callable[[Mapping[int, Mapping[str, Any]]], object] = lambda standings: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_clients, self.most_present = num_clients, most_present or num_clients
        self.peers = peers
        self.events, self.admission, self._clock = events, admission, clock
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        """Wakes whoever waits for clients. Each Pull has its own, or a result would wake all."""
        self._callers, self._replaced, self.moves = set(), 0, 0
        self.sessions = sessions = dict[ClientId, ClientSession]()
        self._holdings = StateInventory(sessions)
        self.presence = Presence(sessions, lambda: self.lease_s, clock)
        self._attendance = Attendance(sessions, lambda: self.lease_s, clock, known, keep)
        self.spool = spool
        self._min_clients = min_clients or num_clients
        evaluators = [EVALUATOR] if expects_evaluator else []
        self._members: list[ClientId] = [*(beginners or range(num_clients)), *evaluators]
        self._out = {**(out or {})}
        for client, line in (out or {}).items():
            self._attendance.stands(client, "out", line)
        self._admitting = threading.Lock()
        """Held from the check of a description until it counts, so that no other comes between."""
        self._trips = OpenTrips()
        self._over = None
        who = self.presence
        self._patience = ClientWait(
            self.changed, who.is_there, who.may_come, deadline_s, clock,
            lambda client: who.is_silent(client, LINE_EVERY_S), self._refusal, self._slow,
        )  # fmt: skip
        self._gathering = WaitNotice("gathering the run's clients", events, clock)
        self.committed = self.watermark = NONE_YET
        self.class_names = admission.class_names if admission else ()
        """Of the classes that an open run began with; none before."""
        self._awaited, self._said, self._forgotten = set(), 0, set()
        self._taken_out = set[int]()

    def _refusal(self, client: ClientId) -> str:
        """Return why what a client brought last is refused; empty where nothing is."""
        found = self._attendance.standings.get(client, {}) if isinstance(client, int) else {}
        return str(found.get("refused", ""))

    @property
    def _expected(self) -> list[ClientId]:
        """The clients that the run begins with, but for those that are out."""
        return [client for client in self._members if client not in self._out]

    # --- for the engine ---------------------------------------------------------------------------

    def gather(self) -> Mapping[int, str]:
        needed, goes_on = self._min_clients, bool(self.class_names)  # a begun open run knows them
        with self.changed:
            while True:
                self._patience.wait_to_join(
                    self._gathering, self._expected, self.sessions, needed, for_the_living=goes_on
                )
                if not (self.admission and self._turn_away(self.admission.settle())):
                    return self._descriptions()

    def meet(self, clients: Sequence[int], needed: int) -> Mapping[int, str]:
        notice = WaitNotice("gathering a round's clients", self.events, self._clock)
        with self.changed:
            self._patience.wait_to_join(notice, clients, self.sessions, needed, enough_will_do=True)
            return self._descriptions()

    def set_out(self, why: Mapping[int, str]) -> None:
        with self.changed:
            if why == self._out:
                return
            present = [client for client in why if client in self.sessions]
            again = sorted(self._out.keys() - why.keys())
            self._out = dict(why)
            for client, line in why.items():
                self._attendance.left(client, line, "out")
            for client in again:
                self._attendance.stands(client, "away", "the run went back to before it was out")
            for client in present:  # it joins again, and is told why it cannot
                self._holdings.dismiss(client)
            self._replaced += len(present)
            self.wake()
            self.changed.notify_all()
        for client in present:
            self.events.tell("left", client, reason=f"told that {why[client]}")
        self.events.tell("present", **self.present())
        for client in again:
            line = (
                f"the run went back to before client {client} was set out: it takes part again "
                "until then, so start it again"
            )
            self.events.tell("note", client, line=line)

    def go_on_without(self, clients: Iterable[int]) -> None:
        """Wait no longer for the results of clients that an operator has taken out, if away."""
        with self.changed:
            self._taken_out |= {*clients}
            self.changed.notify_all()

    def check_known(self, clients: Sequence[int]) -> None:
        """Check that clients take part, before an operator sets them out; or raise PayloadError."""
        with self.changed:
            for client in clients:
                if client in self._out:
                    raise PayloadError(
                        f"client {client} takes no part in this run any more: {self._out[client]}"
                    )
                is_known = self.admission is not None and self.admission.known(client) is not None
                if client not in self.sessions and not is_known:
                    raise PayloadError(
                        f"client {client} has never joined this run, so there is none to "
                        f"exclude; --resume --without {client} keeps it out"
                    )

    def begin(self, classes: RunClasses) -> None:
        """Name the classes that an open run began with, and what they are called by now.

        Clients that joined before went by their own classes. Those that have others join again.
        """
        if self.admission is not None:
            self.admission.follow(classes)
        with self.changed:
            if self.class_names == classes.first:
                return
            self.class_names = classes.first
            others = [
                client
                for client, session in self.sessions.items()
                if Profile.parse(client, session.joined_with).classes != self.class_names
            ]
            for client in others:
                self._holdings.dismiss(client)
            self._replaced += len(others)
            self.wake()

    def news(self) -> News:
        with self.changed:
            self._awaited = {
                c for c in self.sessions if isinstance(c, int) and not self.presence.is_there(c)
            }
            return News(self._said, self._descriptions(), self._awaited)

    def rest(self, number: int, seconds: float | None) -> None:
        until = None if seconds is None else self._clock() + seconds
        with self.changed:
            while self._said == number and (until is None or self._clock() < until):
                self._patience.check_begin()
                self.changed.wait(None if until is None else max(0.0, until - self._clock()))

    def send_and_receive(self, trip: Trip) -> Answers:
        """Give the orders, and wait until all clients answer or the deadline closes the trip.

        Raises:
            RunFailed: too few clients can answer; names the failed clients.
            StateLost: a client came back without its required state.
        """
        with self.changed:
            through = through_whom(self.sessions, trip.orders)
        open_trip = OpenTrip.of(trip, self.spool.budget, through)
        with self.changed:
            if trip.sample.kind == rpc.ORDER_KIND_TRAIN:
                self._patience.check_begin()
            self._trips.open(open_trip)
            self.wake()
            self._patience.wait(
                WaitNotice(what_for(trip), self.events, self._clock),
                open_trip.missing,
                lambda: self._is_decided(open_trip),
                lambda: self._has_enough(open_trip),
                for_the_living=True,
            )
            self._trips.current = None
            self._holdings.check()
        return open_trip.end()

    def _is_decided(self, trip: OpenTrip) -> bool:
        """Tell whether a trip ends, after another look at what will not come any more."""
        for client, line in trip.intake.overdue(self.presence.is_there, self._clock()):
            self.end_result(client, trip, line)
        most, until = len(trip.trip.orders), trip.trip.until
        for client in self._taken_out.intersection(trip.missing()):
            is_spare = until.needed is not None and most - len(trip.failed) > until.needed
            if is_spare and not self.presence.is_there(client):
                self.end_result(client, trip, "an operator excluded or retired it")
        return trip.is_decided() or self._holdings.lost is not None

    def _has_enough(self, trip: OpenTrip) -> bool:
        """Tell whether a trip may close without those that are missing."""
        trip.gone = self.presence.dead(trip.missing())
        return trip.has_enough()

    def send(self, *trips: Trip) -> None:
        self.add_lasting([OpenTrip.of(trip) for trip in trips])

    def add_lasting(self, trips: Sequence[OpenTrip]) -> None:
        """Give the orders of lasting trips whose payloads are encoded."""
        with self.changed:
            self._trips.add_lasting(trips)
            self.wake()

    def take(self, until: AnyOf) -> Answers:
        """Wait until as many results are there as are enough, or as few as are needed.

        Raises:
            RunFailed: too few clients can answer; names those that failed.
            StateLost: a client came back without its required state.
            TooFewOrders: too few of those with an order are left, and others are there.
        """
        with self.changed:
            trips = self._trips

        def is_done() -> bool:
            found = trips.is_decided(until) or self._holdings.lost is not None
            return found or self._starved(until) is not None

        with self.changed:
            self._patience.check_begin()
            what = f"training, interaction {until.interaction + 1}"
            self._patience.wait(
                WaitNotice(what, self.events, self._clock),
                trips.at_work,
                is_done,
                lambda: len(trips.ready(until)) >= until.needed,
                for_the_living=True,
            )
            self._holdings.check()
            if starved := self._starved(until):
                raise starved
            found = trips.take(until)
        check_enough(found, len(found.by_client) >= until.needed, until.round, until.needed)
        return found

    def _starved(self, until: AnyOf) -> TooFewOrders | None:
        has_deadline = self._patience.has_deadline  # else a dead client is waited for
        return self._trips.starved(until, self.presence, dead_count=has_deadline)

    def recall(self, clients: Collection[int] | None = None) -> None:
        with self.changed:
            for client, issue in self._trips.recall(clients):
                session = self.sessions.get(client)
                if session is not None and session.caller is not None:
                    session.caller.answered(client, issue)  # it is not sent, nor waited for

    def commit(self, interaction: Interaction, watermark: Interaction) -> None:
        with self.changed:
            self.committed, self.watermark = interaction, watermark
            self._holdings.went_on(interaction)

    def durable(self) -> Interaction | None:
        with self.changed:
            found = self._holdings.durable(self.committed)
        return None if found is None else Interaction(found)

    def stop(self, reason: str, kind: type[FedtideError] = RunFailed, grace_s: float = 0.0) -> None:
        """End the run with an error; a trip under way may still end within ``grace_s``."""
        with self.changed:
            self._patience.stop(kind(reason), grace_s if self._trips.all() else 0.0)

    def end(self, failure: str = "", *, returning: bool = False) -> None:
        """Tell every client that the run is over; wait until all left, for a lease at most.

        ``returning``: an earlier process reached this end, and may not have told every client.
        """
        with self.changed:
            self._over = RunHasFailed(failure) if failure else RunOver("the run is over")
            self.wake()
            until = self._clock() + (FAILED_S if failure else self.lease_s)
            staying = deque[ClientId]()
            while self._is_expected(staying, returning) and (left := until - self._clock()) > 0:
                self.changed.wait(min(left, LOOK_EVERY_S))

    def _is_expected(self, staying: deque[ClientId], returning: bool) -> bool:
        """Tell whether a client still has to learn that the run is over.

        Args:
            staying: those found connected that were not looked at since, for the next call.
            returning: whether clients that have not joined may still come.
        """
        while staying and not self.presence.is_there(staying[0]):
            staying.popleft()
        if not staying:  # looking at all of them whenever one leaves would take too long
            staying.extend(filter(self.presence.is_there, self.sessions))
        due = {*self._forgotten, *(self._expected if returning else ())}
        return bool(staying) or not due <= self.sessions.keys()

    def require(self, holds: HoldsState, last_trained: Mapping[int, int], safe: int) -> None:
        with self.changed:
            self._holdings.require(holds, last_trained, safe)
            self._replaced += 1
            self.wake()

    def starting_over(self) -> Sequence[int]:
        with self.changed:
            return self._holdings.starting_over()

    def _descriptions(self) -> Mapping[int, str]:
        found = {c: s.client_json for c, s in self.sessions.items() if isinstance(c, int)}
        return dict(sorted(found.items()))

    def has_evaluator(self) -> bool:
        with self.changed:
            return EVALUATOR in self.sessions

    def versions(self) -> Mapping[int, Sequence[int]]:
        with self.changed:
            return self._holdings.versions()

    # --- for who passes calls on ------------------------------------------------------------------

    def live(self) -> dict[ClientId, ClientSession]:
        """Return the sessions of clients that are connected."""
        with self.changed:
            return {c: s for c, s in self.sessions.items() if self.presence.is_connected(s)}

    def tokens(self, clients: Sequence[int]) -> dict[int, bytes]:
        """Return the tokens of clients' sessions, also of clients that have died since."""
        with self.changed:
            return {c: s.token for c in clients if (s := self.sessions.get(c)) is not None}

    def forget(self) -> None:
        """End all sessions: clients join again, which the end of the run waits for."""
        with self.changed:
            self._forgotten |= {*filter(self.presence.is_there, self.sessions)}
            self.sessions.clear()
            self._replaced += 1
            self.wake()

    # --- sessions ---------------------------------------------------------------------------------

    def join(
        self,
        client: ClientId,
        client_json: str,
        token: bytes,
        versions: Sequence[int],
        start_over: bool = False,
        through: Through | None = None,
    ) -> bytes:
        """Admit a client, maybe through somebody, and return its session token.

        Raises:
            AlreadyConnected: the id is connected, and the token is not its session's.
            PayloadError: its description does not fit the run, or its token is too long.
            LossTooLarge: the client lost states, and the run may not go back so far.
            SetOut: the client takes no part any more.
        """
        if len(token) > MAX_TOKEN_BYTES:
            raise PayloadError(f"a session token has {MAX_TOKEN_BYTES} bytes at most")
        with self._admitting:
            client_json = self._checked(client, client_json)
            found = self._joined(client, client_json, token, versions, start_over, through)
        self.events.tell("joined", client)
        return found

    def _checked(self, client: ClientId, client_json: str) -> str:
        """Return a description as the run takes it; note why it refuses one: PayloadError."""
        if self.admission is None:
            return client_json
        try:
            client_json = self.admission.taken(client, client_json)
            self.admission.check(client, client_json)
        except PayloadError as error:
            with self._lock:
                self._attendance.refused(client, str(error))
            raise
        return client_json

    def _joined(
        self,
        client: ClientId,
        client_json: str,
        token: bytes,
        versions: Sequence[int],
        start_over: bool,
        through: Through | None,
    ) -> bytes:
        """Begin the session of a client whose description fits; return its token."""
        with self.changed:
            if isinstance(client, int) and client in self._out:
                raise SetOut.of(client, self._out[client])
            known = self.sessions.get(client)
            takes_over = known is not None and secrets.compare_digest(token, known.token)
            if known and not takes_over and self.presence.is_connected(known):
                raise AlreadyConnected(
                    f"client {client} is connected already; if that was a process that died with "
                    f"its --state-dir, join again in {self.lease_s:g} s"
                )
            trained = known.trained if known else self._holdings.trained(client)
            if self._holdings.lacks(client, versions, start_over, trained):
                self._holdings.lose(client)
            session = ClientSession(
                token or secrets.token_bytes(16), client_json, tuple(versions), self._clock(),
                joined_with=client_json, trained=trained, start_over=start_over, through=through,
            )  # fmt: skip
            self._holdings.admit(client, session)
            self._attendance.joined(client)
            self._replaced += known is not None
            self._regroup(self._trips.moved(client, through))
            self._said += 1
            if self.admission:
                self._turn_away(self.admission.admit(client, client_json))
            self.changed.notify_all()
            if known:
                self.wake()  # ends the Pull of the client's former session
        return session.token

    def _regroup(self, clients: Collection[ClientId]) -> None:
        """Have callers ask again for the orders of clients whose group has become another one.

        A caller learns by itself of a client that it pulls orders for. One that joins elsewhere
        before it joined there would be waited for in vain.
        """
        for session in (self.sessions.get(client) for client in clients):
            if session is not None and session.caller is not None:
                session.caller.is_regrouped = True
                session.caller.changed.notify()

    def _turn_away(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """End the sessions of clients with another problem; they cannot join again."""
        for client in clients:
            self._holdings.dismiss(client)
            line = "turned away: most clients describe another problem"
            self.events.tell("failed", client, reason=line)
        if clients:
            self._replaced += 1
            self.wake()
        return clients

    def session(self, client: ClientId, token: bytes) -> ClientSession:
        """Return the session a token belongs to; UnknownSession if there is none."""
        with self._lock:
            session = self.sessions.get(client)
            if session is None or not secrets.compare_digest(session.token, token):
                raise UnknownSession(f"client {client} has no session with this token; join again")
            self._hear(session)
            return session

    def _hear(self, session: ClientSession) -> None:
        """Note a sign of life of a client, and so of its process."""
        session.seen = self._clock()
        if session.caller is not None:
            session.caller.seen = session.seen

    def hears(self, clients: Sequence[ClientId]) -> None:
        """Note that something of these clients comes."""
        with self._lock:
            for client in clients:
                if client in self.sessions:
                    self._hear(self.sessions[client])

    def caller(self, clients: Sessions, issues: Mapping[ClientId, int]) -> Caller:
        """Return a Pull for clients with these last issues; it replaces their earlier Pulls."""
        with self._lock:
            caller = Caller(clients, threading.Condition(self._lock), worked=self._clock())
            for client, session in clients.items():
                session.end_pull()
                session.caller, session.issue = caller, issues[client]
            self.moves += 1
            self._said += not self._awaited.isdisjoint(clients)
            self.changed.notify_all()
        return caller

    def sends(self, caller: Caller, sending: tuple[int, int, float] | None) -> None:
        """Note how far the orders are that are sent over a Pull, if any are."""
        with self._lock:
            caller.sending, caller.seen = sending, self._clock()

    def _slow(self, client: ClientId) -> str:
        """Return how far a client's order or upload is over a slow link; empty of any other."""
        session, far = self.sessions.get(client), None
        if session is not None and session.caller is not None and session.caller.sending:
            done, size, since = session.caller.sending
            far = done, size, time.monotonic() - since
        for trip in self._trips.all():
            far = far or trip.intake.how_far(client)
        return slow_text(*far) if far and far[2] >= SLOW_S else ""

    def hung_up(self, caller: Caller) -> None:
        """Note that a Pull has ended."""
        with self._lock:
            caller.is_there, caller.sending = False, None

    def listening(self) -> list[Through]:
        """Return through whom clients joined whose orders are pulled now."""
        with self._lock:
            return [
                session.through
                for session in self.sessions.values()
                if session.through and session.caller is not None and session.caller.is_there
            ]

    def is_safe(self, session: ClientSession, durable: int) -> None:
        """Note that a client's private state is safe on its disk."""
        with self._lock:
            session.durable = max(session.durable, durable)

    def works(self, session: ClientSession) -> None:
        """Note that a client tells of work."""
        with self._lock:
            if session.caller is not None:
                session.caller.worked = self._clock()

    def wake(self, caller: Caller | None = None) -> None:
        """Wake one caller, or all callers, to look for orders again."""
        with self._lock:
            for waiting in [caller] if caller else self._callers:
                waiting.changed.notify()

    def present(self) -> dict[str, Any]:
        """Return who is there, and how each client stands that ever was."""
        with self._lock:
            standings = {str(c): {**one} for c, one in self._attendance.standings.items()}
            return {"clients": [*map(str, self._attendance.there)], "roster": standings}

    def look_after(self) -> None:
        """Tell which clients are gone without a word, and which are back; called often."""
        with self._lock:
            gone, back = self._attendance.look()
        for kind, clients in (("gone", gone), ("back", back)):
            if clients:
                self._tell_presence(kind, clients)

    def _tell_presence(self, kind: str, clients: Sequence[ClientId]) -> None:
        """Tell that clients are gone or back."""
        verb = "is" if len(clients) == 1 else "are"
        since = f": nothing was heard for {self.lease_s:g} s" if kind == "gone" else ""
        line = f"{clients_text(clients)} {verb} {kind}{since}"
        self.events.tell(kind, line=line, clients=[*map(str, clients)])

    def leave(self, client: ClientId, reason: str) -> None:
        """End a session; another process may take the id at once."""
        with self.changed:
            session = self.sessions.get(client)
            if session is not None:
                session.end_pull()
                session.caller, session.seen = None, -math.inf
            self._attendance.left(client, reason)
            self.moves += 1
            self.changed.notify_all()
        self.events.tell("left", client, reason=reason)

    # --- orders and results -----------------------------------------------------------------------

    def next_orders(
        self, caller: Caller, is_active: Callable[[], bool]
    ) -> tuple[list[rpc.Order], OpenTrip] | None:
        """Wait for orders of one payload for a caller; None when it is gone, or replaced."""
        with self._lock:
            self._callers.add(caller)
            try:
                return caller.wait(partial(self._orders_for, caller), is_active, self._clock)
            finally:
                self._callers.discard(caller)

    def _orders_for(self, caller: Caller) -> tuple[list[rpc.Order], OpenTrip] | None:
        caller.check(self.sessions, self._replaced)
        if self._over:
            raise self._over
        if caller.is_regrouped:
            raise Superseded("a client has left its group; ask again for the orders")
        found = self._trips.next_for(caller, self.MAX_AHEAD, self.MAX_AT_ONCE)
        if found is None:
            return None
        clients, trip, behind = found
        return trip.issued(clients, behind, self.committed, self.watermark), trip

    def announce(self, client: ClientId, session: ClientSession, client_json: str) -> None:
        """Take what a client of an open run says of its data; PayloadError if it does not fit."""
        assert self.admission is not None, "a run admits its clients"
        with self._admitting, self.changed:
            client_json = self._checked(client, client_json)
            refused = self.admission.refused(client)
            self._attendance.refused(client, "; ".join([*refused.values()][-1:]))
            self.admission.admit(client, client_json)
            session.client_json = client_json
            self._said += 1
            self.changed.notify_all()

    def look_again(self) -> None:
        """Let an open run that rests look at what was decided."""
        with self.changed:
            self._said += 1
            self.changed.notify_all()

    def is_superseded(self, interaction: Interaction) -> bool:
        """Tell whether nobody wants the result of an interaction's order to train any more."""
        with self.changed:
            return 0 <= interaction <= self.committed and self._trips.are_done_with(interaction)

    def count_down(self, trip: OpenTrip, num_bytes: int) -> None:
        """Count bytes that were sent to a client."""
        with self.changed:
            trip.wire_down += num_bytes

    def begin_result(self, client: ClientId, header: rpc.PushHeader) -> OpenTrip | None:
        """Return the trip of a result; None when the result had arrived before.

        Raises:
            Superseded: the order is no longer wanted.
            NotReady: this process has not taken the run up yet, or the result is of an earlier
                issue of the order.
            UnknownSession: the session ended since the result began to come.
        """
        with self.changed:
            if self._over:
                return None
            if not self._trips.has_opened:
                raise NotReady("the run is being taken up; bring the result again")
            trip = self._trips.answered_by(client, header)
            if trip is None:
                if client not in self.sessions:
                    raise UnknownSession(f"client {client} has to join again")
                counted = min(self.committed, self.sessions[client].trained)
                if header.kind == rpc.ORDER_KIND_TRAIN and header.interaction <= counted:
                    return None
                raise Superseded(f"interaction {header.interaction + 1} is no longer wanted")
            if trip.answered(client):
                return None
            trip.check_issue(header)
            return trip

    def check_waits_for(self, client: ClientId, trip: OpenTrip) -> None:
        """Check that the trip of a result is still under way; NotReady where it was recalled."""
        with self.changed:
            if not self._trips.waits_for(client, trip):
                raise NotReady(ISSUED_ANEW)

    def end_result(self, client: ClientId, trip: OpenTrip, arrived: Any) -> bool:
        """Store what a client brought, or why it failed; False when another answer came first.

        What its intake reads of one Push may complete the results of several clients, or of none.
        """
        with self.changed:
            sample = trip.trip.sample
            found = self._trips.keep(client, trip, arrived, self._clock())
            for one, result in ({client: None} if found is None else found).items():
                if isinstance(result, Answer) and sample.kind == rpc.ORDER_KIND_TRAIN:
                    self._holdings.has_trained(one, trip.trip.interaction)
                session = self.sessions.get(one)  # None where who passes calls on forgot it
                if session is not None and session.caller is not None:
                    session.caller.answered(one, trip.issue)
            if trip is not self._trips.current or trip.has_enough() or isinstance(arrived, str):
                self.changed.notify_all()
        for one, result in (found or {}).items():
            if isinstance(result, str) or sample.kind not in WITHOUT_PAYLOAD:
                why = {"reason": result} if isinstance(result, str) else {}
                facts = {"interaction": sample.interaction, "round": sample.round, **why}
                self.events.tell("failed" if why else "upload", one, **facts)
        return found is not None
