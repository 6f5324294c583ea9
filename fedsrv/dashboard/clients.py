"""What each client of a run does now, and how far behind it is, as events tell."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsrv.events import Event
from fedsrv.narration import DOING

MOST_CLIENTS = 200
"""Clients that have a row of their own; of more, quantiles over all are told besides."""
QUANTILES = {"least": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "most": 1.0}


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
    """Return the clients as values of JSON, by id; of many, those that failed or spoke last."""
    told = heapq.nlargest(
        MOST_CLIENTS, clients.items(), key=lambda item: (item[1].failures > 0, item[1].heard)
    )
    ordered = sorted(told, key=lambda item: (len(item[0]), item[0]))
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


def phases_of(clients: Mapping[str, ClientNow]) -> dict[str, int]:
    """Return how many clients are in each phase, the most frequent first."""
    return dict(Counter(now.phase.partition(":")[0] for now in clients.values()).most_common())


def few_of(columns: Mapping[str, Mapping[Any, float]], first: list[str]) -> dict[str, Any]:
    """Return columns of figures by client as values of JSON, thinned out where there are many.

    Args:
        columns: by name and client.
        first: ids of clients, those that have rows before others.

    Returns:
        ``columns`` with the clients that have rows, and ``quantiles`` over all clients by name,
        which is None where everybody has a row.
    """
    columns = {name: {str(c): v for c, v in column.items()} for name, column in columns.items()}
    everybody = list(dict.fromkeys([*first, *(c for column in columns.values() for c in column)]))
    kept = set(everybody[:MOST_CLIENTS])
    few = {name: {c: v for c, v in column.items() if c in kept} for name, column in columns.items()}
    if len(everybody) <= MOST_CLIENTS:
        return {"columns": few, "quantiles": None, "of": len(everybody)}
    at = [*QUANTILES.values()]
    quantiles = {
        name: dict(zip(QUANTILES, np.quantile([*column.values()], at).tolist(), strict=True))
        for name, column in columns.items()
        if column
    }
    return {"columns": few, "quantiles": quantiles, "of": len(everybody)}
