"""A relay that speaks the protocol well and lies in the sums that it brings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmodels.tensors.bundle import Weights
from fedsrv.coordinator import Listen
from fedsrv.event_lines import EventPrinter
from fedsrv.events import EventLog
from fedsrv.relay import relaying
from fedsrv.relay.trips import ClientGroup, RelayedTrips

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

        honest, relaying.RelayedTrips = relaying.RelayedTrips, Lying  # type: ignore[misc]
        try:
            relaying.serve_relay(*arguments)
        finally:
            relaying.RelayedTrips = honest  # type: ignore[misc]

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
