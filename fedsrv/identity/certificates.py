"""A certificate authority and one certificate per identity, for mutual TLS.

An identity is a client id ``7``, a range ``0-24`` (one host process that owns several clients),
or one of the others that :mod:`fedpb.identities` lists. Beside the authority lies a list of the
certificates that it issued, and one of the serial numbers that it revoked, which it signs.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedmodels.errors import ConfigError, reason_of
from fedmodels.host.files import write_atomically, write_new
from fedmodels.host.line_file import append_lines
from fedpb.identities import RELAY, SCHEME, SERVER, SERVER_URI, role_of, without
from fedpb.pem import check_dates, identities_of
from fedpb.revocation import REVOKED, number_of, read_lists
from fedsrv.identity.invitations import void
from fedsrv.identity.roles import identity_uri

AUTHORITY_DAYS = 3650
IDENTITY_DAYS = 365
LIST_DAYS = 30
"""When the next list of revoked certificates is due."""
CLOCK_SKEW = timedelta(hours=1)
"""A certificate is valid from this long before its issue, so that slow clocks accept it."""

MAX_NAME = 64
"""Letters of a common name, which people read; the identity is the URI."""
ISSUED = "issued.jsonl"
"""Beside the authority: serial number, identity and last day of each certificate that it issued."""
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def init_authority(directory: Path) -> tuple[Path, Path]:
    """Create an authority; return ``ca.pem``, ``ca.key``. ConfigError if there is one already."""
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
        identity: see the module.
        hosts: names and addresses by which clients reach who is called, beside loopback's.

    Raises:
        ConfigError: the identity is none, there is no authority, or the files exist already.
    """
    uri = identity_uri(identity)
    authority = Authority.read(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = authority.certificate(uri, key.public_key(), tuple(hosts))
    authority.note(certificate, uri)
    return _write_pair(directory, stem_of(uri), certificate, key)


def stem_of(uri: str) -> str:
    """Return the name of an identity's files, without the suffix."""
    return uri.removeprefix(SCHEME).replace(":", "-")


@dataclass(frozen=True)
class Authority:
    """An authority's certificate and key, and what it has issued."""

    directory: Path
    own: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Return the authority in a directory; ConfigError if there is none that can be used."""
        return cls(directory, *_load_authority(directory))

    def certificate(
        self, uri: str, key: ec.EllipticCurvePublicKey, hosts: Sequence[str] = ()
    ) -> x509.Certificate:
        """Return a new certificate of an identity for this key.

        Raises:
            ConfigError: only who is called has hosts, or a host is neither a name nor an address.
        """
        serves = role_of(uri) in (SERVER, RELAY)
        if hosts and not serves:
            whom = uri.removeprefix(SCHEME)
            raise ConfigError(f"hosts belong to a server's certificate, not to that of {whom!r}")
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)]
        if serves:
            names += [_host_name(host) for host in dict.fromkeys((*LOOPBACK_HOSTS, *hosts))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH] if serves else []
        usages += [] if uri == SERVER_URI else [ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(_name(uri[:MAX_NAME]), self.own.subject, key, IDENTITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(signer, critical=False)
        )
        return builder.sign(self.key, hashes.SHA256())

    def note(self, certificate: x509.Certificate, uri: str) -> None:
        """Note that a certificate was issued, before it is used; ConfigError if that fails."""
        self.add(_facts_of(certificate, uri))

    def add(self, facts: Mapping[str, str]) -> None:
        """Add a line to that list, which goes before earlier ones; or raise ConfigError."""
        try:
            append_lines(self.directory / ISSUED, (json.dumps(facts) + "\n").encode(), sync=True)
        except OSError as error:
            raise ConfigError(
                f"{self.directory / ISSUED} cannot be written: {error.strerror}"
            ) from None

    def issued(self) -> list[dict[str, str]]:
        """Return serial number, identity and last day of every certificate that was issued.

        Of one that was revoked, ``revoked`` is the time.
        """
        found: dict[str, dict[str, str]] = {}
        path = self.directory / ISSUED
        for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError, TypeError, KeyError):  # a line that was cut short
                facts = json.loads(line)
                one = {key: str(facts[key]) for key in ("serial", "identity", "until")}
                when = {"revoked": str(facts["revoked"])} if "revoked" in facts else {}
                found[one["serial"]] = one | when
        for path in self.directory.glob("*.pem"):  # of versions that kept no list
            with contextlib.suppress(OSError, ValueError):
                held = x509.load_pem_x509_certificate(path.read_bytes())
                uris = identities_of(held)
                if len(uris) == 1 and held.issuer == self.own.subject:
                    facts = _facts_of(held, uris[0])
                    found.setdefault(facts["serial"], facts)
        return [*found.values()]


def _facts_of(certificate: x509.Certificate, uri: str) -> dict[str, str]:
    serial, until = certificate.serial_number, certificate.not_valid_after_utc
    return {"serial": f"{serial:x}", "identity": uri, "until": f"{until:%Y-%m-%d}"}


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


def revoke(directory: Path, which: str) -> list[str]:
    """Revoke certificates; return a line for each, and for each open invitation of their owners.

    Those that were revoked before are left out. Invitations go first, so that none of them gives a
    certificate meanwhile.

    Args:
        directory: of the authority; ``crl.pem`` in it is made, or gets more entries.
        which: an identity, all of whose certificates are revoked, or a serial number in
            hexadecimal digits.

    Raises:
        ConfigError: the authority issued no such certificate, or the list cannot be written.
    """
    authority = Authority.read(directory)
    lines = void(directory, {facts["identity"] for facts in _wanted(authority, which)})
    wanted = _wanted(authority, which)
    fresh = [facts for facts in wanted if "revoked" not in facts]
    known = {one.serial_number for found in _lists(directory) for one in found}
    for facts in fresh:
        day = datetime.now(UTC).isoformat(timespec="seconds")
        authority.add({**facts, "revoked": day})
    write_list(directory)
    lines += [
        f"revoked: {facts['identity']}, serial {facts['serial']}, valid until {facts['until']}"
        for facts in fresh
        if int(facts["serial"], 16) not in known
    ]
    return lines + _also_covering(authority, {facts["identity"] for facts in fresh})


def _also_covering(authority: Authority, uris: Collection[str]) -> list[str]:
    """Return a line for each certificate that holds and covers a revoked client beside others."""
    return [
        f"note: {facts['identity']}, serial {facts['serial']}, covers it as well and holds: revoke "
        "that serial if its owner is meant, too"
        for facts in authority.issued()
        if "revoked" not in facts
        and facts["identity"] not in uris
        and without(facts["identity"], uris) != facts["identity"]
    ]


def write_list(directory: Path, days: float = LIST_DAYS) -> datetime:
    """Write the list of revoked certificates anew; return when the next one is due.

    Its number is the time in milliseconds, or one more than the number before if that is greater.
    So a list that is made after ``crl.pem`` was lost counts as newer than the lost one.

    Raises:
        ConfigError: there is no authority, or the list cannot be read or written.
    """
    authority, path, now = Authority.read(directory), directory / REVOKED, datetime.now(UTC)
    before = _lists(directory)
    entries = {entry.serial_number: entry for one in before for entry in one}
    for facts in authority.issued():
        if "revoked" in facts and (serial := int(facts["serial"], 16)) not in entries:
            day = datetime.fromisoformat(facts["revoked"])
            made = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(day)
            entries[serial] = made.build()
    number = max(int(now.timestamp() * 1000), *(1 + number_of(one) for one in before), 0)
    due = min(now + timedelta(days=days), authority.own.not_valid_after_utc)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.own.subject)
        .last_update(now - CLOCK_SKEW)
        .next_update(due)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for entry in entries.values():
        builder = builder.add_revoked_certificate(entry)
    pem = builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    try:
        write_atomically(path, pem.decode(), sync=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return due


def _lists(directory: Path) -> list[x509.CertificateRevocationList]:
    """Return the lists of revoked certificates that lie beside an authority."""
    path = directory / REVOKED
    try:
        return list(read_lists(path, path.read_bytes(), str(path))) if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _wanted(authority: Authority, which: str) -> list[dict[str, str]]:
    """Return the certificates that an identity or a serial number stands for."""
    issued = authority.issued()
    plain = which.lower().replace(":", "").removeprefix("0x").lstrip("0")
    if by_serial := [facts for facts in issued if facts["serial"] == plain]:
        return by_serial
    if re.fullmatch(r"[0-9a-f]{20,40}", plain):
        raise ConfigError(
            f"the authority in {authority.directory} issued no certificate with the serial {which}"
        )
    uri = identity_uri(which)
    if by_name := [facts for facts in issued if facts["identity"] == uri]:
        return by_name
    raise ConfigError(f"the authority in {authority.directory} issued no certificate to {which!r}")
