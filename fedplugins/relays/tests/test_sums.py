"""What a relay brings: all but the weights of each client, and one sum; lies about either."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import grpc
import pytest
import torch

from fedmodels.errors import PayloadError, RunFailed
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.tensors.differences import Measured, TrainingBase
from fedpb import PROTOCOL
from fedpb.codec import encode, read_chunk
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.admission import Relay
from fedplugins.relays.grouped_intake import (
    LEFT_OUT_S,
    SUM_S,
    GroupSum,
    OverdueSums,
    check_moved,
    groups_of,
    mean_with_sums,
)
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import AllOf, Answer, Trip, UploadForm
from fedsrv.identity import certificate_guard
from fedsrv.identity.certificate_guard import CertificateGuard
from fedsrv.identity.guard import Peer
from fedsrv.progress.events import EventLog
from fedsrv.transport.inbox import push_limit_s
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.fedsrv.transport.test_results_of_pushes import PROFILE, Context, Refused

SPEC = BundleSpec.of(Bundle({"w": torch.ones(3)})) | scalar_spec("num_examples")
COUNTS = {0: 2.0, 1: 6.0, 2: 4.0}
WEIGHTS = {0: [1.0, -2.0, 0.0], 1: [0.5, 8.0, 0.0], 2: [1.0, 1.0, 4.0]}
DISTANCES = {c: math.dist(WEIGHTS[c], [0.0] * 3) for c in WEIGHTS}
"""From what everybody was given: zeros."""


def count(upload):
    return upload.scalars["num_examples"]


def check(client, upload):
    if upload.scalars["num_examples"] > 100:
        raise PayloadError("more examples than were announced")


def order(client, kind=rpc.ORDER_KIND_TRAIN):
    return rpc.Order(kind=kind, client_id=str(client), interaction=4, trip=9)


class World:
    """A service with three clients, two of which joined through a relay."""

    now = 1000.0

    def __init__(self, directory, deadline_s=None, min_clients=None):
        self.events = EventLog()
        self.cohort = RemoteCohort(
            3, Spool(directory, 1 << 24), self.events, admission=Admission({}, 3),
            deadline_s=deadline_s, min_clients=min_clients, clock=lambda: self.now,
        )  # fmt: skip
        self.service = Service("run", {}, self.cohort, self.events)
        through = {0: Relay("0-1"), 1: Relay("0-1"), 2: None}
        self.tokens = {
            c: self.cohort.join(c, PROFILE, b"", (), through=who) for c, who in through.items()
        }
        self.engine = ThreadPoolExecutor(1)

    def open(self, **until):
        orders = {c: order(c) for c in range(3)}
        given = Bundle({"w": torch.zeros(3)})
        form = UploadForm(SPEC, count, check_upload=check, measures=True)
        self.trip = Trip(orders, given, form=form, until=AllOf(**until))
        self.done = self.engine.submit(self.cohort.send_and_receive, self.trip)
        while self.cohort._trips.current is None:
            pass
        return self

    def header(self, client, **more):
        return rpc.PushHeader(
            client_id=str(client), token=self.tokens[client], kind=rpc.ORDER_KIND_TRAIN,
            interaction=4, trip=9, **more,
        )  # fmt: skip

    def push(self, header, bundle):
        encoded = encode(bundle)
        header.bundle.CopyFrom(encoded.header)
        head = rpc.PushRequest(header=header).SerializeToString()
        return self.service.push(iter([head, *encoded.chunks()]), Context())

    @property
    def issue(self):
        return self.cohort._trips.current.issue

    def promise(self, client, examples=None, distance="measured"):
        scalars = {"num_examples": COUNTS[client] if examples is None else examples}
        header = self.header(client, summed=True, issue=self.issue)
        if distance is not None:
            header.distance.weights = DISTANCES[client] if distance == "measured" else distance
        return self.push(header, Bundle(scalars=scalars))

    def promises(self):
        for client in (0, 1):
            self.promise(client)
        return self

    def whole(self, client):
        weights = {"w": torch.tensor(WEIGHTS[client])}
        scalars = {"num_examples": COUNTS[client]}
        return self.push(self.header(client), Bundle(weights, scalars=scalars))

    def sum_header(self, *clients):
        header = rpc.PushHeader(kind=rpc.ORDER_KIND_TRAIN, interaction=4, trip=9, issue=self.issue)
        for client in clients:
            header.members.add(client_id=str(client), token=self.tokens[client])
        return header

    def sums(self, *clients, weights=None):
        total = sum(COUNTS[c] * torch.tensor(WEIGHTS[c]).double() for c in clients)
        weights = {"w": total} if weights is None else weights
        return self.push(self.sum_header(*clients), Bundle(weights))

    def pass_time(self, seconds, *living):
        """Let time pass for the engine; who lives is heard of."""
        self.now += seconds
        with self.cohort.changed:
            for client in living:
                self.cohort.session(client, self.tokens[client])
            self.cohort.changed.notify_all()

    def stays(self):
        """Tell whether the engine goes on waiting when it has looked again."""
        with pytest.raises(TimeoutError):
            self.done.result(0.05)
        return True

    def failures(self):
        return {e.client: e.detail["reason"] for e in self.events._kept if e.kind == "failed"}


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    made.cohort.stop("the test is over")
    made.engine.shutdown()


def test_a_sum_of_other_training_is_no_longer_wanted(world):
    """It was on its way when the coordinator died, and its clients were ordered anew."""
    world.open().promises()
    stale = world.sum_header(0, 1)
    stale.trip = 7
    with pytest.raises(Refused) as refused:
        world.push(stale, Bundle({"w": torch.zeros(2, dtype=torch.float64)}))
    assert refused.value.code == grpc.StatusCode.ABORTED
    assert not world.failures(), "its clients are still wanted"


RESULTS = {
    "sum": lambda world: (world.sum_header(0, 1), Bundle({"w": torch.ones(3).double()})),
    "promise": lambda world: (
        world.header(0, summed=True, issue=world.issue), Bundle(scalars={"num_examples": 6.0}),
    ),
    "whole": lambda world: (
        world.header(0, issue=world.issue),
        Bundle({"w": torch.ones(3)}, scalars={"num_examples": 2.0}),
    ),
}  # fmt: skip


@pytest.fixture
def restarted(world, tmp_path):
    """Return the same world behind a crash: its clients have joined again, and brought nothing."""
    again = World(tmp_path).open()
    again.tokens = world.tokens
    for client, session in again.cohort.sessions.items():
        session.token = world.tokens[client]
    yield again
    again.cohort.stop("the test is over")
    again.engine.shutdown()


@pytest.mark.parametrize("what", RESULTS)
def test_what_a_relay_sent_before_a_crash_comes_again(what, world, restarted):
    """The same work has the same number, so the number does not tell."""
    stale, again = RESULTS[what](world.open().promises()), restarted
    with pytest.raises(Refused) as refused:
        again.push(*stale)
    assert refused.value.code == grpc.StatusCode.UNAVAILABLE
    assert not again.failures(), "nobody failed"
    assert not again.cohort._trips.current.intake.promised
    again.promises().sums(0, 1)
    again.whole(2)
    assert again.done.result(10).mean["w"].tolist()[1] == 4.0


def test_a_relay_that_names_no_issue_is_told_so(world):
    """One of an earlier release; its clients do not fail."""
    world.open()
    for header in (world.header(0, summed=True), world.sum_header(0, 1)):
        header.issue = 0
        with pytest.raises(Refused, match="the relay is of another release") as refused:
            world.push(header, Bundle(scalars={"num_examples": 2.0}))
        assert refused.value.code == grpc.StatusCode.FAILED_PRECONDITION
    assert not world.failures()


def test_a_sum_and_a_whole_upload_make_the_mean(world):
    world.open()
    world.promise(1)
    world.promise(0)
    assert not world.done.done(), "nothing counts before the sum"
    world.whole(2)
    world.sums(0, 1)
    answers = world.done.result(10)
    by_hand = [(2 * 1 + 6 * 0.5 + 4) / 12, (-4 + 48 + 4) / 12, 16 / 12]
    assert answers.mean["w"].tolist() == torch.tensor(by_hand, dtype=torch.float64).float().tolist()
    assert answers.mean["w"].dtype == torch.float32
    assert list(answers.by_client) == [0, 1, 2]
    assert not any(len(a.upload.weights) for a in answers.by_client.values())
    assert [a.logical_up for a in answers.by_client.values()] == [8 + 3 * 8, 8, 8 + 3 * 4]
    assert [e.client for e in world.events._kept if e.kind == "upload"] == ["2", "0", "1"]


def test_the_order_of_arrival_does_not_matter(world):
    world.open()
    world.whole(2)
    world.promise(0)
    world.promise(1)
    world.sums(1, 0)
    assert world.done.result(10).mean["w"].tolist()[1] == 4.0


def test_uploads_that_count_nothing_have_an_empty_sum(world):
    world.open()
    world.whole(2)
    world.promise(0, 0.0)
    world.promise(1, 0.0)
    world.push(world.sum_header(0, 1), Bundle())
    assert world.done.result(10).mean["w"].tolist() == WEIGHTS[2]


def test_a_member_may_bring_its_upload_whole_after_all(world):
    """So does one that comes after its relay has sent the sum of the others."""
    world.open()
    world.promise(0)
    world.sums(0)
    world.whole(1)
    world.whole(2)
    assert world.done.result(10).mean["w"].tolist()[1] == 4.0


def test_groups_are_added_in_the_order_of_their_lowest_clients():
    """1e16 + 1 rounds to 1e16, so that the order shows in float64: (1e16 - 1e16) + 1 is 1."""
    dtypes = {"w": torch.float64}
    sums = {(4, 5): [1.0], (0, 1): [1e16], (2, 3): [-1e16]}
    held = {group: {"w": torch.tensor(x, dtype=torch.float64)} for group, x in sums.items()}
    answers = {c: Answer(Bundle(scalars={"num_examples": 1.0}), rpc.Report()) for c in range(6)}
    assert mean_with_sums(answers, held, count, dtypes)["w"].item() == 1.0 / 6


def test_a_second_sum_of_the_same_clients_had_arrived_before(world):
    world.open().promises()
    world.sums(0, 1)
    assert world.sums(0, 1).repeated_upload
    assert world.promise(0).repeated_upload
    world.whole(2)
    assert world.done.result(10).mean["w"].tolist()[1] == 4.0


def test_a_client_that_joins_elsewhere_leaves_its_group(world):
    """It is the same client with the same token; its relay is not to wait for it."""
    world.open().promises()
    world.cohort.join(1, PROFILE, world.tokens[1], ())
    assert world.cohort._trips.current.intake.groups == {0: (0,)}
    with pytest.raises(Refused, match="a client of the sum has joined elsewhere") as refused:
        world.sums(0, 1)
    assert refused.value.code == grpc.StatusCode.ABORTED
    world.whole(1)
    world.sums(0)
    world.whole(2)
    assert world.done.result(10).mean["w"].tolist()[1] == 4.0


def pulled(world, *clients):
    """Return the stream of a relay's Pull for clients, and the group that it is told."""
    waiting = [rpc.Waiting(client_id=str(c), token=world.tokens[c]) for c in clients]
    stream = world.service.pull(rpc.PullRequest(waiting=waiting), Context())
    return stream, [*read_chunk(next(stream), rpc.PullHeader)[0].group]


def test_a_relay_learns_of_a_client_that_leaves_its_group_before_it_comes(world):
    """The relay has been restarted, and does not know client 1 yet."""
    world.open()
    stream, group = pulled(world, 0)
    assert group == [0, 1]
    world.cohort.join(1, PROFILE, world.tokens[1], ())
    with pytest.raises(Refused, match="has left its group") as refused:
        next(stream)
    assert refused.value.code == grpc.StatusCode.ABORTED
    assert pulled(world, 0)[1] == [0]


def join_through(world, process, client=1):
    request = rpc.JoinRequest(
        client_id=str(client), token=world.tokens[client], protocol=PROTOCOL, relay="0-1",
        relay_process=process, description=description_of(PROFILE),
    )  # fmt: skip
    return world.service.join(request, Context())


def test_a_second_relay_of_one_name_waits_until_the_first_is_gone(world):
    """Each would wait for clients of the other in every round."""
    join_through(world, b"first", client=0)
    world.open()
    stream, _ = pulled(world, 0)
    join_through(world, b"first")
    for _ in range(2):
        with pytest.raises(Refused, match="another relay with --clients 0-1 is connected") as no:
            join_through(world, b"second")
        assert no.value.code == grpc.StatusCode.UNAVAILABLE
    (note,) = [e for e in world.events._kept if e.kind == "note"]
    assert "give each relay clients of its own" in note.detail["line"]
    stream.close()
    join_through(world, b"second")
    assert world.cohort._trips.current.intake.groups[0] == (0, 1), "the group is the same"


def test_a_client_that_joins_again_through_its_relay_stays_in_its_group(world):
    world.open()
    world.promise(0)
    world.cohort.join(1, PROFILE, world.tokens[1], (), through=Relay("0-1"))
    world.promise(1)
    world.sums(0, 1)
    world.whole(2)
    assert world.done.result(10).mean["w"].tolist()[1] == 4.0


def test_a_refused_promise_fails_its_client_alone(world):
    world.open(needed=2)
    with pytest.raises(Refused, match="more examples than were announced"):
        world.promise(0, 101.0)
    assert list(world.failures()) == ["0"]
    world.promise(1)
    world.sums(1)
    world.whole(2)
    answers = world.done.result(10)
    assert list(answers.by_client) == [1, 2]
    assert answers.mean["w"].tolist()[0] == pytest.approx((6 * 0.5 + 4 * 1) / 10)


HUGE = {"w": torch.tensor([1e9, 0.0, 0.0], dtype=torch.float64)}


@pytest.mark.parametrize(
    ("weights", "line"),
    [
        (HUGE, "holds 1.25e[+]08, beyond 1e[+]06"),
        ({"w": torch.tensor([float("nan")] * 3).double()}, "NaN or infinite"),
        ({"w": torch.ones(3)}, "float32"),
        ({"w": torch.ones(2).double()}, r"\[2\]; expected float64 \[3\]"),
        ({"v": torch.ones(3).double()}, "unexpected tensor"),
        ({}, "'weights/w' is missing"),
    ],
)
def test_a_sum_that_cannot_be_one_fails_its_clients(world, weights, line):
    world.open(needed=1).promises()
    with pytest.raises(Refused, match=line) as refused:
        world.sums(0, 1, weights=weights)
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert world.failures().keys() == {"0", "1"}
    assert all("the sum of its relay 0-1 was refused" in why for why in world.failures().values())
    world.whole(2)
    assert list(world.done.result(10).by_client) == [2]


@pytest.mark.parametrize(
    ("clients", "line"),
    [
        ((0, 1), "all but the weights of client 1 did not come"),
        ((0, 2), "not of one group"),
        ((0, 0), "not of one group"),
        ((2,), "not of one group"),
    ],
)
def test_a_sum_of_others_is_refused(world, clients, line):
    world.open(needed=1)
    world.promise(0)
    with pytest.raises(Refused, match=line):
        world.sums(*clients)


def test_a_client_that_fails_past_its_relay_is_left_out_of_the_sum_that_follows(world):
    """It has its own token; the relay is told to redo its sum, and who is left of the group."""
    world.open(needed=2).promises()
    world.push(world.header(1, failure="no memory"), Bundle())
    with pytest.raises(Refused, match=r"results that have come without it: client 1$") as refused:
        world.sums(0, 1)
    assert refused.value.code == grpc.StatusCode.ABORTED
    waiting = [rpc.Waiting(client_id="0", token=world.tokens[0])]
    stream = world.service.pull(rpc.PullRequest(waiting=waiting), Context())
    assert list(read_chunk(next(stream), rpc.PullHeader)[0].group) == [0]
    world.sums(0)
    world.whole(2)
    assert list(world.done.result(10).by_client) == [0, 2]


def test_a_client_that_counts_two_things_fails(world):
    """A sum fits one of them alone, and the mean would be of another scale."""
    world.open(needed=2).promises()
    world.promise(1)
    with pytest.raises(Refused, match="counts differently than the same upload did before"):
        world.promise(1, 60.0)
    assert list(world.failures()) == ["1"]
    world.sums(0)
    world.whole(2)
    assert list(world.done.result(10).by_client) == [0, 2]


def test_a_sum_takes_the_token_of_each_client(world):
    world.open().promises()
    header = world.sum_header(0, 1)
    header.members[1].token = b"another"
    with pytest.raises(Refused, match="client 1 has no session with this token") as refused:
        world.push(header, Bundle({"w": torch.ones(3).double()}))
    assert refused.value.code == grpc.StatusCode.UNAUTHENTICATED
    assert not world.failures()


def test_a_client_without_a_relay_sends_its_weights(world):
    world.open(needed=1)
    with pytest.raises(Refused, match="the weights of client 2 come whole in this trip"):
        world.promise(2)
    assert list(world.failures()) == ["2"]


def test_a_sum_that_comes_too_late_is_superseded(world):
    world.open().promises()
    world.whole(0)
    with pytest.raises(Refused, match=r"results that have come without it: client 0$") as refused:
        world.sums(0, 1)
    assert refused.value.code == grpc.StatusCode.ABORTED


def received_sum(world):
    """Return the sum of clients 0 and 1, received and checked, but not stored yet."""
    total = sum(COUNTS[c] * torch.tensor(WEIGHTS[c]).double() for c in (0, 1))
    return GroupSum((0, 1), {"w": total}, num_bytes=24, wire_up=60)


def test_an_upload_that_comes_while_its_sum_is_received_counts_once(world):
    world.open().promises()
    trip = world.cohort._trips.current
    world.whole(1)
    assert not world.cohort.end_result(0, trip, received_sum(world))
    world.whole(0)
    world.whole(2)
    answers = world.done.result(10)
    assert answers.mean is None, "no sum is in it"
    sent = {c: a.upload.weights["w"].tolist() for c, a in answers.by_client.items()}
    assert sent == WEIGHTS


def test_a_sum_that_is_received_while_its_trip_closes_changes_nothing(world):
    world.open().promises()
    trip, world.cohort._trips.current = world.cohort._trips.current, None
    assert not world.cohort.end_result(0, trip, received_sum(world))
    assert not trip.intake.sums
    assert trip.intake.promised.keys() == {0, 1}


def trip(spec=SPEC, counts=True, kind=rpc.ORDER_KIND_TRAIN, enough=None):
    form = UploadForm(spec, count if counts else None)
    orders = {c: order(c, kind) for c in range(4)}
    return Trip(orders, Bundle(), form=form, until=AllOf(enough=enough))


RELAYS = {0: "a", 2: "a", 1: "b"}


def test_groups_are_those_of_the_relays():
    assert groups_of(trip(), RELAYS) == {0: (0, 2), 2: (0, 2)}
    assert groups_of(trip(enough=4), RELAYS) != {}


def test_what_cannot_be_summed_has_no_groups():
    scored = BundleSpec.of(Bundle({"eval/w": torch.ones(1), "w": torch.ones(1)}))
    mixed = BundleSpec.of(Bundle({"v": torch.ones(1).double(), "w": torch.ones(1)}))
    for other in (
        trip(counts=False),  # the method reads single uploads
        trip(enough=3),  # some more are asked than are wanted
        trip(scored),
        trip(mixed),
        trip(kind=rpc.ORDER_KIND_EVALUATE),
    ):
        assert groups_of(other, RELAYS) == {}


def test_a_relay_is_told_the_group_once_and_gets_all_orders(world):
    world.open()
    waiting = [rpc.Waiting(client_id=str(c), token=world.tokens[c]) for c in (0, 1)]
    stream = world.service.pull(rpc.PullRequest(waiting=waiting), Context())
    header, _ = read_chunk(next(stream), rpc.PullHeader)
    assert list(header.group) == [0, 1]
    assert [o.following for o in (header.order, *header.more)] == [1, 0]


def test_a_relay_may_have_more_orders_under_way_than_a_process(tmp_path):
    events = EventLog()
    cohort = RemoteCohort(9, Spool(tmp_path, 1 << 20), events, admission=Admission({}, 9))
    for relay, expected in ((Relay("0-8"), 9), (None, RemoteCohort.MAX_AHEAD)):
        tokens = {c: cohort.join(c, PROFILE, b"same", (), through=relay) for c in range(9)}
        orders = {c: order(c) for c in range(9)}
        cohort.send(Trip(orders, Bundle(), form=UploadForm(SPEC)))
        sessions = {c: cohort.session(c, token) for c, token in tokens.items()}
        caller = cohort.caller(sessions, dict.fromkeys(range(9), 0))
        cohort.MAX_AT_ONCE = 1
        with cohort._lock:
            found = [cohort._orders_for(caller) for _ in range(9)]
        assert sum(one is not None for one in found) == expected
        again = cohort.caller(sessions, dict.fromkeys(range(9), 0))
        cohort.MAX_AT_ONCE = 9
        with cohort._lock:
            orders, _ = cohort._orders_for(again)
        assert [order.client_id for order in orders] == [str(c) for c in range(expected)]
        cohort.recall()


@pytest.mark.parametrize("relay", ["1-2", "x" * 200, "0", "1-0", "-0", "0-\u0660", "\x1b[2J"])
def test_a_client_names_a_relay_that_stands_for_it(world, relay):
    """Or the clients of another relay would wait for it in each round."""
    request = rpc.JoinRequest(client_id="0", protocol=PROTOCOL, relay=relay)
    with pytest.raises(Refused, match="client 0 is none of those of the relay") as refused:
        world.service.join(request, Context())
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("certificate", "relay", "may"),
    [("clients:0-1", "0-1", True), ("clients:0-2", "0-9", True), ("client:0", "0-0", True),
     ("relay:0-1", "0-1", True), ("relay:0-1", "0-2", False),
     ("client:0", "0-1", False), ("clients:0-1", "0-2", False)],
)  # fmt: skip
def test_the_certificate_of_a_relay_covers_its_clients(world, monkeypatch, certificate, relay, may):
    """A client could name its own relay, and stay away from it."""
    peer = Peer(f"fedtide:{certificate}", 1, datetime.now(UTC) + timedelta(1))
    world.service.guard = CertificateGuard()
    monkeypatch.setattr(certificate_guard, "peer_of", lambda context: peer)
    who = {"client_id": "0", "token": world.tokens[0], "protocol": PROTOCOL}
    request = rpc.JoinRequest(**who, relay=relay, description=description_of(PROFILE))
    if may:
        assert world.service.join(request, Context()).run_id == "run"
        return
    with pytest.raises(Refused, match="does not cover") as refused:
        world.service.join(request, Context())
    assert refused.value.code == grpc.StatusCode.PERMISSION_DENIED


class Ending(Context):
    """The context of a sum whose frames never come; it tells when they are waited for."""

    def __init__(self):
        self.waited_for, self.ended = threading.Event(), threading.Event()

    def cancel(self):
        self.ended.set()

    def stream(self, head):
        yield head
        self.waited_for.set()
        self.ended.wait(30)


def test_a_relay_has_two_sums_under_way_at_most(world):
    """Each holds a thread, and room for as many bytes as its header claims."""
    world.open().promises()
    header = world.sum_header(0, 1)
    header.bundle.CopyFrom(encode(Bundle({"w": torch.zeros(3, dtype=torch.float64)})).header)
    head = rpc.PushRequest(header=header).SerializeToString()
    calls = [Ending() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        for call in calls:
            pool.submit(world.service.push, call.stream(head), call)
            assert call.waited_for.wait(10)
        ended = [call.ended.is_set() for call in calls]
        for call in calls:
            call.cancel()
    assert ended == [True, False, False]


# --- what a relay measures ------------------------------------------------------------------------


def test_distances_and_cosines_come_with_the_sum(world):
    world.open().promises()
    header = world.sum_header(0, 1)
    header.members[0].cosine, header.members[1].cosine = 0.25, 7.0
    total = sum(COUNTS[c] * torch.tensor(WEIGHTS[c]).double() for c in (0, 1))
    world.push(header, Bundle({"w": total}))
    world.whole(2)
    held = world.done.result(10).measured()
    assert {c: one.norm for c, one in held.items()} == pytest.approx(DISTANCES)
    assert (held[0].cosine, held[1].cosine) == (0.25, None), "7 is no cosine"


@pytest.mark.parametrize("distance", [-1.0, math.nan, math.inf])
def test_what_is_no_norm_fails_its_client(world, distance):
    world.open(needed=2)
    with pytest.raises(Refused, match="says what is no norm"):
        world.promise(0, distance=distance)
    assert list(world.failures()) == ["0"]


@pytest.mark.parametrize("needed", [2, None])
def test_a_relay_that_does_not_say_how_far_weights_moved_is_refused_and_named(world, needed):
    """Without it nothing would bound the sum; the client behind the relay is not to blame."""
    world.open(needed=needed)
    with pytest.raises(Refused, match="did not say how far its weights moved") as refused:
        world.promise(0, distance=None)
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    line = "its relay 0-1 did not say how far its weights moved"
    assert world.failures() == {"0": line}
    if needed is None:
        with pytest.raises(RunFailed, match=line):
            world.done.result(10)
        return
    world.promise(1)
    world.sums(1)
    world.whole(2)
    assert list(world.done.result(10).by_client) == [1, 2]


def test_a_distance_that_is_left_out_of_what_a_relay_measured_is_zero(world):
    """So says a relay that leaves the number out; its sum must not move anything then."""
    world.open(needed=1)
    for client in (0, 1):
        world.promise(client, distance=0.0)
    with pytest.raises(Refused, match=r"and each upload in it by 0 at most"):
        world.sums(0, 1)
    world.whole(2)
    assert list(world.done.result(10).by_client) == [2]


def test_a_sum_that_moves_statistics_farther_than_each_of_its_uploads_is_refused():
    """What a relay leaves out is 0: then the statistics must not have moved at all."""
    names = {"bn/weight": torch.ones(2), "bn/running_mean": torch.zeros(2)}
    given = TrainingBase(Bundle(names))
    moved = given.measured(Bundle({**names, "bn/running_mean": torch.tensor([3.0, 4.0])}))
    members = [Measured({"weights": 0.0, "statistics": norm}) for norm in (1.0, 5.0)]
    check_moved(given, moved, members)
    with pytest.raises(PayloadError, match="it moves the statistics by 5, and each upload in it"):
        check_moved(given, moved, [Measured({"weights": 0.0}), members[0]])


def test_a_sum_that_moves_farther_than_each_of_its_uploads_fails_its_clients(world):
    """The relay could scale the sum, where the server sees no single upload."""
    world.open(needed=1).promises()
    total = sum(COUNTS[c] * torch.tensor(WEIGHTS[c]).double() for c in (0, 1))
    with pytest.raises(Refused, match=r"moves the weights by 55.4, and each upload in it by 8.02"):
        world.sums(0, 1, weights={"w": 10 * total})
    assert all("sum of its relay 0-1 was refused" in why for why in world.failures().values())
    world.whole(2)
    assert list(world.done.result(10).by_client) == [2]


# --- a relay that keeps weights back --------------------------------------------------------------


@pytest.mark.parametrize("needed", [2, None])
def test_a_relay_that_leaves_a_client_out_of_its_sum_is_named(world, needed):
    """The client has answered, as far as it knows: nobody would bring its weights any more."""
    world.open(needed=needed).promises()
    world.sums(0)
    world.whole(2)
    world.pass_time(LEFT_OUT_S - 1, 0, 1, 2)
    assert world.stays()
    world.pass_time(2, 0, 1, 2)
    line = "its relay 0-1 left it out of its sum"
    if needed is None:
        with pytest.raises(RunFailed, match=f"client 1 failed .*{line}"):
            world.done.result(10)
    else:
        answers = world.done.result(10)
        assert list(answers.by_client) == [0, 2]
        assert answers.failed == {1: line}
        assert answers.mean["w"].tolist()[0] == pytest.approx((2 * 1.0 + 4 * 1.0) / 6)
    assert world.failures() == {"1": line}


def test_a_relay_that_brings_no_sum_is_named(world):
    world.open(needed=1).promises()
    world.whole(2)
    world.pass_time(0, 0, 1, 2)
    assert world.stays()
    world.pass_time(SUM_S - 1, 0, 1, 2)
    assert world.stays()
    world.pass_time(2, 0, 1, 2)
    assert list(world.done.result(10).by_client) == [2]
    assert world.failures() == dict.fromkeys("01", "its relay 0-1 brought no sum")


@pytest.mark.parametrize("bytes_per_s", [20e3, 70e3])
def test_nobody_fails_while_a_sum_is_on_its_way_over_a_slow_link(bytes_per_s):
    """A sum is in float64, twice an upload; who was left out sends its upload to the relay, and the
    relay that up: each takes far longer than the limits without the time of the bytes."""
    size = 8 << 20
    on_its_way_s = 2 * size / bytes_per_s
    assert on_its_way_s > max(SUM_S, LEFT_OUT_S)
    assert push_limit_s(2 * size) > on_its_way_s
    sums, left_out = OverdueSums(2 * size), OverdueSums(2 * size)
    left_out.leave_out({1}, 0.0)

    def failed(now):
        one = sums.failures([(0, 1)], (), lambda client: True, now)
        other = left_out.failures([], {0}, lambda client: True, now)
        return [*one], [*other]

    assert failed(0.0) == failed(on_its_way_s) == ([], [])
    brought, left = failed(SUM_S + 2 * size / (16 << 10))
    assert [client for client, _ in brought] == [0, 1]
    assert [client for client, _ in left] == [1]


def test_a_relay_that_waits_for_one_of_its_clients_owes_nothing(world):
    world.open(needed=1)
    world.promise(0)
    world.whole(2)
    for _ in range(3):
        world.pass_time(SUM_S, 0, 1, 2)
        assert world.stays()
    world.promise(1)
    world.sums(0, 1)
    assert list(world.done.result(10).by_client) == [0, 1, 2]


def test_a_relay_that_is_gone_is_not_at_fault(world):
    """It may have been killed with the weights that it held; its clients bring them again."""
    world.open(needed=2).promises()
    world.sums(0)
    world.whole(2)
    world.pass_time(1000, 0, 2)
    assert world.stays(), "client 1 is not connected"
    world.cohort.join(1, PROFILE, world.tokens[1], (), through=Relay("0-1"))
    world.pass_time(LEFT_OUT_S + 1, 1)
    assert world.stays()
    world.promise(1)
    world.sums(1)
    assert list(world.done.result(10).by_client) == [0, 1, 2]


def test_an_upload_whose_answer_the_relay_never_got_comes_whole(world):
    """The relay's time was over, and it sent the sum without a client that was on its way."""
    world.open(needed=2).promises()
    world.sums(0)
    world.pass_time(LEFT_OUT_S - 1, 0, 1, 2)
    world.whole(1)
    world.whole(2)
    assert list(world.done.result(10).by_client) == [0, 1, 2]
    assert not world.failures()


def test_the_deadline_holds_behind_a_relay_that_keeps_weights_back(tmp_path):
    world = World(tmp_path, deadline_s=5.0, min_clients=2).open(needed=2).promises()
    world.sums(0)
    world.whole(2)
    world.pass_time(4, 0, 1, 2)
    assert world.stays()
    world.pass_time(2, 0, 1, 2)
    assert list(world.done.result(10).by_client) == [0, 2]
    world.engine.shutdown()
