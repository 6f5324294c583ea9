"""A run over mutual TLS: certificates name the clients, and nobody else gets in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from fedsrv.identity.certificates import init_authority, issue
from tests.integration.conftest import Loopback, tables

pytestmark = pytest.mark.loopback


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an authority's directory with the server's and three clients' certificates."""
    root = tmp_path_factory.mktemp("certs")
    init_authority(root)
    for identity in ("server", "0-1", "2", "evaluator", "watcher"):
        issue(root, identity)
    other = root / "other"
    init_authority(other)
    issue(other, "2")
    return root


def server_options(certs: Path) -> list[str]:
    return [
        "--tls-cert", str(certs / "server.pem"), "--tls-key", str(certs / "server.key"),
        "--tls-client-ca", str(certs / "ca.pem"),
    ]  # fmt: skip


def client_options(certs: Path, name: str, ca: Path | None = None) -> list[str]:
    return [
        "--tls-ca", str(ca or certs / "ca.pem"), "--tls-cert", str(certs / f"{name}.pem"),
        "--tls-key", str(certs / f"{name}.key"),
    ]  # fmt: skip


def watch(run: Loopback, certs: Path, name: str) -> Any:
    """Watch a run with a certificate, from its start."""
    pem = [(certs / file).read_bytes() for file in ("ca.pem", f"{name}.key", f"{name}.pem")]
    credentials = grpc.ssl_channel_credentials(*pem)
    channel = grpc.secure_channel(f"127.0.0.1:{run.port}", credentials)
    stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
    return channel, stub.Watch(rpc.WatchRequest(from_start=True), timeout=30)


def test_only_a_watcher_may_watch(loopback, certs):
    run = loopback(tables("fedavg"))
    server = run.serve(*server_options(certs))
    first = run.join("0-1", *client_options(certs, "clients-0-1"))
    server.wait_kind("joined")
    for name in ("clients-0-1", "client-2", "evaluator", "server"):
        channel, events = watch(run, certs, name)
        with channel, pytest.raises(grpc.RpcError) as refused:
            next(events)
        if name != "server":  # whose certificate is none of a client
            assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED
            assert "may not call Watch" in refused.value.details()
    channel, events = watch(run, certs, "watcher")
    with channel:
        begin = [next(events).event.WhichOneof("what") for _ in range(2)]
        assert begin == ["present", "listening"]
        stranger = run.join("2", *client_options(certs, "watcher"), states=run.root / "stranger")
        assert stranger.wait() == 1
        assert "fedtide:watcher may not call Join" in stranger.output()
        run.finish(server, first, run.join("2", *client_options(certs, "client-2")))
        assert {told.event.WhichOneof("what") for told in events} >= {
            "upload",
            "commit",
            "finished",
        }


def test_tls_without_an_authority_of_clients_is_warned_of(loopback, certs):
    run = loopback(tables("fedavg"))
    server = run.serve(*server_options(certs)[:4])
    line = server.wait_kind("note")["detail"]["line"]  # what ``--json`` and watchers show as well
    assert line.startswith("--tls-cert without --tls-client-ca: whoever reaches 127.0.0.1")
    assert "may join as any client" in line


def test_certificates_admit_their_clients_and_nobody_else(loopback, certs):
    run = loopback(tables("fedavg"))
    server = run.serve(*server_options(certs))
    first = run.join("0-1", *client_options(certs, "clients-0-1"))
    stranger = run.join("2", *client_options(certs, "clients-0-1"), states=run.root / "stranger")
    assert stranger.wait() == 1
    assert "does not cover 2 (PERMISSION_DENIED)" in stranger.output()
    assert "--tls-client-ca" not in server.log.read_text()
    for wrong in (
        client_options(certs / "other", "client-2", certs / "ca.pem"),  # a certificate of others
        client_options(certs, "client-2", certs / "other" / "ca.pem"),  # another server expected
        ["--tls-ca", str(certs / "ca.pem")],  # no certificate at all
    ):
        refused = run.join("2", *wrong, "--give-up-after", "2", states=run.root / "refused")
        assert refused.wait() == 1
        last = refused.output().splitlines()[-1]
        assert last.startswith("error: "), last
        assert "TLS" in last
        assert "--tls-ca" in last
    run.finish(server, first, run.join("2", *client_options(certs, "client-2")))
    secrets = [(certs / f"{name}.key").read_text().splitlines()[1] for name in ("server", "ca")]
    token = (run.out / "clients" / "2" / "session.json").read_text().split('"')[-2]
    logs = server.log.read_text() + first.output()
    assert not any(secret in logs for secret in (*secrets, token))
    assert (run.out / "clients" / "2" / "session.json").stat().st_mode & 0o777 == 0o600
