"""Whether the certificate of a server was revoked."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cryptography import x509

from fedmodels.errors import ConfigError, LinkError
from fedmodels.times import CERTIFICATE_SHOWN_S
from fedpb.pem import authorities_of
from fedpb.revocation import Marks, RevocationList

log = logging.getLogger(__name__)


class ServerCheck:
    """Looks whether the certificate of a server was revoked, before anybody joins it.

    gRPC does not show Python the certificate of a server. So this makes a connection of its own.
    """

    def __init__(
        self,
        address: str,
        ca: Path | None,
        crl: Path,
        cert: Path | None,
        key: Path | None,
        option: str = "--tls",
        kept: tuple[Callable[[], Mapping[str, Any]], Callable[[Marks], None]] | None = None,
    ) -> None:
        """Read the list of revoked certificates.

        Args:
            address: of the server.
            ca: the authority of the server.
            crl: the list.
            cert: the caller's certificate, if it has to show one.
            key: that certificate's key.
            option: how the options of these begin, ``--tls`` or ``--up``.
            kept: reads and keeps how new the list was in another place than beside it
                (:meth:`RevocationList.kept_by`).

        Raises:
            ConfigError: the list cannot be used, or the authority that signed it is not given.
        """
        if ca is None:
            raise ConfigError(f"{option}-crl needs {option}-ca")
        self.address = address
        signers = partial(authorities_of, ca, f"{option}-ca")
        self._revoked = RevocationList(crl, signers, f"{option}-crl", must_exist=True)
        if kept is not None:
            self._revoked.kept_by(*kept)
        self._ssl = ssl.create_default_context(cafile=str(ca))
        self._ssl.set_alpn_protocols(["h2"])
        if cert and key:
            self._ssl.load_cert_chain(cert, key)

    def __call__(self) -> None:
        """Check the server's certificate; LinkError if revoked. gRPC says why one is not there."""
        if line := self._revoked.warning():
            log.warning("%s", line)
        host, _, port = self.address.rpartition(":")
        host = host.strip("[]")
        try:
            with (
                socket.create_connection((host, int(port)), CERTIFICATE_SHOWN_S) as link,
                self._ssl.wrap_socket(link, server_hostname=host) as shown,
            ):
                der = shown.getpeercert(binary_form=True) or b""
                serial = x509.load_der_x509_certificate(der).serial_number
        except (OSError, ValueError):
            return
        if why := self._revoked.why_refused(serial):
            raise LinkError(f"TLS: the certificate of the server at {self.address} {why}")
