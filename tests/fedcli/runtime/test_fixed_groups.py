"""A coordinator that wants one upload out of two sums: clients of a fixed group give it nothing."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from fedcli.gate.gate import Gate
from fedcli.gate.privacy_floor import PrivacyFloor
from fedcli.gate.rules import Rules
from fedcli.parts import fixed_group
from fedcli.parts.fixed_group import NAME, FixedGroup
from fedcli.parts.secure_client import SecureSums
from fedcli.parts.secure_peers import check_run
from fedcli.parts.sum_terms import SumTerms
from fedmodels.errors import ArchiveError, ConfigError, PayloadError
from fedmodels.secure_sum.fixed_point import added
from fedmodels.tensors.bundle import Bundle
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.certificates import Authority, init_authority
from tests.conftest import tiny_experiment
from tests.fedcli.runtime.test_secure_attacks import EC, IDS, Certified, Signing
from tests.fedcli.runtime.test_secure_client import GIVEN, upload

FEWER = (2, 3, 5)
NEARLY = Bundle(scalars={"given": 1.0 + 1e-6})
"""A payload that was moved so little that trainings from it come to the same."""


class Site(Certified):
    """Clients 2, 3, 5 and 7, whose site keeps a note of the group of each."""

    def __init__(self, path, authority, site=None, group=IDS, **facts):
        self.site, self.members = site or path / "site", group
        self.site.mkdir(exist_ok=True)
        super().__init__(path, authority, **facts)

    def fixed(self, client):
        return FixedGroup(self.site / NAME.format(client), self.members)

    def summed(self, over=IDS, interaction=4, given=GIVEN):
        """Return the integers that a coordinator opens over some clients."""
        self.group, at = self.attempt(interaction, over, given), {"interaction": interaction}
        self.share(clients=over, **at)
        sent = []
        for client in over:
            order = self.order(rpc.ORDER_KIND_TRAIN, self.group.to_train(client), **at)
            answer = self.clients[client].masked(order, of(client), given, self.form)
            sent.append(self.form.integers(answer))
        self.group.counted, self.group.total = over, added(sent)
        for client in over:
            said = self.ask(client, rpc.ORDER_KIND_AGREE, self.group.to_agree(), **at)
            self.group.agreed[client] = said.signature
        total, closed = self.group.open({c: self.unmask(c, **at) for c in over})
        assert closed == []
        return total


class Changing(Site):
    """Clients of sums that change from round to round, as without fixed groups."""

    def fixed(self, client):
        return None


def of(client):
    """Return what a client uploads: equal trainings come to equal numbers."""
    return upload(client / 8)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    root = tmp_path_factory.mktemp("ours")
    init_authority(root)
    return Authority.read(root)


@pytest.fixture
def world(tmp_path, authority):
    return Site(tmp_path, authority, least=3)


def refused(line, error=PayloadError):
    return pytest.raises(error, match=line)


# --- the difference of two sums -------------------------------------------------------------------


@pytest.mark.parametrize("given", [GIVEN, NEARLY], ids=["replayed", "moved by 1e-6"])
def test_without_a_fixed_group_the_difference_of_two_sums_is_one_upload(given, tmp_path, authority):
    """Both sums are of three certificates or more, and of different interactions."""
    world = Changing(tmp_path, authority, least=3)
    difference = world.summed() - world.summed(FEWER, 5, given)
    assert np.array_equal(difference, world.form.encoded(of(7), {}, world.numbers))


@pytest.mark.parametrize("given", [GIVEN, NEARLY], ids=["replayed", "moved by 1e-6"])
@pytest.mark.parametrize("interaction", [4, 5], ids=["the same interaction", "a later one"])
def test_a_sum_over_fewer_clients_is_refused(given, interaction, world):
    world.summed()
    with refused("over clients 2, 3, 5, and the fixed group of this client is 2, 3, 5, 7") as error:
        world.summed(FEWER, interaction, given)
    assert "\n" not in str(error.value)


def test_fewer_clients_are_refused_before_the_first_sum_as_well(world):
    with refused("the fixed group of this client is 2, 3, 5, 7: it opens the sum of that group"):
        world.summed(FEWER)
    assert not [*world.site.iterdir()], "nothing was opened, so nothing is noted"
    world.summed()


@pytest.mark.parametrize("run", ["another run", "run"])
def test_another_run_of_the_same_settings_opens_no_other_set(run, world, authority, tmp_path):
    """Its config names other groups, its state is new, and the payload is the same."""
    world.summed()
    (tmp_path / "other").mkdir()
    other = Site(tmp_path / "other", authority, world.site, FEWER, least=3, run=run)
    other.held = world.held
    other.clients = {client: other.client(client) for client in IDS}
    with refused("over clients 2, 3, 5, and this client has opened sums over 2, 3, 5, 7 before"):
        other.summed(FEWER, 0)
    other.members = IDS
    other.clients = {client: other.client(client) for client in IDS}
    assert np.array_equal(other.summed(interaction=0), world.summed(interaction=6))


def test_a_run_without_fixed_groups_opens_no_other_set_than_was_noted(world):
    world.summed()
    world.members = None
    world.clients = {client: world.client(client) for client in IDS}
    world.summed(interaction=6)
    with refused("this client has opened sums over 2, 3, 5, 7 before"):
        world.summed(FEWER, 7)


# --- one set, and trainings that are not those of everybody ---------------------------------------

SLOWER = {"training.lr": 1e-30}
"""Settings by which a client's upload is what it was given, so that it adds nothing to a sum."""


@pytest.mark.parametrize("told", [b"t" * 32, b"s" * 32], ids=["settings", "an order's fields"])
def test_a_client_trains_by_no_other_settings_than_its_keys_were_signed_for(told, world):
    """Else all but one would be told to stand still, and the sum of the group were its upload."""
    world.share()
    world.settings = told
    one = world.client(2)
    facts = {} if told != b"s" * 32 else {"settings": table_of(SLOWER)}
    order = world.order(rpc.ORDER_KIND_TRAIN, world.group.to_train(2), **facts)
    with refused("settings, classes or state than when its keys were signed"):
        one.masked(order, of(2), GIVEN, world.form)


@pytest.mark.parametrize(
    "facts",
    [{"new_classes": ["one"]}, {"class_changes": [rpc.ClassChange(old="b", now="a", after=0)]}],
    ids=str,
)
def test_all_clients_sign_for_the_same_classes(facts, world):
    """A client whose classes have become one learns nothing, and adds nothing to a sum."""
    for client in IDS:
        asked, more = world.group.to_share(), facts if client != 7 else {}
        said = world.ask(client, rpc.ORDER_KIND_SHARE, asked, **more)
        world.group.shared[client] = said
    order = world.order(rpc.ORDER_KIND_TRAIN, world.group.to_train(7))
    with refused("client 2: its keys are signed for another cohort, payload, state or settings"):
        world.clients[7].masked(order, of(7), GIVEN, world.form)


def test_all_clients_of_a_fixed_group_begin_from_one_private_state(world):
    """Two sums of which one client begins from another state tell what its upload changed by."""
    for client in IDS:
        more = {"base": 3 if client != 7 else 2}
        said = world.ask(client, rpc.ORDER_KIND_SHARE, world.group.to_share(), **more)
        world.group.shared[client] = said
    for client, peer in ((2, 7), (7, 2)):
        order = world.order(rpc.ORDER_KIND_TRAIN, world.group.to_train(client))
        order.base = 3 if client != 7 else 2
        with refused(f"client {peer}: its keys are signed for another cohort, payload, state"):
            world.clients[client].masked(order, of(client), GIVEN, world.form)


# --- drop-outs ------------------------------------------------------------------------------------


def test_no_mask_is_made_and_nothing_opened_while_a_client_of_the_group_is_missing(world):
    world.share()
    left, asked = [2, 3, 5], world.group.to_train(2)
    del asked.peers[3]
    with refused("over clients 2, 3, 5, and the fixed group"):
        world.clients[2].masked(world.order(0, asked), of(2), GIVEN, world.form)
    world.take({client: of(client) for client in IDS})
    world.group.counted = (2, 3, 5)
    for client in left:
        with refused("over clients 2, 3, 5, and the fixed group"):
            world.ask(client, rpc.ORDER_KIND_AGREE, world.group.to_agree())


# --- crashes, and what is on the disk -------------------------------------------------------------


def test_the_note_is_on_the_disk_before_a_client_agrees(world):
    """A process that is killed then, and starts again, opens that set or none."""
    world.share()
    world.take({client: of(client) for client in IDS})
    assert not [*world.site.iterdir()]
    world.ask(2, rpc.ORDER_KIND_AGREE, world.group.to_agree())
    (note,) = world.site.iterdir()
    assert note.name == "fedtide-group-2.json"
    assert {*json.loads(note.read_text())["members"]} == {*map(str, IDS)}
    assert note.stat().st_mode & 0o777 == 0o600
    world.clients[2] = world.client(2)
    world.agree()
    world.unmask(2)


def test_clients_of_one_host_have_notes_of_their_own(world):
    world.summed()
    assert sorted(path.name for path in world.site.iterdir()) == [NAME.format(c) for c in IDS]


def test_a_damaged_note_lets_nothing_be_opened(world):
    world.summed()
    note = world.site / NAME.format(2)
    for text in ("", "{}", '{"members": 3}', '{"members": {"x": 1}}', "[" * 9999):
        note.write_text(text)
        with refused("is damaged; it says with whom this client opens sums", ArchiveError):
            world.summed(interaction=5)
    note.unlink()  # its owner lets go of the group
    world.summed(interaction=5)


# --- certificates ---------------------------------------------------------------------------------


def test_a_certificate_that_is_renewed_with_its_key_goes_on(world, authority):
    world.summed()
    world.held["7"] = reissued(authority, world.held["7"])
    world.clients[7] = world.client(7)
    world.summed(interaction=5)


def reissued(authority, old):
    """Return a new certificate of the same name and key."""
    made = authority.certificate("fedtide:client:7", old.key.public_key())
    new = object.__new__(Signing)
    new.key, new.shown = old.key, made.public_bytes(Encoding.DER)
    assert new.shown != old.shown
    return new


def test_a_certificate_with_another_key_is_refused_until_the_owner_lets_go(world, authority):
    """Somebody with a second certificate of that name could send what the coordinator knows."""
    world.summed()
    world.held["7"] = Signing(authority, "7", EC())
    world.clients[7] = world.client(7)
    line = r"client 7 has another key than .* issued anew, or .* delete .*fedtide-group-2.json"
    with refused(line):
        world.summed(interaction=5)
    for client in IDS:
        (world.site / NAME.format(client)).unlink()
    world.summed(interaction=5)


# --- before a client joins ------------------------------------------------------------------------

OPEN = {"schedule": {"order": "tasks_outer", "open": True, "rounds": 1, "clients": 4}}
DRAWN = {"schedule": {"clients": 4, "per_round": 3}}


@pytest.mark.parametrize("tables", [OPEN, DRAWN, {"privacy": {"secure_sum": {"fixed": False}}}])
def test_a_site_with_a_least_cohort_joins_no_run_whose_sums_change(tables, world):
    experiment = tiny_experiment(**{"privacy": {"secure_sum": True}, **tables})
    assert not experiment.fixes_groups
    check = partial(check_run, experiment, world.clients[2]._peers)
    with refused("--min-cohort 3: the sums of this run are over other clients", ConfigError):
        check(3)
    check(3, changing=True)
    check(0)


def test_a_floor_with_a_least_cohort_takes_fixed_groups_or_noise_of_clients():
    hides = {"level": "example", "epsilon": 2.0, "delta": 1e-5}
    floor = PrivacyFloor.of("level=example,epsilon=2,delta=1e-5,min-cohort=3")
    floor.check(tiny_experiment(privacy={**hides, "secure_sum": True}))
    with refused("min-cohort=3, and the run's sums are over other clients", ConfigError):
        floor.check(tiny_experiment(privacy={**hides, "secure_sum": {"fixed": False}}))
    assert PrivacyFloor.of("level=client,epsilon=2,delta=1e-5").covers_sums
    assert not floor.covers_sums


@pytest.mark.parametrize(
    ("tables", "line"),
    [
        (OPEN, "fixed = true does not go with .schedule. open = true: clients come, leave"),
        (DRAWN, "fixed = true does not go with .schedule. per_round below clients"),
    ],
)
def test_fixed_groups_are_refused_where_they_cannot_be_kept(tables, line):
    with refused(line, ConfigError):
        tiny_experiment(**{"privacy": {"secure_sum": {"fixed": True}}, **tables})


def test_groups_follow_from_the_ids_alone():
    experiments = [
        tiny_experiment(
            seed=seed, schedule={"clients": 7}, privacy={"secure_sum": {"groups": 2}}
        ) for seed in (1, 2)
    ]  # fmt: skip
    for one in experiments:
        assert one.fixes_groups
        assert one.privacy.secure_sum.group_of_each(7) == [[0, 2, 4, 6], [1, 3, 5]]


def test_a_client_knows_its_group_by_the_config(tmp_path):
    """Of a run with certificates the note lies where the site wants it."""

    experiment = tiny_experiment(schedule={"clients": 7}, privacy={"secure_sum": {"groups": 2}})
    states = SimpleNamespace(path=tmp_path / "states" / "3")
    client: Any = SimpleNamespace(
        client=3, experiment=experiment, states=states, set_up=SimpleNamespace(stores=False)
    )
    part = SecureSums.__new__(SecureSums)
    part.client, part._terms = client, SumTerms(notes=tmp_path)
    rules = experiment.privacy.secure_sum
    found = part._group(3, rules)
    assert not found.of_one_state, "there is no state"
    assert (found.path, found._members) == (tmp_path / "fedtide-group-3.json", [1, 3, 5])
    trusting = rules.model_copy(update={"trust": "coordinator"})
    assert part._group(3, trusting).path.parent == states.path
    client.experiment = tiny_experiment(privacy={"secure_sum": {"fixed": False}})
    assert part._group(3, rules)._members is None
    part._terms = SumTerms(notes=tmp_path, changing=True)
    assert part._group(3, rules) is None


# --- beside the masks -----------------------------------------------------------------------------


def test_a_site_with_a_least_cohort_sends_no_bare_number_beside_its_masks(world):
    """Counts leave, as they were announced; a further number is one that a site has to allow."""
    gate = Gate(rules=Rules.of(min_cohort=3))
    world.share()
    sent = world.mask(2, of(2))
    covered = {"weights/masked": "masked"}
    gate.look_at_upload(sent, covered, ())
    sent.scalars["variance"] = 1.0
    with refused(
        "the upload has scalars/variance, which no mask covers: --min-cohort", ConfigError
    ):
        gate.look_at_upload(sent, covered, ())
    Gate(rules=Rules.of(min_cohort=3, tell=["scalars/variance"])).look_at_upload(sent, covered, ())
    Gate().look_at_upload(sent, covered, ())


@pytest.mark.parametrize("name", ["fedpac", "feddrift", "feddrift-eager", "ifca"])
def test_methods_with_numbers_of_their_own_beside_weights_do_not_go_with_masks(name):
    with refused("needs every upload by itself", ConfigError):
        tiny_experiment(method=name, privacy={"secure_sum": True})


def test_of_two_processes_that_note_a_group_at_a_time_one_is_first(tmp_path, monkeypatch):
    """Both found no note, and each opened a sum over clients of its own."""
    one, other = (FixedGroup(tmp_path / "note.json", group) for group in (IDS, FEWER))
    write, is_first = fixed_group.write_once, [True]

    def meanwhile(path, text, **how):
        if is_first and is_first.pop():
            other.note(dict.fromkeys(FEWER, b"key"), "another run")
        return write(path, text, **how)

    monkeypatch.setattr(fixed_group, "write_once", meanwhile)
    with refused("this client has opened sums over 2, 3, 5 before"):
        one.note(dict.fromkeys(IDS, b"key"), "a run")
    assert one._noted().keys() == {*FEWER}
    assert [*tmp_path.iterdir()] == [tmp_path / "note.json"]
