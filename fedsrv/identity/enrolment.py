"""Invitations of an authority: each gives one certificate to whoever has its secret.

``fedsrv certs serve`` answers for them, on the machine where the authority's key lies. Beside it
lies ``invitations.json``, with the sha256 of each secret. A certificate is stored there before it
is handed out. So whoever asks again with the same key, after a crash of either side, gets the same
certificate, and nobody else gets one.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, RunFailed
from fedpb.invitation import ENROLMENT_SERVICE, SECRET_BYTES, Invitation
from fedpb.pem import uris_of
from fedpb.v1 import enrolment_pb2 as rpc
from fedsrv.identity.certificates import Authority
from fedsrv.identity.invitations import given_by, invitations
from fedsrv.identity.roles import identity_uri
from fedsrv.identity.tls import ServerKeys


class Refused(Exception):
    """A request gets no certificate; says why."""


class TokenUsed(Refused):
    """The invitation has given its certificate to another key."""


class NoRequest(Refused):
    """What came is no request for the certificate of its invitation."""


def invite(directory: Path, identity: str, days: float, hosts: Sequence[str] = ()) -> str:
    """Return the token of a new invitation; its secret is stored as a hash alone.

    Args:
        directory: of the authority.
        identity: whose certificate it gives.
        days: how long it may be used.
        hosts: names of who is called, beside loopback's.

    Raises:
        ConfigError: the identity is none, there is no authority, or nothing can be written there.
    """
    uri = identity_uri(identity)
    authority = Authority.read(directory)
    probe = ec.generate_private_key(ec.SECP256R1()).public_key()
    authority.certificate(uri, probe, hosts)  # hosts that are none are refused here
    secret = secrets.token_bytes(SECRET_BYTES)
    until = datetime.now(UTC) + timedelta(days=days)
    with invitations(directory) as held:
        held[_hash(secret)] = {"identity": uri, "until": until.isoformat(), "hosts": list(hosts)}
    return Invitation(uri, secret, authority.own).token()


def enrol(directory: Path, secret: bytes, request: bytes) -> tuple[str, bytes]:
    """Return the identity and the certificate, in PEM, that a secret and a signing request get.

    Raises:
        Refused: they get none.
        ConfigError: there is no authority, or its files cannot be used.
    """
    authority = Authority.read(directory)
    with invitations(directory) as held:
        found = held.get(_hash(secret))
        if found is None:
            raise Refused("the authority knows no such invitation: ask for another one")
        uri = str(found["identity"])
        if "void" in found:
            raise Refused(f"the invitation of {uri} {found['void']}: ask for another one")
        key = _key_of(request, uri)
        numbers = key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex()
        if "certificate" in found:
            if found["key"] != numbers:
                raise TokenUsed(
                    f"the invitation of {uri} was already used with another key: ask for a new "
                    "one; if none of your people used it, have the certificate revoked"
                )
            return uri, str(found["certificate"]).encode()
        if datetime.now(UTC) > datetime.fromisoformat(str(found["until"])):
            raise Refused(
                f"the invitation of {uri} ended on {str(found['until'])[:10]}: ask for another one"
            )
        uri = given_by(found)
        certificate = authority.certificate(uri, key, found["hosts"])
        authority.note(certificate, uri)
        pem = certificate.public_bytes(Encoding.PEM)
        found |= {"key": numbers, "certificate": pem.decode()}
    return uri, pem


def _key_of(request: bytes, uri: str) -> ec.EllipticCurvePublicKey:
    """Return the key of a signing request for an identity; NoRequest if it asks for another."""
    try:
        found = x509.load_der_x509_csr(request)
        is_signed, uris, key = found.is_signature_valid, uris_of(found), found.public_key()
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        raise NoRequest("this is no certificate signing request") from None
    if not is_signed:
        raise NoRequest("the signing request is not signed by its own key")
    if uris != [uri]:
        asked = ", ".join(uris) or "nobody"
        raise NoRequest(f"the request is for {asked}, and the invitation for {uri}")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise NoRequest("the request's key is not on the curve P-256")
    return key


def _hash(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()


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
        """Answer for the authority in a directory; ConfigError if there is none."""
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
