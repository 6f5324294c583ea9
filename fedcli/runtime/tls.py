"""TLS on the client's side: the authority to trust, and the certificate to show."""

from __future__ import annotations

from pathlib import Path

import grpc

from fedmodels.errors import ConfigError
from fedpb.pem import check_authority, check_pair, read_pem


def channel_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials | None:
    """Return credentials that trust the authority ``ca`` and show ``cert``, where one is given.

    Returns:
        The credentials of a link over TLS; None where nothing is given, for a link without TLS.

    Raises:
        ConfigError: a file is missing or unreadable, the key is not the certificate's, one of the
            two is given alone, or both without an authority.
    """
    if ca is None:
        if cert or key:
            raise ConfigError("--tls-cert and --tls-key need --tls-ca")
        return None
    if (cert is None) != (key is None):
        given, wanted = ("--tls-cert", "--tls-key") if cert else ("--tls-key", "--tls-cert")
        raise ConfigError(f"{given} needs {wanted} beside it")
    ca_pem = read_pem(ca, "--tls-ca")
    check_authority(ca, ca_pem, "--tls-ca")
    if cert is None or key is None:
        return grpc.ssl_channel_credentials(ca_pem)
    cert_pem, key_pem = read_pem(cert, "--tls-cert"), read_pem(key, "--tls-key")
    check_pair(cert, cert_pem, key, key_pem)
    return grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem)
