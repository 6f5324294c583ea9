"""PEM files of certificates and keys, checked before gRPC sees them: it would only say "no"."""

from __future__ import annotations

import logging
import stat
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedmodels.errors import ConfigError

log = logging.getLogger(__name__)


def read_pem(path: Path, option: str) -> bytes:
    """Return what a file holds.

    Raises:
        ConfigError: it cannot be read; names the option.
    """
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


def check_pair(cert: Path, cert_pem: bytes, key: Path, key_pem: bytes) -> None:
    """Check that a certificate is valid now, and that a key is its key; warn of an open key.

    Raises:
        ConfigError: the certificate is not valid now, or the key is another's or cannot be read.
    """
    certificate = check_certificate(cert, cert_pem, "--tls-cert")
    _check_dates(cert, certificate)
    try:
        private = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        raise ConfigError(f"--tls-key {key} holds no unencrypted PEM key") from None
    if private.public_key() != certificate.public_key():
        raise ConfigError(f"--tls-key {key} is not the key of --tls-cert {cert}")
    if key.stat().st_mode & stat.S_IROTH:
        log.warning("--tls-key %s can be read by every user of this machine: chmod 600 it", key)


def _check_dates(path: Path, certificate: x509.Certificate) -> None:
    now = datetime.now(UTC)
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > last:
        raise ConfigError(f"--tls-cert {path} expired on {last:%Y-%m-%d}: issue another one")
    if now < first:
        raise ConfigError(
            f"--tls-cert {path} is valid from {first:%Y-%m-%d %H:%M} UTC on: is the clock right?"
        )
