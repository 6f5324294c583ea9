"""TLS of a client's process: its credentials, and its certificate, which warns before it ends."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path

import grpc

from fedmodels.times import CERTIFICATE_EVERY_S
from fedpb.pem import caller_pems, ends_of

log = logging.getLogger(__name__)


class OwnCertificate:
    """The certificate of a client's process, which warns before it ends."""

    def __init__(self, path: Path) -> None:
        """Warn nobody yet."""
        self._path, self._next = path, -math.inf

    def remind(self) -> None:
        """Warn if the certificate ends soon, once a day."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + CERTIFICATE_EVERY_S
        for line in ends_of(self._path, "--tls-cert"):
            log.warning("%s", line)


def channel_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials | None:
    """Return a client's credentials; None where no file is given, for a link without TLS.

    Raises:
        ConfigError: a file cannot be used, or another one is missing beside it.
    """
    pems = caller_pems(ca, cert, key, "--tls")
    return None if pems is None else grpc.ssl_channel_credentials(*pems)
