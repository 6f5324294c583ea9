"""What one client says for a secure sum: keys, sealed shares, a masked upload, opened shares.

A client answers one question of each kind in an attempt. It never opens both shares of a peer. Of a
fixed group it opens the sums over all of the group, and no others
(:mod:`fedcli.parts.fixed_group`). Otherwise it opens the sum of one interaction over one set of
clients alone: two sums that differ by a client would tell its upload. What it has answered is on
the disk before it leaves, so that a crash repeats the same bits.

Who the others are, it takes from their certificates (:mod:`fedcli.parts.secure_peers`). With
``trust = "coordinator"`` it takes that from the coordinator, who may then invent clients.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from fedcli.gate.gate import MASKED
from fedcli.parts.fixed_group import NAME, FixedGroup
from fedcli.parts.secure_peers import SecurePeers, check_run
from fedcli.parts.sum_terms import SumTerms
from fedcli.runtime.client_part import Client, ClientPart, Training
from fedcli.runtime.sessions import write_private
from fedmodels.config.privacy import MIN_GROUP, SecureSum
from fedmodels.config.sent import settings_digest
from fedmodels.errors import ArchiveError, PayloadError
from fedmodels.host.line_file import append_lines
from fedmodels.secure_sum.fixed_point import FixedPoint
from fedmodels.secure_sum.keys import (
    ATTEMPT_BYTES,
    Attempt,
    Channel,
    Secrets,
    Share,
    own_key,
    pair_key,
    private_key,
)
from fedmodels.secure_sum.masks import add_mask
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.secure_upload import MASKED as VECTOR
from fedmodels.training.secure_upload import SecureUpload
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.secure_terms import payload_digest, terms_of
from fedpb.v1 import coordinator_pb2 as rpc

PLACE = "secure-sum"


class SecureSums(ClientPart):
    """Masks what leaves, and answers the orders of a secure sum."""

    for_evaluator = False

    def __init__(self, client: Client) -> None:
        """Take what the site brings: a certificate, and what it requires of privacy."""
        super().__init__(client)
        terms: SumTerms | None = client.brought.get("sums")
        if terms is None:  # nobody has checked the run for it
            check_run(client.experiment, None, 0)
        self._terms, self._fewest = terms or SumTerms(), 0
        self._made: object = None
        """The masked numbers of the last upload."""
        if (floor := client.brought.get("floor")) is not None:
            self._fewest = floor.floor.min_cohort
            if self._terms.peers is not None:
                self._terms.peers.least = max(self._terms.least, self._fewest)

    @cached_property
    def _talk(self) -> SecureClient:
        client, experiment = self.client, self.client.experiment
        privacy = experiment.privacy
        assert privacy is not None, "secure_sum is a key of it"
        assert privacy.secure_sum is not None, "the config asks for it"
        assert isinstance(client.client, int), "the evaluator trains nothing"
        fewest = max(experiment.fewest_summed if privacy.noise_at_clients else 0, self._fewest)
        return SecureClient(
            client.client, client.states.path, client.states.secret().key, privacy.secure_sum,
            fewest, settings_digest(experiment), self._terms.peers, experiment.schedule.own_tasks,
            self._group(client.client, privacy.secure_sum),
        )  # fmt: skip

    def _group(self, client: int, rules: SecureSum) -> FixedGroup | None:
        """Return the fixed group of a client; None where any sum may be opened.

        Certificates outlive a run, and so does the note of them. Where the coordinator's word
        stands for them, it could invent others, and the note is of the run alone.
        """
        experiment, terms = self.client.experiment, self._terms
        place = terms.notes if rules.signs else None
        path = (place or self.client.states.path) / NAME.format(client)
        if not experiment.fixes_groups:
            return FixedGroup(path, None) if place and not terms.changing else None
        groups = rules.group_of_each(experiment.schedule.clients)
        members = next(group for group in groups if client in group)
        return FixedGroup(path, members, keeps=self.client.set_up.stores)

    def leaves(self, half: Training, upload: Bundle) -> Bundle:
        """Return an upload under masks."""
        form = self.client.set_up.wire.part(SecureUpload)
        masked = self._talk.masked(half.order, upload, half.payload, form)
        self._made = masked.weights.get(VECTOR)
        return masked

    def covers(self, half: Training, upload: Bundle) -> Iterable[tuple[str, str]]:
        """Return the key of the masked numbers; what travels beside them is as it is."""
        made = self._made is not None and upload.weights.get(VECTOR) is self._made
        return [(f"weights/{VECTOR}", MASKED)] if made else []

    def answer(self, order: rpc.Order) -> rpc.Report | None:
        """Answer an order to advertise a key, to share secrets, to agree, or to open shares."""
        if order.kind not in WITHOUT_PAYLOAD:
            return None
        return rpc.Report(secure_sum=self._talk.answer(order))


class SecureClient:
    """One client's part in secure sums."""

    def __init__(
        self,
        client: int,
        path: Path,
        secret: bytes,
        rules: SecureSum,
        fewest: int = 0,
        settings: bytes = b"",
        peers: SecurePeers | None = None,
        own_tasks: bool = False,
        group: FixedGroup | None = None,
    ) -> None:
        """Take part; what was answered before is on the disk, and holds.

        Args:
            client: its id.
            path: its state directory.
            secret: the client's own.
            rules: the run's.
            fewest: clients whose noise epsilon counts on, where clients add it.
            settings: digest of the run's settings.
            peers: signs for this client and checks others; None where the coordinator is trusted.
            own_tasks: whether clients are on tasks of their own, as in an open run.
            group: the fixed group of this client; None where the clients of a sum may change.

        Raises:
            PayloadError: the rules ask for signatures, and nothing signs.
        """
        if rules.signs and peers is None:
            raise PayloadError("this client has no certificate to sign the keys of secure sums by")
        self.client, self.rules, self._fewest = client, rules, fewest
        self._settings, self._peers = settings, peers if rules.signs else None
        self._own_tasks, self._group = own_tasks, group
        self.channel = Channel.of(secret)
        self._path = path / PLACE
        self._secret: set[int] | None = None
        """Interactions whose secrets are on the disk; None until the directory was read."""

    def answer(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Answer an order to advertise a key, to share secrets, or to open shares.

        Raises:
            PayloadError: it is refused.
            ArchiveError: what was answered cannot be read or stored.
        """
        if order.kind == rpc.ORDER_KIND_ADVERTISE:
            found = rpc.SecureAnswer(channel_key=self.channel.public)
            if self._peers is not None:
                self._peers.prove_channel(self.client, found)
            return found
        if order.kind == rpc.ORDER_KIND_SHARE:
            return self._share(order)
        if order.kind == rpc.ORDER_KIND_AGREE:
            return self._agree(order)
        return self._unmask(order)

    def _share(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Draw the secrets of an attempt and share them among the peers."""
        asked = order.secure_sum
        of_one = self._group is not None and self._group.of_one_state
        terms = terms_of(order, self._settings, own_tasks=self._own_tasks, of_one_state=of_one)
        attempt = _attempt(order, terms)
        self._check_peers(asked)
        signers = {} if self._peers is None else self._peers.signers(asked.peers)
        if self._group is not None:
            self._group.check({peer.client: signers.get(peer.client, b"") for peer in asked.peers})
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
        if self._peers is not None:
            self._peers.prove_keys(attempt.terms, self.client, self.channel.public, found)
        news = {
            "attempt": asked.attempt.hex(), "terms": attempt.terms.hex(),
            "at": [order.round, order.task], "trains": self._trains_by(order),
            "numbers": [asked.clients, asked.most],
            "payload": asked.payload.hex(), "signers": {c: k.hex() for c, k in signers.items()},
            "pair": secrets.pair.hex(), "own": secrets.own.hex(),
            "share": _digest(asked), "answer": found.SerializeToString().hex(),
            "keys": {str(peer.client): peer.channel_key.hex() for peer in asked.peers},
        }  # fmt: skip
        self._begin(order, {"opened": held.get("opened"), **news})
        return found

    def masked(
        self, order: rpc.Order, upload: Bundle, payload: Bundle, form: SecureUpload
    ) -> Bundle:
        """Return an upload as it travels, under masks; the client was given the payload.

        Raises:
            PayloadError: the order is refused, or a number does not fit.
            ArchiveError: as :meth:`answer`.
        """
        asked, (attempt, held) = order.secure_sum, self._of_attempt(order)
        self._check_partners(attempt, asked, held)
        if [order.round, order.task] != held["at"]:
            raise PayloadError("another round or task is ordered than was announced before")
        if held.get("trains", by := self._trains_by(order)) != by:
            raise PayloadError(
                "it is to be trained by other settings, classes or state than when its keys were "
                "signed: clients that stand still would leave another's upload alone in a sum"
            )
        if {payload_digest(payload).hex(), asked.payload.hex()} != {held["payload"]}:
            raise PayloadError("the payload is not the one that all clients were told of")
        _check_same(held, "train", asked)
        rules = self.rules
        numbers = FixedPoint(rules.bits, rules.largest, asked.clients, asked.most)
        keys = self._pair_keys(attempt, asked, held)
        vector = form.encoded(upload, payload.weights, numbers)
        add_mask(vector, own_key(attempt, self.client, bytes.fromhex(held["own"])), 1)
        for peer, key in keys.items():
            add_mask(vector, key, 1 if peer > self.client else -1)
        digest = hashlib.sha256(vector.data).hexdigest()
        if held.get("masked", digest) != digest:
            raise PayloadError(
                "the repeated training gave other numbers, and a second upload under the same "
                "masks would reveal their difference"
            )
        partners = [peer.client for peer in asked.peers]
        news = {"train": _digest(asked), "masked": digest, "partners": partners}
        self._keep(order, news)
        return form.travelling(upload, vector)

    def _trains_by(self, order: rpc.Order) -> str:
        """Return a digest of what a training follows from beside round, task and payload."""
        told = rpc.Order(
            settings=order.settings, base=order.base, new_classes=order.new_classes,
            class_changes=order.class_changes, task_began=order.task_began,
        )  # fmt: skip
        said = told.SerializeToString(deterministic=True)
        return hashlib.sha256(self._settings + said).hexdigest()

    def _pair_keys(
        self, attempt: Attempt, asked: rpc.SecureSum, held: Mapping[str, Any]
    ) -> dict[int, bytes]:
        """Return the key of the mask with each peer; PayloadError for a point of small order."""
        own, pair = self.client, private_key(attempt, self.client, bytes.fromhex(held["pair"]))
        return {
            peer.client: pair_key(attempt, own, pair, peer.client, peer.mask_key)
            for peer in asked.peers
            if peer.client != own
        }

    def _agree(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Sign whose uploads came; once signed, the masks of no other set are opened."""
        if self._peers is None:
            raise PayloadError("clients of this run sign nothing")
        attempt, held = self._of_attempt(order)
        counted = self._check_counted(order.secure_sum, held)
        self._keep(order, {"agreed": counted})
        signature = self._peers.prove_counted(attempt.terms, self.client, counted)
        return rpc.SecureAnswer(signature=signature)

    def _unmask(self, order: rpc.Order) -> rpc.SecureAnswer:
        """Open one share of each peer: ``own`` if the peer's upload counts, else ``pair``."""
        asked, (attempt, held) = order.secure_sum, self._of_attempt(order)
        counted = self._check_counted(asked, held)
        if _digest(_as_trained(asked)) != held["train"]:
            raise PayloadError("masks of other peers are to be opened than it trained with")
        if self._peers is not None:
            if held.get("agreed") != counted:
                raise PayloadError("masks are to be opened before this client agreed on whose")
            self._peers.check_agreed(attempt.terms, asked, _signers(held))
        self._keep(order, {"opened": counted})
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

    def _check_counted(self, asked: rpc.SecureSum, held: Mapping[str, Any]) -> list[int]:
        """Return whose uploads came; raise PayloadError unless their sum may be opened."""
        counted = _ascending(asked.counted, "clients whose uploads came")
        if "masked" not in held:
            raise PayloadError("masks are to be opened, and this client has sent no upload")
        if not counted <= {*held["partners"]} or self.client not in counted:
            raise PayloadError("the sum to be opened is not of this client and its peers")
        threshold = self.rules.needed(len(held["keys"]))
        if len(counted) < threshold:
            raise PayloadError(
                f"the sum of {len(counted)} clients is to be opened; the threshold is {threshold}"
            )
        if len(counted) < self._fewest:
            raise PayloadError(
                f"the sum of {len(counted)} clients is to be opened; epsilon counts on the noise "
                f"of {self._fewest}"
            )
        if self._peers is not None:
            self._peers.check_enough(_signers(held), counted)
        if self._group is not None:
            keys = {client: _signers(held).get(client, b"") for client in counted}
            self._group.check(keys)
            self._group.note(keys, "" if self._peers is None else self._peers.run_id)
        for before in ("opened", "agreed"):
            if held.get(before) not in (None, sorted(counted)):
                raise PayloadError(
                    f"this client has {before.replace('agreed', 'agreed on')} the sum of this "
                    "interaction over other clients: two sums would reveal the upload of a "
                    "client that is in only one of them"
                )
        return sorted(counted)

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
        if asked.clients < len(ids) or not (math.isfinite(asked.most) and asked.most > 0):
            raise PayloadError(
                f"a secure sum of {len(ids)} peers is for {asked.clients} clients, whose uploads "
                f"count up to {asked.most:g}"
            )
        keys = {peer.client: peer.channel_key for peer in asked.peers}
        if keys[self.client] != self.channel.public:
            raise PayloadError("a secure sum names another key for this client than its own")
        _check_distinct(keys)
        self.channel.agree(keys)

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
        if self._group is not None:
            self._group.check({client: _signers(held).get(client, b"") for client in ids})
        shared = self.rules.needed(len(known))
        if asked.threshold != shared or [asked.clients, asked.most] != held["numbers"]:
            raise PayloadError("the threshold or the numbers are not those of the shares")
        _check_distinct({peer.client: peer.mask_key for peer in asked.peers})
        if self._peers is not None:
            self._peers.check_keys(attempt.terms, asked.peers, _signers(held))
            self._peers.check_enough(_signers(held), ids)

    # --- what was answered ------------------------------------------------------------------------

    def _file(self, interaction: int) -> Path:
        return self._path / f"{interaction:08d}.json"

    def _held(self, order: rpc.Order) -> dict[str, Any]:
        """Return what was answered of an interaction: each line of its file adds to those above.

        A last line without an end was never safe on the disk, so its answer has not left.
        """
        path = self._file(order.interaction)
        try:
            first, *more = path.read_bytes().splitlines(keepends=True)
            found: dict[str, Any] = json.loads(first)
            if not first.endswith(b"\n"):  # by a version that wrote one line without an end
                self._write(path, found)
            for line in more:
                found |= json.loads(line) if line.endswith(b"\n") else {}
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

    def _of_attempt(self, order: rpc.Order) -> tuple[Attempt, dict[str, Any]]:
        """Return the attempt of an order, and what this client has answered in it."""
        held = self._held(order)
        if held.get("attempt") != order.secure_sum.attempt.hex() or "pair" not in held:
            raise PayloadError("this client has shared no secrets in this attempt")
        return _attempt(order, bytes.fromhex(held["terms"])), held

    def _begin(self, order: rpc.Order, facts: Mapping[str, Any]) -> None:
        """Store what an attempt begins with."""
        self._path.mkdir(exist_ok=True)
        self._secrets().add(order.interaction)
        self._write(self._file(order.interaction), facts)

    def _keep(self, order: rpc.Order, facts: Mapping[str, Any]) -> None:
        """Store what was answered in an attempt."""
        path = self._file(order.interaction)
        try:
            append_lines(path, json.dumps(facts).encode() + b"\n", sync=True)
        except OSError as error:
            raise ArchiveError(f"cannot write {path}: {error.strerror}") from None

    def _forget(self, committed: int) -> None:
        """Delete secrets of committed interactions; keep over which clients each sum was opened."""
        for interaction in [one for one in self._secrets() if one <= committed]:
            facts = self._held(rpc.Order(interaction=interaction))
            if "pair" in facts:
                self._write(self._file(interaction), {"opened": facts.get("opened")})
            self._secrets().remove(interaction)

    def _write(self, path: Path, facts: Mapping[str, Any]) -> None:
        write_private(path, json.dumps(facts).encode() + b"\n")

    def _secrets(self) -> set[int]:
        """Return the interactions whose secrets may be on the disk."""
        if self._secret is None:
            stems = (path.stem for path in self._path.glob("*.json"))
            self._secret = {int(stem) for stem in stems if stem.isdecimal()}
        return self._secret


def _attempt(order: rpc.Order, terms: bytes) -> Attempt:
    number = order.secure_sum.attempt
    if len(number) != ATTEMPT_BYTES:
        raise PayloadError(f"an attempt at a secure sum has a number of {len(number)} bytes")
    return Attempt(number, order.interaction, terms)


def _signers(held: Mapping[str, Any]) -> dict[int, bytes]:
    """Return the keys of peers' certificates, which were checked when secrets were shared."""
    return {int(client): bytes.fromhex(key) for client, key in held["signers"].items()}


def _as_trained(asked: rpc.SecureSum) -> rpc.SecureSum:
    """Return the question that a client was asked when it trained, by that to open masks."""
    found = rpc.SecureSum()
    found.CopyFrom(asked)
    del found.counted[:]
    for peer in found.peers:
        peer.ClearField("agreed")
    return found


def _digest(asked: rpc.SecureSum) -> str:
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).hexdigest()


def _check_same(held: Mapping[str, Any], what: str, asked: rpc.SecureSum) -> None:
    """Check that a question was not asked before in other words."""
    if held.get(what, _digest(asked)) != _digest(asked):
        raise PayloadError(
            "an attempt at a secure sum asks the same twice, for other peers: start a new attempt"
        )


def _ascending(ids: Iterable[int], what: str) -> set[int]:
    listed = [*ids]
    if listed != sorted({*listed}):
        raise PayloadError(f"the {what} of a secure sum are not named once each, in order")
    return {*listed}


def _check_distinct(keys: Mapping[int, bytes]) -> None:
    if len({*keys.values()}) < len(keys):
        raise PayloadError("two peers of a secure sum have one key")
