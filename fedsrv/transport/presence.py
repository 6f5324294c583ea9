"""Who of a run's clients is connected, and who may still come."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedmodels.tensors.bundle import ClientId
from fedsrv.transport.sessions import ClientSession, Sessions


class Presence:
    """Tells the living clients from the dead; used while the cohort holds its lock."""

    def __init__(
        self, sessions: Sessions, lease_s: Callable[[], float], clock: Callable[[], float]
    ) -> None:
        """Look at these sessions from now on.

        Args:
            sessions: those that count.
            lease_s: returns after how long a client that is not heard of is dead.
            clock: the monotonic clock.
        """
        self._sessions, self._lease_s, self._clock = sessions, lease_s, clock
        self._begun = clock()

    def is_connected(self, session: ClientSession) -> bool:
        """Tell whether a session's client waits for orders, or was heard of lately."""
        return session.is_waiting or self._clock() - session.heard < self._lease_s()

    def is_there(self, client: ClientId) -> bool:
        """Tell whether a client has joined and is connected."""
        return client in self._sessions and self.is_connected(self._sessions[client])

    def may_come(self, client: ClientId) -> bool:
        """Tell whether a missing client still has time to join: a lease from the start."""
        return client not in self._sessions and self._clock() - self._begun < self._lease_s()

    def dead(self, clients: Iterable[ClientId]) -> set[ClientId]:
        """Return those of the clients that are neither there nor may come."""
        return {c for c in clients if not self.is_there(c) and not self.may_come(c)}
