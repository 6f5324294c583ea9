"""Live models over HTTP: ``POST /predict``, and the Open Inference Protocol below ``/v2``.

What comes from the network is not trusted: its size, its kind and what it would grow to are bounded
before it is read, and every answer but the metrics is one line of JSON.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from fedcli.predicting.live_model import LiveModel, Loaded
from fedcli.predicting.prediction import Predictions, predicted, predictions
from fedmodels.console.printable import json_text, printable
from fedmodels.errors import ArchiveNotWritten, DataError, FedtideError, pip_line
from fedmodels.host.http_server import HttpServer, Response
from fedmodels.host.machine import cores
from fedmodels.times import ANSWER_S, BODY_S, LAST_ANSWERS_S, RETRY_AFTER_S
from fedplugins.serving.api_description import BODIES, described
from fedplugins.serving.bodies import (
    KINDS,
    check_answer,
    check_growth,
    feedback_of,
    json_inputs,
    schema_of,
)
from fedplugins.serving.figures import Figures
from fedplugins.serving.inference_stats import Tally
from fedplugins.serving.label_store import Asked
from fedplugins.serving.open_inference import (
    EXTENSIONS,
    configuration,
    inferred,
    metadata,
    version_of,
)
from fedplugins.serving.site import Site, TooFast, places_of
from fedplugins.serving.tokens import bearer

JSON_KIND = "application/json"
JSON = f"{JSON_KIND}; charset=utf-8"
BYTES_KIND, JSON_BYTES = "application/octet-stream", "Inference-Header-Content-Length"
"""Of JSON with tensors as bytes behind it: the content type, and the header of its length."""
MAX_BODY = 16 << 20
"""Bytes that may be sent."""
MAX_DRAINED = 4 * MAX_BODY
"""Bytes of a body that is too long which are read, so that its caller hears why."""
MAX_WORKERS = 4
"""Requests that are worked on at a time, at most; no more than there are cores."""
MAX_WAITING = 256
"""Requests that wait for their turn; others are told when to come again."""
log = logging.getLogger(__name__)
Find = Callable[[Loaded, str, bytes], "dict[str, Any] | Response"]
"""Returns the answer to a body of a kind: JSON, unless it is one already."""
NO_SITES: Mapping[str, Site] = {}


@dataclass(frozen=True)
class Told(Response):
    """One line of JSON."""

    by: Loaded | None = None
    """The model that gave the answer, if one did."""
    json_bytes: int | None = None
    """How many bytes of it are JSON, where others follow."""


class NoSuch(HTTPException):
    """A request names no model of the server, or no version that is live; says so."""

    def __init__(self, line: str) -> None:
        super().__init__(HTTPStatus.NOT_FOUND, line)


class ModelServer(HttpServer):
    """Answers with the models that are live at the moment of a request."""

    addressed = (
        "an address, as localhost, by its machine's name, or by a name that --allowed-hosts gives"
    )
    known = (
        "POST /predict, GET /health, GET /metrics and GET /schema; GET /openapi.json tells of all"
    )

    def __init__(
        self,
        host: str,
        port: int,
        models: Mapping[str, LiveModel],
        allowed_hosts: tuple[str, ...] = (),
        sites: Mapping[str, Site] = NO_SITES,
        tokens: tuple[str, ...] = (),
        held_back: frozenset[str] = frozenset(),
    ) -> None:
        """Bind to a place; raise ConfigError if that is not possible.

        ``sites`` have the data of clients whose models are watched, by the names of these. Where
        there are ``tokens``, labels come with one of them. ``held_back`` are classes of
        :mod:`fedpb.told` that the site does not tell.
        """
        self._held_back = held_back
        self._tokens = tokens
        self.models, self.sites = models, sites
        self.figures = Figures(of_data="metrics" not in held_back)
        workers = min(cores(), MAX_WORKERS)
        self._pool = ThreadPoolExecutor(workers, "predict")
        self._tallies = {name: Tally() for name in models}
        self._under_way = 0
        """Requests at work, and those that wait for their turn; changed by the server's loop."""
        self._most = workers + MAX_WAITING
        model, v2 = "/models/{model}", "/v2/models/{model}"
        places = {
            **{f"{one}/predict": "predict" for one in ("", model)},
            **{f"{one}/feedback": "feedback" for one in ("", model)},
            **{f"{one}/schema": "schema" for one in ("", model)},
            **{f"{one}/health": "health" for one in ("", model)},
            "/metrics": "metrics", "/openapi.json": "openapi",
            "/v2": "about", "/v2/health/live": "live", "/v2/health/ready": "ready",
            "/v2/models/stats": "stats", "/v2/repository/index": "index",
        }  # fmt: skip
        for one in (v2, f"{v2}/versions/{{version}}"):
            places |= {one: "metadata", f"{one}/ready": "model_ready", f"{one}/infer": "infer"}
            places |= {f"{one}/config": "config", f"{one}/stats": "stats"}
        self._description = described(places, models)
        routes = [
            Route(
                place,
                getattr(self, f"_{answer}"),
                methods=["POST" if answer in BODIES else "GET"],
            )
            for place, answer in places.items()
        ]
        super().__init__(host, port, routes, round(LAST_ANSWERS_S), allowed_hosts)

    @property
    def is_idle(self) -> bool:
        """Whether no request is worked on: else its thread would keep the process."""
        return not self._under_way

    async def _unknown(self, request: Request, error: Exception) -> HttpResponse:
        if isinstance(error, NoSuch):
            return self.sent(refused(HTTPStatus.NOT_FOUND, error.detail))
        return await super()._unknown(request, error)

    def _model(self, request: Request) -> tuple[str, LiveModel]:
        """Return the model that a request means, and its name; NoSuch if there is none."""
        name: str | None = request.path_params.get("model")
        if name is None and len(self.models) == 1:
            return next(iter(self.models.items()))
        if name is not None and name in self.models:
            return name, self.models[name]
        known = ", ".join(list(self.models)[:8]) + (", …" if len(self.models) > 8 else "")
        if name is None:
            raise NoSuch(f"there are several models: ask at /models/NAME/…, NAME one of {known}")
        raise NoSuch(f"there is no model {printable(name, 60)!r}; there are {known}")

    # --- predictions ------------------------------------------------------------------------------

    async def _predict(self, request: Request) -> HttpResponse:
        name, live = self._model(request)

        def find(now: Loaded, kind: str, body: bytes) -> dict[str, Any]:
            found = _predicted(now, KINDS[kind], body)
            return self._noted(name, now, found, {"model": _about(now), **found.shown()})

        return await self._timed(name, live, request, find)

    async def _infer(self, request: Request) -> HttpResponse:
        name, live = self._model(request)
        begun, tally = time.monotonic_ns(), self._tallies[name]

        asked = request.path_params.get("version")
        find = self._inference(name, asked, request.headers.get(JSON_BYTES))
        # tritonclient says no type; a page of another origin that does so is refused before
        answer = await self._timed(name, live, request, find, (JSON_KIND, "", BYTES_KIND))
        tally.end(time.monotonic_ns() - begun, is_well=answer.status_code == HTTPStatus.OK)
        return answer

    def infer(self, name: str, version: str | None, body: bytes, json_bytes: int) -> Response:
        """Return the answer to an inference that came another way; its JSON has ``json_bytes``."""
        begun = time.monotonic_ns()
        find = self._inference(name, version, str(json_bytes))
        answer = self._found(name, self.models[name], BYTES_KIND, body, find)
        took = time.monotonic_ns() - begun
        self._tallies[name].end(took, is_well=answer.status == HTTPStatus.OK)
        self.figures.count(name, answer.status, took / 1e9)
        return answer

    def _inference(self, name: str, version: str | None, json_bytes: str | None) -> Find:
        def find(now: Loaded, kind: str, body: bytes) -> dict[str, Any] | Response:
            _check_version(version, now)
            found, told, data = inferred(name, now.model, body, json_bytes, self._tallies[name])
            told["parameters"] = {"sha256": now.sha256, "run": now.run}
            told = self._noted(name, now, found, told)
            return _with_bytes(told, data, now) if data else told

        return find

    def _noted(
        self, name: str, now: Loaded, found: Predictions, told: dict[str, Any]
    ) -> dict[str, Any]:
        """Count and watch the inputs; return the answer with the id by which labels may come."""
        self.figures.name(name, found)
        if (site := self.sites.get(name)) and (request := site.answered(now, found)):
            told.get("parameters", told)["request"] = request
        return told

    async def _feedback(self, request: Request) -> HttpResponse:
        name, live = self._model(request)
        site = self.sites.get(name)
        if site is None or site.store is None:
            raise NoSuch("labels are not taken back here: fedcli serve-model --feedback does so")

        whose = bearer(request.headers.get("authorization", ""), self._tokens)
        if self._tokens and whose is None:
            line = "labels come with one of the tokens of --feedback-tokens: Authorization: Bearer"
            found = self.sent(refused(HTTPStatus.UNAUTHORIZED, line), live)
            found.headers["WWW-Authenticate"] = "Bearer"
            return found

        def find(now: Loaded, kind: str, body: bytes) -> dict[str, Any]:
            return _labelled(site, now, body, whose or "")

        return self.sent(await self._answer(name, live, request, find, (JSON_KIND,)), live)

    async def _timed(
        self,
        name: str,
        live: LiveModel,
        request: Request,
        find: Find,
        kinds: Collection[str] = KINDS,
    ) -> HttpResponse:
        begun = time.monotonic()
        try:
            answer = await self._answer(name, live, request, find, kinds)
        except asyncio.CancelledError:
            answer = refused(HTTPStatus.SERVICE_UNAVAILABLE, "the server ends: come again later")
        self.figures.count(name, answer.status, time.monotonic() - begun)
        return self.sent(answer, live)

    async def _answer(
        self, name: str, live: LiveModel, request: Request, find: Find, kinds: Collection[str]
    ) -> Response:
        """Have a body answered whose content type is one of some kinds."""
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
        if kind not in kinds:
            known = ", ".join(filter(None, kinds))
            line = f"the content type {printable(kind, 60)!r} is none of {known}"
            return refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, line)
        if self._under_way >= self._most:
            line = f"{self._under_way} requests are under way: come again later"
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, line)
        return await self._in_turn(lambda: self._found(name, live, kind, body, find))

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

    def _found(self, name: str, live: LiveModel, kind: str, body: bytes, find: Find) -> Response:
        """Return the answer to a body; a worker's thread calls it."""
        try:
            now = live.now()
        except FedtideError as error:
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error)))
        try:
            answer = find(now, kind, body)
            return answer if isinstance(answer, Response) else _told(answer, by=now)
        except NoSuch as error:
            return refused(HTTPStatus.NOT_FOUND, error.detail)
        except TooFast as error:
            return refused(HTTPStatus.TOO_MANY_REQUESTS, str(error))
        except ArchiveNotWritten as error:
            log.error("%s", error)
            return refused(HTTPStatus.SERVICE_UNAVAILABLE, "labels cannot be kept now")
        except FedtideError as error:
            return refused(HTTPStatus.BAD_REQUEST, printable(str(error)))
        except Exception:  # a caller sees no traceback, and others are answered
            log.exception("a request failed")
            return refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the model cannot answer this")

    # --- the other pages --------------------------------------------------------------------------

    def _health(self, request: Request) -> HttpResponse:
        if "model" not in request.path_params and len(self.models) > 1:
            return self._ready(request)

        def told(name: str, live: LiveModel, now: Loaded) -> Mapping[str, Any]:
            status = live.status()
            found = {"status": "ok", "model": _about(now), "held": status.held, "last": status.last}
            site = self.sites.get(name)
            is_told = "metrics" not in self._held_back
            drift = site.watch.last if site and is_told else None
            return found if drift is None else {**found, "drift": drift.shown()}

        return self._of_model(request, told)

    def _schema(self, request: Request) -> HttpResponse:
        told = "moments" not in self._held_back
        return self._of_model(
            request, lambda name, live, now: schema_of(now.model.facts, with_ranges=told)
        )

    def _metadata(self, request: Request) -> HttpResponse:
        return self._of_model(request, lambda name, live, now: metadata(name, now.model))

    def _config(self, request: Request) -> HttpResponse:
        return self._of_model(request, lambda name, live, now: configuration(name, now.model))

    def _stats(self, request: Request) -> HttpResponse:
        """Tell what became of inferences since the server began, whichever version answered."""
        names = [*self.models] if "model" not in request.path_params else [self._model(request)[0]]
        told = [self._tallies[n].told(n, str(self.models[n].round)) for n in names]
        return self.sent(_told({"model_stats": told}))

    async def _index(self, request: Request) -> HttpResponse:
        """List the models; a request may want those that are ready alone."""
        try:
            body = await asyncio.wait_for(_body_of(request), BODY_S)
            wanted = json.loads(body or b"{}") if body is not None else None
        except (TimeoutError, ClientDisconnect, ValueError, RecursionError):
            wanted = None
        if not isinstance(wanted, dict):
            return self.sent(refused(HTTPStatus.BAD_REQUEST, 'a request is {} or {"ready": true}'))
        told = await run_in_threadpool(self.index)
        ready = [one for one in told if one["state"] == "READY" or wanted.get("ready") is not True]
        return self.sent(_told(ready))

    def index(self) -> list[dict[str, str]]:
        """Return the models, their versions, and whether they are ready."""
        return [
            {"name": name, "version": str(live.round), "state": "READY", "reason": ""}
            if live.round
            else {"name": name, "state": "UNAVAILABLE", "reason": "there is no model yet"}
            for name, live in self.models.items()
        ]

    def _model_ready(self, request: Request) -> HttpResponse:
        return self._of_model(request, lambda name, live, now: {"name": name, "ready": True})

    def _of_model(
        self, request: Request, told: Callable[[str, LiveModel, Loaded], Mapping[str, Any]]
    ) -> HttpResponse:
        """Answer with what is told of the model that a request means."""
        name, live = self._model(request)
        try:
            now = live.now()
            _check_version(request.path_params.get("version"), now)
            return self.sent(_told(told(name, live, now), by=now), live)
        except FedtideError as error:
            return self.sent(refused(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error))), live)

    def _about(self, request: Request) -> HttpResponse:
        return self.sent(
            _told({"name": "fedtide", "version": version("fedtide"), "extensions": EXTENSIONS})
        )

    def _live(self, request: Request) -> HttpResponse:
        return self.sent(_told({"live": True}))

    def _ready(self, request: Request) -> HttpResponse:
        for live in self.models.values():
            try:
                live.now()
            except FedtideError as error:
                return self.sent(refused(HTTPStatus.SERVICE_UNAVAILABLE, printable(str(error))))
        return self.sent(_told({"ready": True, "models": [*self.models]}))

    def _openapi(self, request: Request) -> HttpResponse:
        return self.sent(_told(self._description))

    def _metrics(self, request: Request) -> HttpResponse:
        found = self.figures.page(request.headers.get("accept", ""), self.models, self.sites)
        line = f"/metrics needs a package more: {pip_line('prometheus')}"
        return self.sent(found or refused(HTTPStatus.NOT_IMPLEMENTED, line))

    def refused(self, status: HTTPStatus, line: str) -> Response:
        """Return what a request is refused with."""
        return refused(status, line)

    def sent(self, answer: Response, live: LiveModel | None = None) -> HttpResponse:
        """Return an answer as HTTP, with the run and the model in its headers.

        An answer that no model gave has those of the model that was asked and is in memory; one
        that concerns no model those of the only one.
        """
        found = super().sent(answer)
        if answer.status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            found.headers["Retry-After"] = str(RETRY_AFTER_S)
        by = answer.by if isinstance(answer, Told) else None
        if live is None and len(self.models) == 1:
            (live,) = self.models.values()
        if isinstance(answer, Told) and answer.json_bytes is not None:
            found.headers[JSON_BYTES] = str(answer.json_bytes)
        if (named := by or (live.loaded if live else None)) is not None:
            found.headers.update({f"Fedtide-{name}": t for name, t in _named(named).items()})
        return found


def _check_version(version: str | None, now: Loaded) -> None:
    """Raise NoSuch if a request asks for a version that is not live."""
    if version is not None and version != (live := version_of(now.model)):
        raise NoSuch(f"version {printable(version, 60)} is not live: {live} is")


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


def _labelled(site: Site, now: Loaded, body: bytes, whose: str) -> dict[str, Any]:
    """Return what became of labels for inputs, or for those of an answered request.

    The id of a request is known to its caller alone. Of inputs that were asked of nobody, rows are
    those of a caller's token, id and inputs: nobody hears of, or changes, another one's.
    """
    request, inputs, names = feedback_of(body, now.model.facts)
    assert site.store is not None
    asked = site.store.asked(request) if inputs is None else Asked(inputs.x, *places_of(inputs))
    if asked is None:
        raise NoSuch(f"no request {printable(request, 40)!r} was answered here lately")
    if len(names) != asked.answers:
        raise DataError(f"{len(names)} labels come for {asked.answers} predictions")
    origin = f"request {request}"
    if inputs is not None:
        content = hashlib.sha256(np.ascontiguousarray(inputs.x).tobytes()).hexdigest()
        origin = f"call {whose} {request} {content}"
    given = [names[place] for place in asked.places]
    return {"model": _about(now), **site.label(origin, asked.places, asked.x, given, now)}


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


def _with_bytes(facts: Mapping[str, Any], data: bytes, by: Loaded) -> Response:
    """Return JSON with tensors as bytes behind it."""
    text = f"{json_text(facts)}\n".encode()
    return Told(text + data, BYTES_KIND, HTTPStatus.OK, by, len(text))


def _told(facts: Any, status: HTTPStatus = HTTPStatus.OK, by: Loaded | None = None) -> Response:
    return Told(f"{json_text(facts)}\n".encode(), JSON, status, by)
