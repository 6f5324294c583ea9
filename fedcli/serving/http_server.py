"""What carries HTTP for ``fedcli serve-model``: uvicorn, with bounds in time, bytes and callers.

A caller is answered, or told when to come again; nobody is cut off because others came.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from fnmatch import fnmatch
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedmodels.errors import ConfigError, reason_of
from fedmodels.page_server import MAX_BYTES, host_named, is_ip

HEAD_S = 15
"""Time of a request line and its headers, from the connection or from the answer before on."""
SLOW_READER_S = 90.0
"""Time of a whole request, up to the last byte that the caller takes."""
SLACK_S = 2
"""Time for the end itself, after that of the last answers."""
MAX_CONNECTIONS = 1024
"""Connections that are open; each takes an open file, and none a thread."""
BEYOND = "beyond"
"""In the state of a request: its connection came when as many as may be were open."""
BACKLOG = 512
"""Connections that the system may hold for the server."""


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with a limit of time for what a caller sends and takes."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request; note whether more connections are open than may be."""
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
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


class HttpServer:
    """Serves an application of ASGI at a place."""

    def __init__(self, host: str, port: int, app: Any, graceful_s: int) -> None:
        """Bind to a place, on port 0 to any that is free; ConfigError if that is not possible."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # asyncio sends small parts at once on sockets that say that they are of TCP
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(BACKLOG)
        except (OSError, TypeError, UnicodeError) as error:  # some of a name that is none
            self._socket.close()
            reason = reason_of(error)
            raise ConfigError(f"no page at {host}:{port}: {reason}; give another port") from None
        self.port = int(self._socket.getsockname()[1])
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.port}/"
        config = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", loop="asyncio", log_config=None,
            access_log=False, server_header=False, backlog=BACKLOG,
            h11_max_incomplete_event_size=MAX_BYTES, timeout_keep_alive=HEAD_S,
            timeout_graceful_shutdown=graceful_s, proxy_headers=False,
        )  # fmt: skip
        logging.getLogger("uvicorn").setLevel(logging.ERROR)
        self._server = _Server(config)

    def serve(self) -> None:
        """Answer until the process is told to end, and give requests that have come their time.

        Raises:
            SystemExit: SIGTERM came; its status is 143.
            KeyboardInterrupt: Ctrl-C came.
        """
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn calls these when it has ended
                signal.signal(number, lambda number, _: None)
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


def is_addressed(header: str, host: str, allowed: tuple[str, ...]) -> bool:
    """Tell whether a Host header means a server at ``host``, or at a name that is allowed.

    A name that another site lets point here is not taken: its pages must not read these. ``*`` in
    an allowed name stands for any letters.
    """
    name = host_named(header)
    if is_ip(name) or name in {"localhost", host.lower(), socket.gethostname().lower()}:
        return True
    return bool(name) and any(fnmatch(name, pattern.lower()) for pattern in allowed)


def end_for_good(status: int) -> None:
    """End the process now: a thread that still works on a request keeps it no longer."""
    os._exit(status)
