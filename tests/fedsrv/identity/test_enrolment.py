"""Enrolment by an invitation: a key never leaves its site, and a token works once."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

import fedcli.cli
from fedcli.runtime.certificate_request import enrol as get
from fedcli.runtime.certificate_request import given_token
from fedmodels.errors import ConfigError, LinkError
from fedpb.identities import covers, role_of, without
from fedpb.invitation import ENROLMENT_SERVICE, Invitation
from fedpb.pem import check_pair, identities_of
from fedpb.v1 import enrolment_pb2 as rpc
from fedsrv.identity import certificates as certs
from fedsrv.identity import enrolment, invitations
from fedsrv.identity.certificates import revoke
from fedsrv.identity.enrolment import (
    MAX_REQUEST,
    NoRequest,
    Refused,
    TokenUsed,
    enrol,
    invite,
    start_enrolling,
)
from fedsrv.identity.invitations import INVITED, listed, withdraw


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("authority")
    certs.init_authority(root)
    certs.issue(root, "server")
    return root


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """An authority that has invited nobody."""
    certs.init_authority(tmp_path / "fresh")
    return tmp_path / "fresh"


@pytest.fixture(scope="module")
def service(authority: Path) -> Iterator[str]:
    """The address of the authority's service."""
    server, port = start_enrolling(authority, "127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def request(uri: str, key: Any = None) -> bytes:
    """Return a signing request for an identity."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    uris = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(name)
    signed = builder.add_extension(uris, critical=False).sign(
        key or ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()
    )
    return signed.public_bytes(Encoding.DER)


def test_a_site_gets_its_certificate_and_keeps_its_key(authority, service, tmp_path):
    token = invite(authority, "7", 1.0)
    stored = (authority / INVITED).read_text()
    assert Invitation.read(token).secret.hex() not in stored  # hashed at rest
    assert (authority / INVITED).stat().st_mode & 0o777 == 0o600
    files = get(service, f" {token}\n", tmp_path / "site")
    ca, cert, key = files
    assert [path.name for path in files] == ["ca.pem", "client-7.pem", "client-7.key"]
    assert ca.read_bytes() == (authority / "ca.pem").read_bytes()
    assert key.stat().st_mode & 0o777 == 0o600
    check_pair(cert, cert.read_bytes(), key, key.read_bytes())
    assert identities_of(x509.load_pem_x509_certificate(cert.read_bytes())) == ["fedtide:client:7"]
    assert not (authority / "client-7.key").exists()
    before = cert.read_bytes()
    with pytest.raises(ConfigError, match=r"client-7\.pem exists already"):
        get(service, token, tmp_path / "site")
    cert.unlink()  # a crash before the answer was stored: the same key, the same certificate
    get(service, token, tmp_path / "site")
    assert cert.read_bytes() == before
    with pytest.raises(LinkError, match=r"was already used with another key.*ALREADY_EXISTS"):
        get(service, token, tmp_path / "thief")
    cert.unlink()  # renewed: others have noted the key for their secure sums
    get(service, invite(authority, "7", 1.0), tmp_path / "site")
    assert cert.read_bytes() != before
    check_pair(cert, cert.read_bytes(), key, key.read_bytes())
    assert len(revoke(authority, "7")) == 2


def test_a_crash_between_signing_and_answering_is_repeated(authority, monkeypatch):
    secret = Invitation.read(invite(authority, "8", 1.0)).secret
    key = ec.generate_private_key(ec.SECP256R1())
    with monkeypatch.context() as crash:
        crash.setattr(invitations, "replacing", lambda *args, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            enrol(authority, secret, request("fedtide:client:8", key))
    first = enrol(authority, secret, request("fedtide:client:8", key))
    assert enrol(authority, secret, request("fedtide:client:8", key)) == first
    with pytest.raises(TokenUsed, match="with another key"):
        enrol(authority, secret, request("fedtide:client:8"))


def test_what_is_no_request_gets_nothing(authority):
    secret = Invitation.read(invite(authority, "9", 1.0)).secret
    good = request("fedtide:client:9")
    tampered = good.replace(b"fedtide:client:9", b"fedtide:client:8")
    flipped = bytearray(good)
    flipped[-1] ^= 1
    small = rsa.generate_private_key(65537, 2048)
    for wrong, line in (
        (tampered, "not signed by its own key"),
        (bytes(flipped), "not signed by its own key|no certificate signing request"),
        (request("fedtide:client:8"), "for fedtide:client:8, and the invitation for fedtide:cl"),
        (request("fedtide:client:9", small), "not on the curve P-256"),
        (request("fedtide:client:9", ec.generate_private_key(ec.SECP384R1())), "not on the curve"),
        (b"", "no certificate signing request"),
        (b"\x30\x80", "no certificate signing request"),
    ):
        with pytest.raises(NoRequest, match=line):
            enrol(authority, secret, wrong)
    with pytest.raises(Refused, match="knows no such invitation"):
        enrol(authority, b"\x00" * 32, good)
    assert enrol(authority, secret, good)[0] == "fedtide:client:9"  # it was not spent


def test_an_invitation_ends(authority, monkeypatch):
    used, late = (Invitation.read(invite(authority, "10", 1.0)).secret for _ in range(2))
    key = ec.generate_private_key(ec.SECP256R1())
    first = enrol(authority, used, request("fedtide:client:10", key))
    then = SimpleNamespace(
        now=lambda zone: datetime.now(zone) + timedelta(days=2),
        fromisoformat=datetime.fromisoformat,
    )
    monkeypatch.setattr(enrolment, "datetime", then)
    with pytest.raises(Refused, match=r"the invitation of fedtide:client:10 ended on 20"):
        enrol(authority, late, request("fedtide:client:10"))
    assert enrol(authority, used, request("fedtide:client:10", key)) == first


def test_who_is_revoked_has_no_open_invitation_left(fresh):
    enrolled, spare, late = (Invitation.read(invite(fresh, "7", 1.0)).secret for _ in range(3))
    other = Invitation.read(invite(fresh, "8", 1.0)).secret
    key = ec.generate_private_key(ec.SECP256R1())
    enrol(fresh, enrolled, request("fedtide:client:7", key))
    revoked, *void = sorted(revoke(fresh, "7"))
    assert revoked.startswith("revoked: fedtide:client:7, serial ")
    assert len(void) == 2
    assert all(line.startswith("void: invitation ") for line in void)
    for secret in (enrolled, spare, late):
        with pytest.raises(Refused, match=r"of fedtide:client:7 was revoked on 20.*: ask for anot"):
            enrol(fresh, secret, request("fedtide:client:7", key))
    assert enrol(fresh, other, request("fedtide:client:8"))[0] == "fedtide:client:8"
    again = Invitation.read(invite(fresh, "7", 1.0)).secret  # to come back is a new invitation
    assert enrol(fresh, again, request("fedtide:client:7"))[0] == "fedtide:client:7"


def test_invitations_are_listed_and_taken_back(fresh):
    secrets = [Invitation.read(invite(fresh, who, 1.0)).secret for who in ("7", "7", "8")]
    late = Invitation.read(invite(fresh, "relay:0-3", -1.0, ["r.example"])).secret
    enrol(fresh, secrets[0], request("fedtide:client:7"))
    states = [line.split(" ", 2)[1:] for line in listed(fresh)]
    assert [who for who, _ in states] == ["fedtide:client:7"] * 2 + [
        "fedtide:client:8", "fedtide:relay:0-3"
    ]  # fmt: skip
    assert states[0][1] == "was used"
    assert states[1][1].startswith("open until 20")
    assert states[3][1].startswith("ended 20")
    assert states[3][1].endswith(", host r.example")
    name = listed(fresh)[2].split()[0]
    assert withdraw(fresh, name) == [f"taken back: {name} of fedtide:client:8"]
    secrets.append(Invitation.read(invite(fresh, "7", 1.0)).secret)
    assert len(withdraw(fresh, "7")) == 2  # those that are open
    for secret, who in zip(secrets[1:], ("client:7", "client:8", "client:7"), strict=True):
        with pytest.raises(Refused, match=f"the invitation of fedtide:{who} was taken back on 20"):
            enrol(fresh, secret, request(f"fedtide:{who}"))
    for nothing in ("7", "relay:0-3", name, "0" * 12):
        with pytest.raises(ConfigError, match=r"has no open invitation|is no identity"):
            withdraw(fresh, nothing)
    with pytest.raises(Refused, match="ended on"):
        enrol(fresh, late, request("fedtide:relay:0-3"))


def test_a_token_stands_in_no_command(authority, service, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{invite(authority, '7', 1.0)}\n"))

    def enrolling(client: str, *more: str) -> None:
        with pytest.raises(SystemExit, match="0"):
            fedcli.cli.main(["enrol", "--server", service, "--dir", str(tmp_path / client), *more])

    enrolling("7")
    (tmp_path / "token").write_text(invite(authority, "8", 1.0))
    enrolling("8", "--token-file", str(tmp_path / "token"))
    monkeypatch.setenv("FEDCLI_ENROL_TOKEN", invite(authority, "9", 1.0))
    enrolling("9")
    for client in "789":
        assert (tmp_path / client / f"client-{client}.pem").is_file()
    with pytest.raises(ConfigError, match=r"--token-file .*none cannot be read: No such file"):
        given_token(str(tmp_path / "none"))


def test_a_client_trusts_no_other_authority_s_service(authority, service, tmp_path):
    certs.init_authority(tmp_path / "theirs")
    with pytest.raises(LinkError, match="not signed by the authority of the token"):
        get(service, invite(tmp_path / "theirs", "7", 1.0), tmp_path / "site")
    site = tmp_path / "site"
    assert sorted(path.name for path in site.iterdir()) == ["client-7.key"]
    with pytest.raises(LinkError, match=r"no authority's service answers at 127\.0\.0\.1:1"):
        get("127.0.0.1:1", invite(authority, "7", 1.0), site)
    (site / "ca.pem").write_bytes((tmp_path / "theirs" / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match="is another authority than the token's"):
        get(service, invite(authority, "7", 1.0), site)
    (site / "client-7.key").write_text("no key")
    (site / "ca.pem").unlink()
    with pytest.raises(ConfigError, match="holds no key that fedcli enrol made"):
        get(service, invite(authority, "7", 1.0), site)


def test_tokens_that_are_none(authority, tmp_path):
    token = invite(authority, "7", 1.0)
    stranger = Invitation("fedtide:../x", b"\x00" * 32, Invitation.read(token).authority).token()
    for wrong in ("", "x", token[:-40], token[: len(token) // 2], "fedtide-invitation-e30"):
        with pytest.raises(ConfigError, match="the token is no invitation, or not all of one"):
            get("127.0.0.1:1", wrong, tmp_path)
    with pytest.raises(ConfigError, match=r"the token names no identity: fedtide:\.\./x"):
        get("127.0.0.1:1", stranger, tmp_path)
    with pytest.raises(ConfigError, match="hosts belong to a server's certificate"):
        invite(authority, "7", 1.0, ["a.example"])
    assert re.fullmatch(r"[\w-]+", token)
    assert len(token) < 1500


def test_a_relay_enrols_with_its_hosts_and_the_service_takes_no_bomb(authority, service, tmp_path):
    _, cert, _ = get(service, invite(authority, "relay:0-3", 1.0, ["r.example"]), tmp_path)
    names = x509.load_pem_x509_certificate(cert.read_bytes()).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    assert "r.example" in names.value.get_values_for_type(x509.DNSName)
    keys = grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes())
    with grpc.secure_channel(service, keys) as channel:
        call = channel.unary_unary(f"/{ENROLMENT_SERVICE}/Enrol")
        bomb = rpc.EnrolRequest(request=b"x" * MAX_REQUEST).SerializeToString()
        with pytest.raises(grpc.RpcError) as refused:
            call(bomb, timeout=10)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_service_needs_an_authority_and_a_certificate(tmp_path):
    with pytest.raises(ConfigError, match="fedsrv certs init"):
        start_enrolling(tmp_path, "127.0.0.1:0")
    certs.init_authority(tmp_path)
    with pytest.raises(ConfigError, match=r"server\.pem is missing: fedsrv certs issue server"):
        start_enrolling(tmp_path, "127.0.0.1:0")
    (tmp_path / INVITED).write_text("{")
    with pytest.raises(ConfigError, match=r"invitations\.json is damaged"):
        invite(tmp_path, "7", 1.0)


@pytest.mark.parametrize(
    ("who", "others", "left"),
    [
        ("0-9", ["0-0", "9-9"], "fedtide:clients:1-8"),
        ("0-9", ["2-4", "3-6"], "fedtide:clients:0-1,7-9"),
        ("0-9", ["12-15"], "fedtide:clients:0-9"),
        ("0-9", ["0-4", "5-20"], ""),
        ("0-999", [f"{n}-{n}" for n in range(1, 126, 2)], "fedtide:clients:0-0,2-2,"),
        ("0-999", [f"{n}-{n}" for n in range(1, 128, 2)], ""),  # too many parts
    ],
)
def test_what_is_left_of_a_range(who, others, left, fresh):
    found = without(f"fedtide:clients:{who}", [f"fedtide:clients:{one}" for one in others])
    assert found.startswith(left)
    assert bool(found) == bool(left)
    assert found == left or found.count(",") == 63
    if found:  # also with a name that is longer than those of certificates may be
        key = ec.generate_private_key(ec.SECP256R1()).public_key()
        made = certs.Authority.read(fresh).certificate(found, key)
        assert identities_of(made) == [found]
        assert role_of(found) == "client"


def test_an_invitation_of_a_range_goes_on_without_a_revoked_client(fresh, tmp_path):
    """So does one that is asked for after a restart: what is left lies in the file."""
    certs.issue(fresh, "3")
    certs.issue(fresh, "server")
    before = certs.issue(fresh, "2-4")[0]
    token, one, relay = (invite(fresh, who, 1.0) for who in ("0-9", "3-3", "relay:0-9"))
    lines = revoke(fresh, "3")
    assert [line.split(":")[0] for line in lines] == ["narrowed", "void", "revoked", "note"]
    assert lines[0].endswith(" gives a certificate for fedtide:clients:0-2,4-9 only")
    assert f"{x509.load_pem_x509_certificate(before.read_bytes()).serial_number:x}" in lines[3]
    assert any("fedtide:clients:0-2,4-9 open until" in line for line in listed(fresh))
    with pytest.raises(Refused, match=r"of fedtide:clients:3-3 was revoked on 20"):
        enrol(fresh, Invitation.read(one).secret, request("fedtide:clients:3-3"))
    assert enrol(fresh, Invitation.read(relay).secret, request("fedtide:relay:0-9"))  # another's
    server, port = start_enrolling(fresh, "127.0.0.1:0")
    try:
        cert = get(f"127.0.0.1:{port}", token, tmp_path / "site")[1]
    finally:
        server.stop(None).wait()
    (uri,) = identities_of(x509.load_pem_x509_certificate(cert.read_bytes()))
    assert [client for client in range(12) if covers(uri, client)] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    assert role_of(uri) == "client"
