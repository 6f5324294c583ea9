"""Who gets through a TLS handshake, and as whom: a tiny service answers with who the peer is."""

from __future__ import annotations

import contextlib
import re
import shutil
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509

import fedcli.cli
import fedsrv.cli
from fedcli.runtime.link import Link
from fedcli.runtime.own_certificate import channel_credentials
from fedmodels.errors import ConfigError, LinkError
from fedpb.server_check import ServerCheck
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity import certificates as certs
from fedsrv.identity.certificate_guard import peer_of
from fedsrv.identity.certificates import revoke
from fedsrv.identity.tls import server_credentials
from fedsrv.progress.watching import check_health, watched

pytestmark = [pytest.mark.loopback, pytest.mark.timeout(60)]

METHOD = "/test.Echo/WhoAmI"


def _who(context: grpc.ServicerContext) -> str:
    peer = peer_of(context)
    return (peer and peer.uri) or "nobody"


class WhoAmI(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers any call with the identity of the peer."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(lambda request, context: _who(context).encode())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "ours"
    certs.init_authority(directory)
    for identity in ("server", "7", "0-24", "evaluator"):
        certs.issue(directory, identity)
    return directory


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tls") / "theirs"
    certs.init_authority(directory)
    certs.issue(directory, "server")
    certs.issue(directory, "7")
    return directory


def serve(directory: Path, client_ca: Path | None, host: str = "127.0.0.1") -> Iterator[int]:
    server = grpc.server(ThreadPoolExecutor(2), handlers=[WhoAmI()])
    keys = server_credentials(directory / "server.pem", directory / "server.key", client_ca)
    port = server.add_secure_port(f"{host}:0", keys)
    server.start()
    yield port
    server.stop(None).wait()


@pytest.fixture
def mutual(authority: Path) -> Iterator[int]:
    yield from serve(authority, authority / "ca.pem")


@pytest.fixture
def one_sided(authority: Path) -> Iterator[int]:
    yield from serve(authority, None)


@pytest.fixture
def elsewhere(authority: Path) -> Iterator[str]:
    """Return an address that the server there has no certificate for."""
    for port in serve(authority, None, "127.0.0.2"):
        yield f"127.0.0.2:{port}"


def ask(port: int, credentials: grpc.ChannelCredentials, host: str = "localhost") -> str:
    with grpc.secure_channel(f"{host}:{port}", credentials) as channel:
        return str(channel.unary_unary(METHOD)(b"", timeout=10).decode())


def pair(directory: Path, stem: str) -> tuple[Path, Path]:
    return directory / f"{stem}.pem", directory / f"{stem}.key"


@pytest.mark.parametrize(
    ("stem", "identity"),
    [
        ("client-7", "fedtide:client:7"),
        ("clients-0-24", "fedtide:clients:0-24"),
        ("evaluator", "fedtide:evaluator"),
    ],
)
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_client_is_who_its_certificate_says(authority, mutual, stem, identity, host):
    keys = channel_credentials(authority / "ca.pem", *pair(authority, stem))
    assert ask(mutual, keys, host) == identity


def test_without_mutual_tls_nobody_is_known(authority, one_sided):
    assert ask(one_sided, channel_credentials(authority / "ca.pem")) == "nobody"


def refused(port: int, credentials: grpc.ChannelCredentials) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(port, credentials)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_no_certificate_is_refused_under_mutual_tls(authority, mutual):
    refused(mutual, channel_credentials(authority / "ca.pem"))


def test_a_strangers_certificate_is_refused(authority, stranger, mutual):
    refused(mutual, channel_credentials(authority / "ca.pem", *pair(stranger, "client-7")))


def test_the_servers_certificate_is_no_clients(authority, mutual):
    refused(mutual, channel_credentials(authority / "ca.pem", *pair(authority, "server")))


def test_a_client_refuses_a_server_it_does_not_trust(stranger, one_sided):
    refused(one_sided, channel_credentials(stranger / "ca.pem"))


def joined(address: str, keys: grpc.ChannelCredentials) -> None:
    link = Link(address, keys, give_up_after_s=10)
    try:
        link.join(rpc.JoinRequest(client_id="7"))
    finally:
        link.close()


CALLERS = {
    "join": joined,
    "watch": lambda address, keys: list(watched(address, keys, connect_s=0.5)),
    "health": lambda address, keys: check_health(address, keys, within_s=0.5),
}


@pytest.mark.parametrize("call", CALLERS.values(), ids=CALLERS)
def test_why_a_server_is_not_trusted_is_one_line(authority, stranger, elsewhere, call):
    with pytest.raises(LinkError) as caught:
        call(elsewhere, channel_credentials(authority / "ca.pem"))
    assert str(caught.value) == (
        f"TLS: the certificate of the server at {elsewhere} does not name the address 127.0.0.2; "
        "give one that it names, or issue it anew with --host 127.0.0.2"
    )
    with pytest.raises(LinkError, match=r"is not signed by the authority that --tls-ca names"):
        call(elsewhere, channel_credentials(stranger / "ca.pem"))


def test_a_client_refuses_a_client_that_plays_server(authority):
    server = grpc.server(ThreadPoolExecutor(1), handlers=[WhoAmI()])
    port = server.add_secure_port(
        "127.0.0.1:0", server_credentials(*pair(authority, "client-7"), None)
    )
    server.start()
    refused(port, channel_credentials(authority / "ca.pem"))
    server.stop(None).wait()


def shown_by(port: int) -> int:
    """Return the serial number of the certificate that a server shows in a new handshake."""
    pem = ssl.get_server_certificate(("127.0.0.1", port))
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def replaced(place: Path, source: Path) -> None:
    """Replace a pair as a user does, a file after the other."""
    for end in ("pem", "key"):
        fresh = place / f"fresh.{end}"
        shutil.copyfile(source / f"server.{end}", fresh)
        fresh.replace(place / f"server.{end}")


def test_a_server_shows_a_new_certificate_without_a_restart(authority, tmp_path, caplog):
    shutil.copytree(authority, tmp_path / "one")
    shutil.copytree(authority, tmp_path / "two")
    for end in ("pem", "key"):
        (tmp_path / "two" / f"server.{end}").unlink()
    certs.issue(tmp_path / "two", "server")
    running = serve(tmp_path / "one", None)
    port = next(running)
    first = shown_by(port)
    keys = channel_credentials(authority / "ca.pem")
    with grpc.secure_channel(f"localhost:{port}", keys) as channel:
        old = channel.unary_unary(METHOD)
        assert old(b"", timeout=10) == b"nobody"
        (tmp_path / "one" / "server.key").write_text("no key")
        assert shown_by(port) == first
        assert "the certificate in use stays in use: --tls-key" in caplog.text
        assert len(caplog.messages) == 1
        replaced(tmp_path / "one", tmp_path / "two")
        assert shown_by(port) != first
        assert old(b"", timeout=10) == b"nobody"  # an old connection goes on
        assert ask(port, keys) == "nobody"
    with contextlib.suppress(StopIteration):
        next(running)


def test_a_client_joins_no_server_whose_certificate_was_revoked(authority, one_sided, tmp_path):
    ours = tmp_path / "ours"
    shutil.copytree(authority, ours)
    revoke(ours, "7")
    address = f"localhost:{one_sided}"
    check = ServerCheck(address, ours / "ca.pem", ours / "crl.pem", None, None)
    check()
    revoke(ours, "server")
    link = Link(address, channel_credentials(ours / "ca.pem"))
    link.check = check
    with pytest.raises(LinkError, match=r"^TLS: the certificate of the server at .* was revoked"):
        link.join(rpc.JoinRequest(client_id="7"))
    link.close()
    ServerCheck("localhost:1", ours / "ca.pem", ours / "crl.pem", None, None)()  # nobody there
    with pytest.raises(ConfigError, match="--tls-crl needs --tls-ca"):
        ServerCheck(address, None, ours / "crl.pem", None, None)


COMMANDS = {
    "status": [],
    "watch": [],
    "health": [],
    "retire": ["3"],
    "exclude": ["3"],
    "close": [],
}


@pytest.fixture(scope="module")
def revoked(authority, tmp_path_factory):
    """The authority's files where the server's certificate was revoked."""
    place = tmp_path_factory.mktemp("revoked") / "ours"
    shutil.copytree(authority, place)
    revoke(place, "server")
    return place


@pytest.mark.parametrize("command", [*COMMANDS, "add-task"])
def test_no_command_asks_a_server_whose_certificate_was_revoked(
    command, authority, revoked, one_sided, tmp_path, capsys
):
    """The server would answer "nobody", which no command can read: it is not asked."""
    address = f"localhost:{one_sided}"
    words, program = [command, address, *COMMANDS.get(command, ())], fedsrv.cli.main
    if command == "add-task":
        (tmp_path / "0").mkdir()
        words = [command, str(tmp_path), "--client-id", "0", "--data", str(tmp_path)]
        words, program = [*words, "--server", address], fedcli.cli.main
    words += ["--tls-ca", str(authority / "ca.pem"), "--tls-crl", str(revoked / "crl.pem")]
    with pytest.raises(SystemExit) as ended:
        program(words)
    assert ended.value.code == 1
    line = rf"error: TLS: the certificate of the server at {address} was revoked on 20.*\n"
    assert re.fullmatch(line, capsys.readouterr().err)
