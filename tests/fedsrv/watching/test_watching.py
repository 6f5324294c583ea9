"""Watching a run from outside: a real server, asked as ``fedsrv status`` asks it."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import fedsrv.cli
from fedmodels.errors import LinkError
from fedpb.channels import channel_options
from fedsrv.identity import certificates, tls
from fedsrv.identity.certificate_guard import CertificateGuard
from fedsrv.identity.guard import Guard
from fedsrv.identity.tls import server_credentials
from fedsrv.progress import watching
from fedsrv.progress.events import EventLog
from fedsrv.progress.watching import check_health, steer, watched
from fedsrv.state.run_directory import lock
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service


def served(
    events: EventLog, authority: Path | None = None, port: int = 0
) -> tuple[Any, Service, int]:
    """Start a coordinator that has nothing but its events."""
    there = {"present": lambda: {"clients": ["0"]}, "look_after": lambda: None}
    cohort: Any = SimpleNamespace(num_clients=2, most_present=2, **there)
    service = Service("run", {}, cohort, events, guard=CertificateGuard() if authority else Guard())
    keys = None
    if authority is not None:
        pair = authority / "server.pem", authority / "server.key"
        keys = server_credentials(*pair, authority / "ca.pem")
    server, port = start_server(service, f"127.0.0.1:{port}", keys)
    return server, service, port


@pytest.fixture
def events() -> EventLog:
    """Return what a run of two clients told until its second interaction."""
    log = EventLog()
    for client in (0, 1):
        log.tell("joined", client)
    log.tell("order", 0, interaction=0, round=0)
    log.tell("failed", 1, interaction=0, round=0, reason="its disk\x1b[2J is full")
    log.tell("commit", interaction=0, round=0, task=0, loss=0.5, of=4, failed={})
    log.tell("scores", interaction=0, round=0, metrics={"a_loc": 0.75, "a_sel": 0.5})
    log.tell("left", 1, reason="finished")
    log.tell("waiting", line="waiting for client 1", clients=["1"], seconds=3)
    return log


@pytest.fixture
def address(events: EventLog) -> Iterator[str]:
    """Return where a coordinator tells these events."""
    server, service, port = served(events)
    yield f"127.0.0.1:{port}"
    events.close()
    stop_server(server)
    service.gate.close()
    service.complaints.close()


def typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object
) -> tuple[object, list[str], list[str]]:
    """Return exit status, output and errors of ``fedsrv``, as a shell would see them."""
    monkeypatch.setattr(sys, "argv", ["fedsrv", *map(str, words)])
    status: object = 0
    try:
        fedsrv.cli.main()
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    return status, said.out.splitlines(), said.err.splitlines()


@pytest.mark.parametrize("command", ["status", "watch", "health"])
def test_an_address_that_is_none(command, monkeypatch, capsys):
    for address in ("nope", "127.0.0.1:99999", "a b:1"):
        status, out, err = typed(monkeypatch, capsys, command, address)
        assert (status, out) == (2, [])
        assert err[0].startswith(f"error: the coordinator's address {address!r} is not HOST:PORT")


def test_status_says_where_a_run_stands(address, monkeypatch, capsys):
    status, out, _ = typed(monkeypatch, capsys, "status", address, "--seconds", 3)
    assert status == 0
    assert out == [
        "state: waiting",
        "committed: interaction 1 of 4: round 1, task 0, loss 0.5",
        "scores: a_loc 75.0 %, a_sel 50.0 %",
        "clients present: 1 of 2",
        "waiting: waiting for client 1",
        "failures of client 1: 1",
    ]
    _, out, _ = typed(monkeypatch, capsys, "status", address, "--seconds", 3, "--json")
    found = json.loads(out[0])
    assert (found["interaction"], found["present"], found["finished"]) == (0, ["0"], False)
    assert found["metrics"] == {"a_loc": 0.75, "a_sel": 0.5}


def test_status_of_a_directory_says_what_is_committed(tmp_path, monkeypatch, capsys):
    """The command took a path for an address."""
    rows = [{"interaction": i, "round": i, "task": 0, "metrics": {"loss": 2.0 - i, "a_glo": 0.5}}
            for i in range(2)]  # fmt: skip
    (tmp_path / "rounds.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = ["committed: interaction 2: round 2, task 0, loss 1", "scores: a_glo 50.0 %"]
    status, out, _ = typed(monkeypatch, capsys, "status", tmp_path)
    assert (status, out[:3]) == (0, ["state: waiting", *said])
    assert out[3].startswith("waiting: no process on this machine works on it")
    handle = lock(tmp_path)
    assert typed(monkeypatch, capsys, "status", tmp_path)[1] == ["state: going on", *said]
    os.close(handle)
    end = {"metrics": {"loss": 1.0, "a_glo": 0.75}, "state_sha256": "ab12"}
    (tmp_path / "summary.json").write_text(json.dumps(end))
    assert "state digest: ab12" in typed(monkeypatch, capsys, "status", tmp_path)[1]
    _, out, _ = typed(monkeypatch, capsys, "status", tmp_path, "--json")
    found = json.loads(out[0])
    assert (found["finished"], found["interactions"], found["metrics"]["a_glo"]) == (True, 2, 0.75)
    (tmp_path / "none").mkdir()
    status, _, err = typed(monkeypatch, capsys, "status", tmp_path / "none")
    assert status == 1
    assert "is not a run directory" in err[0]


def test_health_tells_whether_a_coordinator_serves(events, monkeypatch, capsys):
    server, service, port = served(events)
    assert typed(monkeypatch, capsys, "health", f"127.0.0.1:{port}") == (0, [], [])
    service.health.enter_graceful_shutdown()
    status, _, errors = typed(monkeypatch, capsys, "health", f"127.0.0.1:{port}")
    assert status == 1
    assert errors == [f"error: 127.0.0.1:{port} says NOT_SERVING: it is about to end"]
    stop_server(server)
    service.gate.close()
    service.complaints.close()
    with pytest.raises(LinkError, match=rf"no coordinator answers at 127\.0\.0\.1:{port}: is"):
        check_health(f"127.0.0.1:{port}", within_s=0.1)


def test_watch_follows_to_the_end(address, events, monkeypatch, capsys):
    def end() -> None:
        events.tell("finished", metrics={"a_loc": 0.9}, state_sha256="0")
        events.close()

    threading.Timer(0.2, end).start()
    status, out, _ = typed(monkeypatch, capsys, "watch", address)
    assert status == 0
    assert out == [
        "client 0 joined",
        "client 1 joined",
        "client 1 failed: its disk\\x1b[2J is full",
        "interaction 1 of 4: round 1, task 0 committed, loss 0.5",
        "interaction 1: round 1 scored: a_loc 75.0 %, a_sel 50.0 %",
        "client 1 left: finished",
        "waiting for client 1",
        "the run has finished: a_loc 90.0 %",
    ]
    _, out, _ = typed(monkeypatch, capsys, "watch", address, "--json")
    kinds = [json.loads(line)["kind"] for line in out]
    assert kinds[3:6] == ["order", "failed", "commit"]


@pytest.mark.parametrize("reason", ["the run has failed: its disk\x1b[2J is full", ""])
def test_watch_fails_where_the_run_did_not_finish(reason, address, events, monkeypatch, capsys):
    events.tell("finished", metrics={"a_loc": 0.9}, state_sha256="0")  # the disk was full then
    events.tell("ended", reason=reason) if reason else events._kept.pop()
    events.close()
    status, out, errors = typed(monkeypatch, capsys, "watch", address)
    assert status == 1
    assert "full" not in out[-1]
    line = reason.replace("\x1b", "\\x1b") or (
        f"{address} ended without giving a reason; see the last line of fedsrv serve"
    )
    assert errors == [f"error: {line}"]


def test_what_a_server_says_to_a_watcher_is_made_printable():
    class Refuses(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            def watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
                context.abort(grpc.StatusCode.INTERNAL, "\x1b[2J\nerror: forged")
                yield b""

            return grpc.unary_stream_rpc_method_handler(watch)

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Refuses()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(LinkError, match="error: forged") as caught:
        list(watched(f"127.0.0.1:{port}"))
    assert str(caught.value).isprintable()
    server.stop(None).wait()


def test_a_watch_leaves_no_thread_that_waits_for_the_connection(address, events, monkeypatch):
    """Such a thread of gRPC fails where the connection is closed soon, as after a refusal."""

    def subscribe(*words: object, **more: object) -> None:
        raise AssertionError("gRPC starts a thread for this")

    monkeypatch.setattr("grpc._channel.Channel.subscribe", subscribe)
    events.close()
    assert [event.kind for event in watched(address)][-1] == "waiting"


def test_only_a_watcher_may_watch_over_mutual_tls(events, tmp_path, monkeypatch, capsys):
    certificates.init_authority(tmp_path)
    for identity in ("server", "watcher", "0"):
        certificates.issue(tmp_path, identity)
    server, service, port = served(events, tmp_path)

    def asked(stem: str) -> tuple[object, list[str], list[str]]:
        pair = ["--tls-cert", tmp_path / f"{stem}.pem", "--tls-key", tmp_path / f"{stem}.key"]
        words = ["status", f"127.0.0.1:{port}", "--seconds", 3, "--tls-ca", tmp_path / "ca.pem"]
        return typed(monkeypatch, capsys, *words, *pair)

    try:
        status, out, _ = asked("watcher")
        assert (status, out[0]) == (0, "state: waiting")
        status, out, errors = asked("client-0")
        assert (status, out) == (1, [])
        assert (
            "fedtide:client:0 may not call Watch: that takes a certificate as operator or"
            in errors[-1]
        )
        assert "(fedsrv certs issue watcher) (PERMISSION_DENIED)" in errors[-1]
        with pytest.raises(LinkError, match="a server that wants TLS ends calls like this"):
            list(watched(f"127.0.0.1:{port}", connect_s=0.5))
        nameless = tls.caller_credentials(tmp_path / "ca.pem", None, None, "--tls")
        for call in (
            lambda: list(watched(f"127.0.0.1:{port}", nameless, connect_s=0.5)),
            lambda: check_health(f"127.0.0.1:{port}", nameless, within_s=0.5),
        ):
            with pytest.raises(LinkError) as caught:
                call()
            assert str(caught.value) == (
                f"no coordinator answers at 127.0.0.1:{port}: the connection was "
                "ended (over TLS a server ends calls like this where it wants a "
                "certificate, or does not accept the one it got: give --tls-cert and --tls-key "
                "beside --tls-ca, from an authority that the server knows)"
                "; a watcher's certificate is made by fedsrv certs issue watcher"
            )
        # of a name with two addresses, gRPC tells the one that refuses
        where, real = f"localhost:{port}", tls.caller_channel
        diverted = {where: "127.0.0.1:1"}
        monkeypatch.setattr(
            tls, "caller_channel", lambda at, *more: real(diverted.get(at, at), *more)
        )
        known = [(family, *(socket.SOCK_STREAM, 6, ""), (host, port)) for family, host in (
            (socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))]  # fmt: skip
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)
        said = tls.silence_of(where, nameless)
        assert "where it wants a certificate" in said
        assert "refused" not in said
        assert tls.silence_of(where, None).endswith("ends calls like this: give --tls-ca)")
    finally:
        events.close()
        stop_server(server)
        service.gate.close()
        service.complaints.close()


def test_a_monitor_notices_that_its_coordinator_fell_silent(monkeypatch):
    seen = list[tuple[str, int]]()

    def channel(address: str, options: list[tuple[str, int]] | None = None) -> Any:
        seen.extend(options or ())
        raise LinkError("enough")

    monkeypatch.setattr(grpc, "insecure_channel", channel)
    for call in (lambda: check_health("a:1"), lambda: list(watched("a:1"))):
        seen.clear()
        with pytest.raises(LinkError, match="enough"):
            call()
        assert seen == channel_options("a:1")


@pytest.mark.parametrize(
    "call",
    [
        lambda address: list(watched(address, seconds=2.0)),
        lambda address: check_health(address, within_s=60.0),
        lambda address: steer(address, close=True, within_s=60.0),
    ],
    ids=["status", "health", "close"],
)
def test_a_port_that_refuses_is_asked_again_for_a_moment(call, monkeypatch):
    monkeypatch.setattr(watching, "REFUSED_S", 0.1)
    monkeypatch.setattr(watching, "CONNECT_S", 60.0)
    begun = time.monotonic()
    with pytest.raises(LinkError, match=r"nothing listens there \(connection refused\)"):
        call("127.0.0.1:1")
    assert 0.1 < time.monotonic() - begun < 30


def test_a_coordinator_that_is_just_starting_is_found(events, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    refused, begun = threading.Event(), list[Any]()
    monkeypatch.setattr(watching, "REFUSED_S", 60.0)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: refused.set())
    monkeypatch.setattr(watching, "time", clock)

    def begin() -> None:
        refused.wait(60)
        begun.extend(served(events, port=port))

    starting = threading.Thread(target=begin)
    starting.start()
    check_health(f"127.0.0.1:{port}", within_s=60.0)
    starting.join()
    server, service, _ = begun
    stop_server(server)
    service.gate.close()
    service.complaints.close()


def test_mistakes_are_one_line(monkeypatch, capsys):
    with pytest.raises(LinkError, match=r"no coordinator answers at 127\.0\.0\.1:1"):
        list(watched("127.0.0.1:1", connect_s=0.3))
    status, _, errors = typed(monkeypatch, capsys, "watch", "127.0.0.1:1", "--tls-key", "x")
    assert (status, len(errors)) == (2, 1)
    assert "belong together" in errors[0]
