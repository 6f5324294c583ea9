"""What clients sign in secure sums, so that a coordinator exchanges no key and invents no client.

Bonawitz et al. (CCS 2017), Figure 4, have each client sign its two public keys in round 0, and the
list of clients whose uploads came in round 3. A statement here names its purpose, the run and the
client. What is signed in an attempt also names the attempt's terms: whom it is of, and from what
everybody trains. So no signature is of use in another run, another attempt or for another purpose.

The keys that sign are those of clients' TLS certificates. A signature of TLS 1.3 is of other bytes:
64 spaces come first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey as EcPublic
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from fedmodels.errors import PayloadError

PrivateKey = EllipticCurvePrivateKey | Ed25519PrivateKey | RSAPrivateKey
"""The kinds of keys that may sign."""
MAX_SIGNATURE = 1024
"""Bytes of a signature; RSA with 8192 bits has so many."""
_PSS = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


def statement(purpose: str, *parts: bytes) -> bytes:
    """Return bytes that no other purpose and no other parts have."""
    head = f"fedtide/secure-sum/2/{purpose}".encode()
    return b"".join(struct.pack(">I", len(part)) + part for part in (head, *parts))


def channel_statement(run_id: str, client: int, channel_key: bytes) -> bytes:
    """Return what a client signs once a run: its key for sealed shares."""
    return statement("channel", run_id.encode(), _number(client), channel_key)


def keys_statement(
    run_id: str, terms: bytes, client: int, channel_key: bytes, mask_key: bytes
) -> bytes:
    """Return what a client signs once an attempt: both of its keys, and the terms."""
    return statement("keys", run_id.encode(), terms, _number(client), channel_key, mask_key)


def counted_statement(run_id: str, terms: bytes, client: int, counted: Sequence[int]) -> bytes:
    """Return what a client signs before masks are opened: whose uploads came."""
    return statement(
        "counted", run_id.encode(), terms, _number(client), b"".join(map(_number, counted))
    )


def sign(key: PrivateKey, said: bytes) -> bytes:
    """Return a signature of a statement."""
    if isinstance(key, Ed25519PrivateKey):
        return key.sign(said)
    if isinstance(key, EllipticCurvePrivateKey):
        return key.sign(said, ECDSA(SHA256()))
    return key.sign(said, _PSS, SHA256())


def check_signature(public: bytes, said: bytes, signature: bytes) -> None:
    """Check a signature of a statement by a public key in DER; PayloadError if it is another's."""
    try:
        key = load_der_public_key(public)
        if isinstance(key, Ed25519PublicKey):
            return key.verify(signature, said)
        if isinstance(key, EcPublic):
            return key.verify(signature, said, ECDSA(SHA256()))
        if isinstance(key, RSAPublicKey):
            return key.verify(signature, said, _PSS, SHA256())
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        raise PayloadError("the signature is not of what this side knows") from None
    raise PayloadError("the key of its certificate is neither EC, Ed25519 nor RSA")


def _number(client: int) -> bytes:
    return struct.pack(">Q", client)
