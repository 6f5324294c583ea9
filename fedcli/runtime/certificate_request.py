"""``fedcli enrol``: a certificate for a key that is made here and never leaves."""

from __future__ import annotations

import os
import sys
from getpass import getpass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, LinkError, reason_of
from fedmodels.host.files import write_new
from fedmodels.times import ENROL_S
from fedpb.channels import channel_options
from fedpb.identities import without
from fedpb.invitation import ENROLMENT_SERVICE, Invitation
from fedpb.pem import identities_of
from fedpb.told import Door, Passed
from fedpb.unreachable import clearest, distrust, why_unreachable
from fedpb.v1 import enrolment_pb2 as rpc

MAX_LETTERS = 1 << 14
"""Of what standard input may bring; a token has some 1,000."""


def given_token(file: str) -> str:
    """Return the token of an invitation, which no list of processes shows.

    Args:
        file: where it is; ``-`` for the variable FEDCLI_ENROL_TOKEN, or standard input without it.

    Raises:
        ConfigError: the file cannot be read, or is none of text.
    """
    if file == "-" and (token := os.environ.get("FEDCLI_ENROL_TOKEN")):
        return token
    try:
        if file != "-":
            return Path(file).read_text("ascii")
        return getpass("token: ") if sys.stdin.isatty() else sys.stdin.read(MAX_LETTERS)
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ConfigError(f"--token-file {file} cannot be read: {reason_of(error)}") from None


def enrol(server: str, token: str, directory: Path) -> list[Path]:
    """Get the certificate of an invitation; return the files that are there then.

    The key is stored first. So after a crash of either side the same command goes on with it.

    Raises:
        ConfigError: the token is no invitation, or the files exist already or cannot be written.
        LinkError: the service refused, cannot be reached or trusted, or sent what does not fit.
    """
    invitation = Invitation.read(token)
    stem = invitation.uri.removeprefix("fedtide:").replace(":", "-")
    if not stem or set(stem) - set("abcdefghijklmnopqrstuvwxyz0123456789-"):
        raise ConfigError(f"the token names no identity: {printable(invitation.uri, 60)}")
    files = [directory / name for name in ("ca.pem", f"{stem}.pem", f"{stem}.key")]
    ca, cert, key_file = files
    if cert.exists():
        raise ConfigError(f"{cert} exists already and is never overwritten; move it away first")
    ca_pem = invitation.authority.public_bytes(Encoding.PEM)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ca.exists() and ca.read_bytes() != ca_pem:
            raise ConfigError(f"{ca} is another authority than the token's; give another --dir")
        key = _key_in(key_file)
        pem = _asked(server, invitation, key, ca_pem)
        _check(pem, invitation, key)
        if not ca.exists():
            write_new(ca, ca_pem, 0o644)
        write_new(cert, pem, 0o644)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be used: {error.strerror}") from None
    return files


def _key_in(path: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key that an earlier try left in a file; make one if there is no file."""
    if not path.exists():
        fresh = ec.generate_private_key(ec.SECP256R1())
        pem = fresh.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_new(path, pem, 0o600)
    try:
        found = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError):
        found = None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds no key that fedcli enrol made; move it away first")
    return found


def _asked(
    server: str, invitation: Invitation, key: ec.EllipticCurvePrivateKey, ca_pem: bytes
) -> bytes:
    """Return the certificate that the authority's service answers with."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, invitation.uri)])
    uris = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(invitation.uri)])
    signed = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(name)
        .add_extension(uris, critical=False)
        .sign(key, hashes.SHA256())
    )
    request = rpc.EnrolRequest(secret=invitation.secret, request=signed.public_bytes(Encoding.DER))
    passed = Door().passed(request)
    keys = grpc.ssl_channel_credentials(ca_pem)

    def call(target: str, options: Any = ()) -> Any:
        with grpc.secure_channel(target, keys, [*channel_options(target), *options]) as channel:
            return channel.unary_unary(
                f"/{ENROLMENT_SERVICE}/Enrol",
                Passed.encoded,
                rpc.EnrolResponse.FromString,
            )(passed, timeout=ENROL_S)

    def said(target: str, options: Any) -> str:
        try:
            call(target, options)
        except grpc.RpcError as error:
            return printable(error.details() or "")
        return ""

    try:
        return bytes(call(server).certificate)
    except grpc.RpcError as error:
        line = printable(error.details() or "")
        if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise LinkError(f"{server}: {line} ({error.code().name})") from None
        line = clearest(line, server, said)
        if why := distrust(line, server):
            why = why.replace("the authority that --tls-ca names", "the authority of the token")
            raise LinkError(why) from None
        why = why_unreachable(line, server, over_tls=True)
        raise LinkError(f"no authority's service answers at {server}: {why}") from None


def _check(pem: bytes, invitation: Invitation, key: ec.EllipticCurvePrivateKey) -> None:
    """Raise LinkError unless a certificate is the one that was asked for."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        found.verify_directly_issued_by(invitation.authority)
        (uri,) = identities_of(found)
        is_part = uri == invitation.uri or not without(uri, [invitation.uri])
        fits = found.public_key() == key.public_key() and bool(is_part)
    except (ValueError, TypeError, InvalidSignature):
        fits = False
    if not fits:
        raise LinkError("the authority's service sent another certificate than was asked for")
