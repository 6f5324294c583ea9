"""Whose secure sums keep coming to nothing: groups in which one client lies, or is broken.

Nobody sees a single upload, so a group is all that can be named. What is known follows from the
committed records, so a restart comes to the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fedmodels.errors import RunFailed
from fedsrv.engine.client_profile import clients_text
from fedsrv.state.record import Record, of_parts

IN_A_ROW = 3
"""Sums in a row after whose coming to nothing a client takes part in no further one. One alone may
be a fault that passes; of groups that change, a client that is honest leaves the row sooner."""


class NoSumLeft(RunFailed):
    """All groups keep coming to nothing, or lack a client for good."""


class SpoiledSums:
    """How often in a row the sums of each client came to nothing."""

    def __init__(self, records: Iterable[Record], gone: Collection[int]) -> None:
        """Count what is committed; a sum of somebody who is gone by now says nothing of others."""
        self._gone = frozenset(gone)
        self._row = dict[int, int]()
        for record in records:
            said = of_parts(record).get("secure_sum", {})
            self.count(said.get("groups", ()), said.get("void", ()))

    def count(self, groups: Iterable[Sequence[int]], void: Sequence[Sequence[int]]) -> list[int]:
        """Count the sums of an interaction; return who takes part in no further one from now on."""
        before = self.clients
        for group in groups:
            is_void = [*group] in [[*one] for one in void] and self._gone.isdisjoint(group)
            for client in group:
                self._row[client] = self._row.get(client, 0) + 1 if is_void else 0
        return sorted(self.clients - before)

    @property
    def clients(self) -> set[int]:
        """The clients that take part in no further sum."""
        return {client for client, times in self._row.items() if times >= IN_A_ROW}


def spoiled_line(clients: Sequence[int]) -> str:
    """Return the line that says who takes part in no further sum."""
    return (
        f"{clients_text([*map(str, clients)])} are excluded from secure sums: their last "
        f"{IN_A_ROW} failed, as if one of them had lied"
    )
