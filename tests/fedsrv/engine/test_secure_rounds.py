"""Rounds whose uploads are summed under masks: drop-outs, liars, late clients and kills."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from fedcli.data.store.commands import run_partition
from fedcli.parts import secure_client
from fedcli.parts.secure_peers import SecurePeers
from fedmodels.errors import ConfigError, TooFewClients
from fedmodels.methods.fedavg import FedAvg
from fedmodels.tensors.bundle import Bundle
from fedpb.peer_certificates import PeerCertificates
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.certificates import Authority, init_authority, issue
from fedsrv.parts import secure_group
from fedsrv.progress.events import EventLog
from fedsrv.transport.remote_cohort import RemoteCohort
from fedtide.inprocess import launch_in_process, run_in_process
from tests import liars
from tests.conftest import records_of, tiny_experiment
from tests.liars import Stage, silent
from tests.runs import Killed

ADVERTISE, SHARE, UNMASK = rpc.ORDER_KIND_ADVERTISE, rpc.ORDER_KIND_SHARE, rpc.ORDER_KIND_UNMASK
AGREE = rpc.ORDER_KIND_AGREE
TRAIN = rpc.ORDER_KIND_TRAIN
TRUST = {"trust": "coordinator", "fixed": False}
"""Nobody has a certificate here; tests/fedcli/runtime/test_secure_attacks.py has them. Clients may
drop out of a group that is not fixed; test_fixed_sums.py has those that are."""
CLIENTS = 5
"""A threshold of two thirds is four of them."""


def secure(**tables: Any) -> Any:
    """Return an experiment of two interactions, of which four clients of five suffice."""
    given = {
        "schedule": {"rounds": 2, "clients": CLIENTS}, "scenario": {"tasks": 1},
        "server": {"min_clients": 4}, "privacy": {"secure_sum": TRUST}, "evaluate": {"every": 0},
    }  # fmt: skip
    return tiny_experiment(**{**given, **tables})


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory):
    made, root = secure(), tmp_path_factory.mktemp("five") / "data"
    run_partition(made.data, made.scenario, CLIENTS, made.seed, root, Console(quiet=True))
    return root


def on(kind: rpc.OrderKind, lie: Any, interaction: int = 0) -> Any:
    """Return a lie that is told to orders of one kind in one interaction."""

    def told(client, order, answer):
        hit = (order.kind, order.interaction) == (kind, interaction)
        return lie(client, order, answer) if hit else answer

    return told


def honest(client, order, answer):
    return answer


@pytest.fixture(scope="module")
def undisturbed(five, tmp_path_factory):
    """Return the summary of a run in which everybody answers."""
    return run_in_process(secure(), five, tmp_path_factory.mktemp("alone") / "run")


def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave every mask out: what is left is the sum of plain fixed-point numbers."""
    for module in (secure_client, secure_group):
        monkeypatch.setattr(module, "add_mask", lambda *_: None)


def test_masks_change_no_bit_of_the_plain_fixed_point_sum(five, undisturbed, tmp_path, monkeypatch):
    stage = Stage(secure(), five, tmp_path / "masked", honest)
    seen: list[Bundle] = []
    monkeypatch.setattr(stage, "lie", on(TRAIN, lambda c, o, a: (seen.append(a[0]), a)[1]))
    masked = stage.run()
    assert masked["state_sha256"] == undisturbed["state_sha256"]
    record = records_of(stage.out)[0]
    said = {"groups": [[0, 1, 2, 3, 4]], "thresholds": [4], "unopened": []}
    assert record["secure_sum"].items() >= said.items()
    assert not list((stage.out / "server").glob("sum-*"))
    assert [*seen[0].weights] == ["masked"]
    assert "difference_norm" not in record["clients"]["0"]
    plainly(monkeypatch)
    plain = run_in_process(secure(), five, tmp_path / "plain")
    assert plain["state_sha256"] == undisturbed["state_sha256"]


def test_groups_have_thresholds_of_their_own_and_one_sum(tmp_path_factory, tmp_path):
    """Nine clients in three groups: the bits are those of one group, unless a rule combines them.

    A group with too few clients left counts for nothing, and the others go on.
    """
    grouped = {"privacy": {"secure_sum": {"groups": 3, **TRUST}}, "server": {"min_clients": 6}}
    tables = {"schedule": {"rounds": 1, "clients": 9}}
    made, root = secure(**tables), tmp_path / "nine"
    run_partition(made.data, made.scenario, 9, made.seed, root, Console(quiet=True))
    one = run_in_process(made, root, tmp_path / "one")
    two = run_in_process(secure(**tables, **grouped), root, tmp_path / "two")
    assert one["state_sha256"] == two["state_sha256"]
    said = records_of(tmp_path / "two")[0]["secure_sum"]
    assert said["thresholds"] == [2, 2, 2]
    assert sorted({c for group in said["groups"] for c in group}) == [*range(9)]
    median = secure(**{**tables, **grouped, "server": {"min_clients": 6, "reduce": "median"}})
    three = run_in_process(median, root, tmp_path / "three")
    assert three["state_sha256"] != two["state_sha256"]
    gone = said["groups"][1][:2]
    stage = Stage(secure(**tables, **grouped), root, tmp_path / "x", on(TRAIN, silent), liars=gone)
    stage.run()
    record = records_of(stage.out)[0]
    assert record["cohort"] == sorted([*said["groups"][0], *said["groups"][2]])
    assert record["failed"][str(said["groups"][1][2])].startswith("its group has 1 clients left")


def test_no_sum_of_fewer_clients_is_opened_than_epsilon_counts_on(tmp_path):
    """Ten clients in two groups of five, and eight suffice: epsilon counts on the noise of four.

    Two of one group are gone. Three would be enough to open its sum, and it stays closed.
    """
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    privacy = {
        "level": "client", "where": "clients", "noise_multiplier": 2.0, "delta": 1e-2,
        "allow": ["announced", "examples", "loss"],
        "secure_sum": {"groups": 2, "threshold": 0.51, **TRUST},
    }  # fmt: skip
    made = secure(
        schedule={"rounds": 1, "clients": 10}, privacy=privacy, server={"min_clients": 8},
        evaluate={"every": 0, "views": []},
    )  # fmt: skip
    run_partition(made.data, made.scenario, 10, made.seed, tmp_path / "data", Console(quiet=True))

    def two_of_a_group(client, order, answer):
        group = [peer.client for peer in order.secure_sum.peers]
        gone = 0 in group and client in group[:2]
        return silent(client, order, answer) if gone else answer

    lie = on(TRAIN, two_of_a_group)
    stage = Stage(made, tmp_path / "data", tmp_path / "x", lie, liars=range(10))
    stage.run()
    record = records_of(stage.out)[0]
    assert record["secure_sum"]["thresholds"] == [3]
    assert len(record["cohort"]) == 5
    assert 0 not in record["cohort"]
    left = [why for why in record["failed"].values() if why.startswith("its group")]
    assert left == ["its group has 3 clients left for a secure sum; it takes 4"] * 3


@pytest.mark.parametrize("kind", [ADVERTISE, SHARE, TRAIN, UNMASK])
def test_a_client_drops_out(kind, five, tmp_path, monkeypatch):
    """The sum is that of the others; after its upload came, the drop-out counts all the same."""
    lie = on(kind, silent)
    found = Stage(secure(), five, tmp_path / "masked", lie).run()
    cohorts = [record["cohort"] for record in records_of(tmp_path / "masked")]
    assert cohorts == [[0, 1, 2, 3, 4] if kind == UNMASK else [0, 1, 3, 4], [0, 1, 2, 3, 4]]
    plainly(monkeypatch)
    plain = Stage(secure(), five, tmp_path / "plain", lie).run()
    assert found["state_sha256"] == plain["state_sha256"]


@pytest.mark.parametrize("kind", [SHARE, TRAIN, UNMASK])
def test_too_many_drop_out(kind, five, tmp_path):
    stage = Stage(secure(), five, tmp_path / "run", on(kind, silent), liars=(1, 2))
    with pytest.raises(TooFewClients, match=r"client 1 failed in round 1 .*: no \(1 more failed\)"):
        stage.run()
    stage.lie = honest  # what was shared and sent before is not asked for anew
    stage.run(resume=True)
    assert records_of(stage.out)[0]["cohort"] == [0, 1, 2, 3, 4]


def test_a_late_upload_is_turned_away(five, tmp_path, monkeypatch):
    opening, passed = threading.Event(), [0.0]

    def clock() -> float:
        return time.monotonic() + passed[0]

    def lie(client, order, answer):
        if order.kind == UNMASK:
            opening.set()
        elif (client, order.kind, order.interaction) == (2, TRAIN, 0):
            with (cohort := stage.cohort).changed:
                cohort.changed.wait_for(lambda: len(cohort._trips.current.results) == 4, 120)
                passed[0] = 2000.0
                cohort.changed.notify_all()
            opening.wait(120)  # its masks with others are known by then, and not its own
        return answer

    monkeypatch.setattr(liars, "RemoteCohort", partial(RemoteCohort, clock=clock))
    tables = secure(server={"min_clients": 4, "deadline_s": 1000.0})
    stage = Stage(tables, five, tmp_path / "run", lie, liars=range(CLIENTS))
    stage.run()
    assert records_of(stage.out)[0]["cohort"] == [0, 1, 3, 4]
    assert any("no longer wanted" in refused.line for refused in stage.refused)


def test_the_coordinator_is_killed_after_every_phase(five, undisturbed, tmp_path, monkeypatch):
    """All clients are killed with it: nothing but what is on the disk is left."""
    stage, ask = Stage(secure(), five, tmp_path / "run", honest), RemoteCohort.send_and_receive
    for kind in (ADVERTISE, SHARE, TRAIN, UNMASK):

        def dying(self, trip, kind=kind):
            found = ask(self, trip)
            if (trip.sample.kind, trip.sample.interaction) == (kind, 0):
                raise Killed
            return found

        monkeypatch.setattr(RemoteCohort, "send_and_receive", dying)
        with pytest.raises(Killed):
            stage.run(resume=True)
    monkeypatch.undo()
    assert stage.run(resume=True)["state_sha256"] == undisturbed["state_sha256"]


def test_a_killed_coordinator_goes_on_with_the_sum_that_was_opened(five, tmp_path, monkeypatch):
    """A client that is back by then is in no second sum: it would tell that client's upload."""
    stage = Stage(secure(), five, tmp_path / "run", on(TRAIN, silent))
    ask = RemoteCohort.send_and_receive

    def dying(self, trip):
        found = ask(self, trip)
        if trip.sample.kind == UNMASK:
            raise Killed
        return found

    monkeypatch.setattr(RemoteCohort, "send_and_receive", dying)
    with pytest.raises(Killed):
        stage.run()
    monkeypatch.undo()
    stage.lie = honest
    stage.run(resume=True)
    assert [r["cohort"] for r in records_of(stage.out)] == [[0, 1, 3, 4], [0, 1, 2, 3, 4]]


def test_a_cohort_that_is_drawn_too_small_counts_for_nothing(five, tmp_path):
    tables = secure(
        schedule={"rounds": 6, "clients": CLIENTS, "per_round": 3, "sampling": "poisson"}, server={}
    )
    run_in_process(tables, five, tmp_path / "run")
    cohorts = [record["cohort"] for record in records_of(tmp_path / "run")]
    assert {len(cohort) for cohort in cohorts} >= {0, 3}
    assert all(len(cohort) not in (1, 2) for cohort in cohorts)


def changed(change: Any) -> Any:
    def lie(client, order, answer):
        change(answer[1].secure_sum)
        return answer

    return lie


def wrong_share(said: rpc.SecureAnswer) -> None:
    for one in said.opened:
        one.own, one.pair = one.own[::-1], one.pair[::-1]


def test_wrong_shares_are_found_and_not_used(five, undisturbed, tmp_path):
    found = Stage(secure(), five, tmp_path / "run", on(UNMASK, changed(wrong_share))).run()
    assert found["state_sha256"] == undisturbed["state_sha256"]


LIES = {
    "a point of small order": (SHARE, lambda s: setattr(s, "mask_key", bytes(32)), "usable point"),
    "a share too few": (SHARE, lambda s: s.shares.pop(), "with others than 5 peers"),
    "a short share": (SHARE, lambda s: setattr(s.shares[0], "sealed", b"x"), "with others than 5"),
    "a short digest": (SHARE, lambda s: setattr(s, "own_digest", b"x"), "another size"),
    "more than was asked": (SHARE, lambda s: s.opened.add(), "'opened', which was not requested"),
    "no key": (ADVERTISE, lambda s: setattr(s, "channel_key", b""), "another size"),
    "a key of small order": (ADVERTISE, lambda s: setattr(s, "channel_key", bytes(32)), "usable"),
    "a stranger's share": (UNMASK, lambda s: s.opened.add(client=9, own=bytes(16)), "strangers"),
    "two of one peer": (UNMASK, lambda s: s.opened.add(client=0, own=bytes(16)), "twice"),
    "the other secret": (
        UNMASK, lambda s: setattr(s.opened[0], "pair", s.opened[0].own), "than asked for",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_client_that_lies_is_left_out(name, five, tmp_path):
    kind, change, line = LIES[name]
    stage = Stage(secure(schedule={"rounds": 1, "clients": 5}), five, tmp_path / "run", honest)
    stage.lie = on(kind, changed(change))
    stage.run()
    record = records_of(stage.out)[0]
    assert record["cohort"] == ([0, 1, 2, 3, 4] if kind == UNMASK else [0, 1, 3, 4])
    assert any(line in refused.line for refused in stage.refused)


def test_a_replayed_key_throws_out_nobody_else_for_good(five, tmp_path):
    """Two clients say that one key is theirs: neither takes part, and the next round asks again."""
    keys: dict[int, bytes] = {}
    both = threading.Barrier(2)

    def lie(client, order, answer):
        if (order.kind, order.interaction) == (SHARE, 0) and client in (1, 2):
            keys[client] = answer[1].secure_sum.mask_key
            both.wait(60)
            answer[1].secure_sum.mask_key = keys[1]
        return answer

    tables = secure(privacy={"secure_sum": {"threshold": 0.6, **TRUST}}, server={"min_clients": 3})
    stage = Stage(tables, five, tmp_path / "run", lie, liars=(1, 2))
    stage.run()
    records = records_of(stage.out)
    assert [record["cohort"] for record in records] == [[0, 3, 4], [0, 1, 2, 3, 4]]
    assert "another client has said that its key is its own" in records[0]["failed"]["2"]


def test_secrets_that_do_not_open_cost_one_interaction(five, tmp_path):
    """Nothing of it counts, and whose secrets they were is not asked again."""

    def bad(said: rpc.SecureAnswer) -> None:
        for share in said.shares:
            share.own_digest = share.own_digest[::-1]

    stage = Stage(secure(), five, tmp_path / "run", on(SHARE, changed(bad)))
    stage.run()
    first, second = records_of(stage.out)
    assert (first["cohort"], first["secure_sum"]["unopened"]) == ([], [2])
    assert "the secrets of clients 2 do not fit" in first["failed"]["0"]
    assert second["cohort"] == [0, 1, 3, 4]


# --- clients that sign ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signing(tmp_path_factory):
    """Return what lets the clients of a stage sign, each with a certificate of its own."""
    root = tmp_path_factory.mktemp("certs")
    init_authority(root)
    places = {c: issue(root, str(c)) for c in range(CLIENTS)}

    def let(stage: Stage) -> Stage:
        stage.peers = PeerCertificates(lambda: [Authority.read(root).own], "--tls-client-ca")
        stage.signing = lambda c: SecurePeers.of(root / "ca.pem", *places[c], None, CLIENTS - 1)
        return stage

    return let


SIGNED = {"privacy": {"secure_sum": {"fixed": False}}}


def test_a_run_of_clients_that_sign_is_killed_after_every_phase(
    five, undisturbed, tmp_path, monkeypatch, signing
):
    """Signatures change no bit, and a killed coordinator goes on with what was signed."""
    stage = signing(Stage(secure(**SIGNED), five, tmp_path / "run", honest))
    ask, asked = RemoteCohort.send_and_receive, list[rpc.OrderKind]()
    for kind in (ADVERTISE, SHARE, TRAIN, AGREE, UNMASK):

        def dying(self, trip, kind=kind):
            found = ask(self, trip)
            asked.append(trip.sample.kind)
            if (trip.sample.kind, trip.sample.interaction) == (kind, 0):
                raise Killed
            return found

        monkeypatch.setattr(RemoteCohort, "send_and_receive", dying)
        with pytest.raises(Killed):
            stage.run(resume=True)
    monkeypatch.undo()
    assert stage.run(resume=True)["state_sha256"] == undisturbed["state_sha256"]
    assert asked[-2:] == [AGREE, UNMASK]


@pytest.mark.parametrize("kind", [ADVERTISE, SHARE, AGREE])
def test_one_bad_signature_costs_its_client_and_nobody_else(kind, five, tmp_path, signing):
    def exchanged(said: rpc.SecureAnswer) -> None:
        said.signature = said.signature[:-1] + bytes([said.signature[-1] ^ 1])

    tables = secure(schedule={"rounds": 1, "clients": CLIENTS}, **SIGNED)
    stage = signing(Stage(tables, five, tmp_path / "run", on(kind, changed(exchanged))))
    stage.run()
    counted = [0, 1, 2, 3, 4] if kind == AGREE else [0, 1, 3, 4]
    assert records_of(stage.out)[0]["cohort"] == counted
    assert any("the signature is not of what" in refused.line for refused in stage.refused)


def test_a_certificate_of_another_client_costs_its_client_and_nobody_else(five, tmp_path, signing):
    shown: list[bytes] = []
    came = threading.Event()

    def stolen(client, order, answer):
        certificates = answer[1].secure_sum.certificates
        if client == 1:
            shown.extend(certificates)
            came.set()
        else:
            assert came.wait(60)
            certificates[0] = shown[0]
        return answer

    tables = secure(schedule={"rounds": 1, "clients": CLIENTS}, **SIGNED)
    stage = signing(Stage(tables, five, tmp_path / "run", on(ADVERTISE, stolen), liars=(1, 2)))
    stage.run()
    assert records_of(stage.out)[0]["cohort"] == [0, 1, 3, 4]
    assert any("its certificate is that of fedtide:client:1" in r.line for r in stage.refused)


@pytest.mark.parametrize("start", [run_in_process, launch_in_process])
def test_a_run_in_one_process_says_that_it_has_no_certificates(start, five, tmp_path, caplog):
    places = (five, tmp_path / "run") if start is run_in_process else (tmp_path / "run",)
    start(secure(schedule={"rounds": 1, "clients": CLIENTS}, **SIGNED), *places)
    assert 'this run is one with [privacy.secure_sum] trust = "coordinator"' in caplog.text
    assert len(records_of(tmp_path / "run")) == 1


def test_payloads_of_their_own_are_refused(five, tmp_path, monkeypatch):
    """One that makes all others upload zeros would leave a sum of one upload."""

    def broadcast(self, ctx, state):
        own = dict.fromkeys(ctx.cohort, Bundle())
        return state.common, own | {0: Bundle()}

    monkeypatch.setattr(FedAvg, "broadcast", broadcast)
    with pytest.raises(ConfigError, match="fedavg gives clients payloads of their own"):
        run_in_process(secure(), five, tmp_path / "run")


# --- lies about numbers ---------------------------------------------------------------------------


def lifted(by: int) -> Any:
    """Return a lie: the first number under a mask is higher by so much."""

    def lie(client, order, answer):
        masked = answer[0].weights["masked"].clone()
        masked[0] += by
        return replace(answer[0], weights={**answer[0].weights, "masked": masked}), *answer[1:]

    return lie


@pytest.fixture
def lines(monkeypatch):
    """Return the lines of what a run tells."""
    told: list[str] = []
    monkeypatch.setattr(
        EventLog, "tell", lambda log, *_, **facts: told.append(str(facts.get("line")))
    )
    return told


def test_a_number_beyond_all_bounds_costs_one_interaction_and_leaves_a_line(five, tmp_path, lines):
    stage = Stage(secure(), five, tmp_path / "run", on(TRAIN, lifted(-(2**31))))
    stage.run()
    first, second = records_of(stage.out)
    assert (first["cohort"], second["cohort"]) == ([], [0, 1, 2, 3, 4])
    why = first["failed"]["0"]
    assert re.search("no sum of honest uploads: the mean of tensor .* largest = 64, so one of", why)
    assert [line for line in lines if why in line] == [
        f"interaction 1 counts for none of clients 0, 1, 2, 3, 4: {why}"
    ]


def test_a_sum_that_is_far_from_those_before_it_is_told(five, tmp_path, lines):
    """2^30 of the scale 2^22 is 256, and 51 of the mean of five."""
    schedule, sums = {"rounds": 4, "clients": CLIENTS}, {"clip": 0.0, **TRUST}
    made = secure(schedule=schedule, privacy={"secure_sum": sums})
    stage = Stage(made, five, tmp_path / "run", honest)
    stage.lie = on(TRAIN, lifted(2**30), interaction=2)
    stage.run()
    moved = [record["secure_sum"]["moved"] for record in records_of(stage.out)]
    assert moved[2][0]["weights"] == pytest.approx(51.2, rel=0.1)
    far = [line for line in lines if "far from those before it" in line]
    assert len(far) == 1
    assert far[0].startswith("interaction 3: a secure sum is far from those before it (its weights")


def test_a_lie_spoils_the_sum_of_its_group_alone(tmp_path):
    tables = {"schedule": {"rounds": 1, "clients": 6}, "server": {"min_clients": 3},
              "privacy": {"secure_sum": {"groups": 2, **TRUST}}}  # fmt: skip
    made, root = secure(**tables), tmp_path / "six"
    run_partition(made.data, made.scenario, 6, made.seed, root, Console(quiet=True))
    stage = Stage(made, root, tmp_path / "run", on(TRAIN, lifted(-(2**31))), liars=(2,))
    stage.run()
    record = records_of(stage.out)[0]
    (group,) = [group for group in record["secure_sum"]["groups"] if 2 in group]
    assert record["cohort"] == [client for client in range(6) if client not in group]
    assert {*record["failed"]} == {*map(str, group)}


def test_a_claim_of_more_examples_than_were_announced_is_refused(five, tmp_path):
    def claimed(client, order, answer):
        scalars = {"num_examples": 1e5}
        return replace(answer[0], scalars=scalars), *answer[1:]

    stage = Stage(secure(schedule={"rounds": 1, "clients": 5}), five, tmp_path / "run", honest)
    stage.lie = on(TRAIN, claimed)
    stage.run()
    assert records_of(stage.out)[0]["cohort"] == [0, 1, 3, 4]
    assert any("examples were announced" in refused.line for refused in stage.refused)


def test_prototypes_count_what_clients_declared(five, tmp_path):
    """A claim of more examples of a class than were announced is refused."""
    tables = {"method": {"name": "fedproto", "weighting": "examples"}}

    def claimed(client, order, answer):
        counts = answer[0].weights["counts"] * 2
        weights = {**answer[0].weights, "counts": counts}
        return replace(answer[0], weights=weights), *answer[1:]

    stage = Stage(secure(**tables), five, tmp_path / "run", on(TRAIN, claimed))
    stage.run()
    assert [r["cohort"] for r in records_of(stage.out)] == [[0, 1, 3, 4], [0, 1, 2, 3, 4]]
    assert any("examples of class" in refused.line for refused in stage.refused)
