"""The coordinator's part in the secure sum of one group of clients: checks, and opening the sum.

The coordinator holds public keys, sealed shares that it cannot read, and sums of masked vectors. In
the end it learns one secret of each client. If the client's upload came, that is the secret of the
client's own mask. If it did not come, that is the secret of the masks that the client agreed on
with others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Self

from fedmodels.errors import PayloadError
from fedmodels.secure_sum.fixed_point import FixedPoint
from fedmodels.secure_sum.keys import (
    ATTEMPT_BYTES,
    DIGEST_BYTES,
    KEY_BYTES,
    SEALED_BYTES,
    SHARE_BYTES,
    Attempt,
    Secrets,
    check_point,
    own_key,
    pair_key,
    private_key,
    secrets_of,
)
from fedmodels.secure_sum.masks import Vector, add_mask
from fedpb.secure_terms import terms_of
from fedpb.v1 import coordinator_pb2 as rpc


@dataclass
class SecureGroup:
    """An attempt at the sum of some clients."""

    attempt: Attempt
    threshold: int
    keys: Mapping[int, rpc.SecureAnswer]
    """What those asked to share said of their channel keys, by ascending id."""
    numbers: FixedPoint
    """How numbers become integers."""
    payload: bytes
    """Digest of what everybody trains from."""
    shared: dict[int, rpc.SecureAnswer] = field(default_factory=dict)
    """The answers of those that shared, by ascending id."""
    counted: tuple[int, ...] = ()
    """Those whose masked uploads came, ascending."""
    total: Vector | None = None
    """The sum of their masked uploads."""
    agreed: dict[int, bytes] = field(default_factory=dict)
    """Their signatures of who is counted, of a run whose clients sign."""

    @classmethod
    def begun(
        cls,
        order: rpc.Order,
        settings: bytes,
        threshold: int,
        keys: Mapping[int, rpc.SecureAnswer],
        numbers: FixedPoint,
        payload: bytes,
        *,
        own_tasks: bool = False,
        of_one_state: bool = False,
    ) -> Self:
        """Return a new attempt; an order says the interaction, the round and the task.

        With ``of_one_state`` it also says from which private state all clients begin.
        """
        number = os.urandom(ATTEMPT_BYTES)
        found = cls(Attempt(number, order.interaction), threshold, keys, numbers, payload)
        told = rpc.Order()
        told.CopyFrom(order)
        told.secure_sum.CopyFrom(found.to_share())
        found.attempt = replace(
            found.attempt,
            terms=terms_of(told, settings, own_tasks=own_tasks, of_one_state=of_one_state),
        )
        return found

    # --- questions --------------------------------------------------------------------------------

    def to_share(self) -> rpc.SecureSum:
        """Return what clients are told, so that they share their secrets."""
        found = self._facts()
        for client, said in self.keys.items():
            found.peers.add(
                client=client, channel_key=said.channel_key, signature=said.signature,
                certificates=said.certificates,
            )  # fmt: skip
        return found

    def to_train(self, client: int) -> rpc.SecureSum:
        """Return what a client is told, so that it masks its upload."""
        found, place = self._facts(), [*self.keys].index(client)
        for peer, said in self.shared.items():
            found.peers.add(
                client=peer, channel_key=self.keys[peer].channel_key, mask_key=said.mask_key,
                share=said.shares[place].sealed, signature=said.signature,
            )  # fmt: skip
        return found

    def to_agree(self) -> rpc.SecureSum:
        """Return what a client is told, so that it signs whose uploads came."""
        return rpc.SecureSum(attempt=self.attempt.number, counted=self.counted)

    def to_unmask(self, client: int) -> rpc.SecureSum:
        """Return what a client is told, so that it opens the shares it holds."""
        found = self.to_train(client)
        found.counted.extend(self.counted)
        for peer in found.peers:
            peer.agreed = self.agreed.get(peer.client, b"")
        return found

    def _facts(self) -> rpc.SecureSum:
        return rpc.SecureSum(
            attempt=self.attempt.number, threshold=self.threshold, payload=self.payload,
            clients=self.numbers.clients, most=self.numbers.most,
        )  # fmt: skip

    # --- answers ----------------------------------------------------------------------------------

    def check_shared(self, said: rpc.SecureAnswer) -> None:
        """Check the keys and the sealed shares of a client.

        Raises:
            PayloadError: names what is wrong.
        """
        check_fields(said, {"mask_key", "own_digest", "shares", "signature"})
        check_point(said.mask_key)
        sizes = {(len(s.sealed), len(s.pair_digest), len(s.own_digest)) for s in said.shares}
        wanted = (SEALED_BYTES, DIGEST_BYTES, DIGEST_BYTES)
        if len(said.shares) != len(self.keys) or sizes != {wanted}:
            raise PayloadError(f"it shares its secrets with others than {len(self.keys)} peers")
        if len(said.own_digest) != DIGEST_BYTES:
            raise PayloadError("the digest of its secret has another size")

    def check_opened(self, said: rpc.SecureAnswer) -> None:
        """Check that a client opened one share of each peer at most, and the right one.

        Raises:
            PayloadError: names what is wrong.
        """
        check_fields(said, {"opened"})
        seen, counted = [one.client for one in said.opened], {*self.counted}
        if len({*seen}) < len(seen) or not {*seen} <= self.shared.keys():
            raise PayloadError("it opens shares of strangers, or of one peer twice")
        for one in said.opened:
            sizes = (0, SHARE_BYTES) if one.client in counted else (SHARE_BYTES, 0)
            if (len(one.pair), len(one.own)) != sizes:
                raise PayloadError(f"it opens another share of client {one.client} than asked for")

    # --- opening ----------------------------------------------------------------------------------

    def open(self, said: Mapping[int, rpc.SecureAnswer]) -> tuple[Vector | None, list[int]]:
        """Take the masks off the sum.

        Args:
            said: the opened shares, by the client that held them.

        Returns:
            The sum of what the clients encoded, or None if a secret does not open; and the clients
            whose secrets do not open. Such a client shared something else than it had announced, or
            too few peers opened their shares of its secret.
        """
        assert self.total is not None, "uploads came"
        total, closed, counted = self.total.copy(), list[int](), {*self.counted}
        secrets = secrets_of(self._shares(said, counted), self.threshold)
        for client in self.shared:
            own, secret = client in counted, secrets.get(client)
            if secret is None or not self._fits(client, secret, own=own):
                closed.append(client)
            elif own:
                add_mask(total, own_key(self.attempt, client, secret), -1)
            else:
                self._take_off(total, client, secret)
        return (None if closed else total), closed

    def _take_off(self, total: Vector, gone: int, secret: bytes) -> None:
        """Take off the masks that others agreed on with a client whose upload did not come."""
        private = private_key(self.attempt, gone, secret)
        for client in self.counted:
            key = pair_key(self.attempt, gone, private, client, self.shared[client].mask_key)
            add_mask(total, key, -1 if gone > client else 1)

    def _shares(
        self, said: Mapping[int, rpc.SecureAnswer], counted: Collection[int]
    ) -> dict[int, dict[int, bytes]]:
        """Return the right shares of each client's secret that were opened, by holder's place."""
        found: dict[int, dict[int, bytes]] = {client: {} for client in self.shared}
        for place, holder in enumerate(self.keys):
            for one in said[holder].opened if holder in said else ():
                sent, own = self.shared[one.client].shares[place], one.client in counted
                kind, share, digest = (
                    ("own-share", one.own, sent.own_digest) if own
                    else ("pair-share", one.pair, sent.pair_digest)
                )  # fmt: skip
                if self.attempt.digest(kind, share, one.client, holder) == digest:
                    found[one.client][place] = share
        return found

    def _fits(self, client: int, secret: bytes, *, own: bool) -> bool:
        """Tell whether a secret is the one that a client has announced."""
        announced, found = self.shared[client], Secrets(secret, secret)
        if own:
            return found.digest(self.attempt, client) == announced.own_digest
        return found.public(self.attempt, client) == announced.mask_key

    # --- at rest ----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Return everything but the sum, as values of JSON."""
        return {
            "attempt": self.attempt.number.hex(), "interaction": self.attempt.interaction,
            "terms": self.attempt.terms.hex(), "threshold": self.threshold,
            "payload": self.payload.hex(), "numbers": [*astuple(self.numbers)],
            "keys": [[c, said.SerializeToString().hex()] for c, said in self.keys.items()],
            "shared": [[c, said.SerializeToString().hex()] for c, said in self.shared.items()],
            "counted": self.counted,
        }  # fmt: skip

    @classmethod
    def from_json(cls, facts: Mapping[str, Any], total: Vector | None) -> Self:
        """Return the group that :meth:`to_json` described, with its sum."""
        keys, shared = (
            {c: rpc.SecureAnswer.FromString(bytes.fromhex(text)) for c, text in facts[name]}
            for name in ("keys", "shared")
        )
        parts = (bytes.fromhex(facts[name]) for name in ("attempt", "terms", "payload"))
        number, terms, payload = parts
        attempt = Attempt(number, facts["interaction"], terms)
        numbers = FixedPoint(*facts["numbers"])
        found = cls(attempt, facts["threshold"], keys, numbers, payload, shared)
        found.counted, found.total = tuple(facts["counted"]), total
        return found


def check_advertised(said: rpc.SecureAnswer) -> None:
    """Check the channel key of a client.

    Raises:
        PayloadError: it is no valid key, or the answer says more.
    """
    check_fields(said, {"channel_key", "signature", "certificates"})
    if len(said.channel_key) != KEY_BYTES:
        raise PayloadError("its channel key has another size")
    check_point(said.channel_key)


def check_fields(said: rpc.SecureAnswer, known: Iterable[str]) -> None:
    """Check that an answer says nothing but what it was asked for.

    Raises:
        PayloadError: it says something else.
    """
    for field_, _ in said.ListFields():
        if field_.name not in known:
            raise PayloadError(f"it has {field_.name!r}, which was not requested")
