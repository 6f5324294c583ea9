"""TLS on the coordinator's side: credentials, who the peer is, and what counts as loopback."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import TypeAlias

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedmodels.errors import ConfigError

IDENTITY_SCHEME = "fedtide:"
Credentials: TypeAlias = grpc.ServerCredentials


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Return the credentials of a TLS server; with ``client_ca``, clients must show a certificate.

    Raises:
        ConfigError: a file is missing or unreadable, or the key is not the certificate's.
    """
    cert_pem = _read(cert, "--tls-cert")
    key_pem = _read(key, "--tls-key")
    _check_pair(cert, cert_pem, key, key_pem)
    roots = None
    if client_ca is not None:
        roots = _read(client_ca, "--tls-client-ca")
        _certificate(client_ca, roots, "--tls-client-ca")
    return grpc.ssl_server_credentials([(key_pem, cert_pem)], roots, client_ca is not None)


def peer_identity(context: grpc.ServicerContext) -> str | None:
    """Return the identity URI of the peer's verified certificate, or ``None`` without one.

    A certificate that names several identities names none.
    """
    uris = context.auth_context().get("peer_uri", ())
    identities = {uri.decode() for uri in uris if uri.startswith(IDENTITY_SCHEME.encode())}
    return identities.pop() if len(identities) == 1 else None


def is_loopback(address: str) -> bool:
    """Tell whether only this machine can reach a gRPC address; in doubt it is not loopback."""
    if re.match(r"unix(-abstract)?:", address):
        return True
    target = re.sub(r"^(dns:(///)?|ipv4:|ipv6:)", "", address)
    match = re.fullmatch(r"\[(?P<six>[^\]]+)\](:\d+)?|(?P<host>[^:]*)(:\d+)?", target)
    host = (match["six"] or match["host"]) if match else target
    if host == "localhost":
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


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
