"""Certificates: what they say, who they cover, and that keys are never exposed or overwritten."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from typer.testing import CliRunner

import fedcli.cli
from fedcli.joining import host_of
from fedcli.runtime import own_certificate as client_tls
from fedmodels.errors import ConfigError, LinkError
from fedpb.channels import is_loopback
from fedpb.identities import covers
from fedpb.kept_lists import LISTS, KeptLists
from fedpb.pem import authorities_of, end_of
from fedpb.revocation import RevocationList
from fedsrv.cli import app
from fedsrv.coordinator import Listen
from fedsrv.identity import certificate_guard, guard, tls
from fedsrv.identity import certificates as certs
from fedsrv.identity.certificate_guard import CertificateGuard
from fedsrv.identity.certificates import revoke
from fedsrv.identity.guard import Peer
from fedsrv.state.store import Store
from tests.conftest import tiny_experiment


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    certs.init_authority(tmp_path / "certs")
    return tmp_path / "certs"


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def extension(path: Path, kind: Any) -> Any:
    return load(path).extensions.get_extension_for_class(kind).value


def test_authority_may_sign_and_nothing_else(authority):
    assert sorted(p.name for p in authority.iterdir()) == ["ca.key", "ca.pem"]
    usage = extension(authority / "ca.pem", x509.KeyUsage)
    assert usage.key_cert_sign
    assert not usage.digital_signature
    basic = extension(authority / "ca.pem", x509.BasicConstraints)
    assert (basic.ca, basic.path_length) == (True, 0)
    key = load(authority / "ca.pem").public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_keys_are_private_whatever_the_umask(tmp_path, mask):
    old = os.umask(mask)
    try:
        _, authority_key = certs.init_authority(tmp_path / "c")
        _, key = certs.issue(tmp_path / "c", "7")
    finally:
        os.umask(old)
    assert authority_key.stat().st_mode & 0o777 == 0o600
    assert key.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("synced")
def test_key_has_its_mode_before_its_content(tmp_path, monkeypatch):
    modes: dict[str, int] = {}
    real_open = os.open

    def watching_open(path: Path, flags: int, mode: int = 0o777) -> int:
        assert flags & os.O_EXCL
        modes[Path(path).name] = mode
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", watching_open)
    certs.init_authority(tmp_path)
    assert modes == {"ca.key": 0o600, "ca.pem": 0o644}


@pytest.mark.parametrize(
    ("identity", "uri", "stem"),
    [
        ("7", "fedtide:client:7", "client-7"),
        ("007", "fedtide:client:7", "client-7"),
        ("0-24", "fedtide:clients:0-24", "clients-0-24"),
        ("evaluator", "fedtide:evaluator", "evaluator"),
        ("watcher", "fedtide:watcher", "watcher"),
        ("operator", "fedtide:operator", "operator"),
    ],
)
def test_client_certificate_names_its_identity(authority, identity, uri, stem):
    cert, key = certs.issue(authority, identity)
    assert (cert.name, key.name) == (f"{stem}.pem", f"{stem}.key")
    names = extension(cert, x509.SubjectAlternativeName)
    assert [n.value for n in names] == [uri]
    assert load(cert).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value == uri
    assert list(extension(cert, x509.ExtendedKeyUsage)) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert not extension(cert, x509.BasicConstraints).ca
    load(cert).verify_directly_issued_by(load(authority / "ca.pem"))


def test_server_certificate_names_its_hosts(authority):
    cert, _ = certs.issue(authority, "server", ["node1.example.org", "10.0.0.5", "localhost"])
    names = extension(cert, x509.SubjectAlternativeName)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    assert uris == ["fedtide:server"]
    assert names.get_values_for_type(x509.DNSName) == ["localhost", "node1.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [
        ipaddress.ip_address(a) for a in ("127.0.0.1", "::1", "10.0.0.5")
    ]
    assert list(extension(cert, x509.ExtendedKeyUsage)) == [ExtendedKeyUsageOID.SERVER_AUTH]


def test_validity_is_ten_years_and_one(authority):
    leaf, _ = certs.issue(authority, "1")
    for path, days in ((authority / "ca.pem", 3650), (leaf, 365)):
        cert = load(path)
        span = cert.not_valid_after_utc - cert.not_valid_before_utc
        assert span == timedelta(days=days) + certs.CLOCK_SKEW


def test_nothing_is_overwritten(authority):
    before = (authority / "ca.key").read_bytes()
    with pytest.raises(ConfigError, match=r"ca\.pem exists already"):
        certs.init_authority(authority)
    certs.issue(authority, "7")
    (authority / "client-7.pem").unlink()
    with pytest.raises(ConfigError, match=r"client-7\.key exists already"):
        certs.issue(authority, "7")
    assert (authority / "ca.key").read_bytes() == before
    assert not (authority / "client-7.pem").exists()


@pytest.mark.parametrize(
    "identity", ["", "-1", "a", "1-", "3-1", "1,2", "\u0667", "Server", "7 ", "../x"]
)
def test_other_identities_are_refused(authority, identity):
    with pytest.raises(ConfigError):
        certs.issue(authority, identity)
    assert sorted(p.name for p in authority.iterdir()) == ["ca.key", "ca.pem"]


@pytest.mark.parametrize("host", ["", "a b", "host:443", "https://x", "ü.example"])
def test_hosts_that_are_none_are_refused(authority, host):
    with pytest.raises(ConfigError, match="neither a host name"):
        certs.issue(authority, "server", [host])


def test_hosts_are_the_servers_only(authority):
    with pytest.raises(ConfigError, match="server's certificate"):
        certs.issue(authority, "7", ["localhost"])


def test_missing_or_mixed_up_authority_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="fedsrv certs init"):
        certs.issue(tmp_path, "7")
    certs.init_authority(tmp_path / "a")
    certs.init_authority(tmp_path / "b")
    (tmp_path / "a/ca.key").write_bytes((tmp_path / "b/ca.key").read_bytes())
    with pytest.raises(ConfigError, match="do not belong together"):
        certs.issue(tmp_path / "a", "7")
    (tmp_path / "b/ca.key").write_text("no key")
    with pytest.raises(ConfigError, match="cannot be used"):
        certs.issue(tmp_path / "b", "7")


@pytest.mark.parametrize(
    ("uri", "yes", "no"),
    [
        ("fedtide:client:7", [7], [0, 6, 8, 77, "evaluator"]),
        ("fedtide:clients:2-4", [2, 3, 4], [1, 5, 24, "evaluator"]),
        ("fedtide:evaluator", ["evaluator"], [0, 7]),
        ("fedtide:server", [], [0, 7, "evaluator"]),
        ("fedtide:relay:2-4", [2, 4], [1, 5, "evaluator"]),
        ("fedtide:relay:3", [], [3]),
        ("fedtide:watcher", [], [0, "evaluator"]),
        ("fedtide:client:7x", [], [7]),
        ("xfedtide:client:7", [], [7]),
        ("fedtide:client:7\n", [], [7]),
        ("fedtide:clients:2", [], [2]),
        ("fedtide:clients:2-4x", [], [2]),
        ("", [], [0, "evaluator"]),
    ],
)
def test_covers(uri, yes, no):
    assert [covers(uri, c) for c in yes] == [True] * len(yes)
    assert [covers(uri, c) for c in no] == [False] * len(no)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:50051", True),
        ("127.8.8.8:1", True),
        ("[::1]:50051", True),
        ("localhost:0", True),
        ("localhost", True),
        ("unix:/tmp/socket", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("dns:///localhost:1", True),
        ("[::ffff:127.0.0.1]:1", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        (":50051", False),
        ("", False),
        ("10.0.0.1:50051", False),
        ("localhost.example.org:1", False),
        ("127.0.0.1.example.org:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("[::ffff:10.0.0.1]:1", False),
    ],
)
def test_is_loopback(address, expected):
    assert is_loopback(address) is expected


def test_unusable_files_name_the_option_and_the_path(authority):
    cert, key = certs.issue(authority, "server")
    other, other_key = certs.issue(authority, "7")
    gone = authority / "gone"
    for call, message in [
        (lambda: tls.server_credentials(gone, key, None), f"--tls-cert {gone} cannot be read"),
        (lambda: tls.server_credentials(cert, gone, None), f"--tls-key {gone} cannot be read"),
        (lambda: tls.server_credentials(cert, key, gone), f"--tls-client-ca {gone} cannot be"),
        (lambda: tls.server_credentials(cert, key, key), f"--tls-client-ca {key} holds no PEM"),
        (lambda: tls.server_credentials(key, key, None), f"--tls-cert {key} holds no PEM"),
        (lambda: tls.server_credentials(cert, cert, None), f"--tls-key {cert} holds no"),
        (lambda: tls.server_credentials(cert, other_key, None), "is not the key of"),
        (lambda: client_tls.channel_credentials(gone), f"--tls-ca {gone} cannot be read"),
        (lambda: client_tls.channel_credentials(key), f"--tls-ca {key} holds no PEM"),
        (lambda: client_tls.channel_credentials(cert, other, key), "is not the key of"),
        (lambda: client_tls.channel_credentials(cert, other), "--tls-cert and --tls-key belong"),
        (lambda: client_tls.channel_credentials(cert, None, key), "one of them is missing"),
        (
            lambda: client_tls.channel_credentials(None, other, key),
            "-cert and --tls-key need --tls-ca",
        ),
        (
            lambda: tls.caller_credentials(None, other, key, "--up"),
            "-cert and --up-key need --up-ca",
        ),
    ]:
        with pytest.raises(ConfigError) as caught:
            call()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("days", "line"),
    [
        (-1000, r"--tls-cert .*client-7\.pem expired on 20\d\d-"),
        (9, r"is valid from .* clock right"),
    ],
)
def test_a_certificate_that_is_not_valid_now_is_one_line(authority, monkeypatch, days, line):
    then = SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(days=days))
    monkeypatch.setattr(certs, "datetime", then)
    cert, key = certs.issue(authority, "7")
    with pytest.raises(ConfigError, match=line):
        client_tls.channel_credentials(authority / "ca.pem", cert, key)
    with pytest.raises(ConfigError, match=line):
        tls.server_credentials(cert, key, None)


def test_a_relay_s_certificate_is_named_by_its_own_option(authority, monkeypatch, caplog):
    cert, key = certs.issue(authority, "0-3")
    _, other = certs.issue(authority, "4")
    ca = authority / "ca.pem"
    with pytest.raises(ConfigError, match=r"--up-key .* is not the key of --up-cert "):
        tls.caller_credentials(ca, cert, other, "--up")
    key.chmod(0o644)
    tls.caller_credentials(ca, cert, key, "--up")
    assert caplog.messages[0].startswith(f"--up-key {key} can be read")
    then = SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(days=1000))
    monkeypatch.setattr(certs, "datetime", then)
    cert, key = certs.issue(authority, "5")
    with pytest.raises(ConfigError, match=r"^--up-cert .*client-5\.pem expired on "):
        tls.caller_credentials(ca, cert, key, "--up")


def test_an_authority_that_has_expired_is_said(tmp_path, monkeypatch):
    then = SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(days=4000))
    monkeypatch.setattr(certs, "datetime", then)
    ca, _ = certs.init_authority(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"^the authority .*ca\.pem expired on .* certs init$"):
        certs.issue(tmp_path, "7")
    certs.init_authority(tmp_path / "new")
    cert, key = certs.issue(tmp_path / "new", "server")
    with pytest.raises(ConfigError, match=r"^--tls-client-ca .*ca\.pem expired on "):
        tls.server_credentials(cert, key, ca)
    with pytest.raises(ConfigError, match=r"^--up-ca .*ca\.pem expired on "):
        tls.caller_credentials(ca, None, None, "--up")
    with pytest.raises(ConfigError, match=r"^--tls-ca .*ca\.pem expired on "):
        client_tls.channel_credentials(ca)
    ca.write_bytes(ca.read_bytes() + (tmp_path / "new" / "ca.pem").read_bytes())
    tls.server_credentials(cert, key, ca)  # one of two is valid


def test_a_key_that_everybody_may_read_is_warned_of(authority, caplog, monkeypatch):
    cert, key = certs.issue(authority, "server")
    tls.server_credentials(cert, key, None)
    assert not caplog.messages
    key.chmod(0o644)
    tls.server_credentials(cert, key, None)
    (line,) = caplog.messages
    assert line == f"--tls-key {key} can be read by every user of this machine: chmod 600 it"
    caplog.clear()
    monkeypatch.setattr(sys, "platform", "win32")  # where each file has such a mode
    tls.server_credentials(cert, key, None)
    assert not caplog.messages


def test_what_could_not_be_written_is_not_in_the_way(tmp_path, monkeypatch):
    """The disk is full when the certificate is written; the key alone would stop the next try."""
    written = certs.write_new

    def full(path: Path, content: bytes, mode: int) -> None:
        if path.suffix == ".pem":
            raise OSError(28, "No space left on device")
        written(path, content, mode)

    with monkeypatch.context() as broken:
        broken.setattr(certs, "write_new", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            certs.init_authority(tmp_path)
    assert list(tmp_path.iterdir()) == []
    certs.init_authority(tmp_path)


def test_an_authority_that_is_there_stays(tmp_path, monkeypatch):
    """The directory cannot be looked at any more: no key that is there is removed."""
    _, key = certs.init_authority(tmp_path)
    before = key.read_bytes()

    def fails(*args: object, **options: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "mkdir", fails)
        with pytest.raises(ConfigError, match="cannot be written: Input/output error"):
            certs.init_authority(tmp_path)
    assert key.read_bytes() == before


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:0", "127.0.0.1:7"),
        ("[::1]:0", "[::1]:7"),
        ("unix:/tmp/x/s.sock", "unix:/tmp/x/s.sock"),
    ],
)
def test_where_clients_reach_a_server(address, expected):
    assert Listen(address).at(7) == expected


def test_what_is_revoked_is_refused_and_can_be_issued_anew(authority):
    cert, key = certs.issue(authority, "7")
    lost = load(cert).serial_number
    for path in (cert, key):  # as whoever renews a certificate does
        path.rename(path.with_suffix(".old"))
    again, _ = certs.issue(authority, "7")
    listed = load_list(authority, must_exist=False)
    lines = revoke(authority, f"{lost:X}")
    assert lines == [f"revoked: fedtide:client:7, serial {lost:x}, valid until {lines[0][-10:]}"]
    assert listed.why_refused(lost).startswith("was revoked on 20")  # without a restart
    assert listed.why_refused(load(again).serial_number) == ""
    assert len(revoke(authority, "7")) == 1
    assert revoke(authority, "7") == []
    assert listed.why_refused(load(again).serial_number)
    for wrong, line in (("8", "issued no certificate to '8'"), ("ab" * 19, "with the serial")):
        with pytest.raises(ConfigError, match=line):
            revoke(authority, wrong)


def load_list(authority: Path, *, must_exist: bool = True) -> RevocationList:
    signers = partial(authorities_of, authority / "ca.pem", "--tls-client-ca")
    return RevocationList(authority / "crl.pem", signers, "--tls-crl", must_exist=must_exist)


def test_a_list_that_is_no_good_revokes_nothing_and_forgives_nothing(authority, tmp_path, caplog):
    certs.init_authority(tmp_path / "theirs")
    certs.issue(tmp_path / "theirs", "7")
    revoke(tmp_path / "theirs", "7")
    theirs, place = (tmp_path / "theirs" / "crl.pem").read_bytes(), authority / "crl.pem"
    serial = load(certs.issue(authority, "7")[0]).serial_number
    with pytest.raises(ConfigError, match=r"--tls-crl .*crl\.pem cannot be read: No such file"):
        load_list(authority)
    revoke(authority, "7")
    listed = load_list(authority)
    wrong = {b"no list": "holds no PEM list", theirs: "is signed by none of the authorities"}
    for content, line in wrong.items():
        place.write_bytes(content)
        with pytest.raises(ConfigError, match=line):
            load_list(authority)
        assert listed.why_refused(serial)
        assert line in caplog.messages[-1]
        assert caplog.messages[-1].endswith("; what was revoked before stays revoked")
    place.unlink()
    assert listed.why_refused(serial)
    assert "is gone" in caplog.messages[-1]
    with pytest.raises(ConfigError, match="--tls-crl needs --tls-client-ca"):
        Listen.given("127.0.0.1:0", None, None, None, False, place)


def test_an_older_list_replaces_no_newer_one(authority, tmp_path, caplog):
    serials = [load(certs.issue(authority, who)[0]).serial_number for who in ("7", "8")]
    place = authority / "crl.pem"
    revoke(authority, "7")
    older = place.read_bytes()
    listed = load_list(authority)
    revoke(authority, "8")
    newer = place.read_bytes()
    assert all(map(listed.why_refused, serials))
    place.write_bytes(older)
    assert all(map(listed.why_refused, serials))
    assert "is an older list" in caplog.messages[-1]
    with pytest.raises(
        ConfigError, match=r"crl\.pem is an older list \(number \d+\) than one that"
    ):
        load_list(authority)  # after a restart
    place.write_bytes(newer)
    assert load_list(authority).why_refused(serials[1])
    place.unlink()
    revoke(authority, "7")  # the authority lost its list, and not what it revoked
    assert all(map(load_list(authority).why_refused, serials))


def test_a_note_that_is_removed_revokes_nothing_back(authority, tmp_path):
    """A run keeps the number of the newest list too, in its database, where an edit shows."""
    serials = [load(certs.issue(authority, who)[0]).serial_number for who in ("7", "8")]
    place, out = authority / "crl.pem", tmp_path / "run"

    def started(resume):
        with closing(Store(out, tiny_experiment(), resume)) as store:
            listed = load_list(authority, must_exist=False)
            listed.kept_by(store.revocations, store.keep_revocations)
            return listed

    revoke(authority, "7")
    older = place.read_bytes()
    revoke(authority, "8")
    newer = place.read_bytes()
    started(resume=False)
    place.write_bytes(older)
    (authority / ".crl.pem.newest").unlink()
    with pytest.raises(
        ConfigError, match=r"crl\.pem is an older list \(number \d+\) than one that"
    ):
        started(resume=True)
    (authority / ".crl.pem.newest").unlink()
    place.unlink()
    with pytest.raises(ConfigError, match=r"crl\.pem is gone, and was here before"):
        started(resume=True)
    place.write_bytes(newer)
    assert started(resume=True).why_refused(serials[1])
    place.unlink()
    with pytest.raises(ConfigError, match=r"crl\.pem is gone, and was here before"):
        load_list(authority, must_exist=False)


def test_a_client_keeps_how_new_its_list_was_beside_its_states(authority, digits, tmp_path):
    """A note beside the list that is removed together with it revokes nothing back."""
    tls, place = (authority / "ca.pem", None, None), authority / "crl.pem"

    def started(run_id=""):
        states = tmp_path / "site" / run_id / "states"
        host = host_of(
            [0], "localhost:1", digits, states, torch.device("cpu"), tls=tls, crl=place,
            run_id=run_id,
        )  # fmt: skip
        host.link.close()

    for who in ("7", "8"):
        certs.issue(authority, who)
    revoke(authority, "7")
    older = place.read_bytes()
    revoke(authority, "8")
    newer = place.read_bytes()
    started()
    for run_id in ("", "a" * 32):  # and a site that stays, in another run
        place.write_bytes(older)
        (authority / ".crl.pem.newest").unlink()
        with pytest.raises(ConfigError, match=r"crl\.pem is an older list \(number \d+\) than one"):
            started(run_id)
    place.write_bytes(newer)
    started()
    (tmp_path / "site" / LISTS).write_text("{")
    with pytest.raises(ConfigError, match=rf"{LISTS} cannot be read: it is damaged"):
        started()


@pytest.mark.needs("relays")
@pytest.mark.parametrize("option", ["--up-crl", "--tls-crl"])
@pytest.mark.parametrize("audit", [True, False])
def test_a_relay_keeps_how_new_its_lists_were(authority, tmp_path, monkeypatch, option, audit):
    """With a directory over a restart as well, else for the runs of one process."""
    from fedplugins.relays.relaying import RunGone

    place, begun = authority / "crl.pem", list[bytes]()
    cert, key = certs.issue(authority, "7")[:2]
    certs.issue(authority, "8")
    revoke(authority, "7")
    older = place.read_bytes()
    revoke(authority, "8")
    newer = place.read_bytes()
    ca = authority / "ca.pem"

    def serve(*args: Any) -> None:
        begun.append(place.read_bytes())
        raise RunGone("it is over")

    def two_runs(relay: Any) -> None:
        """Between which the older list, and no note, is put there."""
        with pytest.raises(RunGone):
            relay()
        put_back()
        relay()

    def put_back() -> None:
        place.write_bytes(older)
        (authority / ".crl.pem.newest").unlink()

    monkeypatch.setattr("fedplugins.relays.relaying.serve_relay", serve)
    monkeypatch.setattr("fedplugins.relays.staying.relay_runs", two_runs)
    options = {
        "--up": "host:1", "--clients": "0-1", "--up-ca": ca, "--up-cert": cert, "--up-key": key,
        "--tls-cert": cert, "--tls-key": key, option: place,
    }  # fmt: skip
    if option == "--tls-crl":
        options["--tls-client-ca"] = ca
    if audit:
        options["--audit"] = tmp_path / "log"
    words = ["relay", *(str(word) for pair in options.items() for word in pair)]
    error = CliRunner().invoke(app, [*words, *([] if audit else ["--stay"])]).exception
    if audit:
        assert isinstance(error, RunGone)
        put_back()
        error = CliRunner().invoke(app, words).exception
    assert isinstance(error, ConfigError)
    assert re.search(rf"^{option} .*crl\.pem is an older list", str(error))
    assert begun == [newer]


def test_add_task_and_a_dry_run_ask_no_server_by_an_older_list(authority, digits, tmp_path):
    """What ``fedcli join`` kept beside the states counts for them; a dry run writes nothing."""
    place, states = authority / "crl.pem", tmp_path / "site" / "states"
    for who in ("7", "8"):
        certs.issue(authority, who)
    revoke(authority, "7")
    older = place.read_bytes()
    revoke(authority, "8")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.csv").write_text("a,label\n1,x\n")
    tls = ["--tls-ca", authority / "ca.pem", "--tls-crl", place, "--server", "localhost:1"]
    common = ["--client-id", "0", "--state-dir", states, *tls]
    dry = ["join", *common, "--data", tmp_path / "photos", "--dry-run", "--give-up-after", "0.1"]
    add = ["add-task", tmp_path / "photos", *common, "--data", digits]

    def error_of(words: list[Any]) -> BaseException | None:
        return CliRunner().invoke(fedcli.cli.app, [*map(str, words)]).exception

    assert isinstance(error_of(dry), LinkError)  # nobody is there
    assert not states.parent.exists()
    states.mkdir(parents=True)
    marks = KeptLists(states.parent)
    RevocationList(
        place, lambda: [load(authority / "ca.pem")], "--tls-crl", must_exist=True
    ).kept_by(marks.read, marks.keep)
    for words in (dry, add):
        place.write_bytes(older)
        (authority / ".crl.pem.newest").unlink(missing_ok=True)
        error = error_of(words)
        assert isinstance(error, ConfigError)
        assert "is an older list" in str(error)


def test_two_authorities_are_counted_apart(authority, tmp_path):
    certs.init_authority(tmp_path / "theirs")
    both = tmp_path / "both"
    both.mkdir()
    names = (authority, tmp_path / "theirs")
    serials = [load(certs.issue(place, "7")[0]).serial_number for place in names]
    for place in names:
        revoke(place, "7")
    (both / "ca.pem").write_bytes(b"".join((place / "ca.pem").read_bytes() for place in names))
    first, second = ((place / "crl.pem").read_bytes() for place in names)
    (both / "crl.pem").write_bytes(first + second)
    listed = load_list(both)
    certs.write_list(tmp_path / "theirs")
    (both / "crl.pem").write_bytes((tmp_path / "theirs" / "crl.pem").read_bytes())
    assert all(map(listed.why_refused, serials)), "the list of the first one is gone, and counts"


def test_a_list_whose_successor_is_overdue_counts_and_is_warned_of(authority):
    serial = load(certs.issue(authority, "7")[0]).serial_number
    revoke(authority, "7")
    listed = load_list(authority)
    assert listed.warning() == ""
    for days, words in ((6, "is due on"), (0.0, "was due on")):
        certs.write_list(authority, days)
        assert listed.why_refused(serial)
        assert words in listed.warning()
        assert listed.warning() in CertificateGuard(listed).warnings()
    due = datetime.now(UTC) + timedelta(days=certs.LIST_DAYS)
    assert abs(certs.write_list(authority) - due) < timedelta(minutes=1)


def in_days(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """Let certificates be issued as if they were to end in so many days, and an hour."""
    shift = timedelta(days=days - certs.IDENTITY_DAYS, hours=1)
    monkeypatch.setattr(certs, "datetime", SimpleNamespace(now=lambda z: datetime.now(z) + shift))


def test_who_ends_soon_is_warned_of_once_a_day(authority, monkeypatch, caplog):
    with monkeypatch.context() as then:
        in_days(then, 29)
        cert, key = certs.issue(authority, "server")
        own, _ = certs.issue(authority, "7")
    listen = Listen.given("127.0.0.1:0", cert, key, authority / "ca.pem", False)
    watching, until = listen.guard(), load(own).not_valid_after_utc
    day = f"on {until:%Y-%m-%d}: put another one in its place before"
    assert watching.warnings() == [f"the certificate --tls-cert {cert} ends in 29 days, {day}"]
    assert watching.warnings() == []
    peer = Peer("fedtide:client:7", 1, until)
    monkeypatch.setattr(certificate_guard, "peer_of", lambda context: peer)
    context: Any = object()
    for _ in range(2):
        with watching.admitted("/x/Join", context):
            pass
    theirs = f"the certificate of fedtide:client:7 ends in 29 days, {day}"
    assert watching.warnings() == [theirs]
    assert watching.warnings() == []
    watching._due -= watching.EVERY
    assert watching.warnings() == [
        theirs,
        f"the certificate --tls-cert {cert} ends in 29 days, {day}",
    ]
    reminder = client_tls.OwnCertificate(own)
    for _ in range(2):
        reminder.remind()
    assert caplog.messages == [f"the certificate --tls-cert {own} ends in 29 days, {day}"]


@pytest.mark.parametrize(
    ("hours", "line"),
    [
        (31 * 24, ""),
        (25, "it ends in 1 day, on"),
        (2, "it ends today, on"),
        (-1, "it has ended on"),
    ],
)
def test_what_is_said_of_an_end(hours, line):
    found = end_of("it", datetime.now(UTC) + timedelta(hours=hours))
    assert found.startswith(line)
    assert bool(found) == bool(line)


def test_a_certificate_that_expires_while_its_owner_is_there_is_refused(monkeypatch):
    """The handshake was long ago: each call looks again, and calls under way end."""
    peer = Peer("fedtide:watcher", 1, datetime.now(UTC) + timedelta(hours=1))
    monkeypatch.setattr(certificate_guard, "peer_of", lambda context: peer)
    ended: list[bool] = []
    context: Any = Mock(cancel=lambda: ended.append(True))
    checks = CertificateGuard()
    with checks.admitted("/x/Watch", context):
        checks.look()
        assert not ended
        then = SimpleNamespace(now=lambda zone: datetime.now(zone) + timedelta(hours=2))
        monkeypatch.setattr(certificate_guard, "datetime", then)
        checks.look()
        assert ended
    with (
        pytest.raises(guard.NotYours, match=r"of fedtide:watcher expired on 20.*for another one"),
        checks.admitted("/x/Watch", context),
    ):
        pass
