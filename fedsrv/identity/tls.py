"""TLS of a coordinator, its monitors and relays: credentials, channels, and why a call fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from fedmodels.printable import printable
from fedpb.channels import channel_options, clearest, why_unreachable
from fedpb.handshakes import distrust, meaning_of_failure
from fedpb.pem import caller_pems
from fedsrv.identity.server_keys import ServerKeys

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
    """Return a monitor's or a relay's credentials; None where no file is given.

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
    """Return a monitor's or a relay's channel, over TLS if there are credentials."""
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
        why = f"is the address right, and the run still going on? {why}"
    return distrust(details, address) or f"no coordinator answers at {address}: {why}"


def distrust_of(address: str, credentials: ChannelCredentials | None) -> str:
    """Return why a caller distrusts its server; empty if it does not."""
    return distrust(failure_of(address, credentials), address)


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
