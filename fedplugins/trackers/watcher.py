"""The option ``--metrics-port`` of ``serve`` and ``launch``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsrv.commands.watchers import Follow, Watcher

if TYPE_CHECKING:
    from fedsrv.progress.events import Ending, EventLog


def _export(events: EventLog, run: Path, host: str, port: int, allowed: tuple[str, ...]) -> Ending:
    from fedplugins.trackers.prometheus import export

    return export(events, run, host, port, allowed)


def _export_several(host: str, port: int, allowed: tuple[str, ...]) -> tuple[Follow, Ending]:
    from fedplugins.trackers.prometheus import export_several

    return export_several(host, port, allowed)


METRICS = Watcher(
    "--metrics-port",
    "Metrics for Prometheus; loopback unless HOST:PORT.",
    _export,
    _export_several,
)
