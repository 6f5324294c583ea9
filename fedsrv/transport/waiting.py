"""Who of a cohort is there, how long the run waits for others, and the lines that name them.

A client that rests says nothing. Its open Pull is its sign of life: gRPC pings each link, and ends
one that does not answer. So nothing more is sent, and a look costs no call.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from types import MappingProxyType
from typing import Any

from fedmodels.errors import FedtideError
from fedmodels.tensors.bundle import ClientId
from fedmodels.times import AWAY_AFTER_S, GONE_EVERY_S, LINE_EVERY_S, LOOK_EVERY_S, STORED_EVERY_S
from fedsrv.engine.client_profile import clients_text
from fedsrv.progress.events import EventLog
from fedsrv.transport.sessions import Sessions

MAX_NAMES = 10
STORED_AT_ONCE = 10  # times in a row; then once in STORED_EVERY_S
NOBODY: Mapping[int, Any] = MappingProxyType({})
SILENT = "connected, and telling of no work: a result may be on its way, or else restart the client"


@dataclass
class WaitNotice:
    """The lines about one wait, told as events."""

    what: str
    events: EventLog
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        """Take the time at which the wait begins."""
        self.begun = self.clock()
        self._last_line: float | None = None

    @property
    def seconds(self) -> float:
        """Return the duration of the wait so far."""
        return self.clock() - self.begun

    def look(
        self,
        away: Sequence[ClientId],
        at_work: Sequence[ClientId],
        rest: str,
        is_silent: Callable[[ClientId], bool] = lambda client: False,
        refusal: Callable[[ClientId], str] = lambda client: "",
        slow: Callable[[ClientId], str] = lambda client: "",
    ) -> None:
        """Name the missing clients in a line, if a line is due."""
        since = self.seconds if self._last_line is None else self.clock() - self._last_line
        if since < (AWAY_AFTER_S if away and self._last_line is None else LINE_EVERY_S):
            return
        self._last_line = self.clock()
        refused = {client: why for client in away if (why := refusal(client))}
        gone = [client for client in away if client not in refused]
        groups = [f"{clients_text(gone, MAX_NAMES)} (not connected)"] if gone else []
        groups += [f"client {c} (refused: {why})" for c, why in [*refused.items()][:MAX_NAMES]]
        on_the_way = {client: how for client in at_work if (how := slow(client))}
        at_work = [client for client in at_work if client not in on_the_way]
        silent = [*filter(is_silent, at_work)]
        busy = [*filterfalse(is_silent, at_work)]
        groups += [f"{clients_text(busy, MAX_NAMES)} (at work)"] if busy else []
        groups += [f"{clients_text(silent, MAX_NAMES)} ({SILENT})"] if silent else []
        each = [f"{clients_text([client])} ({how})" for client, how in on_the_way.items()]
        groups += each[:MAX_NAMES]
        line = f"{self.what}: waiting for {' and '.join(groups)} for {self.seconds:.0f} s; {rest}"
        clients = [str(c) for c in (*away, *at_work, *on_the_way)]
        self.events.tell("waiting", line=line, clients=clients, seconds=round(self.seconds))


class ClientWait:
    """How long the engine waits for clients; used while it holds the cohort's lock."""

    def __init__(
        self,
        changed: threading.Condition,
        is_there: Callable[[ClientId], bool],
        may_come: Callable[[ClientId], bool],
        deadline_s: float | None,
        clock: Callable[[], float],
        is_silent: Callable[[ClientId], bool] = lambda client: False,
        refusal: Callable[[ClientId], str] = lambda client: "",
        slow: Callable[[ClientId], str] = lambda client: "",
    ) -> None:
        """Store the checks whether a client is connected, may still connect, tells of no work.

        ``refusal`` says why what a client brought last is refused, and ``slow`` how far a transfer
        over a slow link is.
        """
        self._is_silent, self._refusal, self._slow = is_silent, refusal, slow
        self._changed, self._deadline_s = changed, deadline_s
        self._is_there, self._may_come, self._clock = is_there, may_come, clock
        self._stopped: FedtideError | None = None
        self._grace_s = 0.0
        """How long a wait may still last once the run is to stop."""

    @property
    def has_deadline(self) -> bool:
        """Whether there is a time after which some clients suffice."""
        return self._deadline_s is not None

    def stop(self, error: FedtideError, grace_s: float = 0.0) -> None:
        """End every wait with an error: at once, or after a time, if others still answer."""
        if self._stopped is None:
            self._stopped, self._stopping_since = error, self._clock()
        self._grace_s = grace_s
        self._changed.notify_all()

    def check_begin(self) -> None:
        """Refuse to begin anything new once the run is to stop."""
        if self._stopped is not None:
            raise self._stopped

    def _is_out(self, at_work: Sequence[ClientId]) -> bool:
        """Tell whether a wait has to end since the run is to stop."""
        if self._stopped is None:
            return False
        return not at_work or self._clock() - self._stopping_since >= self._grace_s

    def wait(
        self,
        notice: WaitNotice,
        missing: Callable[[], Sequence[ClientId]],
        done: Callable[[], bool],
        enough: Callable[[], bool],
        *,
        for_the_living: bool = False,
    ) -> None:
        """Wait until ``done``; name missing clients in log lines.

        With a deadline, ``enough`` suffices after the deadline. With ``for_the_living`` it also
        suffices once all missing clients are dead.

        Raises:
            FedtideError: the one that :meth:`stop` was given.
        """
        while not done():
            late = missing()
            at_work = [c for c in late if self._is_there(c)]
            if self._is_out(at_work):
                self.check_begin()
            there = set(at_work)
            away = [c for c in late if c not in there]
            are_dead = not at_work and not any(map(self._may_come, away))
            left, rest = LOOK_EVERY_S, "all of them are needed"
            if self._deadline_s is not None:
                to_go = self._deadline_s - notice.seconds
                if enough() and (to_go <= 0 or (for_the_living and are_dead)):
                    return
                if to_go > 0:
                    left = min(left, to_go)
                rest = f"it continues without them in {to_go:.0f} s"
                if for_the_living and not at_work:
                    rest += ", or once they count as gone"
                if not enough():
                    rest = "min_clients does not allow fewer"
            notice.look(away, at_work, rest, self._is_silent, self._refusal, self._slow)
            self._changed.wait(left)

    def wait_to_join(
        self,
        notice: WaitNotice,
        wanted: Sequence[ClientId],
        joined: Collection[ClientId],
        needed: int,
        *,
        enough_will_do: bool = False,
        for_the_living: bool = False,
    ) -> None:
        """Wait until clients have joined; with ``enough_will_do``, for no more than are needed.

        With ``for_the_living`` those that do not come within a lease of the start are dead, and
        whoever has joined beside those that are waited for is one of the clients that are needed.
        """

        def missing() -> list[ClientId]:
            return [c for c in wanted if c not in joined]

        def has_enough() -> bool:
            there = [*joined] if for_the_living else [c for c in wanted if c in joined]
            return sum(isinstance(c, int) for c in there) >= needed

        def is_done() -> bool:
            return not missing() or (enough_will_do and has_enough())

        self.wait(notice, missing, is_done, has_enough, for_the_living=for_the_living)


class Attendance:
    """How each client stands that was ever there; used while the cohort holds its lock.

    A standing is ``present``, ``away`` or ``out`` for good, ``since`` a unix time. It says ``why``,
    and why what the client brought last was ``refused``. Whoever has none was never seen.
    """

    def __init__(
        self,
        sessions: Sessions,
        lease_s: Callable[[], float],
        clock: Callable[[], float],
        known: Mapping[int, Mapping[str, Any]] = NOBODY,
        keep: Callable[[Mapping[int, Mapping[str, Any]]], object] = lambda standings: None,
    ) -> None:
        """Let nobody be there yet.

        Args:
            sessions: of the clients that have joined.
            lease_s: returns after how long a client that is not heard of is gone.
            clock: the monotonic clock.
            known: how clients stood before a restart.
            keep: stores how clients stand that stand otherwise than before.
        """
        self._sessions, self._lease_s, self._clock, self._keep = sessions, lease_s, clock, keep
        self._alive: dict[ClientId, float] = {}
        """When each client that is there was last known to be alive."""
        self._next = -math.inf
        self.standings = {client: dict(one) for client, one in known.items()}
        self._changed = dict[int, Mapping[str, Any]]()
        self._room = dict[int, tuple[float, float]]()
        """How many more times each client's standing may be stored, and when that was counted."""
        for client, one in known.items():
            if one["state"] == "present":
                self.stands(client, "away", "it has not joined since the coordinator began again")

    @property
    def there(self) -> Collection[ClientId]:
        """Return the clients that count as there."""
        return self._alive.keys()

    def stands(self, client: ClientId, state: str, why: str = "") -> None:
        """Note how a client stands from now on."""
        before = self.standings.get(client, {}) if isinstance(client, int) else None
        if before is None or (before.get("state"), before.get("why", "")) == (state, why):
            return
        now = {**before, "state": state, "since": round(time.time(), 1), "why": why}
        self._note(int(client), now)

    def refused(self, client: ClientId, why: str = "") -> None:
        """Note why what a client brought is refused; nothing where it is taken."""
        if isinstance(client, int) and self.standings.get(client, {}).get("refused", "") != why:
            if client not in self.standings:
                self.stands(client, "away", "it was never taken")
            self._note(client, {**self.standings[client], "refused": why})

    def _note(self, client: int, now: dict[str, Any]) -> None:
        self.standings[client] = now
        self._changed[client] = now

    def joined(self, client: ClientId) -> None:
        """Note that a client has joined, which an event tells."""
        self._alive[client] = self._clock()
        self.stands(client, "present")
        self.refused(client)

    def left(self, client: ClientId, why: str, state: str = "away") -> None:
        """Note that a client has left or was set out, which an event tells."""
        self._alive.pop(client, None)
        self.stands(client, state, why)

    def store(self) -> None:
        """Store the standings that have changed; one that keeps changing, at a bounded rate."""
        if due := {c: one for c, one in self._changed.items() if self._may_store(c)}:
            self._changed = {c: one for c, one in self._changed.items() if c not in due}
            self._keep(due)

    def _may_store(self, client: int) -> bool:
        now = self._clock()
        room, since = self._room.get(client, (STORED_AT_ONCE, now))
        room = min(STORED_AT_ONCE, room + (now - since) / STORED_EVERY_S)
        self._room[client] = room - (room >= 1), now
        return room >= 1

    def look(self) -> tuple[list[ClientId], list[ClientId]]:
        """Return who is gone and who is back since the last look, if a look is due."""
        self.store()
        now = self._clock()
        if now < self._next:
            return [], []
        self._next, lease_s = now + GONE_EVERY_S, self._lease_s()
        back = list[ClientId]()
        for client, session in self._sessions.items():
            heard = now if session.is_waiting else session.heard
            if client in self._alive:
                self._alive[client] = max(heard, self._alive[client])
            elif now - heard < lease_s:
                self._alive[client] = heard
                back.append(client)
                self.stands(client, "present")
        gone = [client for client, alive in self._alive.items() if now - alive >= lease_s]
        for client in gone:
            self.left(client, f"nothing was heard for {lease_s:g} s")
        return gone, back
