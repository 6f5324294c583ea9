"""The clients that have joined a run: their sessions, their states, and Pulls that wait for them.

This module knows nothing of gRPC, nor of trips.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import HoldsState
from fedsrv.events import EventLog
from fedsrv.transport.sessions import (
    AlreadyConnected,
    Caller,
    ClientSession,
    Presence,
    Sessions,
    UnknownSession,
)
from fedsrv.transport.state_inventory import StateInventory

MAX_TOKEN_BYTES = 64


class JoinedClients:
    """Who has joined; its methods are called from many threads."""

    LEASE_S = 15.0
    """A client neither waiting nor heard of for this long is no longer connected."""

    def __init__(
        self,
        num_clients: int,
        most_present: int,
        events: EventLog,
        admission: Admission | None,
        clock: Callable[[], float],
    ) -> None:
        self.num_clients, self.most_present = num_clients, most_present
        self.events, self.admission, self._clock = events, admission, clock
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        """Wakes whoever waits for clients. Each Pull has its own, or a result would wake all."""
        self._callers: set[Caller] = set()
        self.sessions: dict[ClientId, ClientSession] = {}
        self.moves = 0
        """How many times a client came or left, as far as calls tell."""
        self._replaced = 0
        """How often a session may have been replaced or removed."""
        self._holdings = StateInventory(self.sessions)
        self.presence = Presence(self.sessions, lambda: self.LEASE_S, clock)

    # --- for the engine ---------------------------------------------------------------------------

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

    # --- for a relay ------------------------------------------------------------------------------

    def live(self) -> dict[ClientId, ClientSession]:
        """Return the sessions of clients that are connected; the caller holds the lock."""
        return {c: s for c, s in self.sessions.items() if self.presence.is_connected(s)}

    def tokens(self, clients: Sequence[int]) -> dict[int, bytes]:
        """Return the tokens of clients' sessions, also of clients that have died since."""
        with self.changed:
            return {c: s.token for c in clients if (s := self.sessions.get(c)) is not None}

    def forget(self) -> None:
        """End all sessions: clients join again."""
        with self.changed:
            self.sessions.clear()
            self._replaced += 1
            self.wake()

    # --- for the service --------------------------------------------------------------------------

    def join(
        self,
        client: ClientId,
        client_json: str,
        token: bytes,
        versions: Sequence[int],
        start_over: bool = False,
        relay: str = "",
    ) -> bytes:
        """Admit a client, maybe through a relay, and return its session token.

        Raises:
            AlreadyConnected: the id is connected, and the token is not its session's.
            PayloadError: its description does not fit the run, or its token is too long.
            LossTooLarge: the client lost states, and the run may not go back so far.
        """
        if len(token) > MAX_TOKEN_BYTES:
            raise PayloadError(f"a session token has {MAX_TOKEN_BYTES} bytes at most")
        if self.admission:
            self.admission.check(client, client_json)
        with self.changed:
            known = self.sessions.get(client)
            takes_over = known is not None and secrets.compare_digest(token, known.token)
            if known and not takes_over and self.presence.is_connected(known):
                raise AlreadyConnected(f"client {client} is connected already")
            trained = known.trained if known else self._holdings.trained(client)
            if self._holdings.lacks(client, versions, start_over, trained):
                self._holdings.lose(client)
            session = ClientSession(
                token or secrets.token_bytes(16), client_json, tuple(versions), self._clock(),
                trained=trained, start_over=start_over, relay=relay,
            )  # fmt: skip
            self._holdings.admit(client, session)
            self._replaced += known is not None
            self._has_joined(client, relay)
            if self.admission:
                self._turn_away(self.admission.admit(client, client_json))
            self.changed.notify_all()
            if known:
                self.wake()  # ends the Pull of the client's former session
        self.events.tell("joined", client)
        return session.token

    def _has_joined(self, client: ClientId, relay: str) -> None:
        """Note that a client has joined, maybe through a relay; the caller holds the lock."""

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
        """Return the session a token belongs to.

        Raises:
            UnknownSession: there is none.
        """
        session = self.sessions.get(client)
        if session is None or not secrets.compare_digest(session.token, token):
            raise UnknownSession(f"client {client} has no session with this token; join again")
        session.seen = self._clock()
        return session

    def caller(self, clients: Sessions, issues: Mapping[ClientId, int]) -> Caller:
        """Return a Pull for clients with these last issues; it replaces their earlier Pulls."""
        with self._lock:
            caller = Caller(clients, threading.Condition(self._lock))
            for client, session in clients.items():
                session.end_pull()
                session.caller, session.issue = caller, issues[client]
            self.moves += 1
            self.changed.notify_all()
        return caller

    def wake(self, caller: Caller | None = None) -> None:
        """Wake one caller, or all callers, to look for orders again."""
        with self._lock:
            for waiting in [caller] if caller else self._callers:
                waiting.changed.notify()

    def leave(self, client: ClientId, reason: str) -> None:
        """End a session; another process may take the id at once."""
        with self.changed:
            session = self.sessions.get(client)
            if session is not None:
                session.end_pull()
                session.caller, session.seen = None, -math.inf
            self.moves += 1
            self.changed.notify_all()
        self.events.tell("left", client, reason=reason)
