"""A coordinator or a relay that says anything to clients of secure sums, and what it works out.

It draws cohorts, payloads, partners and lists of uploads at random, goes back and asks again. What
it was answered is put together apart from the product: each masked upload is one equation over
uploads and masks, opened secrets take masks away, and what is left of the equations without masks
are the sums that it knows. Equal trainings come to equal uploads, so sums of all attempts count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fedmodels.errors import ArchiveError, PayloadError
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.certificates import Authority, init_authority
from fedsrv.parts.secure_group import SecureGroup
from tests.fedcli.runtime.test_fixed_groups import NEARLY, Changing, Site, of
from tests.fedcli.runtime.test_secure_client import GIVEN

REFUSED = (PayloadError, ArchiveError)
GROUPS = (2, 3, 5), (7, 8, 11)
"""Two fixed groups, all of whose clients are behind one relay."""


@dataclass
class Attempt:
    """What a coordinator holds of one attempt."""

    threshold: int
    sent: dict[int, list[int]] = field(default_factory=dict)
    """Who sent a masked upload, with the partners of its masks."""
    own: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By client: who opened a share of the secret of its own mask."""
    pair: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def known(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the sums of uploads of some clients that follow, a row each, (n, clients)."""
        opened = {c for c, who in self.own.items() if len(who) >= self.threshold}
        apart = {c for c, who in self.pair.items() if len(who) >= self.threshold}
        masks: dict[Any, int] = {}
        rows = []
        for client, partners in self.sent.items():
            row = {} if client in opened else {client: 1.0}
            for peer in partners:
                if peer != client and not apart & {client, peer}:
                    row[min(client, peer), max(client, peer)] = 1.0 if peer > client else -1.0
            rows.append(row)
            for name in row:
                masks.setdefault(name, len(masks))
        hidden = np.zeros((len(rows), len(masks) + 1))
        for place, row in enumerate(rows):
            for name, sign in row.items():
                hidden[place, masks[name]] = sign
        left, sizes, _ = np.linalg.svd(hidden)
        rank = int((sizes > 1e-9).sum())
        uploads = np.array([[float(c == client) for c in ids] for client in self.sent])
        return left[:, rank:].T @ uploads if len(rows) else np.zeros((0, len(ids)))


@dataclass
class Liar:
    """Asks the clients of a site for whatever it likes."""

    world: Any
    rng: Any
    held: list[Attempt] = field(default_factory=list)
    groups: list[SecureGroup] = field(default_factory=list)
    """Its own part of each attempt."""
    refused: int = 0

    def some(self, clients: Sequence[int], least: int = 3) -> tuple[int, ...]:
        """Draw all of some clients, or fewer."""
        if self.rng.random() < 0.6 or len(clients) <= least:
            return tuple(clients)
        return tuple(sorted(self.rng.choice(clients, least, replace=False).tolist()))

    def play(self) -> None:
        """Make an attempt, as far as clients go along."""
        over = self.over()
        given = [GIVEN, NEARLY][self.rng.integers(2)]
        at = {"interaction": int(self.rng.integers(4, 8)), "committed": 3}
        world = self.world
        world.group = group = world.attempt(at["interaction"], over, given)
        self.groups.append(group)
        self.held.append(found := Attempt(group.threshold))
        for client in over:
            said = self.ask(client, rpc.ORDER_KIND_SHARE, group.to_share(), at)
            if said is not None:
                group.shared[client] = said
        for client in group.shared:
            self.train(client, given, at, found)
        for _ in range(2):
            group.counted = self.some([*found.sent])
            for client in self.some([*group.counted]):
                said = self.ask(client, rpc.ORDER_KIND_AGREE, group.to_agree(), at)
                if said is not None:
                    group.agreed[client] = said.signature
            for client in found.sent:
                asked = group.to_unmask(client)
                self.lie(asked)
                said = self.ask(client, rpc.ORDER_KIND_UNMASK, asked, at)
                for one in said.opened if said is not None else ():
                    (found.own if one.own else found.pair)[one.client].add(client)

    def over(self) -> tuple[int, ...]:
        """Draw the clients of an attempt: all, or three of them."""
        ids = self.world.ids
        sets = [ids, *combinations(ids, 3)]
        return sets[self.rng.integers(len(sets))] if self.rng.random() < 0.5 else ids

    def train(self, client: int, given: Any, at: Any, found: Attempt) -> None:
        asked = self.world.group.to_train(client)
        self.lie(asked)
        order = self.world.order(rpc.ORDER_KIND_TRAIN, asked, **at)
        try:
            one = self.world.clients[client]
            one.masked(order, of(client), given, self.world.form)
            found.sent[client] = [peer.client for peer in asked.peers]
        except REFUSED:
            self.refused += 1

    def lie(self, asked: Any) -> None:
        """Leave a partner out, now and then."""
        if asked.peers and self.rng.random() < 0.15:
            del asked.peers[self.rng.integers(len(asked.peers))]

    def ask(self, client: int, kind: Any, asked: Any, at: Any) -> Any:
        try:
            return self.world.ask(client, kind, asked, **at)
        except REFUSED:
            self.refused += 1
            return None

    def known(self) -> np.ndarray[Any, Any]:
        ids = self.world.ids
        return np.concatenate([np.zeros((1, len(ids))), *(one.known(ids) for one in self.held)])


class Mixing(Liar):
    """A relay: it has the true messages of two groups, and passes those of one to the other."""

    def over(self) -> tuple[int, ...]:
        if self.rng.random() < 0.6:
            return GROUPS[self.rng.integers(2)]
        return tuple(sorted(self.rng.choice(self.world.ids, 3, replace=False).tolist()))

    def lie(self, asked: Any) -> None:
        """Now and then, put what a client of the other group said in the place of a peer's."""
        super().lie(asked)
        others = [group for group in self.groups[:-1] if group.shared]
        if asked.peers and others and self.rng.random() < 0.3:
            group = others[self.rng.integers(len(others))]
            known = group.to_train(next(iter(group.keys))).peers
            asked.peers[self.rng.integers(len(asked.peers))].CopyFrom(
                known[self.rng.integers(len(known))]
            )
            kept = sorted(asked.peers, key=lambda peer: peer.client)
            del asked.peers[:]
            asked.peers.extend(kept)


class TwoGroups(Site):
    """Clients of two fixed groups."""

    ids = sum(GROUPS, ())

    def fixed(self, client):
        self.members = next(group for group in GROUPS if client in group)
        return super().fixed(client)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    init_authority(root)
    return Authority.read(root)


@pytest.mark.parametrize("seed", range(3))
def test_whatever_it_says_it_knows_the_sum_of_the_fixed_group_and_no_other(
    seed, authority, tmp_path
):
    liar = Liar(Site(tmp_path, authority, least=3), np.random.default_rng(seed))
    for _ in range(25):
        liar.play()
    known = liar.known()
    assert liar.refused > 0
    assert np.linalg.matrix_rank(known, tol=1e-6) == 1, "it opened the sum of the group"
    assert np.allclose(known, known[:, :1])


@pytest.mark.parametrize("seed", range(3))
def test_a_relay_that_mixes_two_groups_knows_the_sum_of_each_and_no_other(
    seed, authority, tmp_path
):
    relay = Mixing(TwoGroups(tmp_path, authority, least=3), np.random.default_rng(seed))
    for _ in range(40):
        relay.play()
    known = relay.known()
    assert relay.refused > 0
    assert np.linalg.matrix_rank(known, tol=1e-6) == 2, "it opened the sum of both"
    assert np.allclose(known[:, :3], known[:, :1])
    assert np.allclose(known[:, 3:], known[:, 3:4])


def test_of_clients_that_change_it_works_out_single_uploads(authority, tmp_path):
    """So it would notice: the same lies, and the same sums, without fixed groups."""
    liar = Liar(Changing(tmp_path, authority, least=3), np.random.default_rng(0))
    for _ in range(25):
        liar.play()
    assert np.linalg.matrix_rank(liar.known(), tol=1e-6) > 1
