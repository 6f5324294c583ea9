"""``fedsrv certs serve``: the authority's service, on the machine where its key lies."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from fedmodels.errors import ConfigError, RunFailed
from fedmodels.printable import printable
from fedpb.invitation import ENROLMENT_SERVICE
from fedpb.v1 import enrolment_pb2 as rpc
from fedsrv.identity.certificates import Authority
from fedsrv.identity.invitations import NoRequest, Refused, TokenUsed, enrol
from fedsrv.identity.server_keys import ServerKeys

MAX_REQUEST = 16 << 10
"""Bytes of a request; a signing request has some hundred."""
THREADS, MAX_WAITING = 4, 64
_CODES = {
    NoRequest: grpc.StatusCode.INVALID_ARGUMENT,
    TokenUsed: grpc.StatusCode.ALREADY_EXISTS,
    Refused: grpc.StatusCode.PERMISSION_DENIED,
}
log = logging.getLogger("fedsrv")


class Enrolling:
    """The calls of ``service EnrolmentService``."""

    def __init__(self, directory: Path) -> None:
        """Answer for the authority in a directory.

        Raises:
            ConfigError: there is none.
        """
        Authority.read(directory)
        self.directory = directory
        self._lock = threading.Lock()

    def enrol(self, request: rpc.EnrolRequest, context: grpc.ServicerContext) -> rpc.EnrolResponse:
        """Issue the certificate of an invitation."""
        try:
            with self._lock:  # one call at a time; a lock of the file keeps other processes out
                uri, pem = enrol(self.directory, request.secret, request.request)
        except Refused as error:
            line = printable(str(error))
            log.warning("refused, from %s: %s", printable(context.peer()), line)
            context.abort(_CODES[type(error)], line)
        except ConfigError as error:
            log.error("%s", error)
            context.abort(grpc.StatusCode.INTERNAL, "the authority's files cannot be used")
        log.info("%s has its certificate, from %s", uri, printable(context.peer()))
        return rpc.EnrolResponse(certificate=pem)


def start_enrolling(directory: Path, address: str) -> tuple[grpc.Server, int]:
    """Start listening; return the server and the port it got.

    Raises:
        ConfigError: there is no authority, or no certificate ``server.pem`` beside it.
        RunFailed: the address cannot be listened on.
    """
    service = Enrolling(directory)
    keys = ServerKeys(directory / "server.pem", directory / "server.key", None)
    if not keys.cert.is_file():
        raise ConfigError(
            f"{keys.cert} is missing: fedsrv certs issue server --dir {directory} --host HOST"
        )
    call = grpc.unary_unary_rpc_method_handler(
        service.enrol, rpc.EnrolRequest.FromString, rpc.EnrolResponse.SerializeToString
    )
    handlers = [grpc.method_handlers_generic_handler(ENROLMENT_SERVICE, {"Enrol": call})]
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_REQUEST),
    ]
    server = grpc.server(
        ThreadPoolExecutor(THREADS), handlers, options=options, maximum_concurrent_rpcs=MAX_WAITING
    )
    try:
        port = server.add_secure_port(address, keys.credentials())
    except RuntimeError:
        port = 0
    if not port:
        raise RunFailed(f"cannot listen on {address}: give another --listen")
    server.start()
    return server, port
