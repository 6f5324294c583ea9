"""TLS of a coordinator and those who call it: credentials, channels, and why a call fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError
from fedmodels.host.guarded import Guarded
from fedpb.channels import channel_options
from fedpb.pem import caller_pems, check_authority, check_pair, read_pem
from fedpb.unreachable import clearest, distrust, meaning_of_failure, why_unreachable

log = logging.getLogger(__name__)


class ServerKeys:
    """The files of a TLS server, looked at in each handshake.

    Connections that are open go on. A new pair that cannot be used keeps the old one.
    """

    _seen: Guarded[tuple[object, ...]] = Guarded("_lock")

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self.cert, self.key, self.client_ca = cert, key, client_ca
        self._lock = threading.RLock()
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


Credentials: TypeAlias = grpc.ServerCredentials
ChannelCredentials: TypeAlias = grpc.ChannelCredentials


def server_credentials(cert: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """Return the credentials of a TLS server; with ``client_ca``, clients must show a certificate.

    Raises:
        ConfigError: a file is missing or unreadable, or the key is not the certificate's.
    """
    return ServerKeys(cert, key, client_ca).credentials()


def caller_credentials(
    ca: Path | None, cert: Path | None, key: Path | None, option: str
) -> ChannelCredentials | None:
    """Return a caller's credentials; None where no file is given.

    Args:
        ca: the coordinator's authority.
        cert: the caller's certificate, if it has to show one.
        key: that certificate's key.
        option: how the options of the three begin, ``--tls`` or ``--up``.

    Raises:
        ConfigError: a file cannot be used, or another one is missing beside it.
    """
    pems = caller_pems(ca, cert, key, option)
    return None if pems is None else grpc.ssl_channel_credentials(*pems)


def caller_channel(
    address: str, credentials: ChannelCredentials | None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Return a caller's channel, over TLS if there are credentials."""
    every = [*channel_options(address), *options]
    if credentials is None:
        return grpc.insecure_channel(address, options=every)
    return grpc.secure_channel(address, credentials, options=every)


def silence_of(address: str, credentials: ChannelCredentials | None) -> str:
    """Return why a coordinator does not answer, as far as that can be told."""
    details, over_tls = failure_of(address, credentials), credentials is not None
    why = why_unreachable(details, address, over_tls=over_tls)
    meaning = meaning_of_failure(details, over_tls, "--tls")
    if meaning and over_tls and "--tls-cert" in meaning:
        why += "; a watcher's certificate is made by fedsrv certs issue watcher"
    if not meaning:
        why = f"is the address right, and the run still in progress? {why}"
    return distrust(details, address) or f"no coordinator answers at {address}: {why}"


def failure_of(address: str, credentials: ChannelCredentials | None) -> str:
    """Return what gRPC says of a failed call: only a call that does not wait is told."""

    def asked(target: str, options: Sequence[tuple[str, Any]] = ()) -> str:
        with caller_channel(target, credentials, options) as channel:
            try:
                channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=1.0)
            except grpc.RpcError as error:
                return printable(error.details() or "")
        return ""

    return clearest(asked(address), address, asked)
