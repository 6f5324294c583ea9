"""How far the sums of relays lie from the uploads beside them.

What a relay says of its clients' uploads is the relay's word. Of the mean behind its sum the
coordinator measures itself how far it moved, and in which direction. A mean of uploads moves no
farther than the farthest of them. So a sum is one upload among those that came whole and the other
sums, and has their bounds; what is out of bounds is the relay's fault, not its clients'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedmodels.tensors.differences import Measured
from fedsrv.engine.cohort import Answers, RelayedSum
from fedsrv.engine.odd_uploads import far_out, standing_out

Judge = Callable[[Mapping[int, Measured]], dict[int, str]]
"""Returns which uploads stand out, and in what."""


def far_out_beside_relays(results: Answers) -> dict[int, str]:
    """Return the clients whose uploads, or whose relay's sum, lie too far out, and why."""
    found = far_out(results.measured())
    for one in results.relayed:
        word = f" (as its relay {one.relay} says)"
        found |= {client: found[client] + word for client in one.clients if client in found}
    for one, why in _judged(results, far_out):
        line = why.replace("its upload", f"the sum of its relay {one.relay}", 1)
        found |= dict.fromkeys(one.clients, line)
    return found


def sums_standing_out(results: Answers) -> dict[str, str]:
    """Return the relays whose sums stand out though they count, and in what."""
    return {one.relay: why for one, why in _judged(results, standing_out)}


def _judged(results: Answers, judge: Judge) -> list[tuple[RelayedSum, str]]:
    """Return the sums that stand out among uploads that came whole and other sums, and why."""
    sums = [one for one in results.relayed if one.moved is not None]
    if not sums:
        return []
    held = {client for one in results.relayed for client in one.clients}
    cohort = {client: m for client, m in results.measured().items() if client not in held}
    first = max(cohort, default=-1) + 1
    places = dict(enumerate(sums, first))
    beside = {place: one.moved for place, one in places.items() if one.moved is not None}
    found = judge({**cohort, **beside})
    return [(one, found[place]) for place, one in places.items() if place in found]
