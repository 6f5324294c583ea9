"""The server of pages: whom it answers, and that slow, large and many callers cost it little."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from fedmodels.host import http_server
from fedmodels.host.http_server import MAX_BYTES, PageServer, Response

Connect = Callable[[], socket.socket]


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """Return the place of a server of one page."""
    server = PageServer("127.0.0.1", 0, {"/": lambda accept: Response(b"here")})
    end = server.begin("pages")
    yield "127.0.0.1", server.port
    end()


@pytest.fixture
def connect(address: tuple[str, int]) -> Iterator[Connect]:
    with ExitStack() as stack:
        yield lambda: stack.enter_context(socket.create_connection(address, timeout=30))


def got(address: tuple[str, int], path: str = "/", method: str = "GET", **headers: str) -> int:
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request(method, path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def end_of(connection: socket.socket) -> bytes:
    """Return all that comes until a connection is closed."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_slow_connections_have_no_threads_and_keep_nobody_away(address, connect):
    assert got(address) == 200
    before = threading.active_count()
    slow = [connect() for _ in range(96)]
    for connection in slow:
        connection.sendall(b"GET / HTTP/1.0\r\n")
    assert got(address) == 200
    assert threading.active_count() <= before


def test_a_head_has_a_time_in_all(connect, monkeypatch):
    """However often its caller says something."""
    monkeypatch.setattr(http_server, "HEAD_S", 0.1)
    slow = connect()
    slow.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n")
    slow.sendall(b"X-More: 1\r\n")
    assert end_of(slow) == b""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.0\r\nX: " + b"x" * MAX_BYTES, b" 400 "),
        (b"GET / HTTP/1.0\r\n" + b"X: 1\r\n" * MAX_BYTES, b" 400 "),
        (b"GET /" + b"x" * MAX_BYTES, b" 400 "),
        (b"nonsense\r\n\r\n", b" 400 "),
        (b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", b" 200 "),
    ],
)
def test_what_a_request_keeps_waiting_for_has_a_size(connect, request_, status):
    caller = connect()
    caller.sendall(request_)
    assert status in end_of(caller).split(b"\r\n")[0]


@pytest.mark.parametrize(
    ("files", "answered"), [(1 << 20, http_server.MAX_TO_PAGES), (256, 32), (5, 1)]
)
def test_pages_take_few_of_the_files_that_a_run_needs(monkeypatch, files, answered):
    """Some hundred connections that asked for nothing had ended a run."""
    monkeypatch.setattr(http_server, "most_files", lambda: files)
    server = PageServer("127.0.0.1", 0, {"/": lambda accept: Response(b"here")})
    end, held = server.begin("pages"), server._server.server_state.connections
    assert server._server.config.backlog <= answered, "as many are taken before any is looked at"
    place = ("127.0.0.1", server.port)
    try:
        with ExitStack() as stack:
            for count in range(2 * answered):
                stack.enter_context(socket.create_connection(place, timeout=30))
                while len(held) <= count:
                    time.sleep(0.001)
            for _ in range(8):
                more = stack.enter_context(socket.create_connection(place, timeout=30))
                assert end_of(more) == b""
            assert len(held) <= 2 * answered
        while held:
            time.sleep(0.001)
        assert got(place) == 200
    finally:
        end()


TOLD_EARLY = """
import os, signal
from fedmodels.host.http_server import PageServer
server = PageServer("127.0.0.1", 0, {})
run = server._server.run
def begin(**given):
    os.kill(os.getpid(), signal.SIGTERM)
    run(**given)
server._server.run = begin
server.serve()
"""


def test_a_server_that_is_told_to_end_before_it_has_begun_ends():
    words = [sys.executable, "-c", TOLD_EARLY]
    assert subprocess.run(words, check=False, timeout=30).returncode == 143


def test_a_machine_may_be_asked_by_its_name(address):
    assert got(address, Host=socket.gethostname()) == 200
