"""The live model over HTTP: ``POST /predict``, ``GET /schema``, ``/health`` and ``/metrics``.

What comes from the network is not trusted: its size, its kind and what it would grow to are bounded
before it is read, and every answer but the metrics is one line of JSON.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from fedcli.prediction import Predictions, predicted, predictions
from fedcli.serving.bodies import KINDS, check_answer, check_growth, json_inputs, schema_of
from fedcli.serving.figures import Figures
from fedcli.serving.live_model import LiveModel, Loaded
from fedmodels.errors import DataError, FedtideError, pip_line
from fedmodels.http_server import HttpServer, Response
from fedmodels.log_lines import json_text
from fedmodels.machine import cores
from fedmodels.printable import printable

JSON = "application/json; charset=utf-8"
MAX_BODY = 16 << 20
"""Bytes that may be sent."""
MAX_DRAINED = 4 * MAX_BODY
"""Bytes of a body that is too long which are read, so that its caller hears why."""
MAX_WORKERS = 4
"""Requests that are worked on at a time, at most; no more than there are cores."""
MAX_WAITING = 256
"""Requests that wait for their turn; others are told when to come again."""
BODY_S, ANSWER_S = 15.0, 30.0
"""Time for the body of a request, and then for its answer, the wait for its turn included."""
AGAIN_AFTER_S = 1
"""After how many seconds a caller who finds no room is to come again."""
LAST_ANSWERS_S = 10
"""Time for requests that have come when the server is stopped."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Told(Response):
    """One line of JSON."""

    by: Loaded | None = None
    """The model that gave the answer, if one did."""


class ModelServer(HttpServer):
    """Answers with the model that is live at the moment of a request."""

    addressed = (
        "an address, as localhost, by its machine's name, or by a name that --allowed-hosts gives"
    )
    known = "GET /health, GET /metrics, GET /schema and POST /predict"

    def __init__(
        self, host: str, port: int, live: LiveModel, allowed_hosts: tuple[str, ...] = ()
    ) -> None:
        """Bind to a place; raise ConfigError if that is not possible."""
        self.live, self.figures = live, Figures()
        workers = min(cores(), MAX_WORKERS)
        self._pool = ThreadPoolExecutor(workers, "predict")
        self._under_way = 0
        """Requests at work, and those that wait for their turn; changed by the server's loop."""
        self._most = workers + MAX_WAITING
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/schema", self._schema),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        super().__init__(host, port, routes, LAST_ANSWERS_S, allowed_hosts)

    @property
    def is_idle(self) -> bool:
        """Whether no request is worked on: else its thread would keep the process."""
        return not self._under_way

    # --- predictions ------------------------------------------------------------------------------

    async def _predict(self, request: Request) -> HttpResponse:
        begun = time.monotonic()
        try:
            answer = await self._answer(request)
        except asyncio.CancelledError:
            answer = refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server ends: come again later")
        self.figures.count(answer.status, time.monotonic() - begun)
        return self.sent(answer)

    async def _answer(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            body = await asyncio.wait_for(_body_of(request), BODY_S)
        except TimeoutError:
            line = f"the request did not come within {BODY_S:.0f} seconds"
            return refused(HTTPStatus.REQUEST_TIMEOUT, line)
        except ClientDisconnect:
            return refused(HTTPStatus.BAD_REQUEST, "the caller went away")
        if body is None:
            line = f"more than {MAX_BODY} bytes are sent; at most {MAX_BODY} are taken"
            return refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, line)
        if kind not in KINDS:
            line = f"the content type {printable(kind, 60)!r} is none of {', '.join(KINDS)}"
            return refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, line)
        if self._under_way >= self._most:
            line = f"{self._under_way} requests are under way: come again later"
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, line)
        return await self._in_turn(lambda: self._found(kind, body))

    async def _in_turn(self, work: Callable[[], Response]) -> Response:
        """Have a worker answer; one that takes too long goes on, and its caller is told."""
        loop = asyncio.get_running_loop()
        self._under_way += 1

        def done(_: Future[Response]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end_one)

        future = self._pool.submit(work)
        future.add_done_callback(done)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), ANSWER_S)
        except TimeoutError:
            line = f"there was no answer within {ANSWER_S:.0f} seconds: come again, or send less"
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, line)

    def _end_one(self) -> None:
        self._under_way -= 1

    def _found(self, kind: str, body: bytes) -> Response:
        """Return the answer to a body; a worker's thread calls it."""
        try:
            now = self.live.now()
        except FedtideError as error:
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error)))
        try:
            found = _predicted(now, KINDS[kind], body)
            self.figures.name(found)
            return _told({"model": _about(now), **found.shown()}, by=now)
        except FedtideError as error:
            return refused(HTTPStatus.BAD_REQUEST, printable(str(error)))
        except Exception:  # a caller sees no traceback, and others are answered
            log.exception("a request failed")
            return refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the model cannot answer this")

    # --- the other pages --------------------------------------------------------------------------

    def _health(self, request: Request) -> HttpResponse:
        try:
            now = self.live.now()
        except FedtideError as error:
            return self.sent(refused(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error))))
        status = self.live.status()
        told = {"status": "ok", "model": _about(now), "held": status.held, "last": status.last}
        return self.sent(_told(told, by=now))

    def _schema(self, request: Request) -> HttpResponse:
        try:
            now = self.live.now()
            return self.sent(_told(schema_of(now.model.facts), by=now))
        except FedtideError as error:
            return self.sent(refused(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error))))

    def _metrics(self, request: Request) -> HttpResponse:
        found = self.figures.page(request.headers.get("accept", ""), self.live)
        line = f"/metrics needs a package more: {pip_line('prometheus')}"
        return self.sent(found or refused(HTTPStatus.NOT_IMPLEMENTED, line))

    def refused(self, status: HTTPStatus, line: str) -> Response:
        """Return what a request is refused with."""
        return refused(status, line)

    def sent(self, answer: Response) -> HttpResponse:
        """Return an answer as HTTP, with the run and the model in its headers.

        An answer that no model gave has those of the model that is in memory.
        """
        found = super().sent(answer)
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE:
            found.headers["Retry-After"] = str(AGAIN_AFTER_S)
        by = answer.by if isinstance(answer, Told) else None
        if (named := by or self.live.loaded) is not None:
            found.headers.update({f"Fedtide-{name}": t for name, t in _named(named).items()})
        return found


async def _body_of(request: Request) -> bytes | None:
    """Return what is sent; None if it is too long, once the caller has sent it or much of it."""
    parts, size = list[bytes](), 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_DRAINED:
            return None
        if size <= MAX_BODY:
            parts.append(part)
        else:
            parts.clear()
    return b"".join(parts) if size <= MAX_BODY else None


def _predicted(now: Loaded, end: str, body: bytes) -> Predictions:
    """Return predictions for a request's body; raise DataError if the model cannot take it."""
    facts = now.model.facts
    if end == "npy":
        inputs = json_inputs(body, facts)
        check_answer(len(inputs.x), facts)
        return predicted(now.model, inputs)
    with tempfile.TemporaryDirectory(prefix="fedtide-") as place:
        file = Path(place) / f"input.{end}"
        try:
            file.write_bytes(body)
            check_growth(file, end, body, facts)
            found, *others = predictions(now.model, now.file, [file])
            if others:
                raise DataError("the input has several sheets that fit: send one")
        except FedtideError as error:  # where the file lay is nobody's business
            line = str(error).replace(str(file), "the input").replace(str(now.file), "the model")
            raise DataError(line) from None
    return found


def _about(now: Loaded) -> dict[str, Any]:
    facts = now.model.facts
    about = {"method": facts.method, "view": facts.view, "round": facts.round + 1}
    return {**about, "sha256": now.sha256, "run": now.run}


def _named(now: Loaded) -> dict[str, str]:
    """Return by which names of headers an answer says whose it is."""
    found = {"Model-Sha256": now.sha256, "Model-Round": str(now.model.facts.round + 1)}
    return found | ({"Run": now.run} if now.run else {})


def refused(status: HTTPStatus, line: str) -> Response:
    """Return what a request is refused with."""
    return _told({"error": line}, status)


def _told(
    facts: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK, by: Loaded | None = None
) -> Response:
    return Told(f"{json_text(facts)}\n".encode(), JSON, status, by)
