"""Sums that relays owe: a relay that is there and does not bring one is at fault, and no client is.

A client behind a relay has answered once all but its weights came; its weights come in a sum. A
relay could leave them out of the sum, or bring none. Nobody would wait for its client then, and the
trip would not end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from fedmodels.tensors.bundle import ClientId

LEFT_OUT_S = 15.0
"""Time in which a client that a sum left out must come whole: it brings its upload again where the
relay never heard that the first one came."""
SUM_S, SUM_BYTES_PER_S = 90.0, 16 << 10
"""Time for a sum: that of a Push of its size, and half a minute to begin it."""


@dataclass
class OverdueSums:
    """What the relays of one trip owe; used while the cohort holds its lock."""

    num_bytes: int
    """The most bytes of a sum."""
    _left_out: dict[int, float] = field(default_factory=dict)
    """Clients that a sum of their relay left out, and when it came."""
    _complete: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Since when each group waits for nothing but its sum."""

    def leave_out(self, clients: Collection[int], now: float) -> None:
        """Note that a sum came without these clients, who had brought all but their weights."""
        self._left_out |= dict.fromkeys(clients, now)

    def joined_again(self, client: ClientId) -> None:
        """Give a client and its relay time again: either of them may have been restarted."""
        if isinstance(client, int):
            self._left_out.pop(client, None)
            self._complete = {g: since for g, since in self._complete.items() if client not in g}

    def failures(
        self,
        owed: Collection[tuple[int, ...]],
        unanswered: Callable[[int], bool],
        is_there: Callable[[ClientId], bool],
        now: float,
    ) -> Iterator[tuple[int, str]]:
        """Yield the clients whose weights will not come any more, and what their relay did.

        Args:
            owed: the groups that wait for nothing but a sum: all others of it have answered.
            unanswered: tells whether a client's result is still incomplete.
            is_there: tells whether a client is connected, and so its relay.
            now: the time on the monotonic clock.
        """
        for client, since in self._left_out.items():
            if unanswered(client) and is_there(client) and now - since >= LEFT_OUT_S:
                yield client, "left it out of its sum"
        there = {group for group in owed if all(map(is_there, group))}
        self._complete = {group: self._complete.get(group, now) for group in there}
        limit = SUM_S + self.num_bytes / SUM_BYTES_PER_S
        for group, since in self._complete.items():
            if now - since >= limit:
                yield from ((client, "brought no sum") for client in group)
