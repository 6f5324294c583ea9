"""How far the sums of relays lie from the uploads beside them.

What a relay says of its clients' uploads is the relay's word. Of the mean behind its sum the
coordinator measures itself how far it moved, and in which direction. A mean of uploads moves no
farther than the farthest of them. So a sum is one upload among those that came whole and the other
sums, and has their bounds; what is out of bounds is the relay's fault, not its clients'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedmodels.tensors.differences import Measured
from fedsrv.engine.cohort import Answers
from fedsrv.engine.comparison import agreed_on, far_out, standing_out
from fedsrv.state.record import Record, of_parts


@dataclass(frozen=True)
class RelayedSum:
    """The sum that a relay brought of the weights of some clients."""

    relay: str
    clients: tuple[int, ...]
    moved: Measured | None
    """How far the mean behind it lies from what they were given; None where nothing counts."""


@dataclass(frozen=True)
class RelayedSums:
    """The sums of one trip, as the look at odd uploads asks for them."""

    sums: Sequence[RelayedSum]
    judges_each: bool = True
    """Whether single uploads may lie too far out; of those that come again the sums alone may."""

    def again(self) -> RelayedSums:
        """Return what judges the sums alone."""
        return replace(self, judges_each=False)

    def far_out(self, results: Answers) -> dict[int, str]:
        """Return the clients whose uploads, or whose relay's sum, lie too far out, and why.

        A sum with an upload that lies too far out by its relay's word says nothing of the others:
        they send theirs again, and their sum is judged then.
        """
        found = far_out(results.measured()) if self.judges_each else {}
        for one in self.sums:
            word = f" (as its relay {one.relay} says)"
            found |= {client: found[client] + word for client in one.clients if client in found}
        cohort, sums = self._beside(results)
        beside = far_out({**cohort, **{place: moved for place, (_, moved) in sums.items()}})
        for place, (one, _) in sums.items():
            if place in beside and found.keys().isdisjoint(one.clients):
                line = beside[place].replace("its upload", f"the sum of its relay {one.relay}", 1)
                found |= dict.fromkeys(one.clients, line)
        return found

    def stand_out(
        self, results: Answers, liars: int | None, record: Record
    ) -> tuple[dict[int, str], list[int]]:
        """Return whose uploads stand out and in what, and on whom all agree but ``liars``.

        Of a client whose upload is in a sum there is the relay's word alone, which warns of nobody.
        The record says whose sums stand out, ``warned_relays``, and in what.
        """
        whole, sums = self._beside(results)
        cohort = {**whole, **{place: moved for place, (_, moved) in sums.items()}}
        found = standing_out(cohort)
        relays = {one.relay: found[place] for place, (one, _) in sums.items() if place in found}
        if relays:
            of_parts(record)["warned_relays"] = relays
        agreed = [client for client in agreed_on(cohort, liars) if client in whole]
        return {c: why for c, why in found.items() if c in whole}, agreed

    def _beside(
        self, results: Answers
    ) -> tuple[dict[int, Measured], dict[int, tuple[RelayedSum, Measured]]]:
        """Return the uploads that came whole, and the sums under numbers of their own."""
        held = {client for one in self.sums for client in one.clients}
        cohort = {c: one for c, one in results.measured().items() if c not in held}
        first = max(cohort, default=-1) + 1
        sums = [(one, one.moved) for one in self.sums if one.moved is not None]
        return cohort, dict(enumerate(sums, first))
