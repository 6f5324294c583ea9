"""The HTTP server of the live page: two things to get, nothing to change."""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedmodels.errors import ConfigError, FedtideError, reason_of
from fedmodels.printable import printable
from fedsrv.dashboard.state import State
from fedsrv.events import Ending, EventLog
from fedsrv.report.run_record import read_run

PAGE = Path(__file__).with_name("page.html")
SILENT_S = 10.0
"""A connection without a request for this long is closed."""
log = logging.getLogger(__name__)


class PageServer(ThreadingHTTPServer):
    """Serves one run's page and its state."""

    daemon_threads = True

    def __init__(self, host: str, port: int, state: State) -> None:
        """Bind to a place.

        Raises:
            ConfigError: that is not possible.
        """
        self.host, self.state = host, state
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, TypeError, UnicodeError) as error:  # some of a name that is none
            reason = reason_of(error)
            raise ConfigError(f"no page at {host}:{port}: {reason}; give another port") from None

    @property
    def url(self) -> str:
        """Return where the page is."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.server_port}/"

    def is_addressed(self, host: str) -> bool:
        """Tell whether a Host header means this server.

        A name that another site lets point here is not taken: its pages must not read this one.
        """
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::[0-9]+)?", host)
        name = found[1].strip("[]").lower() if found else ""
        return name in ("localhost", self.host.lower()) or _is_ip(name)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say little about a caller that went away."""
        log.debug("a caller of the live page went away", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page and of its state; everything else is refused."""

    server: PageServer
    timeout = SILENT_S
    server_version, sys_version = "fedtide", ""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer."""
        if not self.server.is_addressed(self.headers.get("Host", "")):
            self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", b"unknown host\n")
        elif self.path == "/":
            self._send(HTTPStatus.OK, "text/html", page()[0])
        elif self.path == "/state.json":
            self._send_state()
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there are / and /state.json\n")

    def _send_state(self) -> None:
        try:
            body = self.server.state.to_json().encode()
        except FedtideError as error:
            line = printable(str(error)).encode()
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", line)
            return
        self._send(HTTPStatus.OK, "application/json", body)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        policy = f"default-src 'none'; script-src '{page()[1]}'; style-src 'unsafe-inline'; "
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        more = "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'"
        self.send_header("Content-Security-Policy", policy + more)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log a request where somebody debugs."""
        log.debug("%s: %s", self.client_address[0], printable(format % args))


@cache
def page() -> tuple[bytes, str]:
    """Return the page, and the digest of its script, which alone may run."""
    content = PAGE.read_bytes()
    script = content.split(b"<script>", 1)[1].split(b"</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script).digest()).decode()
    return content, f"sha256-{digest}"


def show(events: EventLog, run: Path, host: str, port: int) -> Ending:
    """Serve the live page of a run that goes on; return what ends that.

    Raises:
        ConfigError: the place cannot be used.
    """
    server = PageServer(host, port, State(run))
    events.tell("dashboard", url=server.url)

    events.follow(server.state.take, "dashboard")
    threading.Thread(target=server.serve_forever, name="dashboard", daemon=True).start()

    def end() -> None:
        events.close()
        server.shutdown()
        server.server_close()

    return end


def serve_page(runs: Sequence[Path], host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of one run directory until Ctrl-C.

    Raises:
        ConfigError: there is not one run, or nothing can listen there.
        ArchiveError: the directory is no run's, or damaged.
    """
    if len(runs) != 1:
        raise ConfigError("--serve shows one run; name one directory")
    read_run(runs[0])
    with PageServer(host, port, State(runs[0])) as server:
        say(f"live page: {server.url} (Ctrl-C ends it)")
        server.serve_forever()


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
