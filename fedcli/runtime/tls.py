"""TLS on the client's side: the authority to trust, and the certificate to show."""

from __future__ import annotations

from pathlib import Path

import grpc

from fedpb.pem import caller_pems


def channel_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials | None:
    """Return a client's credentials; None where no file is given, for a link without TLS.

    Raises:
        ConfigError: a file cannot be used, or another one is missing beside it.
    """
    pems = caller_pems(ca, cert, key, "--tls")
    return None if pems is None else grpc.ssl_channel_credentials(*pems)
