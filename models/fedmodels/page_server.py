"""An HTTP server of a few pages, bounded in connections, time and bytes by one set of checks.

The live page and the pages that Prometheus scrapes are served by it. A connection takes one
request. Where too many are open, the oldest one ends, so that slow callers keep nobody away.
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, cast

from fedmodels.errors import ConfigError, reason_of
from fedmodels.printable import printable

CONNECTION_S = 15.0
"""Time of a connection, from its first byte to the last one of the answer."""
MAX_CONNECTIONS = 32
"""Connections at a time; each has a thread."""
MAX_BYTES = 16 << 10
"""Size of a request line and its headers."""
SLOT_S = 1.0
"""Time for a connection that was ended to leave its thread; else the new one is closed."""
POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """What is sent for a path."""

    body: bytes
    kind: str = "text/plain; charset=utf-8"
    """The content type."""
    status: HTTPStatus = HTTPStatus.OK


Pages = Mapping[str, Callable[[str], Response]]
"""Path -> what answers it, given the request's ``Accept``."""


class PageServer(ThreadingHTTPServer):
    """Serves pages at a place."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, pages: Pages, policy: str = POLICY) -> None:
        """Bind to a place; port 0 is any that is free.

        Raises:
            ConfigError: that is not possible.
        """
        self.host, self.pages, self.policy = host, pages, policy
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """When each connection began; the oldest comes first."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, TypeError, UnicodeError) as error:  # some of a name that is none
            reason = reason_of(error)
            raise ConfigError(f"no page at {host}:{port}: {reason}; give another port") from None

    @property
    def url(self) -> str:
        """Return where the page ``/`` is."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_port}/"

    def is_addressed(self, host: str) -> bool:
        """Tell whether a Host header means this server.

        A name that another site lets point here is not taken: its pages must not read these.
        """
        name = host_named(host)
        names = {"localhost", self.host.lower(), socket.gethostname().lower()}
        return name in names or is_ip(name)

    def refusal(self, status: HTTPStatus, line: str) -> Response:
        """Return what a request is refused with: one line."""
        return Response(f"{line}\n".encode(), status=status)

    def begin(self, name: str) -> Callable[[], None]:
        """Serve in a thread of this name; return what ends that."""
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

        def end() -> None:
            self.shutdown()
            self.server_close()

        return end

    # --- bounds -----------------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection a thread."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                self._end(next(iter(self._open)))
        if not self._slots.acquire(timeout=SLOT_S):
            self.shutdown_request(request)
            return
        with self._lock:
            self._open[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system gives no thread
            self._forget(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and leave the connection's place to others."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def service_actions(self) -> None:
        """End connections whose time is over; the server's loop calls it twice a second."""
        last = time.monotonic() - CONNECTION_S
        with self._lock:
            for request in [request for request, begun in self._open.items() if begun < last]:
                self._end(request)

    def _end(self, request: socket.socket) -> None:
        """Shut a connection down: its thread reads or writes no more."""
        del self._open[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say little about a caller that went away."""
        log.debug("a caller of a page went away", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the server's pages."""

    server: PageServer
    server_version, sys_version = "fedtide", ""

    def setup(self) -> None:
        """Bound what a request may hold."""
        super().setup()
        self.rfile = cast("Any", _Bounded(cast("BinaryIO", self.rfile)))

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer."""
        pages = self.server.pages
        if not self._is_for_here():
            return
        if self.path in pages:
            self._send(pages[self.path](self.headers.get("Accept", "")))
        else:
            self._send_unknown()

    def _is_for_here(self) -> bool:
        """Tell whether a request means this server; refuse it otherwise."""
        found = self.server.is_addressed(self.headers.get("Host", ""))
        if not found:
            line = "this page is asked for by an address, as localhost, or by its machine's name"
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST, line)
        return found

    def _send_unknown(self) -> None:
        self.send_error(HTTPStatus.NOT_FOUND, f"there are {' and '.join(self.server.pages)}")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request in plain words."""
        status = HTTPStatus(code)
        self._send(self.server.refusal(status, printable(message or status.phrase)))

    def _send(self, answer: Response) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request where somebody debugs."""
        log.debug("%s: %s", self.client_address[0], printable(format % args))


class _Bounded:
    """Lines of a request, up to some bytes in all."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._left = file, MAX_BYTES

    def readline(self, size: int = -1) -> bytes:
        """Read a line.

        Raises:
            LineTooLong: the request holds too much; the caller is told, or the connection ends.
        """
        line = self._file.readline(min(size, self._left) if size >= 0 else self._left)
        self._left -= len(line)
        if not self._left:
            raise http.client.LineTooLong("request")
        return line

    def close(self) -> None:
        """Close what is read."""
        self._file.close()


def host_named(header: str) -> str:
    """Return the host that a Host header names, in small letters; an empty text for none."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]+)?", header)
    return found[1].strip("[]").lower() if found else ""


def is_ip(name: str) -> bool:
    """Tell whether a host is an address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
