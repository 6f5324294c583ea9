"""Which private states clients hold, and which they must hold for the run to go on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fedmodels.tensors.bundle import ClientId
from fedsrv.engine.cohort import HoldsState, StateLost
from fedsrv.state.history import LossTooLarge
from fedsrv.transport.sessions import ClientSession

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

    def has_trained(self, client: ClientId, interaction: int) -> None:
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
