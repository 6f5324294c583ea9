"""A coordinator that deviates: clients that know one another by certificates give it nothing.

The coordinator of these tests is the attacker. It changes what it passes on, tells clients
different things, and has keys and certificates of its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key as generate_rsa
from cryptography.hazmat.primitives.serialization import Encoding

from fedcli.parts.secure_peers import SecurePeers, check_run
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.secure_sum.fixed_point import added
from fedmodels.secure_sum.keys import Secrets, own_key, pair_key, private_key, secrets_of
from fedmodels.secure_sum.masks import add_mask
from fedpb.peer_certificates import PeerCertificates
from fedpb.revocation import RevocationList
from fedpb.signatures import channel_statement, sign
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.certificates import Authority, init_authority, revoke
from fedsrv.identity.roles import identity_uri
from tests.conftest import tiny_experiment
from tests.fedcli.runtime.test_secure_client import World, counting, upload, without

IDS = (2, 3, 5, 7)
EC = partial(generate_private_key, SECP256R1())


class Certified(World):
    """The clients have certificates; one that is in no range has its own."""

    trust, ids = "certificates", IDS

    def __init__(self, path, authority, *, least=0, keys=(), names=(), run="run", revoked=None):
        self.authority, self.least, self.run = authority, least, run
        self.revoked, self.names = revoked, {c: str(c) for c in self.ids} | dict(names)
        made = dict(
            zip(sorted(set(self.names.values())), keys or [EC] * len(self.ids), strict=False)
        )
        self.held = {name: Signing(authority, name, key()) for name, key in made.items()}
        super().__init__(path, self.ids)

    def peers(self, client):
        peers = PeerCertificates(lambda: [self.authority.own], "--tls-ca", self.revoked)
        mine = self.held[self.names[client]]
        found = SecurePeers(mine.key, [mine.shown], peers, self.least)
        found.run_id = self.run
        return found

    def agree(self, sets=None):
        """Let clients sign whose uploads came; tell some of them another set."""
        for client in self.group.counted:
            asked = self.group.to_agree()
            if sets:
                counting(*sets[client])(asked)
            said = self.ask(client, rpc.ORDER_KIND_AGREE, asked)
            self.group.agreed[client] = said.signature

    def train(self, *clients):
        sent = self.take(dict.fromkeys(clients or IDS, upload()))
        self.agree()
        return sent


class Signing:
    """A key and its certificate in DER."""

    def __init__(self, authority, name, key):
        self.key, uri = key, identity_uri(name)
        made = authority.certificate(uri, key.public_key())
        authority.note(made, uri)
        self.shown = made.public_bytes(Encoding.DER)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    init_authority(root)
    return Authority.read(root)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Return another authority, such as a coordinator makes for itself."""
    root = tmp_path_factory.mktemp("theirs")
    init_authority(root)
    return Authority.read(root)


@pytest.fixture
def world(tmp_path, authority):
    return Certified(tmp_path, authority)


def refused(line: str) -> Any:
    return pytest.raises(PayloadError, match=line)


def test_keys_of_all_kinds_sign_and_the_sum_opens(tmp_path, authority):
    kinds = [EC, partial(generate_private_key, SECP384R1()), Ed25519PrivateKey.generate,
             partial(generate_rsa, 65537, 2048)]  # fmt: skip
    world = Certified(tmp_path, authority, keys=kinds, least=4)
    world.share()
    world.train()
    total, closed = world.group.open({c: world.unmask(c) for c in IDS})
    assert closed == []
    plain = [world.form.encoded(upload(), {}, world.numbers)] * 4
    assert np.array_equal(total, added(plain))


# --- keys that are exchanged ----------------------------------------------------------------------


def read_by_exchanging_keys(world: World, sent: Any, ours: Secrets, target: int = 2) -> Any:
    """Return the integers of one client's upload, whose mask keys were exchanged for ours."""
    group, vector = world.group, world.form.integers(sent).copy()
    shares = {
        [*group.keys].index(c): one.own
        for c in IDS
        if c != target
        for one in world.unmask(c).opened
        if one.client == target
    }
    secret = secrets_of({target: shares}, group.threshold)[target]
    own = own_key(group.attempt, target, secret)
    add_mask(vector, own, -1)
    for peer in (c for c in IDS if c != target):
        pair = private_key(group.attempt, peer, ours.pair)
        key = pair_key(group.attempt, peer, pair, target, group.shared[target].mask_key)
        add_mask(vector, key, -1 if peer > target else 1)
    return vector


def exchanging(world: World, ours: Secrets, target: int = 2) -> Any:
    def change(asked):
        for peer in asked.peers:
            if peer.client != target:
                peer.mask_key = ours.public(world.group.attempt, peer.client)

    return change


def test_a_trusted_coordinator_reads_an_upload_by_exchanging_mask_keys(tmp_path):
    """That is why the config has to say so: ``trust = "coordinator"``."""
    world, ours = World(tmp_path), Secrets.fresh()
    world.share()
    sent = world.mask(2, upload(0.37), exchanging(world, ours))
    for client in (3, 5, 7):
        world.mask(client, upload())
    world.group.counted = IDS
    found = read_by_exchanging_keys(world, sent, ours)
    assert np.array_equal(found, world.form.encoded(upload(0.37), {}, world.numbers))


def test_mask_keys_that_are_exchanged_are_refused(world):
    world.share()
    with refused(
        "client 3: its keys are signed for another cohort, payload, state or settings .* or were"
    ):
        world.mask(2, upload(), exchanging(world, Secrets.fresh()))
    assert "masked" not in world.clients[2]._held(world.order(0, None)), "nothing was sent"


def test_channel_keys_that_are_exchanged_are_refused(world):
    """With one, the coordinator would read the shares that are sealed for that client."""

    def change(asked):
        asked.peers[1].channel_key = world.clients[7].channel.public
        asked.peers[3].channel_key = world.clients[3].channel.public

    with refused("client 3: the signature is not of what this side knows"):
        world.share(change, clients=[2])


# --- clients that are invented --------------------------------------------------------------------


def invented(world: Certified, by: Signing | None, client: int = 3) -> Any:
    """Put a client's channel key under a key of the coordinator's."""

    def change(asked):
        peer = next(peer for peer in asked.peers if peer.client == client)
        del peer.certificates[:]
        if by is not None:
            peer.certificates.append(by.shown)
            told = channel_statement(world.run, client, peer.channel_key)
            peer.signature = sign(by.key, told)

    return change


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("of another authority", "client 3: its certificate is of no authority of --tls-ca: "),
        ("8", "client 3: its certificate is that of fedtide:client:8"),
        ("relay:0-24", "client 3: its certificate is that of fedtide:relay:0-24"),
        ("watcher", "client 3: its certificate is that of fedtide:watcher"),
        ("server", "client 3: its certificate is of no authority"),
        ("", "client 3: it shows no certificate"),
    ],
)
def test_clients_that_are_invented_are_refused(name, line, world, authority, stranger):
    by = None
    if name:
        whose = (stranger, "3") if name == "of another authority" else (authority, name)
        by = Signing(*whose, EC())
    with refused(line) as error:
        world.share(invented(world, by), clients=[2])
    assert "\n" not in str(error.value)
    assert not (world.path / "2" / "secure-sum").exists(), "no secret was drawn"


def test_a_certificate_that_was_revoked_or_is_damaged_is_refused(tmp_path, authority):
    world = Certified(tmp_path, authority)
    revoke(authority.directory, "5")
    place = authority.directory / "crl.pem"
    world.revoked = RevocationList(place, lambda: [authority.own], "--tls-crl", must_exist=True)
    world.clients[2] = world.client(2)
    serial = x509.load_der_x509_certificate(world.held["5"].shown).serial_number
    with refused(f"client 5: its certificate was revoked on .*{serial:x}"):
        world.share(clients=[2])
    with refused("client 3: its certificate cannot be read"):
        world.share(lambda a: a.peers[1].certificates.__setitem__(0, b"x"), clients=[2])
    with refused("client 3: it shows more certificates"):
        world.share(lambda a: a.peers[1].certificates.extend([b"x"] * 9), clients=[2])


def test_a_cohort_below_the_clients_own_least_is_refused(tmp_path, authority):
    """Whoever has a certificate for several clients can take all their uploads off a sum."""
    world = Certified(tmp_path, authority, least=4)

    def small(asked):
        without(3)(asked)
        asked.threshold = 2

    with refused("of 3 certificates, and this client's --min-cohort is 4"):
        world.share(small, clients=[2])
    for client in IDS:
        (tmp_path / "shared" / str(client)).mkdir(parents=True)
    shared = Certified(
        tmp_path / "shared", authority, least=3, names={2: "2-5", 3: "2-5", 5: "2-5"}
    )
    with refused("of 2 certificates, and this client's --min-cohort is 3"):
        shared.share(clients=[7])
    world.least = 0
    world.share()
    world.clients[2]._peers.least = 4
    with refused("of 3 certificates"):
        world.mask(2, upload(), without(3))


# --- clients that are told different things -------------------------------------------------------


def fewer(asked):
    without(3)(asked)
    asked.threshold = 2


TOLD = {
    "cohorts": fewer,
    "payloads": lambda asked: setattr(asked, "payload", bytes(32)),
    "counts": lambda asked: setattr(asked, "most", 1e12),
    "sizes": lambda asked: setattr(asked, "clients", 400),
}


@pytest.mark.parametrize("what", TOLD)
def test_clients_that_are_told_different_things_find_out(what, world):
    """With another payload, or a count that rounds others to 0, one upload would be the sum."""
    world.share(clients=[2, 5, 7])
    asked = world.group.to_share()
    TOLD[what](asked)
    said = world.ask(3, rpc.ORDER_KIND_SHARE, asked)
    if what == "cohorts":
        said.shares.add().CopyFrom(said.shares[0])
    world.group.shared = dict(sorted([*world.group.shared.items(), (3, said)]))
    with refused("client 3: its keys are signed for another cohort, payload, state or settings"):
        world.mask(2, upload())


def test_other_settings_or_another_run_show(world, tmp_path, authority):
    world.share(clients=[2, 5, 7])
    world.clients[3]._settings = b"o" * 32
    world.share(clients=[3])
    world.group.shared = dict(sorted(world.group.shared.items()))
    with refused("client 3: its keys are signed for another"):
        world.mask(2, upload())
    world.clients[3]._settings = world.clients[2]._settings
    (other := tmp_path / "other").mkdir()
    elsewhere = Certified(other, authority, run="another run")
    elsewhere.held = world.held
    advertised = elsewhere.client(3).answer(rpc.Order(kind=rpc.ORDER_KIND_ADVERTISE))
    world.group = world.attempt(interaction=9)
    with refused("client 3: the signature is not of what this side knows"):
        world.share(lambda a: setattr(a.peers[1], "signature", advertised.signature), clients=[2],
                    interaction=9)  # fmt: skip


def test_another_round_or_payload_than_was_told_is_not_trained(world):
    world.share()
    asked = world.group.to_train(2)
    order = world.order(rpc.ORDER_KIND_TRAIN, asked)
    order.round += 1
    with refused("another round or task"):
        world.clients[2].masked(order, upload(), upload(), world.form)
    order.round -= 1
    with refused("the payload is not the one that all clients were told of"):
        world.clients[2].masked(order, upload(), upload(), world.form)


def test_a_signature_of_an_earlier_attempt_is_of_no_use(world):
    world.share()
    old = world.group.shared[3]
    world.group = world.attempt()
    world.share()
    world.group.shared[3].mask_key, world.group.shared[3].signature = old.mask_key, old.signature
    with refused("client 3: its keys are signed for another"):
        world.mask(2, upload())


def test_without_certificates_shares_of_other_terms_do_not_open(tmp_path):
    """Keys are derived from the terms: also a trusted coordinator that errs learns nothing."""
    world = World(tmp_path)
    world.share(clients=[2, 5, 7])
    asked = world.group.to_share()
    asked.payload = bytes(32)
    world.group.shared[3] = world.ask(3, rpc.ORDER_KIND_SHARE, asked)
    world.group.shared = dict(sorted(world.group.shared.items()))
    world.take(dict.fromkeys((2, 5, 7), upload()))
    assert [one.client for one in world.unmask(2).opened] == [2, 5, 7]


# --- what is opened -------------------------------------------------------------------------------


def test_nobody_opens_masks_before_enough_agreed_on_whose(world):
    world.share()
    world.take(dict.fromkeys(IDS, upload()))
    with refused("before this client agreed on whose"):
        world.unmask(2)
    world.agree()
    world.group.agreed = {c: world.group.agreed[c] for c in (2, 3)}
    with refused("2 clients agreed on whose uploads came, and it takes 3"):
        world.unmask(2)
    world.group.agreed[5] = world.group.agreed[2]
    with refused("client 5: it has not agreed on whose uploads came"):
        world.unmask(2)


def test_two_lists_of_clients_are_not_opened(world):
    """Half of the clients are told that 7 dropped out, so as to get both of its secrets."""
    world.share()
    world.take(dict.fromkeys(IDS, upload()))
    some, all_of_them = (2, 3, 5), IDS
    world.agree({2: some, 3: some, 5: all_of_them, 7: all_of_them})
    said = dict(world.group.agreed)
    for client, counted, believers in ((2, some, (2, 3)), (5, all_of_them, (5, 7))):
        world.group.agreed = said
        with refused(r"client \d: it has not agreed on whose uploads came"):
            world.unmask(client, counting(*counted))
        world.group.agreed = {c: said[c] for c in believers}
        with refused("2 clients agreed on whose uploads came, and it takes 3"):
            world.unmask(client, counting(*counted))
    with refused("has agreed on the sum of this interaction over other clients"):
        world.ask(2, rpc.ORDER_KIND_AGREE, world.group.to_agree())
    world.clients[2] = world.client(2)  # killed and started again
    with refused("has agreed on the sum of this interaction over other clients"):
        world.ask(2, rpc.ORDER_KIND_AGREE, world.group.to_agree())


def test_after_a_roll_back_no_other_share_is_opened(world):
    """A new attempt opens the sum over the same clients, or none."""
    world.share()
    world.train(2, 3, 5)
    first = world.unmask(2)
    assert [(o.client, bool(o.own), bool(o.pair)) for o in first.opened][-1] == (7, False, True)
    world.group = world.attempt()
    world.share()
    world.take(dict.fromkeys(IDS, upload()))
    with refused("has opened the sum of this interaction over other clients"):
        world.agree()
    world.group.counted = (2, 3, 5)
    world.agree()
    again = world.unmask(2)
    assert [(o.client, bool(o.own)) for o in again.opened] == [
        (o.client, bool(o.own)) for o in first.opened
    ]


# --- before a client joins ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("secure", "least", "line"),
    [
        (False, 3, "--min-cohort 3: this run has no .privacy. secure_sum, so that its coordinator"),
        ({"trust": "coordinator"}, 3, "--min-cohort 3: this run trusts its coordinator"),
        (True, 0, "join with --tls-ca, --tls-cert and --tls-key"),
        (True, 4, "--min-cohort 4: a secure sum of this run is of 3 clients"),
    ],
)
def test_a_client_joins_no_run_that_asks_for_less(secure, least, line, world):
    experiment = tiny_experiment(privacy={"secure_sum": secure})
    peers = None if not least else world.clients[2]._peers
    with pytest.raises(ConfigError, match=line) as error:
        check_run(experiment, peers, least)
    assert "\n" not in str(error.value)


def test_only_the_certificate_of_a_client_signs(authority, tmp_path):
    relay = Signing(authority, "relay:0-9", EC())
    peers = SecurePeers(relay.key, [relay.shown], PeerCertificates(lambda: [], "--tls-ca"))
    with pytest.raises(ConfigError, match="--tls-cert is that of fedtide:relay:0-9, and secure"):
        check_run(tiny_experiment(privacy={"secure_sum": True}), peers, 0)
