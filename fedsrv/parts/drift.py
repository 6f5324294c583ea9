"""Drift of clients' examples (``[evaluate] drift``): its mean, and what is beyond chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedmodels.numerics.data_drift import ALPHA
from fedmodels.numerics.metric_tables import DRIFT_PARTS
from fedmodels.training.position import Task
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import NOTHING, Interaction, ServerPart
from fedsrv.events import EventLog
from fedsrv.state.record import Record
from fedsrv.state.store import Store


class Drift(ServerPart):
    """Tells how far examples moved from those of the task before."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin; nothing was told."""
        super().__init__(store, events, given)
        self._tasks: dict[int, dict[str, Task]] = {}
        """The task of each client, of interactions that are not on the disk yet."""
        self._warned: dict[tuple[str, str], Task] = {}
        """The last task of which drift was told, by part and client."""

    def records(self, at: Interaction, found: Reduced, record: Record) -> None:
        """Put down the mean drift of the clients that report one, by part."""
        rows = record["clients"].values()
        tasks = {client: at.step.task_of(int(client)) for client in record["clients"]}
        self._tasks[at.step.interaction] = tasks
        for name in (f"{part}_drift" for part in DRIFT_PARTS):
            if values := [row[name] for row in rows if name in row]:
                record["metrics"][name] = math.fsum(values) / len(values)

    def committed(self, record: Record) -> None:
        """Say once of each client and task that examples moved from those of the task before."""
        tasks = self._tasks.pop(record["interaction"])
        for part, moved in drifted_in(record).items():
            news: dict[Task, list[str]] = {}
            for client in moved:
                if self._warned.get((part, client), -1) < tasks[client]:
                    self._warned[part, client] = tasks[client]
                    news.setdefault(tasks[client], []).append(client)
            for task, clients in sorted(news.items()):
                line = (
                    f"{part}s of task {task} moved from those of the task before at "
                    f"{clients_text(clients)}: by up to {max(moved[c] for c in clients):.2f} of 1 "
                    f"(Kolmogorov-Smirnov, p < {ALPHA:g}; docs/metrics.md#drift)"
                )
                self.events.tell("note", line=line)


def drifted_in(record: Record) -> dict[str, dict[str, float]]:
    """Return the clients whose examples moved beyond chance, and how far, by part."""
    return {
        part: moved
        for part in DRIFT_PARTS
        if (
            moved := {
                client: row[f"{part}_drift"]
                for client, row in record["clients"].items()
                if row.get(f"{part}_drift_p", 1.0) < ALPHA
            }
        )
    }
