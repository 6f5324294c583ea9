"""The state of a run for Prometheus to scrape (``--metrics-port``)."""

from __future__ import annotations

import importlib
import logging
import math
import threading
import time
import tomllib
from collections import deque
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, pip_line
from fedmodels.host.guarded import Guarded
from fedmodels.host.http_server import PageServer, Response
from fedsrv.progress.events import HAS_FAILED, Ending, Event, EventLog, Hear
from fedsrv.progress.run_status import RunStatus

PLACES = frozenset({"commit", "finished", "growth", "resting", "resumed", "rollback"})
"""Kinds of events after which a run stands elsewhere, or has another length."""

LAST_SCRAPE_S = 60.0
"""How long a run's end waits for the scrape that shows it, at most."""
SHOWN_S = 900.0
"""How long the figures of a queue's run stay after its end: several scrapes see how it ended."""
log = logging.getLogger(__name__)


class Exporter:
    """Keeps a registry of metrics in step with events."""

    def __init__(self, prometheus: Any, run: Path | None = None) -> None:
        """Declare the metrics; ``prometheus`` is the package ``prometheus_client``."""
        self.registry = prometheus.CollectorRegistry()
        self._run = run
        self._status = RunStatus()

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
        self.clients = made(
            "Gauge", "clients_joined", "Clients that were ever there and still belong to the run."
        )
        self.present = made(
            "Gauge", "clients_present", "Clients that are connected now, by their open calls."
        )
        self.scored = made(
            "Gauge", "clients_scored", "Clients that the last metrics are means over."
        )
        self.resting = made(
            "Gauge", "resting", "1 while an open run has learned all it has, and waits for news."
        )
        self.waiting = made(
            "Gauge", "waiting_seconds", "Seconds that the run has waited; 0 while it is active."
        )
        self.failures = made("Counter", "client_failures", "Failures of clients.", "client")
        self.refused = made(
            "Counter", "models_refused",
            "Models that a client's guard kept from going live.", "client",
        )  # fmt: skip
        self.finished = made("Gauge", "finished", "1 once the run has finished.")
        self.failed = made("Gauge", "failed", "1 once the run has failed.")
        self.stopped = made(
            "Gauge", "stopped", "1 once the run was stopped as asked, and can be resumed."
        )
        self.info = made("Gauge", "info", "1; what runs here.", "version", "method", "run")

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
            self.scored.set(status.scored)
        elif event.kind == "joined" and event.client.isdigit():
            self.failures.labels(event.client)  # from 0 on, so that increase() sees the first one
            self.refused.labels(event.client)
        elif event.kind == "waiting":
            self.waiting.set(facts["seconds"])
        elif event.kind in ("resting", "growth"):
            self.waiting.set(0)
        elif event.kind == "failed":
            self.failures.labels(event.client).inc()
        elif event.kind == "refused":
            self.refused.labels(event.client).inc()
        elif event.kind == "listening" and self._run is not None:
            self.info.labels(version("fedtide"), method_of(self._run), self._run.name).set(1)
        elif event.kind == "finished":
            self.finished.set(1)
        elif event.kind == "ended":
            has_failed = facts["reason"].startswith(HAS_FAILED)
            (self.failed if has_failed else self.stopped).set(1)
        self.clients.set(len(status.members))
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


def method_of(run: Path) -> str:
    """Return the method of a run by its config; nothing where that cannot be read."""
    try:
        return str(tomllib.loads((run / "config.toml").read_text("utf-8"))["method"]["name"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


class Scrapes:
    """When a page was asked for, so that a run's end can wait for the scrape that shows it."""

    _count: Guarded[int] = Guarded("_changed")
    _times: Guarded[deque[float]] = Guarded("_changed")

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count, self._times = 0, deque[float](maxlen=2)

    def note(self) -> None:
        """Note that the page was asked for."""
        with self._changed:
            self._count += 1
            self._times.append(time.monotonic())
            self._changed.notify_all()

    def wait_for_next(self) -> None:
        """Wait for the next scrape, of a page that is scraped: twice its interval at most."""
        with self._changed:
            if len(self._times) < 2:
                return
            first, last = self._times
            seen, until = self._count, time.monotonic() + min(2 * (last - first), LAST_SCRAPE_S)
            while self._count == seen and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)


def export(
    events: EventLog, run: Path, host: str, port: int, allowed_hosts: tuple[str, ...] = ()
) -> Ending:
    """Serve the metrics of a run at ``http://HOST:PORT/metrics``; return what ends that.

    The page says how the run has ended: whoever scrapes it regularly gets to see that.

    Raises:
        ConfigError: the package is missing, or the address cannot be listened on.
    """
    prometheus = _package()
    exporter, scrapes = Exporter(prometheus, run), Scrapes()
    prometheus.ProcessCollector(registry=exporter.registry)

    def answer(accept: str) -> Response:
        encode, kind = prometheus.exposition.choose_encoder(accept)
        body = encode(exporter.registry)
        scrapes.note()
        return Response(body, kind)

    server = PageServer(host, port, {"/metrics": answer, "/": answer}, allowed_hosts=allowed_hosts)
    events.tell("metrics", url=f"{server.url}metrics")
    end_telling = events.follow(exporter.take, "metrics")
    stop = server.begin("metrics")

    def end() -> None:
        end_telling()
        scrapes.wait_for_next()
        stop()

    return end


def _package() -> Any:
    """Return the package ``prometheus_client``; ConfigError where it is missing."""
    try:
        return importlib.import_module("prometheus_client")
    except ImportError:
        raise ConfigError(
            f"--metrics-port needs a package more: {pip_line('prometheus')}"
        ) from None


class QueuedRuns:
    """The metrics of a queue's runs as one collector: each sample says of which run it is."""

    _exporters: Guarded[dict[str, Exporter]] = Guarded("_lock")
    _ended: Guarded[dict[str, float]] = Guarded("_lock")
    """When the process of a run ended; its figures stay for a while, so that a scrape sees them."""

    def __init__(self, prometheus: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._prometheus, self._clock = prometheus, clock
        self._lock = threading.RLock()
        self._exporters, self._ended = {}, {}

    def follow(self, name: str, run: Path | None) -> Hear:
        """Return what takes in the events of a run; without a directory, its process has ended."""
        with self._lock:
            if run is None:
                self._ended[name] = self._clock()
                return lambda event: None
            self._ended.pop(name, None)
            exporter = self._exporters[name] = Exporter(self._prometheus, run)
        return exporter.take

    def collect(self) -> list[Any]:
        """Return the families of all runs, merged by name; runs that ended long ago are dropped."""
        with self._lock:
            for name, at in [*self._ended.items()]:
                if self._clock() - at > SHOWN_S:
                    del self._ended[name], self._exporters[name]
            served = len(self._exporters) - len(self._ended)
            exporters = [*self._exporters.items()]
        family: Any = importlib.import_module("prometheus_client.core").GaugeMetricFamily
        runs = family("fedtide_queue_runs_served", "Runs of the queue that are served now.", served)
        merged: dict[str, Any] = {}
        for name, exporter in exporters:
            for family in exporter.registry.collect():
                samples = [
                    one._replace(labels={**one.labels, "run": name}) for one in family.samples
                ]
                merged.setdefault(family.name, family)
                if merged[family.name] is family:
                    family.samples = samples
                else:
                    merged[family.name].samples += samples
        return [runs, *merged.values()]


def export_several(
    host: str, port: int, allowed_hosts: tuple[str, ...] = ()
) -> tuple[Callable[[str, Path | None], Hear], Ending]:
    """Serve the metrics of a queue's runs at ``http://HOST:PORT/metrics``.

    Returns:
        What follows a run, and what ends the page.

    Raises:
        ConfigError: the package is missing, or the address cannot be listened on.
    """
    prometheus = _package()
    registry, runs = prometheus.CollectorRegistry(), QueuedRuns(prometheus)
    prometheus.ProcessCollector(registry=registry)
    registry.register(runs)

    def answer(accept: str) -> Response:
        encode, kind = prometheus.exposition.choose_encoder(accept)
        return Response(encode(registry), kind)

    server = PageServer(host, port, {"/metrics": answer, "/": answer}, allowed_hosts=allowed_hosts)
    log.info("metrics for Prometheus: %smetrics", server.url)
    return runs.follow, server.begin("metrics")
