"""The live model over HTTP: ``POST /predict``, ``GET /health`` and ``GET /metrics``.

What comes from the network is not trusted: its size, its kind and what it would grow to are bounded
before it is read, and every answer but the metrics is one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import tempfile
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedcli.data.arrays import DAMAGED
from fedcli.data.image_files import FORMATS
from fedcli.data.own.recordings import MAX_GROWTH
from fedcli.prediction import Predictions, predictions
from fedcli.serving.live_model import LiveModel, Loaded
from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.errors import DataError, FedtideError, pip_line
from fedmodels.log_lines import json_text
from fedmodels.nets.trained import ModelFacts
from fedmodels.page_server import PageServer, Response
from fedmodels.printable import printable

KINDS = {
    "text/csv": "csv", "text/tab-separated-values": "tsv", "application/json": "npy",
    "image/png": "png", "image/jpeg": "jpg", "image/bmp": "bmp", "image/webp": "webp",
    "image/tiff": "tiff", "image/gif": "gif", "image/x-portable-anymap": "ppm",
}  # fmt: skip
"""Content types that are taken, and how files of them end."""
MAX_VALUES = 1 << 26
"""Numbers of a table's inputs, and pixels of an image's frames."""
JSON = "application/json; charset=utf-8"
log = logging.getLogger(__name__)


class ModelServer(PageServer):
    """Answers with the model that is live at the moment of a request."""

    def __init__(self, host: str, port: int, live: LiveModel) -> None:
        """Bind to a place; raise ConfigError if that is not possible."""
        self.live, self.figures = live, Figures()
        self._working = threading.Lock()
        """Requests are worked on in turn: each may take much memory."""
        pages = {"/health": self._health, "/metrics": self._metrics}
        super().__init__(host, port, pages, posts={"/predict": self._predict})

    def refusal(self, status: HTTPStatus, line: str) -> Response:
        """Return what a request is refused with."""
        return _told({"error": line}, status)

    def _predict(self, kind: str, body: bytes) -> Response:
        begun = time.monotonic()
        answer = self._answer(kind.partition(";")[0].strip().lower(), body)
        self.figures.count(answer.status, time.monotonic() - begun)
        return answer

    def _answer(self, kind: str, body: bytes) -> Response:
        if kind not in KINDS:
            known = ", ".join(KINDS)
            line = f"the content type {printable(kind, 60)!r} is none of {known}"
            return self.refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, line)
        try:
            now = self.live.now()
        except FedtideError as error:
            return self.refusal(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error)))
        try:
            with self._working:
                found = _predicted(now, KINDS[kind], body)
                self.figures.name(found)
                return _told({"model": _about(now), **_shown(found)})
        except FedtideError as error:
            return self.refusal(HTTPStatus.BAD_REQUEST, printable(str(error)))
        except Exception:  # a caller sees no traceback, and others are answered
            log.exception("a request failed")
            return self.refusal(HTTPStatus.INTERNAL_SERVER_ERROR, "the model cannot answer this")

    def _health(self, accept: str) -> Response:
        try:
            now = self.live.now()
        except FedtideError as error:
            return self.refusal(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error)))
        status = self.live.status()
        told = {"status": "ok", "model": _about(now), "held": status.held, "last": status.last}
        return _told(told)

    def _metrics(self, accept: str) -> Response:
        return self.figures.page(accept, self.live) or self.refusal(
            HTTPStatus.NOT_IMPLEMENTED, f"/metrics needs a package more: {pip_line('prometheus')}"
        )


class Figures:
    """What was asked and answered, for Prometheus; nothing where its package is missing."""

    def __init__(self) -> None:
        try:
            self._prometheus: Any = importlib.import_module("prometheus_client")
        except ImportError:
            self._prometheus = None
            return
        self._registry = self._prometheus.CollectorRegistry()

        def made(kind: str, name: str, what: str, *labels: str) -> Any:
            return getattr(self._prometheus, kind)(
                f"fedtide_{name}", what, labels, registry=self._registry
            )

        self._requests = made("Counter", "predict_requests", "Requests by HTTP status.", "code")
        self._seconds = made("Histogram", "predict_seconds", "Duration of a request to predict.")
        self._named = made("Counter", "predictions", "Inputs by the class named.", "class")
        self._round = made("Gauge", "live_model_round", "Round of the live model, from 1.")
        self._reads = made("Gauge", "live_model_reads", "Models that this process has read.")
        self._held = made("Gauge", "live_model_held", "1 while a roll-back holds the live model.")
        self._events = made("Gauge", "live_model_events", "Since the client began.", "event")

    def count(self, status: HTTPStatus, seconds: float) -> None:
        """Count a request to predict."""
        if self._prometheus is not None:
            self._requests.labels(str(int(status))).inc()
            self._seconds.observe(seconds)

    def name(self, found: Predictions) -> None:
        """Count the classes of some inputs."""
        if self._prometheus is not None:
            for name, count in found.best().items():
                self._named.labels(printable(name)).inc(count)

    def page(self, accept: str, live: LiveModel) -> Response | None:
        """Return the page; None where the package is missing."""
        if self._prometheus is None:
            return None
        try:
            self._round.set(live.now().model.facts.round + 1)
        except FedtideError:
            self._round.set(0)
        status = live.status()
        self._reads.set(live.reads)
        self._held.set(status.held)
        for event in ("went_live", "refused", "rollbacks"):
            self._events.labels(event).set(getattr(status, event))
        encode, kind = self._prometheus.exposition.choose_encoder(accept)
        return Response(encode(self._registry), kind)


def _predicted(now: Loaded, end: str, body: bytes) -> Predictions:
    """Return predictions for a request's body; raise DataError if the model cannot take it."""
    with tempfile.TemporaryDirectory(prefix="fedtide-") as place:
        file = Path(place) / f"input.{end}"
        try:
            if end == "npy":
                np.save(file, _array_of(body), allow_pickle=False)
            else:
                file.write_bytes(body)
                _check_growth(file, end, body, now.model.facts)
            (found,) = predictions(now.model, now.file, [file])
        except FedtideError as error:  # where the file lay is nobody's business
            line = str(error).replace(str(file), "the input").replace(str(now.file), "the model")
            raise DataError(line) from None
    return found


def _array_of(body: bytes) -> np.ndarray[Any, Any]:
    """Return the numbers of a JSON array, or of ``{"inputs": [...]}``; DataError for another."""
    try:
        found = json.loads(body)
        found = found.get("inputs") if isinstance(found, dict) else found
        array = np.array(found, dtype=np.float64)  # of texts, numpy would make a huge array
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise DataError("the input is no JSON array of numbers") from None
    if not array.ndim:
        raise DataError("the input is no JSON array of numbers")
    return array


def _check_growth(file: Path, end: str, body: bytes, facts: ModelFacts) -> None:
    """Raise DataError if a body would take too much memory, or is damaged."""
    if end in ("csv", "tsv"):
        how = parse_transform(facts.transform, "the model")
        if not isinstance(how, TableTransform):
            return
        columns = how.columns
        rows = body.count(b"\n") + body.count(b"\r") + 1
        made = rows * (1 if columns.rate is None else MAX_GROWTH)
        hop = columns.hop or columns.window or 1
        values = made * max(math.prod(facts.input_shape) / hop, len(columns.features or ()))
    else:
        try:
            with Image.open(file, formats=FORMATS) as image:
                values = image.width * image.height * getattr(image, "n_frames", 1)
        except (*DAMAGED, Image.DecompressionBombError):
            raise DataError("the input is no image, or damaged") from None
    if values > MAX_VALUES:
        raise DataError(f"the input makes more than {MAX_VALUES} numbers: send it in parts")


def _shown(found: Predictions) -> dict[str, Any]:
    """Return predictions as JSON has them."""
    rows = []
    for number, shares in enumerate(found.shares):
        best = int(shares.argmax())
        row: dict[str, Any] = {"class": found.classes[best], "probability": float(shares[best])}
        row["probabilities"] = [float(share) for share in shares]
        if found.inputs.places:
            row["from"], row["to"] = found.inputs.places[number]
        rows.append(row)
    return {"classes": [*found.classes], "predictions": rows}


def _about(now: Loaded) -> dict[str, Any]:
    facts = now.model.facts
    return {"method": facts.method, "view": facts.view, "round": facts.round + 1}


def _told(facts: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(f"{json_text(facts)}\n".encode(), JSON, status)
