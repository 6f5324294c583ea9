"""Revocation: the authority signs a list of the serial numbers of revoked certificates."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fedmodels.errors import ConfigError
from fedmodels.files import write_atomically
from fedpb.revocation import REVOKED, read_lists
from fedsrv.identity.certificates import CLOCK_SKEW, Authority
from fedsrv.identity.roles import identity_uri


def revoke(directory: Path, which: str) -> list[str]:
    """Revoke certificates; return a line for each that was not revoked before.

    Args:
        directory: of the authority; ``crl.pem`` in it is made, or gets more entries.
        which: an identity, all of whose certificates are revoked, or a serial number in
            hexadecimal digits.

    Raises:
        ConfigError: the authority issued no such certificate, or the list cannot be written.
    """
    authority = Authority.read(directory)
    found = {int(facts["serial"], 16): facts for facts in _wanted(authority, which)}
    path = directory / REVOKED
    try:
        before = list(read_lists(path, path.read_bytes(), str(path))) if path.exists() else []
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    known = {entry.serial_number: entry for one in before for entry in one}
    now = datetime.now(UTC)
    number = 1 + max((_number_of(one) for one in before), default=0)
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.own.subject)
        .last_update(now - CLOCK_SKEW)
        .next_update(authority.own.not_valid_after_utc)
        .add_extension(x509.CRLNumber(number), critical=False)
    )
    for entry in known.values():
        builder = builder.add_revoked_certificate(entry)
    for serial in found.keys() - known.keys():
        fresh = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now)
        builder = builder.add_revoked_certificate(fresh.build())
    pem = builder.sign(authority.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    try:
        write_atomically(path, pem.decode(), sync=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    return [
        f"revoked: {facts['identity']}, serial {serial:x}, valid until {facts['until']}"
        for serial, facts in found.items()
        if serial not in known
    ]


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


def _number_of(found: x509.CertificateRevocationList) -> int:
    """Return the number of a list of revoked certificates; 0 where it has none."""
    try:
        return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    except x509.ExtensionNotFound:
        return 0
