"""Who may join through a relay, and what takes the uploads that such clients bring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedmodels.console.printable import printable
from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import ClientId
from fedplugins.relays.grouped_intake import GroupedIntake, groups_of
from fedsrv.engine.cohort import Trip
from fedsrv.transport.refusals import SecondRelay


@dataclass(frozen=True)
class Relay:
    """A relay by its name: the ids of its clients, so it is the same after a restart."""

    name: str
    process: bytes = field(default=b"", compare=False)
    """Identifies the process that it is at present."""

    def __str__(self) -> str:
        """Return its name."""
        return self.name

    @property
    def told(self) -> Mapping[str, str]:
        """What is put down of it when a client joins through it."""
        return {"relay": self.name}

    def intake(self, trip: Trip, through: Mapping[ClientId, Relay]) -> GroupedIntake | None:
        """Return what takes the uploads of a trip; None where no relay adds up any of them."""
        groups = groups_of(trip, through)
        return GroupedIntake(trip, groups, through) if groups else None


def admitted(
    name: str,
    process: bytes,
    clients: Sequence[ClientId],
    *,
    num_clients: int,
    check_covers: Callable[[str], object],
    listening: Iterable[object],
) -> Relay:
    """Return the relay through which clients join.

    A client that is behind no relay could name one whose clients then wait for it. Two relays of
    one name would wait for each other's clients, so the second one waits until the first is gone.

    Args:
        name: what the relay says it is called.
        process: tells the relay from others of this name.
        clients: who joins.
        num_clients: those of the run.
        check_covers: checks that the caller's certificate covers a client, given its id.
        listening: through whom clients joined whose orders are pulled now.

    Raises:
        SecondRelay: another process pulls orders under this name.
        PayloadError: the relay is none of these clients'.
        NotYours: the caller's certificate does not cover the relay's clients.
    """
    found = re.fullmatch(r"([0-9]{1,9})-([0-9]{1,9})", name)
    ids = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    for client in clients:
        if client not in ids:
            said = printable(name, 60)
            raise PayloadError(f"client {client} is none of those of the relay {said!r}")
    for end in (ids[0], min(ids[-1], num_clients - 1)):
        check_covers(str(end))  # it covers all between two of its own that were not revoked
    relay = Relay(name, process)
    for other in listening:
        if isinstance(other, Relay) and other == relay and other.process != process:
            raise SecondRelay(
                f"another relay with --clients {name} is connected: give each relay clients of "
                "its own; these clients wait until the other one is gone"
            )
    return relay
