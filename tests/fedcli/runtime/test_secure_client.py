"""What a client checks before it shares secrets, masks an upload or opens a sum."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcli.parts.secure_client import SecureClient
from fedmodels.config.privacy import SecureSum
from fedmodels.errors import ArchiveError, PayloadError
from fedmodels.secure_sum.fixed_point import added
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import scalar_spec
from fedmodels.training.secure_upload import SecureUpload
from fedpb.codec import encode
from fedpb.secure_terms import payload_digest
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.parts.secure_group import SecureGroup

GIVEN = Bundle(scalars={"given": 1.0})
"""What everybody trains from."""
SETTINGS = b"s" * 32


class World:
    """Clients 2, 3, 5 and 7 and the coordinator's part of their sum; a threshold of three.

    The coordinator is trusted; test_secure_attacks.py has clients with certificates.
    """

    trust, settings = "coordinator", SETTINGS

    def __init__(self, path, clients=(2, 3, 5, 7), bits=32, size=40):
        self.rules, self.path = SecureSum(bits=bits, trust=self.trust), path
        self.form = SecureUpload(
            self.rules, {"w": torch.empty(size, device="meta")}, (), {}, False,
            scalar_spec("num_examples"), lambda upload: upload.scalars["num_examples"],
        )  # fmt: skip
        self.numbers = self.form.numbers(len(clients), 10)
        for client in clients:
            (path / str(client)).mkdir(exist_ok=True)
        self.clients = {c: self.client(c) for c in clients}
        self.group = self.attempt()

    def client(self, client):
        """Return a client as it is after a restart."""
        path, secret = self.path / str(client), bytes([client]) * 32
        peers, group = self.peers(client), self.fixed(client)
        rules, settings = self.rules, self.settings
        return SecureClient(client, path, secret, rules, 0, settings, peers, False, group)

    def peers(self, client):
        """Return what signs for a client."""
        return None

    def fixed(self, client):
        """Return the fixed group of a client."""
        return None

    def attempt(self, interaction=4, over=None, given=GIVEN):
        advertise = rpc.Order(kind=rpc.ORDER_KIND_ADVERTISE)
        keys = {c: self.clients[c].answer(advertise) for c in over or self.clients}
        order, payload = self.order(0, None, interaction), payload_digest(given)
        threshold = self.rules.needed(len(keys))
        group = self.clients[min(keys)]._group
        of_one = group is not None and group.of_one_state
        facts = order, SETTINGS, threshold, keys, self.numbers, payload
        return SecureGroup.begun(*facts, of_one_state=of_one)

    def order(self, kind, asked, interaction=4, committed=3, **more):
        facts = {"interaction": interaction, "committed": committed, "round": 2, "task": 1}
        return rpc.Order(kind=kind, secure_sum=asked, **facts, **more)

    def ask(self, client, kind, asked, **facts):
        return self.clients[client].answer(self.order(kind, asked, **facts))

    def share(self, change=lambda asked: None, clients=None, **facts):
        for client in clients or self.clients:
            asked = self.group.to_share()
            change(asked)
            said = self.ask(client, rpc.ORDER_KIND_SHARE, asked, **facts)
            self.group.check_shared(said)
            self.group.shared[client] = said

    def mask(self, client, upload, change=lambda asked: None, **facts):
        asked = self.group.to_train(client)
        change(asked)
        order = self.order(rpc.ORDER_KIND_TRAIN, asked, **facts)
        return self.clients[client].masked(order, upload, GIVEN, self.form)

    def unmask(self, client, change=lambda asked: None, **facts):
        asked = self.group.to_unmask(client)
        change(asked)
        return self.ask(client, rpc.ORDER_KIND_UNMASK, asked, **facts)

    def take(self, uploads):
        """Let clients send their uploads."""
        sent = {c: self.mask(c, upload) for c, upload in uploads.items()}
        self.group.counted = tuple(sent)
        self.group.total = added([self.form.integers(each) for each in sent.values()])
        return sent


def upload(value=0.25, examples=3.0, size=40):
    return Bundle({"w": torch.full((size,), value)}, scalars={"num_examples": examples})


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@settings(max_examples=25)
@given(st.sampled_from([32, 64]), st.integers(3, 6), st.integers(0, 2), st.integers(0, 2**32))
def test_the_opened_sum_is_the_plain_sum_of_those_that_stayed(
    tmp_path_factory, bits, clients, gone, seed
):
    rng = np.random.default_rng(seed)
    ids = sorted(rng.choice(50, clients, replace=False).tolist())
    world = World(tmp_path_factory.mktemp("w"), ids, bits, size=17)
    world.share()
    stay = sorted(rng.choice(ids, max(world.group.threshold, clients - gone), False).tolist())
    uploads = {
        c: Bundle({"w": torch.from_numpy(rng.uniform(-60, 60, 17)).float()},
                  scalars={"num_examples": float(rng.integers(0, 11))}) for c in stay
    }  # fmt: skip
    world.take(uploads)
    tell = rng.choice(stay, world.group.threshold, replace=False).tolist()
    total, closed = world.group.open({c: world.unmask(c) for c in tell})
    plain = added([world.form.encoded(u, {}, world.numbers) for u in uploads.values()])
    assert closed == []
    assert total is not None
    assert np.array_equal(total, plain)
    assert not np.array_equal(world.group.total, plain)


def test_no_message_has_a_size_that_depends_on_what_it_holds(world, tmp_path):
    (tmp_path / "other").mkdir()
    sizes = []
    for place, value in ((world, 0.0), (World(tmp_path / "other"), -63.9)):
        place.share()
        sent = place.take(dict.fromkeys(place.clients, upload(value)))
        encoded = {c: encode(each) for c, each in sent.items()}
        messages = [len(e.header.SerializeToString()) for e in encoded.values()]
        messages += [sum(map(len, e.chunks())) for e in encoded.values()]
        messages += [said.ByteSize() for said in place.group.shared.values()]
        messages += [place.unmask(c).ByteSize() for c in place.clients]
        sizes.append(messages)
    assert sizes[0] == sizes[1]


def peer(place: int, **facts: Any) -> Any:
    def change(asked):
        for name, value in facts.items():
            setattr(asked.peers[place], name, value)

    return change


def swapped(asked):
    asked.peers[0].channel_key, asked.peers[1].channel_key = (
        asked.peers[1].channel_key, asked.peers[0].channel_key,
    )  # fmt: skip


def again(asked):
    asked.peers.add().CopyFrom(asked.peers[1])


def without(*places: int) -> Any:
    def change(asked):
        for place in sorted(places, reverse=True):
            del asked.peers[place]

    return change


ONE = b"\1" + bytes(31)
WRONG_TO_SHARE = {
    "a short attempt": (lambda a: setattr(a, "attempt", b"x"), "a number of 1 bytes"),
    "nobody": (lambda a: a.peers.__delitem__(slice(None)), "of 0 peers"),
    "two": (without(2, 3), "it takes 3"),
    "without itself": (without(0), "this client among them"),
    "a low threshold": (lambda a: setattr(a, "threshold", 2), "by the config it is 3"),
    "no threshold": (lambda a: setattr(a, "threshold", 0), "by the config it is 3"),
    "twice": (again, "not named once each"),
    "out of order": (peer(0, client=4), "not named once each"),
    "another key of its own": (peer(0, channel_key=ONE), "another key for this client"),
    "keys exchanged": (swapped, "another key for this client"),
    "a point of small order": (peer(1, channel_key=ONE), "client 3: its public key is no usable"),
    "no key": (peer(1, channel_key=b""), "client 3: its public key is no usable"),
    "no most": (lambda a: setattr(a, "most", float("inf")), "count up to inf"),
    "fewer clients": (lambda a: setattr(a, "clients", 3), "is for 3 clients"),
    "one key twice": (lambda a: setattr(a.peers[2], "channel_key", a.peers[1].channel_key),
                      "have one key"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TO_SHARE)
def test_secrets_are_not_shared_with_just_anybody(name, world):
    change, line = WRONG_TO_SHARE[name]
    with pytest.raises(PayloadError, match=line) as refused:
        world.share(change, clients=[2])
    assert "\n" not in str(refused.value)
    assert not (world.path / "2" / "secure-sum").exists()


def test_one_attempt_shares_once(world):
    world.share()
    first = world.group.shared[3]
    world.clients[3] = world.client(3)
    world.share(clients=[3])
    assert world.group.shared[3] == first, "a restart repeats the same bits"
    with pytest.raises(PayloadError, match="asks the same twice, for other peers"):
        world.ask(3, rpc.ORDER_KIND_SHARE, _fewer(world))


def _fewer(world):
    asked = world.group.to_share()
    del asked.peers[3]
    asked.threshold = 2
    return asked


WRONG_TO_TRAIN = {
    "another attempt": (lambda a: setattr(a, "attempt", bytes(16)), "shared no secrets"),
    "a stranger": (peer(1, client=4), "client 4 is a stranger"),
    "another channel": (swapped, "client 2 is a stranger"),
    "too few": (without(1, 2), "2 peers are too few"),
    "another threshold": (lambda a: setattr(a, "threshold", 4), "not those of the shares"),
    "fewer clients": (lambda a: setattr(a, "clients", 3), "not those of the shares"),
    "another most": (lambda a: setattr(a, "most", 1e9), "not those of the shares"),
    "no most": (lambda a: setattr(a, "most", float("nan")), "not those of the shares"),
    "another payload": (lambda a: setattr(a, "payload", bytes(32)), "payload is not the one"),
    "another key of its own": (peer(0, mask_key=ONE), "another mask key for this client"),
    "without itself": (without(0), "another mask key for this client"),
    "a replayed key": (lambda a: setattr(a.peers[2], "mask_key", a.peers[1].mask_key),
                       "have one key"),
    "a point of small order": (peer(1, mask_key=bytes(32)), "client 3: its public key"),
    "a short key": (peer(1, mask_key=b"x"), "client 3: its public key"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TO_TRAIN)
def test_an_upload_is_not_masked_with_just_anybody(name, world):
    world.share()
    change, line = WRONG_TO_TRAIN[name]
    with pytest.raises(PayloadError, match=line):
        world.mask(2, upload(), change)
    world.mask(2, upload())


def test_one_attempt_masks_one_upload(world):
    world.share()
    first = world.mask(2, upload())
    world.clients[2] = world.client(2)
    again = world.mask(2, upload())
    assert torch.equal(first.weights["masked"], again.weights["masked"])
    with pytest.raises(PayloadError, match="gave other numbers"):
        world.mask(2, upload(0.26))
    with pytest.raises(PayloadError, match="asks the same twice, for other peers"):
        world.mask(2, upload(), without(3))
    world.group.counted = (2, 3, 5)
    with pytest.raises(PayloadError, match="masks of other peers"):
        world.unmask(2, without(3))


def counting(*clients: int) -> Any:
    def change(asked):
        del asked.counted[:]
        asked.counted.extend(clients)

    return change


def test_no_sum_with_less_noise_than_epsilon_counts_on_is_opened(world):
    world.share()
    world.take(dict.fromkeys((2, 3, 5), upload()))
    client = SecureClient(2, world.path / "2", bytes([2]) * 32, world.rules, 4, SETTINGS)
    order = world.order(rpc.ORDER_KIND_UNMASK, world.group.to_unmask(2))
    with pytest.raises(PayloadError, match=r"sum of 3 clients .* epsilon counts on the noise of 4"):
        client.answer(order)


@pytest.mark.parametrize(
    ("clients", "line"),
    [
        ((2, 3), "the threshold is 3"),
        ((3, 5, 7), "not of this client and its peers"),
        ((2, 3, 4), "not of this client and its peers"),
        ((2, 2, 3), "not named once each"),
        ((3, 2, 5), "not named once each"),
        ((), "not of this client and its peers"),
    ],
)
def test_no_other_sum_is_opened(clients, line, world):
    world.share()
    world.take(dict.fromkeys((2, 3, 5, 7), upload()))
    with pytest.raises(PayloadError, match=line):
        world.unmask(2, counting(*clients))
    world.unmask(2)


def test_nothing_is_opened_before_an_upload_was_sent(world):
    world.share()
    world.group.counted = (2, 3, 5)
    with pytest.raises(PayloadError, match="has sent no upload"):
        world.unmask(2)


def test_the_sum_of_an_interaction_is_opened_over_one_set_of_clients(world):
    """Also in another attempt, after a restart, and after its commit."""
    world.share()
    world.take(dict.fromkeys((2, 3, 5, 7), upload()))
    first = world.unmask(2)
    world.clients[2] = world.client(2)
    assert world.unmask(2) == first
    with pytest.raises(PayloadError, match="has opened the sum of this interaction over other"):
        world.unmask(2, counting(2, 3, 5))
    world.group = world.attempt(interaction=5)
    world.share(interaction=5, committed=4)
    facts = json.loads((world.path / "2" / "secure-sum" / "00000004.json").read_text())
    assert facts == {"opened": [2, 3, 5, 7]}, "no secret of a committed interaction stays"
    world.group = world.attempt()
    world.share()
    world.take(dict.fromkeys((2, 3, 5), upload()))
    with pytest.raises(PayloadError, match="has opened the sum of this interaction over other"):
        world.unmask(2)


def test_a_share_of_each_peer_is_opened_and_never_both(world):
    world.share()
    world.take(dict.fromkeys((2, 3, 5), upload()))
    said = world.unmask(2)
    assert [(o.client, len(o.own), len(o.pair)) for o in said.opened] == [
        (2, 16, 0), (3, 16, 0), (5, 16, 0), (7, 0, 16),
    ]  # fmt: skip


def test_a_share_that_is_damaged_is_left_to_the_others(world):
    world.share()
    world.group.shared[3].shares[0].sealed = bytes(60)
    world.take(dict.fromkeys((2, 3, 5, 7), upload()))
    said = {c: world.unmask(c) for c in world.clients}
    assert [one.client for one in said[2].opened] == [2, 5, 7]
    assert world.group.open(said)[1] == []
    announced = world.group.shared[5].own_digest
    world.group.shared[5].own_digest = bytes(32)
    assert world.group.open(said)[1] == [5], "its shares tell another secret than it announced"
    world.group.shared[5].own_digest = announced
    world.group.shared[3].shares[1].own_digest = bytes(32)
    assert world.group.open(said) == (None, [3]), "two shares of three are left"


def test_an_answer_that_was_cut_short_was_not_given_and_what_is_above_it_holds(world):
    """Each answer is a line; a version before wrote one without an end, and it holds as well."""
    world.share()
    world.take(dict.fromkeys((2, 3, 5, 7), upload()))
    path = world.path / "2" / "secure-sum" / "00000004.json"
    whole = path.read_text()
    assert whole.count("\n") == 2, "secrets, and the upload"
    path.write_text(whole + '{"opened": [2, 3, 5]')
    first = world.unmask(2)
    path.write_text(
        json.dumps(json.loads(whole.splitlines()[0]) | json.loads(whole.splitlines()[1]))
    )
    assert world.unmask(2) == first
    assert world.unmask(2) == first
    with pytest.raises(PayloadError, match="has opened the sum of this interaction over other"):
        world.unmask(2, counting(2, 3, 5))


def test_secrets_of_a_process_before_are_deleted_and_files_are_read_once(world, monkeypatch):
    world.share()
    world.clients[2] = world.client(2)
    read = list[int]()
    held = SecureClient._held
    monkeypatch.setattr(SecureClient, "_held", lambda self, order: read.append(order.interaction)
                        or held(self, order))  # fmt: skip
    for interaction in (5, 6, 7):
        world.group = world.attempt(interaction=interaction)
        world.share(interaction=interaction, committed=interaction - 1)
    facts = [path.read_text() for path in sorted((world.path / "2" / "secure-sum").glob("*.json"))]
    assert ["pair" in one for one in facts] == [False, False, False, True]
    assert read.count(4) == len(world.clients), "once a client, when it is forgotten"


def test_a_file_that_is_damaged_opens_nothing(world):
    world.share()
    world.take(dict.fromkeys((2, 3, 5, 7), upload()))
    (world.path / "2" / "secure-sum" / "00000004.json").write_text("{")
    with pytest.raises(ArchiveError, match="is damaged; it says what this client has answered"):
        world.unmask(2)
