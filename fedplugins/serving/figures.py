"""What callers of ``fedcli serve-model`` asked, and which model answered, for Prometheus."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fedcli.predicting.live_model import LiveModel
from fedcli.predicting.prediction import Predictions
from fedmodels.console.printable import printable
from fedmodels.host.http_server import Response
from fedplugins.serving.site import Site


class Figures:
    """What was asked and answered, for Prometheus; nothing where its package is missing."""

    def __init__(self, *, of_data: bool = True) -> None:
        """Make the figures; ``of_data`` are those that tell of inputs and of the client's data."""
        self._of_data = of_data
        try:
            self._prometheus: Any = importlib.import_module("prometheus_client")
        except ImportError:
            self._prometheus = None
            return
        self._registry = self._prometheus.CollectorRegistry()

        def made(kind: str, name: str, what: str, *labels: str) -> Any:
            return getattr(self._prometheus, kind)(
                f"fedtide_{name}", what, ("model", *labels), registry=self._registry
            )

        self._requests = made(
            "Counter", "predict_requests", "Requests for predictions by HTTP status.", "code"
        )
        self._seconds = made("Histogram", "predict_seconds", "Duration of a request to predict.")
        self._named = made("Counter", "predictions", "Inputs by the class named.", "class")
        self._round = made(
            "Gauge", "live_model_round", "Round of the live model, from 1; 0: none yet."
        )
        self._reads = made("Gauge", "live_model_reads", "Models that this process has read.")
        self._held = made("Gauge", "live_model_held", "1 while a roll-back holds the live model.")
        self._events = made(
            "Gauge", "live_model_events",
            "How often a model `went_live`, was `refused` by the guard, and how many `rollbacks` "
            "there were, since the client's first model.", "event",
        )  # fmt: skip
        self._windows = made(
            "Gauge", "served_windows", "Windows of served inputs that were tested."
        )
        self._drift = made(
            "Gauge", "served_drift",
            "Distance of the last window of served inputs from the client's data, from 0 to 1.",
        )  # fmt: skip
        self._alarm = made(
            "Gauge", "served_drift_alarm", "1 while served inputs are reported to drift."
        )
        self._labels = made(
            "Gauge", "feedback_rows", "Delayed labels received, by outcome.", "what"
        )

    def count(self, model: str, status: HTTPStatus, seconds: float) -> None:
        """Count a request to predict."""
        if self._prometheus is not None:
            self._requests.labels(model, str(int(status))).inc()
            self._seconds.labels(model).observe(seconds)

    def name(self, model: str, found: Predictions) -> None:
        """Count the classes of some inputs."""
        if self._prometheus is not None and self._of_data:
            for name, count in found.best().items():
                self._named.labels(model, printable(name)).inc(count)

    def page(
        self, accept: str, models: Mapping[str, LiveModel], sites: Mapping[str, Site]
    ) -> Response | None:
        """Return the page; None where the package is missing."""
        if self._prometheus is None:
            return None
        for name, site in sites.items():
            self._windows.labels(name).set(site.watch.windows)
            if self._of_data and (drift := site.watch.last) is not None:
                self._drift.labels(name).set(drift.amount)
                self._alarm.labels(name).set(drift.alarm)
            for what, count in site.rows.items():
                self._labels.labels(name, what).set(count)
        for name, live in models.items():
            self._round.labels(name).set(live.round)
            status = live.status()
            self._reads.labels(name).set(live.reads)
            self._held.labels(name).set(status.held)
            for event in ("went_live", "refused", "rollbacks"):
                self._events.labels(name, event).set(getattr(status, event))
        encode, kind = self._prometheus.exposition.choose_encoder(accept)
        return Response(encode(self._registry), kind)
