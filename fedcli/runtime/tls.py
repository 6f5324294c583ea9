"""TLS on the client's side: the authority to trust, and the certificate to show."""

from __future__ import annotations

import logging
import math
import socket
import ssl
import time
from functools import partial
from pathlib import Path

import grpc
from cryptography import x509

from fedmodels.errors import ConfigError, LinkError
from fedpb.pem import authorities_of, caller_pems, ends_of
from fedpb.revocation import RevocationList

CONNECT_S = 5.0
"""How long the server may take to show its certificate before a client joins."""
log = logging.getLogger(__name__)


class OwnCertificate:
    """The certificate of a client's process, which warns before it ends."""

    EVERY_S = 24 * 3600.0

    def __init__(self, path: Path | None) -> None:
        """Warn nobody yet; without a path there is nothing to warn of."""
        self._path, self._next = path, -math.inf

    def remind(self) -> None:
        """Warn if the certificate ends soon, once a day."""
        if self._path is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.EVERY_S
        for line in ends_of(self._path, "--tls-cert"):
            log.warning("%s", line)


class ServerCheck:
    """Looks whether the certificate of a server was revoked, before clients join.

    gRPC does not show Python the certificate of a server. So this makes a connection of its own.
    """

    def __init__(
        self, address: str, ca: Path | None, crl: Path, cert: Path | None, key: Path | None
    ) -> None:
        """Read the list of revoked certificates.

        Raises:
            ConfigError: it cannot be used, or there is no authority that could have signed it.
        """
        if ca is None:
            raise ConfigError("--tls-crl needs --tls-ca")
        self.address = address
        signers = partial(authorities_of, ca, "--tls-ca")
        self._revoked = RevocationList(crl, signers, "--tls-crl", must_exist=True)
        self._ssl = ssl.create_default_context(cafile=str(ca))
        self._ssl.set_alpn_protocols(["h2"])
        if cert and key:
            self._ssl.load_cert_chain(cert, key)

    def __call__(self) -> None:
        """Look; a server that is away, or that gRPC refuses for another reason, passes.

        Raises:
            LinkError: its certificate was revoked.
        """
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        try:
            with (
                socket.create_connection((host, int(port)), CONNECT_S) as link,
                self._ssl.wrap_socket(link, server_hostname=host) as shown,
            ):
                der = shown.getpeercert(binary_form=True) or b""
                serial = x509.load_der_x509_certificate(der).serial_number
        except (OSError, ValueError):
            return
        if why := self._revoked.why_refused(serial):
            raise LinkError(f"TLS: the certificate of the server at {self.address} {why}")


def channel_credentials(
    ca: Path | None, cert: Path | None = None, key: Path | None = None
) -> grpc.ChannelCredentials | None:
    """Return a client's credentials; None where no file is given, for a link without TLS.

    Raises:
        ConfigError: a file cannot be used, or another one is missing beside it.
    """
    pems = caller_pems(ca, cert, key, "--tls")
    return None if pems is None else grpc.ssl_channel_credentials(*pems)
