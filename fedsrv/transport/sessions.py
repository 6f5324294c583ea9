"""Sessions of clients, the Pulls that wait for them, and the private states that clients hold."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import TypeVar

from fedmodels.console.printable import printable
from fedmodels.errors import PayloadError
from fedmodels.facts.position import Interaction
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedmodels.times import NEWS_EVERY_S, PIECE_S
from fedpb.pace import PIECE_BYTES, UNSEEN_BYTES, Pace
from fedsrv.engine.cohort import HoldsState, StateLost
from fedsrv.state.history import LossTooLarge
from fedsrv.transport.intake import Through
from fedsrv.transport.refusals import UnknownSession

T = TypeVar("T")
MAX_VERSIONS = 10_000
"""Private states of a client that a session remembers, the newest ones."""


@dataclass(slots=True)
class ClientSession:
    """A client that has joined."""

    token: bytes
    client_json: str
    versions: tuple[int, ...]
    """Private states that the client holds; it may have pruned some below the watermark."""
    seen: float
    """Time of the client's last call, on the monotonic clock."""
    joined_with: str = ""
    """The description that it joined with; ``client_json`` is that of now."""
    durable: int = -1
    issue: int = 0
    """Issue of the last order that the client got."""
    trained: int = -1
    """Interaction of the client's last upload."""
    start_over: bool = False
    """Whether the client agrees to go on from its initial private state."""
    last_news: float = -math.inf
    """Time of the last beat that became an event."""
    through: Through | None = None
    """Who passes the client's calls on, if somebody does."""
    caller: Caller | None = None
    """The newest Pull that waits for the client; earlier ones get no more orders."""

    def __post_init__(self) -> None:
        self.versions = self.versions[-MAX_VERSIONS:]

    @property
    def is_waiting(self) -> bool:
        """Whether a Pull waits for the client's orders now."""
        return self.caller is not None and self.caller.is_waiting

    @property
    def heard(self) -> float:
        """Time of the client's last sign of life, on the monotonic clock."""
        return self.seen if self.caller is None else max(self.seen, self.caller.seen)

    def end_pull(self) -> None:
        """End the Pull that waits for the client; its process makes another one for others."""
        if self.caller is not None:
            self.caller.is_replaced = True
            self.caller.changed.notify()

    def is_news(self, now: float) -> bool:
        """Tell whether it is time for another progress event."""
        due = now - self.last_news >= NEWS_EVERY_S
        self.last_news = now if due else self.last_news
        return due

    def add_version(self, interaction: Interaction) -> None:
        """Note that the client has trained in an interaction, and holds its private state."""
        self.trained = interaction
        self.versions = (*self.versions, interaction)[-MAX_VERSIONS:]


Sessions = Mapping[ClientId, ClientSession]
"""The sessions of some clients."""


def through_whom(sessions: Sessions, clients: Iterable[ClientId]) -> dict[ClientId, Through]:
    """Return through whom each of these clients joined that joined through somebody."""
    found = ((client, sessions.get(client)) for client in clients)
    return {client: one.through for client, one in found if one and one.through}


@dataclass(eq=False)
class Caller:
    """A Pull, and the condition that wakes this Pull alone.

    It keeps what is left of a trip, so that an order costs the same for two clients and thousands.
    """

    clients: Sessions
    changed: threading.Condition
    is_full: bool = False
    """Whether the caller has as many unanswered orders as it may have."""
    is_waiting: bool = False
    """Whether the caller waits for an order now."""
    is_there: bool = True
    """Whether its stream has not ended yet; a large payload may be on its way."""
    is_regrouped: bool = False
    """Whether a client has left the group that it was told of, and may not be one of its own."""
    is_replaced: bool = False
    """Whether another Pull waits for one of the clients, or one has left."""
    seen: float = -math.inf
    """Time at which it last waited, on the monotonic clock."""
    worked: float = math.inf
    """Time at which one of its clients last told of work; at first, that of the call."""
    pace: Pace = field(default_factory=lambda: Pace(PIECE_BYTES, PIECE_S, UNSEEN_BYTES))
    """How fast it takes orders; of the thread of its call."""
    sending: tuple[int, int, float] | None = None
    """Bytes of orders sent, of how many, and since when on the monotonic clock, if some are on
    their way."""
    checked: int = -1
    """How often sessions had been replaced when its own were last compared."""
    _left: dict[int, Unanswered] = field(default_factory=dict)
    """What is left of each trip under way, by its issue."""

    @cached_property
    def passes_on(self) -> bool:
        """Whether its orders go on to other processes."""
        return any(session.through for session in self.clients.values())

    def wait(
        self,
        look: Callable[[], T | None],
        is_active: Callable[[], bool],
        clock: Callable[[], float],
    ) -> T | None:
        """Wait until ``look`` finds something; None when the caller is gone, or replaced.

        Used while the lock of ``changed`` is held.
        """
        self.is_waiting = True
        try:
            while is_active() and not self.is_replaced:
                found = look()
                if found is not None:
                    return found
                self.changed.wait()
            return None
        finally:
            self.is_waiting, self.seen = False, clock()

    def check(self, sessions: Sessions, replaced: int) -> None:
        """Check that no other session took over one of the caller's clients.

        ``replaced`` says how often a session of these was replaced or removed.

        Raises:
            UnknownSession: names the client.
        """
        if self.checked != replaced:
            for client, session in self.clients.items():
                if client not in sessions:
                    raise UnknownSession(f"client {client} has no session any more; join again")
                if sessions[client] is not session:
                    raise UnknownSession(f"another session took over client {client}")
            self.checked = replaced

    def left_of(
        self, trips: Mapping[int, Callable[[], Sequence[ClientId]]]
    ) -> Mapping[int, Unanswered]:
        """Return what is left of trips, and forget all others.

        What returns the clients that have not answered is called for a trip that is new.
        """
        for issue, missing in trips.items():
            if issue not in self._left:
                due = [c for c in missing() if c in self.clients]
                fresh = dict.fromkeys(c for c in due if self.clients[c].issue != issue)
                self._left[issue] = Unanswered(fresh, set(due) - fresh.keys())
        self._left = {issue: self._left[issue] for issue in trips}
        return self._left

    def take(self, issue: int, most: int) -> list[ClientId]:
        """Return whose orders of a trip come next, and note that they are sent."""
        left = self._left[issue]
        taken = list(islice(left.fresh, most))
        for client in taken:
            del left.fresh[client]
            left.ahead.add(client)
            self.clients[client].issue = issue
        return taken

    def answered(self, client: ClientId, issue: int) -> None:
        """Note that a client answered its order of a trip; wake the caller if it waited for that.

        An order of another trip stays due: the answer may be a late one, to a trip that has ended.
        """
        if left := self._left.get(issue):
            left.fresh.pop(client, None)
            left.ahead.discard(client)
        if self.is_full:
            self.changed.notify()


@dataclass
class Unanswered:
    """The clients of a caller that have not answered their orders of a trip."""

    fresh: dict[ClientId, None]
    """Clients whose orders were not sent yet, in the order of the trip."""
    ahead: set[ClientId]
    """Clients whose orders were sent."""


def client_id_of(text: str, num_clients: int) -> ClientId:
    """Read a client id off the wire; PayloadError if nobody of the run has it."""
    if text == EVALUATOR:
        return EVALUATOR
    if re.fullmatch(r"0|[1-9][0-9]{0,8}", text) and int(text) < num_clients:
        return int(text)
    said = printable(text, 60)
    raise PayloadError(f"client id {said!r} is none of this run's: 0 to {num_clients - 1}")


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

    def is_silent(self, client: ClientId, seconds: float) -> bool:
        """Tell whether a client's process waits, and none of its clients has told of work lately.

        Another client of the process may be at work, and this one's order wait for that.
        """
        session = self._sessions.get(client)
        caller = None if session is None else session.caller
        return caller is not None and self._clock() - caller.worked >= seconds

    def may_come(self, client: ClientId) -> bool:
        """Tell whether a missing client still has time to join: a lease from the start."""
        return client not in self._sessions and self._clock() - self._begun < self._lease_s()

    def dead(self, clients: Iterable[ClientId]) -> set[ClientId]:
        """Return those of the clients that are neither there nor may come."""
        return {c for c in clients if not self.is_there(c) and not self.may_come(c)}


MAX_LOSSES = 5
"""A client that loses its state more often while no new interaction is committed is refused."""


class StateInventory:
    """The private states of the cohort's clients; used while the cohort holds its lock."""

    def __init__(self, sessions: dict[ClientId, ClientSession]) -> None:
        self._sessions = sessions
        self._required: HoldsState = lambda client, versions: True
        self._stateful = False
        self._last_trained: Mapping[ClientId, int] = {}
        self._safe = -1
        self._unsafe: set[int] = set()
        """Clients whose newest state may not be safe on their disks yet."""
        self.lost: int | None = None
        """A client that came back without the state it must hold."""
        self._starting_over: set[int] = set()
        self._losses = Counter[int]()
        self._highest = -1

    def require(self, holds: HoldsState, last_trained: Mapping[int, int], safe: int) -> None:
        """Set the required states; a client that lost too much has to join again."""
        self._required, self._stateful, self._safe = holds, True, safe
        self._last_trained = dict(last_trained.items())
        self._unsafe = set(last_trained)
        for client, session in list(self._sessions.items()):
            session.trained = self.trained(client)
            session.durable = min(session.durable, session.trained)  # later states are done again
            try:
                self.lacks(client, session.versions, session.start_over)
            except LossTooLarge:  # the client learns the reason when it joins again
                self.dismiss(client)

    def admit(self, client: ClientId, session: ClientSession) -> None:
        """Begin a client's session; what it has synced is unknown until it says so."""
        self._sessions[client] = session
        if isinstance(client, int):
            self._unsafe.add(client)

    def dismiss(self, client: ClientId) -> None:
        """End a client's session; what it lost does not matter any more."""
        self._sessions.pop(client, None)
        if self.lost == client:
            self.lost = None

    def has_trained(self, client: ClientId, interaction: Interaction) -> None:
        """Note a client's upload, and with it a private state that may not be safe yet."""
        assert isinstance(client, int), "the evaluator trains nothing"
        if client in self._sessions:  # else it was turned away while its upload came
            self._sessions[client].add_version(interaction)
        self._unsafe.add(client)

    def trained(self, client: ClientId) -> int:
        """Return the last committed interaction that a client trained in; -1 for none."""
        return self._last_trained.get(client, -1)

    def lose(self, client: ClientId) -> None:
        """Note that a client came back without the state it must hold.

        Raises:
            LossTooLarge: it does so again and again; each time, the others would wait for it.
        """
        assert isinstance(client, int), "the evaluator holds no state"
        self._losses[client] += 1
        if self._losses[client] > MAX_LOSSES:
            self._starting_over.discard(client)
            raise LossTooLarge(
                f"client {client} came back without its private state {MAX_LOSSES} times since "
                f"the commit of interaction {self._highest + 1}; see that its --state-dir keeps "
                "what is written, and start the coordinator again with --resume to admit it"
            )
        self.lost = client

    def check(self) -> None:
        """Raise StateLost if a client came back without the state it must hold."""
        if self.lost is not None:
            raise StateLost(self.lost, self._sessions[self.lost].versions)

    def went_on(self, committed: int) -> None:
        """Forget earlier losses once an interaction is committed for the first time."""
        if committed > self._highest:
            self._highest = committed
            self._losses.clear()

    def starting_over(self) -> Sequence[int]:
        """Return the clients that start over, and forget them."""
        found, self._starting_over = sorted(self._starting_over), set()
        return found

    def lacks(
        self, client: ClientId, versions: Sequence[int], start_over: bool, uploaded: int = -1
    ) -> bool:
        """Tell whether a client's states fall short; note a client that may start over.

        Args:
            client: who holds the states.
            versions: the interactions after which it holds one.
            start_over: whether it may go on from its initial state.
            uploaded: the interaction of its last upload that was taken, which may not be committed.

        Raises:
            LossTooLarge: the run may not go back to any state of the client.
        """
        if not isinstance(client, int):
            return False
        try:
            held = self._required(client, versions)
            return not held or (self._stateful and uploaded not in (-1, *versions))
        except LossTooLarge:
            if not start_over:
                raise
            self._starting_over.add(client)
            return True

    def versions(self) -> Mapping[int, Sequence[int]]:
        """Return the private states that each client says it holds; clear the lost client."""
        self.lost = None
        return {c: s.versions for c, s in self._sessions.items() if isinstance(c, int)}

    def durable(self, committed: int) -> int | None:
        """Return the interaction up to which every client's state is safe; None: all are safe.

        A client that has not joined since the coordinator began cannot say what it has synced. Who
        said that its newest state is safe is not looked at again until it trains or joins: a commit
        costs the same for a hundred clients and for thousands.
        """
        if not self._stateful:
            return None
        late = []
        for client in list(self._unsafe):
            session = self._sessions.get(client)
            durable = self._safe if session is None else session.durable
            trained = self.trained(client) if session is None else session.trained
            if durable >= trained:
                self._unsafe.discard(client)
            elif durable < min(trained, committed):
                late.append(durable)
        return min(late, default=None)
