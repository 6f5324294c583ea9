"""A relay that speaks the protocol well and lies in the sums that it brings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmodels.tensors.bundle import Bundle, Weights
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays import relaying
from fedplugins.relays.trips import ClientGroup, RelayedTrips
from fedsrv.coordinator import Listen
from fedsrv.progress.event_lines import EventPrinter
from fedsrv.progress.events import EventLog

Lie = Callable[[ClientGroup], None]
"""Changes a group whose sum is about to go up."""


def drops(*clients: int) -> Lie:
    """Leave clients out of the sum who have brought all but their weights."""

    def lie(group: ClientGroup) -> None:
        for client in clients:
            group.results.pop(client, None)

    return lie


def brings_nothing(group: ClientGroup) -> None:
    """Bring no sum at all."""
    group.results.clear()


def scales(factor: float) -> Lie:
    """Multiply the sum, and say of each upload what is true."""

    def lie(group: ClientGroup) -> None:
        sums = group.sums

        def scaled() -> Weights | None:
            found = sums()
            return found and {name: factor * tensor for name, tensor in found.items()}

        group.sums = scaled  # type: ignore[method-assign]

    return lie


def tells_the_truth(group: ClientGroup) -> None:
    """Bring the sum as it is."""


def omits(*path: str) -> Lie:
    """Leave a field out of what is told of each client's upload, and of each sum."""
    return Omission(path)


@dataclass(frozen=True)
class Omission:
    """A lie about headers; groups stay as they are."""

    path: tuple[str, ...]

    def __call__(self, group: ClientGroup) -> None:
        """Change nothing in a group."""

    def told(self, header: rpc.PushHeader) -> None:
        """Clear the field, in each message of a list."""
        *within, name = self.path
        held: list[Any] = [header]
        for each in within:
            found = [getattr(message, each) for message in held if _has(message, each)]
            held = [m for one in found for m in (one if isinstance(one, Iterable) else [one])]
        for message in held:
            message.ClearField(name)


def _has(message: Any, name: str) -> bool:
    return any(field.name == name for field, _ in message.ListFields())


class LyingRelay:
    """A relay in a thread of this process; ``address`` is a socket in a directory."""

    def __init__(self, clients: range, above: str, root: Path, lie: Lie) -> None:
        self.address = f"unix:{root}/r"
        self._ready = threading.Event()
        arguments = (clients, relaying.Upstream(above), Listen(self.address), _Quiet(self._ready))
        self._lie = lie
        self._thread = threading.Thread(target=self._serve, args=arguments, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def _serve(self, *arguments: Any) -> None:
        lie = self._lie

        class Lying(RelayedTrips):
            def ready_group(self) -> ClientGroup | None:
                group = super().ready_group()
                if group is not None:
                    lie(group)
                return group

        class Omitting(relaying.Uplink):
            def push(self, header: rpc.PushHeader, upload: Bundle) -> rpc.PushResponse:
                if isinstance(lie, Omission):
                    lie.told(header)
                return super().push(header, upload)

        honest = relaying.RelayedTrips, relaying.Uplink
        relaying.RelayedTrips, relaying.Uplink = Lying, Omitting  # type: ignore[misc]
        try:
            relaying.serve_relay(*arguments)
        finally:
            relaying.RelayedTrips, relaying.Uplink = honest  # type: ignore[misc]

    def close(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()


class _Quiet(EventPrinter):
    """Tells nobody but whoever waits for the relay."""

    def __init__(self, ready: threading.Event) -> None:
        super().__init__(names_address=False, prints=False)
        self._ready = ready

    def begin(self, address: str, events: EventLog) -> None:
        self._ready.set()
