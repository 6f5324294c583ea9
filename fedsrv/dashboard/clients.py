"""What each client of a run does now, and how far behind it is, as events tell."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedsrv.events import Event
from fedsrv.narration import DOING


@dataclass
class ClientNow:
    """One client, by the last events about it."""

    phase: str = "unknown"
    heard: float = 0.0
    """Unix time of the last event."""
    answered: int = -1
    """The last interaction that it answered."""
    failures: int = 0

    def take(self, event: Event) -> None:
        """Take in an event about this client."""
        facts = event.detail
        self.heard = event.unix_time
        if event.kind == "beat":
            self.phase = f"trains: epoch {facts['epoch']}, batch {facts['batch']}"
        elif event.kind == "order":
            self.phase = DOING.get(facts["order"], "works")
        elif event.kind == "upload":
            self.phase, self.answered = "waits", max(self.answered, event.interaction)
        elif event.kind == "failed":
            self.phase, self.failures = f"failed: {facts.get('reason', '')}", self.failures + 1
        elif event.kind in ("joined", "left"):
            self.phase = event.kind

    def lag(self, committed: int) -> int | None:
        """Return how many committed interactions it has not answered; None before its first."""
        return None if self.answered < 0 else max(committed - self.answered, 0)


def rows_of(clients: dict[str, ClientNow], committed: int) -> list[dict[str, Any]]:
    """Return the clients as values of JSON, by id."""
    ordered = sorted(clients.items(), key=lambda item: (len(item[0]), item[0]))
    return [
        {
            "id": name,
            "phase": now.phase,
            "heard": now.heard,
            "lag": now.lag(committed),
            "failures": now.failures,
        }
        for name, now in ordered
    ]
