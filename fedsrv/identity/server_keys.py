"""The key and certificate of a TLS server; new files take effect without a restart."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import grpc

from fedmodels.errors import ConfigError
from fedpb.pem import check_authority, check_pair, read_pem

log = logging.getLogger(__name__)


class ServerKeys:
    """The files of a TLS server, looked at in each handshake.

    Connections that are open go on. A new pair that cannot be used keeps the old one.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self._lock = threading.Lock()
        self._seen = self._state()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a server; with an authority, callers must show a certificate.

        Raises:
            ConfigError: a file is missing or unreadable, or the key is not the certificate's.
        """
        must_show = self.client_ca is not None
        return grpc.dynamic_ssl_server_credentials(self._read(), self._changed, must_show)

    def _state(self) -> tuple[object, ...]:
        """Return what tells versions of the files apart."""
        found: list[object] = []
        for path in filter(None, (self.cert, self.key, self.client_ca)):
            try:
                stat = path.stat()
            except OSError:
                found.append(None)
            else:
                found += [stat.st_mtime_ns, stat.st_size, stat.st_ino]
        return tuple(found)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        cert_pem = read_pem(self.cert, "--tls-cert")
        key_pem = read_pem(self.key, "--tls-key")
        check_pair(self.cert, cert_pem, self.key, key_pem)
        roots = None
        if self.client_ca is not None:
            roots = read_pem(self.client_ca, "--tls-client-ca")
            check_authority(self.client_ca, roots, "--tls-client-ca")
        return grpc.ssl_server_certificate_configuration([(key_pem, cert_pem)], roots)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what the files hold if they have changed; gRPC asks in each handshake."""
        with self._lock:
            state = self._state()
            if state == self._seen:
                return None
            self._seen = state
        try:
            found = self._read()
        except ConfigError as error:
            log.warning("the certificate in use stays in use: %s", error)
            return None
        log.info("new connections see the certificate that %s holds now", self.cert)
        return found
