"""What carries HTTP, for served models and for pages: uvicorn, bounded in time, bytes and callers.

A caller is answered, or told when to come again; nobody is cut off because others came.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from http import HTTPStatus
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedmodels.errors import ConfigError, reason_of
from fedmodels.host.shortages import most_files
from fedmodels.times import HEAD_S, SLACK_S, SLOW_READER_S

MAX_BYTES = 16 << 10
"""Size of a request line and its headers."""
POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
HEADERS = {
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer", "Content-Security-Policy": POLICY,
}  # fmt: skip
MAX_CONNECTIONS, MAX_TO_PAGES = 1024, 128
"""Connections that are open and answered, to models and to pages; each takes an open file."""
SHARE, SHARE_OF_PAGES = 4, 8
"""They are no more than one in so many of the files that this process may open."""
READING = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing: what they answer is kept from other origins by the browser."""
BEYOND = "beyond"
"""In the state of a request: its connection came when as many as may be were open."""
BACKLOG = 512
"""Connections that the system may hold for the server, which takes so many before it looks."""


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a limit of time for what a caller sends and takes."""

    _timer: asyncio.TimerHandle | None = None
    most = MAX_CONNECTIONS
    """Connections that are answered; of more than twice as many the newest are closed at once."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; note whether more connections are open than may be."""
        super().connection_made(transport)
        if len(self.connections) > 2 * self.most:  # else what else the process does has no files
            transport.abort()
            return
        if len(self.connections) > self.most:
            self.app_state = {**self.app_state, BEYOND: True}
        self._wait(HEAD_S, None)

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        super().on_response_complete()
        self._wait(HEAD_S, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, seconds: float, cycle: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self._look, cycle)

    def _look(self, before: Any) -> None:
        """End the connection unless a request is at work, which a second look ends too."""
        at_work = self.cycle is not None and not self.cycle.response_complete
        if at_work and self.cycle is not before:
            self._wait(SLOW_READER_S, self.cycle)
        else:
            self.transport.abort()


class _Server(uvicorn.Server):
    """uvicorn's server, which ends the process for good where its own end takes too long."""

    signalled = 0
    """The signal that ends it."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second signal changes nothing."""
        if self.signalled:
            return
        self.signalled = sig
        last = (self.config.timeout_graceful_shutdown or 0) + SLACK_S
        timer = threading.Timer(last, os._exit, [128 + sig])
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


@dataclass(frozen=True)
class Response:
    """What is sent for a path."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    """The content type."""
    status: HTTPStatus = HTTPStatus.OK


class HttpServer:
    """Serves what answers some paths, at a place; refuses requests that mean another server."""

    addressed = "an address, as localhost, or by its machine's name"
    """How this server may be asked for."""
    known = ""
    """What it answers, for those who ask for something else."""
    most, share = MAX_CONNECTIONS, SHARE
    """Connections that are answered at a time, and how large a part of the files they may be."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Sequence[Route],
        graceful_s: int,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        """Bind to a place, on port 0 to any that is free; ConfigError if that is not possible."""
        self._host, self._allowed = host, allowed_hosts
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._unknown})
        app.router.redirect_slashes = False
        self.most = max(1, min(self.most, most_files() // self.share))
        backlog = min(BACKLOG, max(1, self.most // 2))
        protocol = type("Protocol", (BoundedProtocol,), {"most": self.most})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small parts at once on sockets that say that they are of TCP
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(backlog)
        except (OSError, TypeError, UnicodeError) as error:  # some of a name that is none
            self._socket.close()
            reason = reason_of(error)
            raise ConfigError(f"no page at {host}:{port}: {reason}; give another port") from None
        self.port = int(self._socket.getsockname()[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/"
        config = uvicorn.Config(
            self._for_here(app), http=protocol, ws="none", lifespan="off", loop="asyncio",
            log_config=None, access_log=False, server_header=False, backlog=backlog,
            h11_max_incomplete_event_size=MAX_BYTES, timeout_keep_alive=HEAD_S,  # type: ignore[arg-type]
            timeout_graceful_shutdown=graceful_s, proxy_headers=False,
        )  # fmt: skip
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self._server = _Server(config)

    def refused(self, status: HTTPStatus, line: str) -> Response:
        """Return what a request is refused with: one line."""
        return Response(f"{line}\n".encode(), status=status)

    def sent(self, answer: Response) -> HttpResponse:
        """Return an answer as HTTP."""
        headers = {**HEADERS, "Content-Type": answer.kind}
        return HttpResponse(answer.body, int(answer.status), headers)

    def _for_here(self, app: ASGIApp) -> ASGIApp:
        """Return an application that refuses what means another server, or comes from its pages.

        A browser lets any page send some requests to any server, and says by ``Origin`` whose page
        it was.
        """

        async def checked(scope: Scope, receive: Receive, send: Send) -> None:
            if scope.get("state", {}).get(BEYOND):
                line = f"more than {self.most} connections are open: come again later"
                full = self.sent(self.refused(HTTPStatus.SERVICE_UNAVAILABLE, line))
                full.headers["Connection"] = "close"
                return await full(scope, receive, send)
            headers = Headers(scope=scope)
            host = headers.get("host", "")
            if not is_addressed(host, self._host, self._allowed):
                line = f"this server is asked for by {self.addressed}"
                refused = self.refused(HTTPStatus.MISDIRECTED_REQUEST, line)
            elif scope["method"] not in READING and any(
                not is_own_origin(origin, host) for origin in headers.getlist("origin")
            ):
                line = "a page of another origin may not send this"
                refused = self.refused(HTTPStatus.FORBIDDEN, line)
            else:
                return await app(scope, receive, send)
            await self.sent(refused)(scope, receive, send)

        return checked

    async def _unknown(self, request: Request, error: Exception) -> HttpResponse:
        assert isinstance(error, HTTPException)
        found = self.sent(self.refused(HTTPStatus(error.status_code), f"there are {self.known}"))
        found.headers.update(error.headers or {})  # Allow, of a method that a path does not have
        return found

    def serve(self) -> None:
        """Answer until the process is told to end, and give requests that have come their time.

        Raises:
            SystemExit: SIGTERM came; its status is 143.
            KeyboardInterrupt: Ctrl-C came.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # until uvicorn hears them, and after
                signal.signal(number, self._server.handle_exit)
        self._server.run(sockets=[self._socket])
        if self._server.signalled == signal.SIGINT:
            raise KeyboardInterrupt
        if self._server.signalled:
            raise SystemExit(128 + self._server.signalled)

    def begin(self, name: str) -> Callable[[], None]:
        """Serve in a thread of this name; return what ends that."""
        thread = threading.Thread(target=self.serve, name=name, daemon=True)
        thread.start()

        def end() -> None:
            self._server.should_exit = True
            thread.join()

        return end


Pages = Mapping[str, Callable[..., Response]]
"""Path -> what answers it, given the request's ``Accept``, and what stands for each ``{name}``."""


class PageServer(HttpServer):
    """Serves pages at a place, beside a run that needs its process's files."""

    most, share = MAX_TO_PAGES, SHARE_OF_PAGES

    def __init__(
        self,
        host: str,
        port: int,
        pages: Pages,
        policy: str = POLICY,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        """Bind to a place; raise ConfigError if that is not possible."""
        self._policy, self.known = policy, " and ".join(pages)

        def route(path: str) -> Route:
            def answer(request: Request) -> HttpResponse:
                accept = request.headers.get("accept", "")
                return self.sent(pages[path](accept, **request.path_params))

            return Route(path, answer)

        super().__init__(host, port, [*map(route, pages)], SLACK_S, allowed_hosts)

    def sent(self, answer: Response) -> HttpResponse:
        """Return an answer as HTTP, with the policy of these pages."""
        found = super().sent(answer)
        found.headers["Content-Security-Policy"] = self._policy
        return found


def is_addressed(header: str, host: str, allowed: tuple[str, ...]) -> bool:
    """Tell whether a Host header means a server at ``host``, or at a name that is allowed.

    A name that another site lets point here is not taken: its pages must not read these. ``*`` in
    an allowed name stands for any letters.
    """
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]+)?", header)
    name = found[1].strip("[]").lower() if found else ""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        own = {"localhost", host.lower(), socket.gethostname().lower()}
        return name in own or any(name and fnmatch(name, each.lower()) for each in allowed)
    return True


def is_own_origin(origin: str, host: str) -> bool:
    """Tell whether an Origin header names the server that the Host header means, by its port too.

    A proxy may have taken TLS off, so ``https`` is as good as ``http``.
    """
    found = re.fullmatch(r"(https?)://([^/\s]+)", origin.lower())
    if not found:
        return False
    usual = ":80" if found[1] == "http" else ":443"
    return found[2].removesuffix(usual) == host.lower().removesuffix(usual)
