"""Keys and shares of secure aggregation.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017.
https://eprint.iacr.org/2017/281

    paper         here
    c_u^SK        Channel: the key that shares for a client are sealed with
    s_u^SK, b_u   Secrets.pair, Secrets.own: 16 bytes each, of which keys are derived
    s_u^PK        Secrets.public
    s_{u,v}       pair_key
    u, v, t       ids, clients, threshold

Every key is derived for one purpose, attempt, interaction and pair of clients. X25519, HKDF with
SHA-256 and ChaCha20-Poly1305 are those of ``cryptography``, and Shamir's secret sharing is that of
``pycryptodome``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmodels.errors import ConfigError, PayloadError, pip_line

ATTEMPT_BYTES = SECRET_BYTES = SHARE_BYTES = 16
KEY_BYTES = DIGEST_BYTES = 32
NONCE_BYTES, TAG_BYTES = 12, 16
SEALED_BYTES = NONCE_BYTES + 2 * SHARE_BYTES + TAG_BYTES


@dataclass(frozen=True)
class Attempt:
    """One attempt at the sum of an interaction; keys of two attempts have nothing in common.

    Keys are derived from the terms too. So clients that were told other terms open no share of one
    another, and agree on no mask.
    """

    number: bytes
    """16 random bytes."""
    interaction: int
    terms: bytes = b""
    """Digest of what everybody was told alike; 32 bytes, once it is known."""

    def label(self, purpose: str, *clients: int) -> bytes:
        """Return the label that a key is derived with, for this purpose and these clients alone."""
        whom = "/".join(map(str, clients))
        head = f"fedtide/secure-sum/2/{purpose}/{self.interaction}/{whom}/"
        return head.encode() + self.number + self.terms

    def digest(self, purpose: str, secret: bytes, *clients: int) -> bytes:
        """Return the hash that a secret is recognised by; its 128 random bits cannot be guessed."""
        return hashlib.sha256(self.label(purpose, *clients) + secret).digest()


@dataclass(frozen=True)
class Channel:
    """The key pair with which a client seals shares for others, and opens those for itself."""

    private: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> Channel:
        """Return the channel derived from a secret that only this client knows."""
        return cls(_derived(secret, b"fedtide/secure-sum/2/channel"))

    @property
    def public(self) -> bytes:
        """Return the public key, 32 bytes, with which others seal shares for this client."""
        return _public(self.private)

    def seal(self, attempt: Attempt, own: int, other: int, key: bytes, share: Share) -> bytes:
        """Return the share that a client gives to another, for that one alone to read."""
        label = attempt.label("share", own, other)
        nonce = os.urandom(NONCE_BYTES)
        cipher = ChaCha20Poly1305(_agreed(self.private, key, label))
        return nonce + cipher.encrypt(nonce, share.pair + share.own, label)

    def open(self, attempt: Attempt, other: int, own: int, key: bytes, sealed: bytes) -> Share:
        """Return the share that another client gave to this one.

        Raises:
            PayloadError: it was not sealed by that client, for this one, in this attempt.
        """
        label = attempt.label("share", other, own)
        cipher = ChaCha20Poly1305(_agreed(self.private, key, label))
        try:
            plain = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], label)
        except (InvalidTag, ValueError):
            raise PayloadError(f"the share of client {other} does not open") from None
        if len(plain) != 2 * SHARE_BYTES:
            raise PayloadError(f"the share of client {other} has {len(plain)} bytes")
        return Share(plain[:SHARE_BYTES], plain[SHARE_BYTES:])


@dataclass(frozen=True)
class Share:
    """What one client holds of the two secrets of another."""

    pair: bytes = field(repr=False)
    own: bytes = field(repr=False)


@dataclass(frozen=True)
class Secrets:
    """The two secrets that a client's masks of one attempt come from."""

    pair: bytes = field(repr=False)
    """Of the masks that cancel between two clients."""
    own: bytes = field(repr=False)
    """Of the mask that is the client's own."""

    @classmethod
    def fresh(cls) -> Secrets:
        """Draw both from the operating system's entropy."""
        return cls(os.urandom(SECRET_BYTES), os.urandom(SECRET_BYTES))

    def public(self, attempt: Attempt, client: int) -> bytes:
        """Return the public key, 32 bytes, with which others agree on the masks they share."""
        return _public(private_key(attempt, client, self.pair))

    def digest(self, attempt: Attempt, client: int) -> bytes:
        """Return the hash that the secret of the own mask is recognised by."""
        return attempt.digest("own", self.own, client)

    def shares(self, threshold: int, count: int) -> list[Share]:
        """Return ``count`` shares, any ``threshold`` of which give the two secrets."""
        pairs, owns = (_split(secret, threshold, count) for secret in (self.pair, self.own))
        return [Share(pair, own) for pair, own in zip(pairs, owns, strict=True)]


def private_key(attempt: Attempt, client: int, secret: bytes) -> bytes:
    """Return the private key of a client's masks with others."""
    return _derived(secret, attempt.label("pair", client))


def pair_key(attempt: Attempt, own: int, private: bytes, other: int, public: bytes) -> bytes:
    """Return the key of the mask that two clients share; both come to the same.

    Raises:
        PayloadError: the public key is a point of small order.
    """
    label = attempt.label("mask", *sorted((own, other)))
    try:
        return _agreed(private, public, label)
    except PayloadError as error:
        raise PayloadError(f"client {other}: {error}") from None


def own_key(attempt: Attempt, client: int, secret: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return _derived(secret, attempt.label("self", client))


def check_point(public: bytes) -> None:
    """Check a public key.

    Raises:
        PayloadError: it has another size, or is a point of small order: every agreement with it
            comes to nothing.
    """
    _agreed(b"\1" * KEY_BYTES, public, b"check")


def secret_of(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret behind shares.

    Args:
        shares: by the place of their holder, from 0; ``threshold`` of them at least.
        threshold: how many shares give the secret.
    """
    some = sorted(shares.items())[:threshold]
    found: bytes = _shamir().combine([(place + 1, share) for place, share in some])
    return found


def check_installed() -> None:
    """Check that the package for secret sharing is installed.

    Raises:
        ConfigError: the extra ``secure-sum`` is missing.
    """
    _shamir()


def _split(secret: bytes, threshold: int, count: int) -> Sequence[bytes]:
    return [share for _, share in _shamir().split(threshold, count, secret)]


def _shamir() -> Any:
    try:
        from Crypto.Protocol.SecretSharing import Shamir
    except ImportError:
        raise ConfigError(
            f"[privacy] secure_sum needs a package more: {pip_line('secure-sum')}"
        ) from None
    return Shamir


def _public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _agreed(private: bytes, public: bytes, label: bytes) -> bytes:
    try:
        other = X25519PublicKey.from_public_bytes(public)
        agreed = X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise PayloadError("its public key is no usable point of X25519") from None
    return _derived(agreed, label)


def _derived(secret: bytes, label: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=label).derive(secret)
