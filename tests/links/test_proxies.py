"""A proxy in the environment: loopback never goes through it, and a line names it elsewhere."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest

from fedcli.runtime.link import Link
from fedmodels.errors import LinkError
from fedpb.channels import is_here
from fedpb.unreachable import EXCEPTIONS, proxy_to
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.uplink import Uplink
from fedsrv.launch import remote_host
from fedsrv.launch.remote_host import HostInstructions
from fedsrv.progress.watching import check_health, watched

pytestmark = pytest.mark.loopback


class Proxy:
    """A proxy that lets nobody through, and remembers who asked."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self._socket.accept()
                with caller:
                    self.asked.append(caller.recv(4096).split(b"\r\n")[0])
                    caller.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    made = Proxy()
    monkeypatch.setenv("http_proxy", f"http://ada:secret@127.0.0.1:{made.port}")
    yield made
    made.close()


def joined(address: str) -> str:
    link = Link(address, give_up_after_s=0.0)
    try:
        link.join(rpc.JoinRequest(client_id="0"))
    except LinkError as error:
        return str(error)
    finally:
        link.close()
    return ""


def above(address: str) -> str:
    uplink = Uplink(address)
    try:
        return uplink.check()
    finally:
        uplink.close()


def health(address: str) -> str:
    with pytest.raises(LinkError) as caught:
        check_health(address, within_s=0.2)
    return str(caught.value)


def watch(address: str) -> str:
    with pytest.raises(LinkError) as caught:
        list(watched(address, connect_s=0.2))
    return str(caught.value)


@pytest.mark.parametrize("call", [joined, above, health, watch])
def test_loopback_has_no_proxy_and_another_host_names_it(call, proxy):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        for host in ("127.0.0.1", "localhost", socket.gethostname()):
            said = call(f"{host}:{nobody.getsockname()[1]}")
            assert said.endswith("nothing listens there (connection refused)"), said
    assert proxy.asked == []
    said = call("coordinator.invalid:9")
    assert proxy.asked[0] == b"CONNECT coordinator.invalid:9 HTTP/1.1"
    assert f"the proxy 127.0.0.1:{proxy.port} of http_proxy is on the way: name" in said
    assert "coordinator.invalid in no_proxy" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("address", "variables", "found"),
    [
        ("far:1", {"http_proxy": "http://p:8"}, "the proxy p:8 of http_proxy"),
        ("far:1", {"https_proxy": "http://p", "http_proxy": "http://q"},
         "the proxy p of https_proxy"),
        ("far:1", {"grpc_proxy": "http://p", "https_proxy": "http://q"},
         "the proxy p of grpc_proxy"),
        ("far:1", {"https_proxy": "https://p", "http_proxy": "http://q"}, ""),
        ("far:1", {"http_proxy": "p:8"}, ""),
        ("far:1", {"http_proxy": "http://p:x"}, ""),
        ("far:1", {"HTTP_PROXY": "http://p:8"}, ""),
        ("a.far:1", {"http_proxy": "http://p", "no_proxy": "x, .FAR"}, ""),
        ("a.far:1", {"http_proxy": "http://p", "no_proxy": "*"}, "the proxy p of http_proxy"),
        ("a.far:1", {"http_proxy": "http://p", "no_grpc_proxy": "x", "no_proxy": "far"},
         "the proxy p of http_proxy"),
        ("10.1.2.3:1", {"http_proxy": "http://p", "no_proxy": "10.0.0.0/8"}, ""),
        ("[fd00::1]:1", {"http_proxy": "http://p", "no_proxy": "fd00::/16"}, ""),
        ("11.1.2.3:1", {"http_proxy": "http://p", "no_proxy": "10.0.0.0/8"},
         "the proxy p of http_proxy"),
        *((here, {"http_proxy": "http://p"}, "") for here in (
            "unix:/tmp/s", "dns:///localhost:1", "ipv4:127.0.0.2:1", "[::1]:1", "127.1.1.1:1")),
    ],
)  # fmt: skip
def test_which_variables_count(address, variables, found, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert proxy_to(address) == found


def test_the_machines_own_name_is_here():
    assert is_here(f"{socket.gethostname().upper()}:5055")
    assert not is_here("far.example:5055")


def test_a_host_of_a_cluster_needs_no_proxy_to_its_coordinator(monkeypatch, proxy):
    seen = []

    def hosted(clients: str, arguments: list[str]) -> Iterator[dict[str, int]]:
        seen.append(proxy_to(arguments[1]))
        yield {"status": 0}

    monkeypatch.setenv(EXCEPTIONS[0], "")
    monkeypatch.setattr(remote_host, "_hosted", hosted)
    for address in ("10.1.2.3:5055", "[fd00::1]:5055"):
        stay = HostInstructions("0", ["--server", address], str(Path.cwd()))
        assert list(remote_host.remote_host(asdict(stay))) == [{"status": 0}]
    assert seen == ["", ""]
    assert os.environ[EXCEPTIONS[0]] == "fd00::1"
