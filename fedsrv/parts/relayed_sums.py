"""How far the sums of relays lie from the uploads beside them.

What a relay says of its clients' uploads is the relay's word. Of the mean behind its sum the
coordinator measures itself how far it moved, and in which direction. A mean of uploads moves no
farther than the farthest of them. So a sum is one upload among those that came whole and the other
sums, and has their bounds; what is out of bounds is the relay's fault, not its clients'.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedmodels.tensors.differences import Measured
from fedsrv.engine.cohort import Answers, RelayedSum
from fedsrv.parts.odd_uploads import agreed_on, far_out, standing_out


@dataclass(frozen=True)
class Warnings:
    """Whose uploads and sums count and stand out."""

    clients: dict[int, str]
    """In what each client's upload does."""
    relays: dict[str, str]
    """In what each relay's sum does."""
    agreed: list[int]
    """The clients on whom all agree but those that may lie: these may be excluded."""


def far_out_beside_relays(results: Answers) -> dict[int, str]:
    """Return the clients whose uploads, or whose relay's sum, lie too far out, and why."""
    found = far_out(results.measured())
    for one in results.relayed:
        word = f" (as its relay {one.relay} says)"
        found |= {client: found[client] + word for client in one.clients if client in found}
    cohort, sums = _beside(results)
    beside = far_out({**cohort, **{place: moved for place, (_, moved) in sums.items()}})
    for place, (one, _) in sums.items():
        if place in beside:
            line = beside[place].replace("its upload", f"the sum of its relay {one.relay}", 1)
            found |= dict.fromkeys(one.clients, line)
    return found


def warnings_of(results: Answers, liars: int | None) -> Warnings:
    """Return whose uploads and sums stand out, and in what.

    Of a client whose upload is in a sum there is the relay's word alone, which warns of nobody.
    ``liars`` may lie in a round, where the config says so.
    """
    whole, sums = _beside(results)
    cohort = {**whole, **{place: moved for place, (_, moved) in sums.items()}}
    found = standing_out(cohort)
    relays = {one.relay: found[place] for place, (one, _) in sums.items() if place in found}
    agreed = [client for client in agreed_on(cohort, liars) if client in whole]
    return Warnings({c: why for c, why in found.items() if c in whole}, relays, agreed)


def _beside(
    results: Answers,
) -> tuple[dict[int, Measured], dict[int, tuple[RelayedSum, Measured]]]:
    """Return the uploads that came whole, and the sums under numbers of their own."""
    held = {client for one in results.relayed for client in one.clients}
    cohort = {client: one for client, one in results.measured().items() if client not in held}
    first = max(cohort, default=-1) + 1
    sums = [(one, one.moved) for one in results.relayed if one.moved is not None]
    return cohort, dict(enumerate(sums, first))
