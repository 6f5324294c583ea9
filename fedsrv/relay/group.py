"""The clients of a trip whose weights a relay adds up, and what has come of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass, field

from fedmodels.tensors.bundle import Bundle, ClientId, Weights
from fedmodels.tensors.differences import cosines
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer
from fedsrv.engine.streaming_mean import StreamingMean


@dataclass(eq=False)
class Group:
    """A group under way; used while the cohort holds its lock, but for :meth:`sums`."""

    order: rpc.Order
    """One of its orders: they differ in the client only."""
    clients: tuple[int, ...]
    folding: StreamingMean
    count: Callable[[Bundle], float]
    """Gives what an upload counts in the mean."""
    strangers_until: float
    """Time on the monotonic clock at which it goes on without clients that never joined here."""
    until: float
    """Time at which it goes on without anybody who is missing."""
    results: dict[ClientId, Answer] = field(default_factory=dict)
    failed: set[ClientId] = field(default_factory=set)
    """Clients that are not in the sum, whatever happened to them."""
    on_their_way: set[ClientId] = field(default_factory=set)
    """Clients whose results are just being told to the coordinator above."""
    is_closed: bool = False
    """Whether the sum is settled; results that come later go up whole."""

    def takes(self, client: ClientId) -> bool:
        """Tell whether a client's weights may still be added; if so, its result is on its way."""
        if self.is_closed or client not in self.clients or client in self.failed:
            return False
        self.on_their_way.add(client)
        return True

    def keep(self, client: ClientId, result: Answer) -> None:
        """Add the result of a client that the coordinator above has been told of."""
        self.results[client] = result
        self.folding.add_answer(result, self.results, self.failed)

    def is_ready(
        self,
        now: float,
        joined: Container[ClientId],
        dead: Callable[[Iterable[ClientId]], Collection[ClientId]],
    ) -> bool:
        """Tell whether the sum can go up: all have come, or it is time.

        Args:
            now: the time on the monotonic clock.
            joined: the clients that have joined this relay, dead ones as well. Another one may
                have joined the coordinator itself under this relay's name.
            dead: returns those of some clients that are dead; with a deadline nobody waits for one.
        """
        if self.is_closed or self.on_their_way:
            return False
        missing = self.missing()
        if now >= self.strangers_until:
            missing -= self.strangers(joined)
        if self.until < math.inf:
            missing -= {*dead(missing)}
        return not missing or (now >= self.until and bool(self.results))

    def missing(self) -> set[ClientId]:
        """Return the clients that have not answered."""
        everybody: set[ClientId] = {*self.clients}
        return everybody - self.results.keys() - self.failed

    def strangers(self, joined: Container[ClientId]) -> set[ClientId]:
        """Return the clients that are missing and never joined here."""
        return {client for client in self.missing() if client not in joined}

    def cosines(self) -> dict[int, float]:
        """Return the cosine between each client's difference and their mean; before the sums."""
        held = {c: r for c, r in self.results.items() if isinstance(c, int)}
        drawn = {c: r.measured.sketch for c, r in held.items() if r.measured is not None}
        sketches = {client: sketch for client, sketch in drawn.items() if sketch is not None}
        return cosines(sketches, {c: self.count(held[c].upload) for c in sketches}, {})

    def sums(self) -> Weights | None:
        """Return the weighted sums of all results, and drop their weights; None: nothing counts."""
        found = self.folding.sums(self.results)
        for result in self.results.values():
            result.upload = Bundle()
        return found
