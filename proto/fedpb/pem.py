"""PEM files of certificates and keys, checked before gRPC sees them: it would only say "no"."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedmodels.errors import ConfigError


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
    """Check that a key is the certificate's.

    Raises:
        ConfigError: it is not, or is no key that can be read.
    """
    public = check_certificate(cert, cert_pem, "--tls-cert").public_key()
    try:
        private = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        raise ConfigError(f"--tls-key {key} holds no unencrypted PEM key") from None
    if private.public_key() != public:
        raise ConfigError(f"--tls-key {key} is not the key of --tls-cert {cert}")
