"""The state of a run for Prometheus to scrape (``--metrics-port``)."""

from __future__ import annotations

import importlib
import math
from typing import Any

from fedmodels.errors import ConfigError, pip_line
from fedmodels.http_server import PageServer, Response
from fedsrv.events import Ending, Event, EventLog
from fedsrv.run_status import RunStatus

PLACES = frozenset({"commit", "finished", "growth", "resting", "resumed", "rollback"})
"""Kinds of events after which a run stands elsewhere, or has another length."""


class Exporter:
    """Keeps a registry of metrics in step with events."""

    def __init__(self, prometheus: Any) -> None:
        """Declare the metrics; ``prometheus`` is the package ``prometheus_client``."""
        self.registry = prometheus.CollectorRegistry()
        self._status = RunStatus()
        self._joined: set[str] = set()

        def made(kind: str, name: str, what: str, *labels: str) -> Any:
            return getattr(prometheus, kind)(
                f"fedtide_{name}", what, labels, registry=self.registry
            )

        self.committed = made("Gauge", "interactions_committed", "Interactions committed so far.")
        self.planned = made("Gauge", "interactions_planned", "Interactions of the whole run.")
        self.round = made("Gauge", "round", "Round of the last commit, from 0.")
        self.task = made("Gauge", "task", "Task of the last commit, from 0.")
        self.left = made(
            "Gauge", "seconds_left",
            "Time the run still needs, by its last commits; NaN while that is not known.",
        )  # fmt: skip
        self.left.set(math.nan)
        self.took = made("Histogram", "interaction_seconds", "Duration of an interaction.")
        self.bytes = made("Counter", "payload_bytes", "Bytes of payloads and uploads.", "direction")
        self.metric = made("Gauge", "metric", "Last value of each metric of the run.", "name")
        self.clients = made("Gauge", "clients_joined", "Clients that have joined and not left.")
        self.present = made(
            "Gauge", "clients_present", "Clients that are connected now, by their open calls."
        )
        self.resting = made(
            "Gauge", "resting", "1 while an open run has learned all it has, and waits for news."
        )
        self.waiting = made(
            "Gauge", "waiting_seconds", "How long the run has waited; 0: it goes on."
        )
        self.failures = made("Counter", "client_failures", "Failures of clients.", "client")
        self.refused = made(
            "Counter", "models_refused",
            "Models that a client's guard kept from going live.", "client",
        )  # fmt: skip
        self.finished = made("Gauge", "finished", "1 once the run has ended.")

    def take(self, event: Event) -> None:
        """Take in one event."""
        status, facts = self._status, event.detail
        status.take(event)
        if event.kind == "commit":
            self.took.observe(facts["seconds"])
            self.waiting.set(0)
            for way, size in facts["bytes"].items():
                self.bytes.labels(way).inc(size)
        elif event.kind in ("scores", "resumed"):
            for name, value in (facts.get("metrics") or {}).items():
                self.metric.labels(name).set(value)
        elif event.kind in ("joined", "left"):
            (self._joined.add if event.kind == "joined" else self._joined.discard)(event.client)
            self.clients.set(sum(name.isdigit() for name in self._joined))
        elif event.kind == "waiting":
            self.waiting.set(facts["seconds"])
        elif event.kind in ("resting", "growth"):
            self.waiting.set(0)
        elif event.kind == "failed":
            self.failures.labels(event.client).inc()
        elif event.kind == "refused":
            self.refused.labels(event.client).inc()
        elif event.kind == "finished":
            self.finished.set(1)
        self.present.set(status.num_present)
        self.resting.set(bool(status.resting))
        if event.kind in PLACES:
            self._set_place()

    def _set_place(self) -> None:
        """Set where the run stands, and how long it still takes."""
        status = self._status
        self.committed.set(status.interaction + 1)
        self.round.set(max(status.round, 0))
        self.task.set(max(status.task, 0))
        if status.interactions:
            self.planned.set(status.interactions)
        left = 0.0 if status.is_at_the_end else status.seconds_left
        self.left.set(math.nan if left is None else left)


def export(events: EventLog, host: str, port: int) -> Ending:
    """Serve the metrics of a run at ``http://HOST:PORT/metrics``; return what ends that.

    Raises:
        ConfigError: the package is missing, or the address cannot be listened on.
    """
    try:
        prometheus: Any = importlib.import_module("prometheus_client")
    except ImportError:
        raise ConfigError(
            f"--metrics-port needs a package more: {pip_line('prometheus')}"
        ) from None
    exporter = Exporter(prometheus)

    def answer(accept: str) -> Response:
        encode, kind = prometheus.exposition.choose_encoder(accept)
        return Response(encode(exporter.registry), kind)

    server = PageServer(host, port, {"/metrics": answer, "/": answer})
    events.tell("metrics", url=f"{server.url}metrics")
    end_telling = events.follow(exporter.take, "metrics")
    stop = server.begin("metrics")

    def end() -> None:
        end_telling()
        stop()

    return end
