"""TLS on the client's side: whom to trust, and who one is."""

from __future__ import annotations

from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedmodels.errors import ConfigError


def channel_credentials(
    ca: Path, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials:
    """Return credentials that trust the authority ``ca`` and show ``cert``, where one is given.

    Raises:
        ConfigError: a file is missing or unreadable, the key is not the certificate's, or only
            one of the two is given.
    """
    if (cert is None) != (key is None):
        given, wanted = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} needs {wanted} beside it")
    ca_pem = _read(ca, "--tls-ca")
    _certificate(ca, ca_pem, "--tls-ca")
    if cert is None or key is None:
        return grpc.ssl_channel_credentials(ca_pem)
    cert_pem, key_pem = _read(cert, "--tls-cert"), _read(key, "--tls-key")
    _check_pair(cert, cert_pem, key, key_pem)
    return grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem)


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be read: {error.strerror}") from None


def _certificate(path: Path, pem: bytes, option: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificates(pem)[0]
    except ValueError:
        raise ConfigError(f"{option} {path} holds no PEM certificate") from None


def _check_pair(cert: Path, cert_pem: bytes, key: Path, key_pem: bytes) -> None:
    public = _certificate(cert, cert_pem, "--tls-cert").public_key()
    try:
        private = load_pem_private_key(key_pem, None)
    except (ValueError, TypeError):
        raise ConfigError(f"--tls-key {key} holds no unencrypted PEM key") from None
    if private.public_key() != public:
        raise ConfigError(f"--tls-key {key} is not the key of --tls-cert {cert}")
