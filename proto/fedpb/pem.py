"""PEM files of certificates and keys, checked first, since gRPC does not say what is wrong."""

from __future__ import annotations

import logging
import stat
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedmodels.errors import ConfigError

SOON = timedelta(days=30)
"""Before a certificate ends, its owner is warned for so long."""
log = logging.getLogger(__name__)


def read_pem(path: Path, option: str) -> bytes:
    """Return what a file holds; ConfigError, with the option's name, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None


def check_certificate(path: Path, pem: bytes, option: str) -> x509.Certificate:
    """Return the first certificate of a file.

    Raises:
        ConfigError: it holds none; names the option.
    """
    try:
        return x509.load_pem_x509_certificates(pem)[0]
    except ValueError:
        raise ConfigError(f"{option} {path} holds no PEM certificate") from None


def check_authority(path: Path, pem: bytes, option: str) -> None:
    """Check that the certificates of authorities in a file are valid now, one at least.

    Raises:
        ConfigError: it holds none, or none that is valid now; names the option.
    """
    check_certificate(path, pem, option)
    wrong = [check_dates(path, found, option) for found in x509.load_pem_x509_certificates(pem)]
    if all(wrong):
        raise ConfigError(wrong[0])


def authorities_of(path: Path, option: str) -> list[x509.Certificate]:
    """Return the certificates of authorities in a file, one of them valid now at least.

    Raises:
        ConfigError: as :func:`check_authority` says.
    """
    pem = read_pem(path, option)
    check_authority(path, pem, option)
    return x509.load_pem_x509_certificates(pem)


def check_pair(
    cert: Path, cert_pem: bytes, key: Path, key_pem: bytes, option: str = "--tls"
) -> None:
    """Check that a certificate is valid now, and that a key is its key; warn of an open key.

    Args:
        cert: where the certificate is.
        cert_pem: what that file holds.
        key: where the key is.
        key_pem: what that file holds.
        option: how the options of the two begin, ``--tls`` or ``--up``.

    Raises:
        ConfigError: the certificate is not valid now, or the key is another's or cannot be read.
    """
    certificate = check_certificate(cert, cert_pem, f"{option}-cert")
    if wrong := check_dates(cert, certificate, f"{option}-cert"):
        raise ConfigError(wrong)
    try:
        private = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        raise ConfigError(f"{option}-key {key} holds no unencrypted PEM key") from None
    if private.public_key() != certificate.public_key():
        raise ConfigError(f"{option}-key {key} is not the key of {option}-cert {cert}")
    if sys.platform != "win32" and key.stat().st_mode & stat.S_IROTH:  # modes say nothing there
        line = "%s-key %s can be read by every user of this machine: chmod 600 it"
        log.warning(line, option, key)


def caller_pems(
    ca: Path | None, cert: Path | None, key: Path | None, option: str
) -> tuple[bytes, bytes | None, bytes | None] | None:
    """Read and check what a caller needs for a link over TLS.

    Args:
        ca: the authority of the server.
        cert: the caller's certificate, if it has to show one.
        key: that certificate's key.
        option: how the options of the three begin, ``--tls`` or ``--up``.

    Returns:
        The authority, the key and the certificate, as ``grpc.ssl_channel_credentials`` takes them;
        None where nothing is given, for a link without TLS.

    Raises:
        ConfigError: a file is missing or unreadable, the key is not the certificate's, one of the
            two is given alone, or both without an authority.
    """
    if (cert is None) != (key is None):
        raise ConfigError(f"{option}-cert and {option}-key belong together; one of them is missing")
    if ca is None:
        if cert is not None:
            raise ConfigError(f"{option}-cert and {option}-key need {option}-ca")
        return None
    ca_pem = read_pem(ca, f"{option}-ca")
    check_authority(ca, ca_pem, f"{option}-ca")
    if cert is None or key is None:
        return ca_pem, None, None
    cert_pem, key_pem = read_pem(cert, f"{option}-cert"), read_pem(key, f"{option}-key")
    check_pair(cert, cert_pem, key, key_pem, option)
    return ca_pem, key_pem, cert_pem


def end_of(what: str, until: datetime) -> str:
    """Return a line that warns of a certificate's end; nothing while that is far away."""
    left = until - datetime.now(UTC)
    if left > SOON:
        return ""
    if left < timedelta(0):
        return f"{what} has ended on {until:%Y-%m-%d}: put another one in its place"
    days = "today" if left.days < 1 else f"in {left.days} day{'s' if left.days > 1 else ''}"
    return f"{what} ends {days}, on {until:%Y-%m-%d}: put another one in its place before"


def ends_of(path: Path, option: str) -> list[str]:
    """Return a line for each certificate of a file that ends soon; nothing where it has none."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError):
        return []
    lines = (end_of(f"the certificate {option} {path}", one.not_valid_after_utc) for one in found)
    return [*filter(None, lines)]


def identities_of(certificate: x509.Certificate) -> list[str]:
    """Return the URIs of a certificate that say whose it is."""
    return [uri for uri in uris_of(certificate) if uri.startswith("fedtide:")]


def uris_of(found: x509.Certificate | x509.CertificateSigningRequest) -> list[str]:
    """Return the URIs among the alternative names of a certificate, or of a request for one."""
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return list(names.get_values_for_type(x509.UniformResourceIdentifier))


def check_dates(path: Path, certificate: x509.Certificate, what: str) -> str:
    """Return why a certificate is not valid now; nothing where it is."""
    now = datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        return f"{what} {path} expired on {last:%Y-%m-%d}: issue another one"
    if now < first:
        return f"{what} {path} is valid from {first:%Y-%m-%d %H:%M} UTC on: is the clock right?"
    return ""
