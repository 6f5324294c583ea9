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
SHA-256 and ChaCha20-Poly1305 are those of ``cryptography``.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmodels.errors import PayloadError
from fedmodels.secure_sum.shamir import SECRET_BYTES, combined, split

ATTEMPT_BYTES = SHARE_BYTES = 16
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
    _agreed: dict[bytes, bytes] = field(default_factory=dict, repr=False)
    """What was agreed on with the peers of the last attempt, by their public keys."""

    @classmethod
    def of(cls, secret: bytes) -> Channel:
        """Return the channel derived from a secret that only this client knows."""
        return cls(_derived(secret, b"fedtide/secure-sum/2/channel"))

    @property
    def public(self) -> bytes:
        """Return the public key, 32 bytes, with which others seal shares for this client."""
        return _public(self._key)

    @cached_property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.private)

    def agree(self, keys: Mapping[int, bytes]) -> None:
        """Agree with the peers of an attempt, once for all shares either way.

        Args:
            keys: the public key of each peer.

        Raises:
            PayloadError: a key is a point of small order; names the peer.
        """
        found = {key: self._agreed_with(key, client) for client, key in keys.items()}
        self._agreed.clear()
        self._agreed.update(found)

    def seal(self, attempt: Attempt, own: int, other: int, key: bytes, share: Share) -> bytes:
        """Return the share that a client gives to another, for that one alone to read."""
        label = attempt.label("share", own, other)
        nonce = os.urandom(NONCE_BYTES)
        cipher = ChaCha20Poly1305(_derived(self._agreed_with(key, other), label))
        return nonce + cipher.encrypt(nonce, share.pair + share.own, label)

    def open(self, attempt: Attempt, other: int, own: int, key: bytes, sealed: bytes) -> Share:
        """Return the share that another client gave to this one.

        Raises:
            PayloadError: it was not sealed by that client, for this one, in this attempt.
        """
        label = attempt.label("share", other, own)
        cipher = ChaCha20Poly1305(_derived(self._agreed_with(key, other), label))
        try:
            plain = cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], label)
        except (InvalidTag, ValueError):
            raise PayloadError(f"the share of client {other} cannot be decrypted") from None
        if len(plain) != 2 * SHARE_BYTES:
            raise PayloadError(f"the share of client {other} has {len(plain)} bytes")
        return Share(plain[:SHARE_BYTES], plain[SHARE_BYTES:])

    def _agreed_with(self, key: bytes, client: int) -> bytes:
        known = self._agreed.get(key)
        return _agreed(self._key, key, client) if known is None else known


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
        pairs, owns = (split(secret, threshold, count) for secret in (self.pair, self.own))
        return [Share(pair, own) for pair, own in zip(pairs, owns, strict=True)]


def private_key(attempt: Attempt, client: int, secret: bytes) -> X25519PrivateKey:
    """Return the private key of a client's masks with others."""
    return X25519PrivateKey.from_private_bytes(_derived(secret, attempt.label("pair", client)))


def pair_key(
    attempt: Attempt, own: int, private: X25519PrivateKey, other: int, public: bytes
) -> bytes:
    """Return the key of the mask that two clients share; both come to the same.

    Raises:
        PayloadError: the public key is a point of small order.
    """
    label = attempt.label("mask", *sorted((own, other)))
    return _derived(_agreed(private, public, other), label)


def own_key(attempt: Attempt, client: int, secret: bytes) -> bytes:
    """Return the key of a client's own mask."""
    return _derived(secret, attempt.label("self", client))


def check_point(public: bytes) -> None:
    """Check a public key.

    Raises:
        PayloadError: it has another size, or is a point of small order: every agreement with it
            comes to nothing.
    """
    _agreed(_PROBE, public)


def secrets_of(held: Mapping[int, Mapping[int, bytes]], threshold: int) -> dict[int, bytes]:
    """Return the secrets behind shares, but of clients with too few shares.

    Args:
        held: the shares of each client's secret, by the place of their holder, from 0.
        threshold: how many shares give a secret.
    """
    by_places = defaultdict[tuple[int, ...], list[int]](list)
    for client, shares in held.items():
        if len(shares) >= threshold:
            by_places[tuple(sorted(shares)[:threshold])].append(client)
    found = dict[int, bytes]()
    for places, clients in by_places.items():
        shares_of = [[held[client][place] for place in places] for client in clients]
        found |= zip(clients, combined(places, shares_of), strict=True)
    return found


def _public(private: X25519PrivateKey) -> bytes:
    return private.public_key().public_bytes_raw()


def _agreed(private: X25519PrivateKey, public: bytes, client: int | None = None) -> bytes:
    """Return what two keys agree on; name the client of the public one where it is no good."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        whose = "" if client is None else f"client {client}: "
        raise PayloadError(f"{whose}its public key is no usable point of X25519") from None


def _derived(secret: bytes, label: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=label).derive(secret)


_PROBE = X25519PrivateKey.from_private_bytes(b"\1" * KEY_BYTES)
