"""A certificate authority and one certificate per identity, for mutual TLS.

An identity is a client id ``7``, a range ``0-24`` (one host process that owns several clients),
``evaluator``, ``monitor`` or ``server``. A certificate says whose it is by one URI among its
alternative names::

    fedtide:client:7    fedtide:clients:0-24
    fedtide:evaluator    fedtide:monitor    fedtide:server

which the coordinator compares with the ids that a client claims (:func:`covers`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedmodels.errors import ConfigError, reason_of
from fedmodels.files import write_new
from fedmodels.tensors.bundle import EVALUATOR, ClientId
from fedpb.pem import check_dates

AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 730
CLOCK_SKEW = timedelta(hours=1)
"""Certificates are valid from this long ago, so that a clock that is slow accepts them."""

SERVER = "server"
SERVER_URI = f"fedtide:{SERVER}"
EVALUATOR_URI = f"fedtide:{EVALUATOR}"
MONITOR = "monitor"
MONITOR_URI = f"fedtide:{MONITOR}"
"""Who may watch a run, and nothing else."""
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")

_CLIENT = re.compile(r"fedtide:client:([0-9]{1,9})")
_CLIENTS = re.compile(r"fedtide:clients:([0-9]{1,9})-([0-9]{1,9})")


def init_authority(directory: Path) -> tuple[Path, Path]:
    """Create an authority in ``directory``; return the paths of ``ca.pem`` and ``ca.key``.

    Raises:
        ConfigError: there is one already, or the directory cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("fedtide authority")
    builder = (
        _builder(name, name, key.public_key(), AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
    )
    return _write_pair(directory, "ca", builder.sign(key, hashes.SHA256()), key)


def issue(directory: Path, identity: str, hosts: Iterable[str] = ()) -> tuple[Path, Path]:
    """Issue a certificate from the authority in ``directory``; return its path and its key's.

    Args:
        directory: where ``ca.pem`` and ``ca.key`` are, and where the new files go.
        identity: a client id, a range of ids ``A-B``, ``evaluator``, ``monitor`` or ``server``.
        hosts: names and addresses by which clients reach the server, beside loopback's.

    Raises:
        ConfigError: the identity is none, there is no authority, or the files exist already.
    """
    uri = identity_uri(identity)
    hosts = tuple(hosts)
    if hosts and uri != SERVER_URI:
        raise ConfigError(f"hosts belong to the server's certificate, not to {identity!r}")
    authority, authority_key = _load_authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
    if uri == SERVER_URI:
        names += [_host_name(host) for host in dict.fromkeys((*LOOPBACK_HOSTS, *hosts))]
    usage = (
        ExtendedKeyUsageOID.SERVER_AUTH if uri == SERVER_URI else ExtendedKeyUsageOID.CLIENT_AUTH
    )
    builder = (
        _builder(_name(uri), authority.subject, key.public_key(), IDENTITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()),
            critical=False,
        )
    )
    stem = uri.removeprefix("fedtide:").replace(":", "-")
    return _write_pair(directory, stem, builder.sign(authority_key, hashes.SHA256()), key)


def identity_uri(identity: str) -> str:
    """Return the URI that stands for an identity in a certificate.

    Raises:
        ConfigError: it is no client id, no range, and none of the other identities.
    """
    if identity in (SERVER, EVALUATOR, MONITOR):
        return f"fedtide:{identity}"
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", identity)
    if match is None:
        raise ConfigError(
            f"{identity!r} is no identity: give a client id (7), a range (0-24), "
            f"'{EVALUATOR}', '{MONITOR}' or '{SERVER}'"
        )
    first, last = match.groups()
    if last is None:
        return f"fedtide:client:{int(first)}"
    if int(first) > int(last):
        raise ConfigError(f"the range {identity!r} is empty: its first id exceeds its last")
    return f"fedtide:clients:{int(first)}-{int(last)}"


def covers(identity_uri: str, client_id: ClientId) -> bool:
    """Tell whether the owner of a certificate with this URI may speak for a client."""
    if client_id == EVALUATOR:
        return identity_uri == EVALUATOR_URI
    if match := _CLIENT.fullmatch(identity_uri):
        return int(match[1]) == client_id
    if match := _CLIENTS.fullmatch(identity_uri):
        return int(match[1]) <= int(client_id) <= int(match[2])
    return False


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", host):
        raise ConfigError(
            f"{host!r} is neither a host name nor an address (give it without a port)"
        )
    return x509.DNSName(host)


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _load_authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
    except FileNotFoundError as error:
        raise ConfigError(
            f"no authority in {directory} ({Path(error.filename).name} is missing); "
            "create one with `fedsrv certs init`"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the authority in {directory} cannot be used: {reason_of(error)}"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{directory / 'ca.key'} is not an elliptic-curve key")
    if certificate.public_key() != key.public_key():
        raise ConfigError(f"ca.pem and ca.key in {directory} do not belong together")
    if wrong := check_dates(directory / "ca.pem", certificate, "the authority"):
        raise ConfigError(wrong.replace("issue another one", "make another with fedsrv certs init"))
    return certificate, key


def _write_pair(
    directory: Path, stem: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
) -> tuple[Path, Path]:
    certificate_path, key_path = directory / f"{stem}.pem", directory / f"{stem}.key"
    key_pem = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (certificate_path, key_path):
            if path.exists():
                raise FileExistsError(None, None, str(path))
        write_new(key_path, key_pem, 0o600)
        try:
            write_new(certificate_path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        except OSError:
            key_path.unlink()  # alone it is of no use, and it would stop the next try
            raise
    except FileExistsError as error:
        raise ConfigError(
            f"{error.filename} exists already and is never overwritten; move it away first"
        ) from None
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written: {error.strerror}") from None
    return certificate_path, key_path
