"""What one client says for a secure sum: keys, sealed shares, a masked upload, opened shares.

The coordinator is trusted to pass on the clients' messages, and not to invent clients. A client
checks what it can: it answers one question of each kind in an attempt. It never opens both shares
of a peer, and for one interaction it opens the sum over one set of clients alone: two sums that
differ by a client would tell its upload. What it has answered is on the disk before it leaves, so
that a crash repeats the same bits.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedcli.runtime.sessions import write_private
from fedmodels.config.privacy import MIN_GROUP, SecureSum
from fedmodels.errors import ArchiveError, PayloadError
from fedmodels.secure_sum.fixed_point import FixedPoint
from fedmodels.secure_sum.keys import (
    ATTEMPT_BYTES,
    Attempt,
    Channel,
    Secrets,
    Share,
    check_point,
    own_key,
    pair_key,
    private_key,
)
from fedmodels.secure_sum.masks import add_mask
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.training.secure_upload import SecureUpload
from fedpb.v1 import coordinator_pb2 as rpc

PLACE = "secure-sum"


class SecureClient:
    """One client's part in secure sums."""

    def __init__(
        self, client: int, path: Path, secret: bytes, rules: SecureSum, fewest: int = 0
    ) -> None:
        """Take part with a client's secret; what was answered before is on the disk, and holds.

        ``fewest`` clients have the noise that epsilon counts on, where clients add it.
        """
        self.client, self.rules, self._fewest = client, rules, fewest
        self.channel = Channel.of(secret)
        self._path = path / PLACE

    def answer(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Answer an order to advertise a key, to share secrets, or to open shares.

        Raises:
            PayloadError: it is refused.
            ArchiveError: what was answered cannot be read or stored.
        """
        if order.kind == rpc.ORDER_KIND_ADVERTISE:
            return rpc.SecureAnswer(channel_key=self.channel.public)
        if order.kind == rpc.ORDER_KIND_SHARE:
            return self._share(order)
        return self._unmask(order)

    def _share(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Draw the secrets of an attempt and share them among the peers."""
        asked, attempt = order.secure_sum, _attempt(order)
        self._check_peers(asked)
        held = self._held(order)
        if held.get("attempt") == asked.attempt.hex():
            _check_same(held, "share", asked)
            again: rpc.SecureAnswer = rpc.SecureAnswer.FromString(bytes.fromhex(held["answer"]))
            return again
        self._forget(order.committed)
        secrets = Secrets.fresh()
        found = rpc.SecureAnswer(
            mask_key=secrets.public(attempt, self.client),
            own_digest=secrets.digest(attempt, self.client),
        )
        shares = secrets.shares(asked.threshold, len(asked.peers))
        for peer, share in zip(asked.peers, shares, strict=True):
            key, whose = peer.channel_key, (self.client, peer.client)
            found.shares.add(
                sealed=self.channel.seal(attempt, *whose, key, share),
                pair_digest=attempt.digest("pair-share", share.pair, *whose),
                own_digest=attempt.digest("own-share", share.own, *whose),
            )
        news = {
            "attempt": asked.attempt.hex(), "pair": secrets.pair.hex(), "own": secrets.own.hex(),
            "share": _digest(asked), "answer": found.SerializeToString().hex(),
            "keys": {str(peer.client): peer.channel_key.hex() for peer in asked.peers},
        }  # fmt: skip
        self._keep(order, {"opened": held.get("opened"), **news})
        return found

    def masked(
        self, order: rpc.Order, upload: Bundle, received: Weights, form: SecureUpload
    ) -> Bundle:
        """Return an upload as it travels, under masks; the client was given the received weights.

        Raises:
            PayloadError: the order is refused, or a number does not fit.
            ArchiveError: as :meth:`answer`.
        """
        asked, attempt, held = order.secure_sum, _attempt(order), self._of_attempt(order)
        self._check_partners(attempt, asked, held)
        _check_same(held, "train", asked)
        rules = self.rules
        numbers = FixedPoint(rules.bits, rules.largest, asked.clients, asked.most)
        vector = form.encoded(upload, received, numbers)
        pair = private_key(attempt, self.client, bytes.fromhex(held["pair"]))
        add_mask(vector, own_key(attempt, self.client, bytes.fromhex(held["own"])), 1)
        for peer in asked.peers:
            if peer.client != self.client:
                key = pair_key(attempt, self.client, pair, peer.client, peer.mask_key)
                add_mask(vector, key, 1 if peer.client > self.client else -1)
        digest = hashlib.sha256(vector.data).hexdigest()
        if held.get("masked", digest) != digest:
            raise PayloadError(
                "the training came to other numbers than before, and the masks of this attempt "
                "were used for those: a second upload under them would tell of both"
            )
        self._keep(order, {**held, "train": _digest(asked), "masked": digest})
        return form.sent(upload, vector)

    def _unmask(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Open one share of each peer: ``own`` if the peer's upload counts, else ``pair``."""
        asked, attempt, held = order.secure_sum, _attempt(order), self._of_attempt(order)
        counted = _ascending(asked.counted, "clients whose uploads came")
        if "masked" not in held:
            raise PayloadError("masks are to be opened, and this client has sent no upload")
        trained = rpc.SecureSum()
        trained.CopyFrom(asked)
        del trained.counted[:]
        if _digest(trained) != held["train"]:
            raise PayloadError("masks of other peers are to be opened than it trained with")
        if not counted <= {peer.client for peer in asked.peers} or self.client not in counted:
            raise PayloadError("the sum to be opened is not of this client and its peers")
        if len(counted) < asked.threshold:
            raise PayloadError(
                f"the sum of {len(counted)} clients is to be opened; the threshold is "
                f"{asked.threshold}"
            )
        if len(counted) < self._fewest:
            raise PayloadError(
                f"the sum of {len(counted)} clients is to be opened; epsilon counts on the noise "
                f"of {self._fewest}"
            )
        if held.get("opened") not in (None, sorted(counted)):
            raise PayloadError(
                "this client has opened the sum of this interaction over other clients: two sums "
                "would tell the upload of whoever is in one of them alone"
            )
        self._keep(order, {**held, "opened": sorted(counted)})
        found = rpc.SecureAnswer()
        for peer in asked.peers:
            if (share := self._opened(attempt, peer)) is None:
                continue
            if peer.client in counted:
                found.opened.add(client=peer.client, own=share.own)
            else:
                found.opened.add(client=peer.client, pair=share.pair)
        return found

    def _opened(self, attempt: Attempt, peer: rpc.SecurePeer) -> Share | None:
        """Return the share that a peer gave to this client; None if it is damaged."""
        try:
            return self.channel.open(
                attempt, peer.client, self.client, peer.channel_key, peer.share
            )
        except PayloadError:
            return None

    # --- checks -----------------------------------------------------------------------------------

    def _check_peers(self, asked: rpc.SecureSum) -> None:
        """Raise PayloadError unless who takes part is as it must be, before a secret is shared."""
        ids = _ascending((peer.client for peer in asked.peers), "peers")
        if len(ids) < MIN_GROUP or self.client not in ids:
            raise PayloadError(
                f"a secure sum is of {len(ids)} peers; it takes {MIN_GROUP}, this client among them"
            )
        if asked.threshold != self.rules.needed(len(ids)):
            raise PayloadError(
                f"a secure sum of {len(ids)} peers has a threshold of {asked.threshold}; by the "
                f"config it is {self.rules.needed(len(ids))}"
            )
        keys = {peer.client: peer.channel_key for peer in asked.peers}
        if keys[self.client] != self.channel.public:
            raise PayloadError("a secure sum names another key for this client than its own")
        _check_keys(keys)

    def _check_partners(
        self, attempt: Attempt, asked: rpc.SecureSum, held: Mapping[str, Any]
    ) -> None:
        """Raise PayloadError unless masks are agreed on with peers that this client shared with."""
        ids = _ascending((peer.client for peer in asked.peers), "peers")
        known: Mapping[str, str] = held["keys"]
        for peer in asked.peers:
            if known.get(str(peer.client)) != peer.channel_key.hex():
                raise PayloadError(f"client {peer.client} is a stranger: it shared nothing")
        own = Secrets(bytes.fromhex(held["pair"]), b"").public(attempt, self.client)
        if own not in [peer.mask_key for peer in asked.peers if peer.client == self.client]:
            raise PayloadError("a secure sum names another mask key for this client than its own")
        if len(ids) < asked.threshold:
            raise PayloadError(f"{len(ids)} peers are too few to mask an upload with")
        shared = self.rules.needed(len(known))
        if asked.threshold != shared or asked.clients < len(known):
            raise PayloadError("the threshold or the number of clients is not that of the shares")
        if not (math.isfinite(asked.most) and asked.most > 0):
            raise PayloadError(f"uploads cannot count up to {asked.most:g}")
        _check_keys({peer.client: peer.mask_key for peer in asked.peers})

    # --- what was answered ------------------------------------------------------------------------

    def _file(self, interaction: int) -> Path:
        return self._path / f"{interaction:08d}.json"

    def _held(self, order: rpc.Order) -> dict[str, Any]:
        path = self._file(order.interaction)
        try:
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise ArchiveError(f"cannot read {path}: {error.strerror}") from None
        except ValueError:
            raise ArchiveError(
                f"{path} is damaged; it says what this client has answered, and without it nothing "
                "more is opened of this interaction"
            ) from None
        return found

    def _of_attempt(self, order: rpc.Order) -> dict[str, Any]:
        held = self._held(order)
        if held.get("attempt") != order.secure_sum.attempt.hex():
            raise PayloadError("this client has shared no secrets in this attempt")
        return held

    def _keep(self, order: rpc.Order, facts: Mapping[str, Any]) -> None:
        self._path.mkdir(exist_ok=True)
        write_private(self._file(order.interaction), json.dumps(facts).encode())

    def _forget(self, committed: int) -> None:
        """Delete secrets of committed interactions; keep over which clients each sum was opened."""
        for path in self._path.glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) <= committed:
                facts = json.loads(path.read_text("utf-8"))
                if "pair" in facts:
                    write_private(path, json.dumps({"opened": facts.get("opened")}).encode())


def _attempt(order: rpc.Order) -> Attempt:
    number = order.secure_sum.attempt
    if len(number) != ATTEMPT_BYTES:
        raise PayloadError(f"an attempt at a secure sum has a number of {len(number)} bytes")
    return Attempt(number, order.interaction)


def _digest(asked: rpc.SecureSum) -> str:
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).hexdigest()


def _check_same(held: Mapping[str, Any], what: str, asked: rpc.SecureSum) -> None:
    """Check that a question was not asked before in other words."""
    if held.get(what, _digest(asked)) != _digest(asked):
        raise PayloadError(
            "an attempt at a secure sum asks the same twice, of other peers: it takes a new attempt"
        )


def _ascending(ids: Iterable[int], what: str) -> set[int]:
    listed = [*ids]
    if listed != sorted({*listed}):
        raise PayloadError(f"the {what} of a secure sum are not named once each, in order")
    return {*listed}


def _check_keys(keys: Mapping[int, bytes]) -> None:
    """Check public keys: points of X25519, no two of them equal."""
    if len({*keys.values()}) < len(keys):
        raise PayloadError("two peers of a secure sum have one key")
    for client, key in keys.items():
        try:
            check_point(key)
        except PayloadError as error:
            raise PayloadError(f"client {client}: {error}") from None
