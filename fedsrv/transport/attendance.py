"""Who of a cohort is there: what events tell of clients whose links end without a word.

A client that rests says nothing. Its open Pull is its sign of life: gRPC pings each link, and ends
one that does not answer. So nothing more is sent, and a look costs no call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from fedmodels.tensors.bundle import ClientId
from fedsrv.transport.sessions import Sessions

LOOK_EVERY_S = 2.0
"""Clients are looked after at this interval."""


class Attendance:
    """The clients that count as there, as events tell; used while the cohort holds its lock."""

    def __init__(
        self, sessions: Sessions, lease_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        """Let nobody be there yet.

        Args:
            sessions: of the clients that have joined.
            lease_s: returns after how long a client that is not heard of is gone.
            clock: the monotonic clock.
        """
        self._sessions, self._lease_s, self._clock = sessions, lease_s, clock
        self._alive: dict[ClientId, float] = {}
        """When each client that is there was last known to be alive."""
        self._next = -math.inf

    @property
    def there(self) -> Collection[ClientId]:
        """Return the clients that count as there."""
        return self._alive.keys()

    def joined(self, client: ClientId) -> None:
        """Note that a client has joined, which an event tells."""
        self._alive[client] = self._clock()

    def left(self, client: ClientId) -> None:
        """Note that a client has left or was set out, which an event tells."""
        self._alive.pop(client, None)

    def look(self) -> tuple[list[ClientId], list[ClientId]]:
        """Return who is gone and who is back since the last look, if a look is due."""
        now = self._clock()
        if now < self._next:
            return [], []
        self._next, lease_s = now + LOOK_EVERY_S, self._lease_s()
        back = list[ClientId]()
        for client, session in self._sessions.items():
            heard = now if session.is_waiting else session.heard
            if client in self._alive:
                self._alive[client] = max(heard, self._alive[client])
            elif now - heard < lease_s:
                self._alive[client] = heard
                back.append(client)
        gone = [client for client, alive in self._alive.items() if now - alive >= lease_s]
        for client in gone:
            del self._alive[client]
        return gone, back
