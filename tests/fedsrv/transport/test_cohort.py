import json
import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from fedmodels.errors import PayloadError, RunFailed
from fedmodels.tensors.bundle import EVALUATOR, Bundle
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import AllOf, Answer, AnyOf, StateLost, Trip, UploadForm
from fedsrv.progress.events import EventLog
from fedsrv.state.history import LossTooLarge
from fedsrv.transport.refusals import AlreadyConnected, SetOut, Superseded, UnknownSession
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.sessions import client_id_of
from fedsrv.transport.spool import Spool

PROFILE = json.dumps(
    {
        "format": 1,
        "input_shape": [4],
        "num_classes": 2,
        "tasks": [{"train": [1, 1], "test": [1, 1]}],
    }
)
REPEATED = "repeated"


class World:
    """A cohort, an engine in a thread of its own, and clients that do as they are told."""

    def __init__(self, directory, num_clients=3, **options):
        self.events = EventLog()
        self.cohort = RemoteCohort(
            num_clients, Spool(directory, 1 << 20), self.events, admission=Admission({}), **options
        )
        self.cohort.MAX_AT_ONCE = 1
        self.engine = ThreadPoolExecutor(1)
        self.issues = {}

    def join(self, client, token=b"", versions=()):
        self.issues.pop(client, None)
        return self.cohort.join(client, PROFILE, token, versions)

    def join_all(self, clients=(0, 1, 2)):
        self.tokens = {c: self.join(c) for c in clients}
        return self.tokens

    def send_and_receive(self, trip):
        """Begin an exchange; wait until clients can see it."""
        future = self.engine.submit(self.cohort.send_and_receive, trip)
        until(lambda: self.cohort._trips.current is not None or future.done())
        return future

    def pull(self, *clients, wait_s=30.0):
        """Wait for an order as a Pull does; None if none comes in time."""
        waiting = {c: self.cohort.session(c, self.tokens[c]) for c in clients}
        end = time.monotonic() + wait_s
        timer = threading.Timer(wait_s + 0.01, self.cohort.wake)
        timer.start()
        issues = {c: self.issues.get(c, 0) for c in clients}
        caller = self.cohort.caller(waiting, issues)
        found = self.cohort.next_orders(caller, lambda: time.monotonic() < end)
        timer.cancel()
        if found is None:
            return None
        (order,), _ = found
        client = EVALUATOR if order.client_id == EVALUATOR else int(order.client_id)
        self.issues[client] = order.issue  # the next Pull says so
        return order

    def push(self, client, order, value=0.0, failure=""):
        """Return what the cohort makes of a result: taken, dropped, or repeated."""
        header = rpc.PushHeader(
            client_id=str(client), kind=order.kind, interaction=order.interaction, trip=order.trip
        )
        trip = self.cohort.begin_result(client, header)
        if trip is None:
            return REPEATED
        upload = Bundle(weights=as_received(value))
        result = Answer(upload, rpc.Report(), upload.num_bytes(), wire_up=10)
        return self.cohort.end_result(client, trip, failure or result)

    def answer(self, *clients):
        for client in clients:
            self.push(client, self.pull(client))


def as_received(value):
    """Return weights in one block, as the codec makes them."""
    tensors = {"w": torch.tensor([value])}
    names, layout = names_and_layout(tensors)
    block = layout.empty()
    layout.views(block)[0].copy_(tensors["w"])
    return PackedWeights(names, layout, layout.clear(block))


def until(condition, wait_s=30.0):
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


def order_of(client, interaction=0, kind=rpc.ORDER_KIND_TRAIN, trip=0):
    return rpc.Order(
        kind=kind, client_id=str(client), interaction=interaction, round=interaction, trip=trip
    )


def trip_to(*clients, interaction=0, kind=rpc.ORDER_KIND_TRAIN, personal=None, **until):
    orders = {c: order_of(c, interaction, kind) for c in clients}
    form = UploadForm(count=lambda upload: 1.0)
    given = Bundle(weights={"w": torch.zeros(3)})
    return Trip(orders, given, personal or {}, form, AllOf(**until))


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    made.join_all()
    yield made
    made.cohort.stop("the test is over")
    made.engine.shutdown()


def values(results):
    return {c: r.upload.weights["w"].item() for c, r in results.by_client.items()}


# --- orders ---------------------------------------------------------------------------------------


def test_an_order_is_given_once(world):
    future = world.send_and_receive(trip_to(0, 1, interaction=4))
    world.cohort.commit(3, 2)
    order = world.pull(0)
    assert (order.client_id, order.interaction, order.kind) == ("0", 4, rpc.ORDER_KIND_TRAIN)
    assert (order.committed, order.durable) == (3, 2)
    assert world.pull(0, wait_s=0.05) is None, "client 0 has its order already"
    assert world.pull(0, 1).client_id == "1", "a host asks for all its clients"
    assert world.pull(2, wait_s=0.05) is None, "client 2 is not in the cohort"
    assert not future.done()


def test_a_process_gets_a_few_orders_ahead(tmp_path):
    """Orders it cannot begin yet would be in vain if the trip closed without them."""
    world = World(tmp_path, num_clients=6)
    clients = range(6)
    world.join_all(clients)
    world.send_and_receive(trip_to(*clients))
    members = {c: world.cohort.session(c, world.tokens[c]) for c in clients}
    caller = world.cohort.caller(members, dict.fromkeys(clients, 0))
    orders = [world.cohort.next_orders(caller, lambda: True)[0][0] for _ in range(3)]
    assert [order.client_id for order in orders] == ["0", "1", "2"]
    with ThreadPoolExecutor(1) as pool:
        fourth = pool.submit(world.cohort.next_orders, caller, lambda: True)
        until(lambda: caller.is_full)
        assert not fourth.done()
        world.push(1, orders[1])
        assert fourth.result(30)[0][0].client_id == "3"
    world.cohort.stop("the test is over")
    world.engine.shutdown()


def test_an_order_tells_how_many_follow_it_to_the_same_process(tmp_path):
    """So that a relay knows for whom to wait."""
    world = World(tmp_path, num_clients=6)
    world.cohort.MAX_AHEAD = 5
    world.join_all(range(6))
    world.send_and_receive(trip_to(*range(6)))
    members = {c: world.cohort.session(c, world.tokens[c]) for c in range(5)}
    caller = world.cohort.caller(members, dict.fromkeys(range(5), 0))
    orders = [world.cohort.next_orders(caller, lambda: True)[0][0] for _ in range(5)]
    assert [order.following for order in orders] == [4, 3, 2, 1, 0]
    assert world.pull(5).following == 0
    world.cohort.stop("the test is over")
    world.engine.shutdown()


def test_a_new_call_takes_the_place_of_the_old_one(world):
    members = {0: world.cohort.session(0, world.tokens[0])}
    old = world.cohort.caller(members, {0: 0})
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(world.cohort.next_orders, old, lambda: True)
        until(lambda: members[0].is_waiting)
        new = world.cohort.caller(members, {0: 0})
        assert waits.result(30) is None
    world.send_and_receive(trip_to(0))
    assert world.cohort.next_orders(old, lambda: True) is None
    assert world.cohort.next_orders(new, lambda: True)[0][0].client_id == "0"


def test_clients_that_wait_are_told_at_once(world):
    with ThreadPoolExecutor(3) as pool:
        pulls = [pool.submit(world.pull, c) for c in (0, 1, 2)]
        until(lambda: all(world.cohort.sessions[c].is_waiting for c in (0, 1, 2)))
        begun = time.monotonic()
        future = world.send_and_receive(trip_to(0, 1, 2))
        orders = [p.result(30) for p in pulls]
        assert time.monotonic() - begun < 2
    assert [o.client_id for o in orders] == ["0", "1", "2"]
    for client, order in enumerate(orders):
        assert world.push(client, order) is True
    assert future.result(30).failed == {}


def test_a_result_wakes_no_client_that_waits(world, monkeypatch):
    """Else N results wake N clients N times."""
    future = world.send_and_receive(trip_to(0, 1))
    order, other = world.pull(0), world.pull(1)
    looks = []
    looked = world.cohort._orders_for
    monkeypatch.setattr(world.cohort, "_orders_for", lambda c: looks.append(c) or looked(c))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(world.pull, 2)
        until(lambda: looks)
        before = len(looks)
        assert world.push(0, order) is True
        assert world.push(1, other, failure="no")
        assert len(looks) == before
        with pytest.raises(RunFailed):
            future.result(30)
        world.send_and_receive(trip_to(2))
        assert waits.result(30).client_id == "2"


def test_more_clients_than_anything_wait_together(tmp_path):
    world = World(tmp_path, 40)
    world.join_all(range(40))
    with ThreadPoolExecutor(40) as pool:
        done = pool.map(lambda c: world.push(c, world.pull(c), float(c)), range(40))
        results = world.send_and_receive(trip_to(*range(40))).result(10)
        assert all(done)
    assert values(results) == {c: float(c) for c in range(40)}


def test_a_session_remembers_so_many_states_and_no_more(world):
    """A Join of 4 MiB may list a million; kept as they are, they would take 55 MiB a client."""
    world.join(0, world.tokens[0], range(1_000_000))
    assert world.cohort.versions()[0] == tuple(range(990_000, 1_000_000))
    session = world.cohort.session(0, world.tokens[0])
    session.add_version(1_000_000)
    assert (session.versions[0], session.versions[-1]) == (990_001, 1_000_000)


def test_an_order_is_issued_anew_after_a_new_trip(world):
    """A new trip for the same interaction, as after a roll-back, has another issue."""
    world.cohort.require(lambda client, versions: client != 2, {}, -1)
    future = world.send_and_receive(trip_to(0, 1))
    first = world.pull(0)
    world.join(2, world.tokens[2])
    with pytest.raises(StateLost):
        future.result(30)
    world.cohort.versions()
    world.send_and_receive(trip_to(0, 1))
    again = world.pull(0)
    assert again.interaction == first.interaction
    assert again.issue != first.issue
    assert again.issue


def test_an_order_is_issued_anew_to_a_client_that_joins_again(world):
    world.send_and_receive(trip_to(0, 1))
    first = world.pull(0)
    assert world.join(0, world.tokens[0]) == world.tokens[0]
    assert world.pull(0) == first


def test_clients_that_answered_are_not_asked_again(world):
    world.send_and_receive(trip_to(0, 1, 2))
    assert world.push(0, world.pull(0))
    assert world.push(1, world.pull(1), failure="out of memory")
    for client in (0, 1):
        world.join(client, world.tokens[client])
        assert world.pull(client, wait_s=0.05) is None


# --- sessions -------------------------------------------------------------------------------------


def test_an_id_is_connected_once(world):
    for token in (b"", b"guess", world.tokens[1]):
        with pytest.raises(AlreadyConnected, match=r"client 0 is connected already; if .* 15 s"):
            world.join(0, token)


def test_the_token_takes_over(world):
    with ThreadPoolExecutor(1) as pool:
        old = pool.submit(world.pull, 0)
        until(lambda: world.cohort.sessions[0].is_waiting)
        assert world.join(0, world.tokens[0]) == world.tokens[0]
        with pytest.raises(UnknownSession, match="took over client 0"):
            old.result(30)
    world.send_and_receive(trip_to(0))
    assert world.pull(0).client_id == "0"


def test_a_lease_runs_out(world, monkeypatch):
    """Without a sign of life the id is free; the newcomer gets a token of its own."""
    monkeypatch.setattr(RemoteCohort, "lease_s", 0.05)
    time.sleep(0.06)
    token = world.join(0)
    assert token != world.tokens[0]
    with pytest.raises(UnknownSession, match="join again"):
        world.cohort.session(0, world.tokens[0])
    world.cohort.session(0, token)


def test_a_waiting_client_needs_no_other_sign_of_life(world, monkeypatch):
    monkeypatch.setattr(RemoteCohort, "lease_s", 0.05)
    with ThreadPoolExecutor(1) as pool:
        pull = pool.submit(world.pull, 0)
        until(lambda: world.cohort.sessions[0].is_waiting)
        time.sleep(0.1)
        with pytest.raises(AlreadyConnected):
            world.join(0)
        world.send_and_receive(trip_to(0))
        assert pull.result(30).client_id == "0"


def test_a_session_given_back_is_free_at_once(world):
    world.cohort.leave(0, "finished")
    assert world.join(0) != world.tokens[0]


def test_the_end_waits_for_clients_whose_sessions_were_forgotten(tmp_path):
    """As where who passes calls on hears of the end before they have joined again."""
    world = World(tmp_path, 2)
    world.join_all(range(2))
    cohort = world.cohort

    def is_expected():
        with cohort.changed:
            return cohort._is_expected(deque(), returning=False)

    cohort.leave(0, "finished")
    cohort.forget()
    assert is_expected(), "client 1 has not heard of it"
    world.join(1)
    assert is_expected()
    cohort.leave(1, "finished")
    assert not is_expected(), "client 0 had left before"


def test_the_end_does_not_look_at_all_clients_whenever_one_leaves(tmp_path, monkeypatch):
    """With 10,000 clients that took longer than all that they said."""
    world = World(tmp_path, 40)
    world.join_all(range(40))
    looks, is_there = [], world.cohort.presence.is_there
    monkeypatch.setattr(world.cohort.presence, "is_there", lambda c: looks.append(c) or is_there(c))
    staying = deque()

    def is_expected():
        with world.cohort.changed:
            return world.cohort._is_expected(staying, returning=False)

    for client in range(40):
        assert is_expected()
        world.cohort.leave(client, "finished")
    world.join(0)
    assert is_expected(), "it came back meanwhile"
    world.cohort.leave(0, "finished")
    assert not is_expected()
    assert len(looks) < 6 * 40


def test_a_restarted_server_knows_the_tokens_of_state_directories(tmp_path):
    world = World(tmp_path)
    token = b"0123456789abcdef"
    assert world.join(0, token) == token
    world.cohort.session(0, token)


def test_unknown_sessions(world):
    for client, token in ((0, b""), (0, world.tokens[1]), (EVALUATOR, b"")):
        with pytest.raises(UnknownSession):
            world.cohort.session(client, token)


def test_a_client_with_another_problem_is_not_admitted(world):
    other = json.dumps({**json.loads(PROFILE), "input_shape": [5]})
    world.cohort.leave(0, "")
    with pytest.raises(PayloadError, match="client 0 has inputs"):
        world.cohort.join(0, other, b"", ())


def test_gather_waits_for_everybody(tmp_path):
    world = World(tmp_path, expects_evaluator=True)
    future = world.engine.submit(world.cohort.gather)
    world.join_all([2, 0, 1])
    time.sleep(0.05)
    assert not future.done()
    world.join(EVALUATOR)
    assert future.result(30) == dict.fromkeys((0, 1, 2), PROFILE)
    assert list(future.result()) == [0, 1, 2]
    assert world.cohort.has_evaluator()


@pytest.mark.parametrize(
    "text", ["3", "-1", "", "00x", "٣", "Evaluator", "1.0", "99999999999999999"]
)
def test_ids_that_are_none(text):
    with pytest.raises(PayloadError, match="none of this run's: 0 to 2"):
        client_id_of(text, 3)


def test_ids():
    assert [client_id_of(t, 3) for t in ("0", "2", EVALUATOR)] == [0, 2, EVALUATOR]


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_uploads_come_out_in_client_order(tmp_path, seed):
    world = World(tmp_path, 12)
    world.join_all([*range(12), EVALUATOR])
    everybody = [*range(12), EVALUATOR]
    future = world.send_and_receive(trip_to(*everybody, kind=rpc.ORDER_KIND_EVALUATE))
    random.Random(seed).shuffle(everybody)
    for client in everybody:
        number = -1.0 if client == EVALUATOR else float(client)
        assert world.push(client, world.pull(client), number)
    results = future.result(30)
    assert list(results.by_client) == [*range(12), EVALUATOR]
    assert list(values(results).values()) == [*map(float, range(12)), -1.0]
    assert results.wire_up == 130


def test_a_repeated_result_is_dropped(world):
    future = world.send_and_receive(trip_to(0, 1))
    order = world.pull(0)
    assert world.push(0, order, 1.0) is True
    assert world.push(0, order, 2.0) == REPEATED
    assert world.push(1, world.pull(1), 3.0) is True
    assert values(future.result(30)) == {0: 1.0, 1: 3.0}
    world.cohort.commit(0, -1)
    assert world.push(0, order, 2.0) == REPEATED, "its interaction is committed"


def test_two_results_at_once(world):
    """Both began before either ended: the first to end counts."""
    future = world.send_and_receive(trip_to(0))
    order = world.pull(0)
    header = rpc.PushHeader(kind=order.kind, interaction=order.interaction, trip=order.trip)
    trips = [world.cohort.begin_result(0, header) for _ in range(2)]
    results = [Answer(Bundle(weights={"w": torch.tensor([v])}), rpc.Report()) for v in (1.0, 2.0)]
    assert world.cohort.end_result(0, trips[1], results[1]) is True
    assert world.cohort.end_result(0, trips[0], results[0]) is False
    assert values(future.result(30)) == {0: 2.0}


def test_results_nobody_waits_for(world):
    future = world.send_and_receive(trip_to(1))
    world.push(1, world.pull(1))
    future.result(30)
    with pytest.raises(Superseded, match="interaction 1 is no longer wanted"):
        world.push(0, order_of(0))
    world.send_and_receive(trip_to(0, 1, interaction=5))
    for other in (
        order_of(0, 4),
        order_of(0, 6),
        order_of(0, 5, rpc.ORDER_KIND_EVALUATE),
        order_of(2, 5),
    ):
        with pytest.raises(Superseded):
            world.push(int(other.client_id), other)


def test_results_of_another_evaluation_trip(world):
    """The models of another trip are others; the numbers tell them apart."""
    world.send_and_receive(trip_to(0, kind=rpc.ORDER_KIND_EVALUATE))
    with pytest.raises(Superseded):
        world.push(0, order_of(0, 0, rpc.ORDER_KIND_EVALUATE, trip=1))


def ordered_before_a_crash(directory, **facts):
    """Return the order that client 0 got from a coordinator that died since."""
    directory.mkdir()
    before = World(directory)
    before.join_all()
    before.send_and_receive(trip_to(0, interaction=7, **facts))
    order = before.pull(0)
    before.cohort.stop("it died")
    before.engine.shutdown()
    return order


@pytest.mark.parametrize("kind", [rpc.ORDER_KIND_TRAIN, rpc.ORDER_KIND_EVALUATE])
def test_a_result_from_before_a_crash_of_the_server_counts(world, tmp_path, kind):
    """The interaction is issued anew; the client need not do it again."""
    order = ordered_before_a_crash(tmp_path / "before", kind=kind)
    future = world.send_and_receive(trip_to(0, interaction=7, kind=kind))
    assert world.push(0, order, 4.0) is True
    assert values(future.result(30)) == {0: 4.0}


@pytest.mark.parametrize(
    "kind", [rpc.ORDER_KIND_TRAIN, rpc.ORDER_KIND_EVALUATE, rpc.ORDER_KIND_FINISH]
)
@pytest.mark.parametrize("differs", ["common", "personal", "base"])
def test_a_result_that_began_elsewhere_does_not_count(world, tmp_path, kind, differs):
    """What came before was computed again without somebody, and the payload is another one."""
    stale = ordered_before_a_crash(tmp_path / "before", kind=kind)
    again = trip_to(0, interaction=7, kind=kind)
    if differs == "base":
        again.orders[0].base = 5
    elif differs == "common":
        again = replace(again, common=Bundle(weights={"w": torch.ones(3)}))
    else:
        again = replace(again, personal={0: Bundle(weights={"own": torch.zeros(1)})})
    future = world.send_and_receive(again)
    with pytest.raises(Superseded):
        world.push(0, stale, 4.0)
    assert world.push(0, world.pull(0), 5.0) is True
    assert values(future.result(30)) == {0: 5.0}


def test_what_the_payload_counts_for_each_client(world):
    personal = {1: Bundle(weights={"own": torch.zeros(5)})}
    future = world.send_and_receive(trip_to(0, 1, personal=personal))
    world.answer(0, 1)
    found = {c: r.logical_down for c, r in future.result(30).by_client.items()}
    assert found == {0: 12, 1: 32}


def test_training_for_what_is_committed_is_pointless(world):
    world.cohort.commit(3, -1)
    assert not world.cohort.is_superseded(3), "before its first trip it cannot know"
    world.send_and_receive(trip_to(0, interaction=4))
    assert [world.cohort.is_superseded(i) for i in (-1, 0, 3, 4)] == [False, True, True, False]


# --- deadlines and failures -----------------------------------------------------------------------


def test_a_deadline_closes_with_enough(tmp_path):
    world = World(tmp_path, deadline_s=0.2)
    world.join_all()
    begun = time.monotonic()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    late = world.pull(1)
    for client in (2, 0):
        world.push(client, world.pull(client), float(client))
    results = future.result(30)
    assert time.monotonic() - begun >= 0.2
    assert values(results) == {0: 0.0, 2: 2.0}
    assert results.failed == {}
    with pytest.raises(Superseded):
        world.push(1, late)


def test_an_answer_after_a_deadline_is_late(tmp_path):
    """The interaction went on without client 1, and is committed: its upload is not taken for one
    that came twice.
    """
    world = World(tmp_path, deadline_s=0.1)
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, needed=1))
    late = world.pull(1)
    world.push(0, world.pull(0))
    future.result(30)
    world.cohort.commit(0, -1)
    with pytest.raises(Superseded):
        world.push(1, late)
    assert world.push(0, order_of(0)) == REPEATED


def test_a_result_of_a_session_that_is_forgotten_meanwhile(world):
    """A relay forgets all sessions while a result is on its way to the coordinator above."""
    future = world.send_and_receive(trip_to(0))
    world.pull(0)
    trip = world.cohort._trips.current
    world.cohort.sessions.clear()
    assert world.cohort.end_result(0, trip, "its place is gone")
    with pytest.raises(RunFailed):
        future.result(30)


def test_a_late_answer_takes_no_order_of_the_next_trip(tmp_path):
    """Its upload was still under way when its trip ended; the next one has begun."""
    world = World(tmp_path, deadline_s=0.1)
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, needed=1))
    first, _ = [world.pull(client) for client in (0, 1)]
    late = world.cohort._trips.current
    world.push(0, first)
    future.result(30)
    world.send_and_receive(trip_to(0, 1, interaction=1))
    members = {c: world.cohort.session(c, world.tokens[c]) for c in (0, 1)}
    caller = world.cohort.caller(members, world.issues)
    assert world.cohort.next_orders(caller, lambda: True)[0][0].client_id == "0"
    result = Answer(Bundle(weights=as_received(1.0)), rpc.Report())
    assert not world.cohort.end_result(1, late, result)
    assert world.cohort.next_orders(caller, lambda: True)[0][0].client_id == "1"
    world.cohort.stop("the test is over")
    world.engine.shutdown()


def test_a_deadline_waits_for_enough(tmp_path):
    world = World(tmp_path, deadline_s=0.05)
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    world.push(0, world.pull(0))
    time.sleep(0.15)
    assert not future.done()
    world.push(2, world.pull(2))
    assert list(future.result(30).by_client) == [0, 2]


def test_without_a_deadline_everybody_is_waited_for(world):
    future = world.send_and_receive(trip_to(0, 1, 2, needed=1))
    world.answer(0, 1)
    time.sleep(0.05)
    assert not future.done()
    world.push(2, world.pull(2))
    assert len(future.result(30).by_client) == 3


def test_a_failure_is_borne_while_enough_are_left(world):
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    assert world.push(1, world.pull(1), failure="no memory") is True
    world.answer(0, 2)
    results = future.result(30)
    assert results.failed == {1: "no memory"}
    assert list(results.by_client) == [0, 2]


def test_too_many_failures_name_the_client(world):
    future = world.send_and_receive(trip_to(0, 1, 2, interaction=6, needed=2))
    world.push(2, world.pull(2), failure="its disk is full")
    assert not future.done()
    world.push(1, world.pull(1), failure="its upload was refused: tensor 'x' is missing")
    with pytest.raises(RunFailed) as caught:
        future.result(30)
    line = str(caught.value)
    assert line.startswith("client 1 failed in round 7")
    assert "its upload was refused: tensor 'x' is missing" in line
    assert line.endswith(
        "(1 more failed); the run needs 2 clients here ([server] min_clients, all of them without "
        "it): --resume tries again, and --resume --without 1 continues without client 1"
    )


def test_one_failure_ends_a_run_that_needs_all(world):
    future = world.send_and_receive(trip_to(0, 1, 2))
    world.push(0, world.pull(0), failure="ValueError: no")
    with pytest.raises(RunFailed, match=r"client 0 failed in round 1 .*ValueError: no"):
        future.result(30)


def test_stopping_ends_the_waiting(world):
    future = world.send_and_receive(trip_to(0))
    world.cohort.stop("the server is shutting down")
    with pytest.raises(RunFailed, match="shutting down"):
        future.result(30)


# --- private states -------------------------------------------------------------------------------


def holds_four(client, versions):
    return client != 1 or 4 in versions


def test_a_client_without_its_state(world):
    """Client 1 must hold the state after interaction 4, but comes back with older ones only."""
    world.cohort.require(holds_four, {1: 4}, -1)
    future = world.send_and_receive(trip_to(0, 1, interaction=5))
    world.join(0, world.tokens[0])
    world.join(1, world.tokens[1], versions=(3, 4))
    assert not future.done()
    world.join(1, world.tokens[1], versions=(2, 3))
    with pytest.raises(
        StateLost, match=r"client 1 holds private states of interactions 3, 4 only"
    ) as caught:
        future.result(30)
    assert caught.value.client == 1
    assert world.cohort.versions()[1] == (2, 3)
    world.send_and_receive(trip_to(0, interaction=3))
    assert world.pull(0) is not None, "the run goes on"


def test_a_client_that_loses_the_state_behind_an_upload_that_was_taken(world):
    """Client 0's upload is in, the trip is open; its machine fails before the state is synced."""
    world.cohort.require(lambda client, versions: True, {0: 4, 1: 4}, -1)
    future = world.send_and_receive(trip_to(0, 1, interaction=5))
    assert world.push(0, world.pull(0)) is True
    world.join(0, world.tokens[0], versions=(4, 5))
    assert not future.done()
    world.join(0, world.tokens[0], versions=(3, 4))
    with pytest.raises(StateLost, match=r"client 0 holds private states of interactions 4, 5 only"):
        future.result(30)


def test_a_client_that_loses_its_state_again_and_again_is_refused(world):
    """Each loss makes the others do an interaction again; six without a new commit are too many."""
    world.cohort.require(holds_four, {1: 4}, -1)
    world.cohort.commit(4, -1)
    for _ in range(5):
        world.join(1, world.tokens[1], versions=(3,))
    with pytest.raises(LossTooLarge, match=r"client 1 came back without .* 5 times since .* 5;"):
        world.join(1, world.tokens[1], versions=(3,))
    world.cohort.commit(4, -1)  # the same commit again is no progress
    with pytest.raises(LossTooLarge):
        world.join(1, world.tokens[1], versions=(3,))
    world.cohort.commit(5, -1)
    world.join(1, world.tokens[1], versions=(3,))


def test_a_state_lost_between_trips_shows_at_the_next(world):
    world.cohort.require(holds_four, {1: 4}, -1)
    world.join(1, world.tokens[1], versions=())
    with pytest.raises(StateLost):
        world.send_and_receive(trip_to(0, 1)).result(30)


def test_durable_is_the_oldest_state_that_is_not_safe(world):
    assert world.cohort.durable() is None, "nobody holds a state"
    world.cohort.require(lambda client, versions: True, {0: 7, 1: 5}, -1)
    world.cohort.commit(8, -1)
    assert world.cohort.durable() == -1
    world.cohort.session(0, world.tokens[0]).durable = 6
    world.cohort.session(1, world.tokens[1]).durable = 5
    assert world.cohort.durable() == 6, "client 1 is safe up to its last training"
    world.cohort.session(0, world.tokens[0]).durable = 7
    assert world.cohort.durable() is None


def test_a_client_that_has_not_come_back_holds_the_watermark(world):
    """Client 7 trained in 6 and has not joined: what it synced since the watermark is unknown."""
    for client in (0, 1):
        world.cohort.session(client, world.tokens[client]).durable = 8
    world.cohort.commit(8, -1)
    world.cohort.require(lambda client, versions: True, {0: 8, 1: 8, 7: 6}, 4)
    assert world.cohort.durable() == 4
    world.cohort.require(lambda client, versions: True, {0: 8, 1: 8, 7: 6}, 6)
    assert world.cohort.durable() is None, "the watermark had passed its last training"
    world.cohort.require(lambda client, versions: True, {0: 8, 1: 8, 7: 6}, 4)
    world.tokens[7] = world.join(7)
    assert world.cohort.durable() == -1
    world.cohort.session(7, world.tokens[7]).durable = 6
    assert world.cohort.durable() is None


def test_who_said_that_its_state_is_safe_is_not_looked_at_until_it_trains_again(world):
    world.cohort.require(lambda client, versions: True, {0: 3, 1: 3}, -1)
    world.cohort.commit(9, -1)
    for client in (0, 1):
        world.cohort.session(client, world.tokens[client]).durable = 3
    assert world.cohort.durable() is None
    assert not world.cohort._holdings._unsafe
    world.cohort._holdings.has_trained(1, 5)
    assert world.cohort.durable() == 3, "its state after 5 may be in memory alone"
    world.join(0, world.tokens[0], versions=(3,))
    assert world.cohort.durable() == -1, "a process that begins has to say again what is safe"


# --- events ---------------------------------------------------------------------------------------


def test_what_is_told(world):
    world.send_and_receive(trip_to(0, 1, needed=1))
    world.push(0, world.pull(0))
    world.push(1, world.pull(1), failure="no memory")
    world.cohort.leave(1, "finished")
    world.events.close()
    told = [(e.kind, e.client) for e in world.events.listen(from_start=True)]
    assert told == [
        *(("joined", c) for c in "012"),
        ("upload", "0"),
        ("failed", "1"),
        ("left", "1"),
    ]


def test_what_a_client_lost_does_not_matter_once_it_was_turned_away(tmp_path):
    """Client 0 lacks its state and describes another problem than most: the run goes on."""
    events = EventLog()
    cohort = RemoteCohort(3, Spool(tmp_path, 1 << 20), events, admission=Admission({}, 3))
    cohort.require(lambda client, versions: client != 0, {}, -1)
    other = json.dumps({**json.loads(PROFILE), "input_shape": [5]})
    cohort.join(0, other, b"", ())
    for client in (1, 2):
        cohort.join(client, PROFILE, b"", ())
    cohort.stop("the test is over")
    with pytest.raises(RunFailed, match="the test is over"):
        cohort.send_and_receive(trip_to(1, 2))


# --- lasting trips --------------------------------------------------------------------------------


def flush(size, interaction=1, needed=None, wanted=None):
    return AnyOf(interaction, interaction, size, needed or size, wanted or {})


def taking(world, *args, **facts):
    return world.engine.submit(world.cohort.take, flush(*args, **facts))


def test_a_flush_takes_the_first_results_of_all_lasting_trips(world):
    world.cohort.send(trip_to(0, 1, interaction=0))
    world.cohort.send(trip_to(2, interaction=1))
    world.cohort.commit(0, -1)
    orders = {c: world.pull(c) for c in (0, 1, 2)}
    assert {c: (o.interaction, o.committed) for c, o in orders.items()} == {
        0: (0, -1),  # what it is ordered to do is not committed
        1: (0, -1),
        2: (1, 0),
    }
    future = taking(world, 2)
    assert world.push(2, orders[2], value=2.0)
    assert not future.done()
    assert world.push(0, orders[0], value=0.5)
    found = future.result(30)
    assert values(found) == {0: 0.5, 2: 2.0}
    assert [*found.arrivals.items()] == [(2, 1), (0, 0)]
    assert found.under_way == {1: 0}
    assert found.wire_up == 20
    assert world.push(0, orders[0]) == REPEATED, "its result was taken"
    assert world.pull(0, 2, wait_s=0.05) is None, "their orders are done with"


def test_a_result_that_comes_before_its_flush_waits_for_it(world):
    world.cohort.send(trip_to(0, 1, interaction=0))
    for client in (1, 0):
        assert world.push(client, world.pull(client), value=float(client))
    assert values(taking(world, 1).result(30)) == {1: 1.0}
    assert values(taking(world, 1).result(30)) == {0: 0.0}


def test_the_bytes_of_lasting_orders_are_counted_in_one_flush(world):
    world.cohort.send(trip_to(0, 1, interaction=0))
    orders = {c: world.pull(c) for c in (0, 1)}
    [trip] = world.cohort._trips.lasting
    for client, num_bytes in ((0, 100), (1, 7)):
        world.cohort.count_down(trip, num_bytes)
        world.push(client, orders[client])
        assert taking(world, 1).result(30).wire_down == num_bytes


def test_uploads_of_lasting_orders_stay_whole_however_large_they_are(world):
    """Each counts by its staleness, which nobody knows before the flush."""
    world.cohort.spool.budget = 0
    world.cohort.send(trip_to(0, 1, interaction=0))
    for client in (0, 1):
        assert world.push(client, world.pull(client), value=float(client))
    (trip,) = world.cohort._trips.lasting
    assert trip.intake._folding.finish(trip.results) is None, "nothing is added up"
    assert values(taking(world, 2).result(30)) == {0: 0.0, 1: 1.0}


def test_a_flush_may_want_certain_results_alone(world):
    world.cohort.send(trip_to(0, 1, 2, interaction=0))
    orders = {c: world.pull(c) for c in (0, 1, 2)}
    future = taking(world, 1, wanted={1: 0})
    assert world.push(0, orders[0])
    assert not future.done()
    assert world.push(1, orders[1])
    found = future.result(30)
    assert (found.arrivals, found.under_way) == ({1: 0}, {0: 0, 2: 0})


def test_others_score_while_lasting_orders_are_under_way(world):
    world.cohort.send(trip_to(0, 1, interaction=0))
    order = world.pull(0)
    future = world.send_and_receive(trip_to(2, kind=rpc.ORDER_KIND_EVALUATE))
    scoring = world.pull(2)
    assert scoring.kind == rpc.ORDER_KIND_EVALUATE
    assert world.push(0, order)
    assert not future.done()
    assert world.push(2, scoring)
    assert values(future.result(30)) == {2: 0.0}
    assert taking(world, 1).result(30).arrivals == {0: 0}


def test_what_failed_comes_with_the_next_flush(world):
    world.cohort.send(trip_to(0, 1, 2, interaction=0))
    orders = {c: world.pull(c) for c in (0, 1, 2)}
    world.push(0, orders[0], failure="it broke")
    world.push(1, orders[1])
    found = taking(world, 1).result(30)
    assert (found.failed, found.arrivals, found.under_way) == ({0: "it broke"}, {1: 0}, {2: 0})
    world.push(2, orders[2])
    assert taking(world, 1).result(30).failed == {}


def test_a_flush_fails_where_too_few_are_left(world):
    world.cohort.send(trip_to(0, 1, interaction=0))
    orders = {c: world.pull(c) for c in (0, 1)}
    future = taking(world, 2, interaction=3)
    world.push(1, orders[1], failure="it broke")
    with pytest.raises(RunFailed, match=r"client 1 failed in round 4 .*it broke"):
        future.result(30)


def test_a_flush_goes_on_with_as_many_as_suffice(world):
    world.cohort.send(trip_to(0, 1, interaction=0))
    orders = {c: world.pull(c) for c in (0, 1)}
    world.push(1, orders[1], failure="it broke")
    world.push(0, orders[0])
    assert taking(world, 2, needed=1).result(30).arrivals == {0: 0}


def test_an_order_that_is_recalled_is_not_sent_and_takes_no_room(world):
    """Client 0's trips go on for client 1, who is slow."""
    members = {0: world.cohort.session(0, world.tokens[0])}
    caller = world.cohort.caller(members, {0: 0})
    for number in range(2 * world.cohort.MAX_AHEAD):
        world.cohort.send(trip_to(0, 1, interaction=number))
        if number % 2:  # it was on its way
            ((order,), _) = world.cohort.next_orders(caller, lambda: True)
            assert order.interaction == number
        world.cohort.recall([0])
    world.cohort.send(trip_to(0, interaction=9))
    ((order,), _) = world.cohort.next_orders(caller, lambda: not caller.is_full)
    assert order.interaction == 9


def test_an_old_order_is_wanted_until_it_is_recalled(world):
    """Its interaction is committed long ago; its result counts all the same."""
    world.cohort.send(trip_to(0, interaction=0))
    world.cohort.commit(3, -1)
    order = world.pull(0)
    assert not world.cohort.is_superseded(0)
    world.cohort.recall()
    assert world.cohort.is_superseded(0)
    with pytest.raises(Superseded):
        world.push(0, order)
    assert world.pull(0, wait_s=0.05) is None


def test_a_run_that_is_to_stop_begins_no_flush(world):
    world.cohort.send(trip_to(0, interaction=0))
    world.push(0, world.pull(0))
    world.cohort.stop("stopped as asked")
    with pytest.raises(RunFailed, match="stopped as asked"):
        taking(world, 1).result(30)


def test_a_flush_ends_where_a_client_lost_the_state_behind_its_upload(world):
    world.cohort.require(lambda client, versions: True, {}, -1)
    world.cohort.send(trip_to(0, 1, interaction=5))
    future = taking(world, 2, interaction=6)
    assert world.push(0, world.pull(0))
    world.join(0, world.tokens[0], versions=(4,))
    with pytest.raises(StateLost, match=r"client 0 holds private states of interactions 5 only"):
        future.result(30)


def test_a_round_closes_with_the_uploads_it_wants(world):
    """Two of three orders are enough: the straggler's upload is no longer wanted."""
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2, enough=2))
    orders = {c: world.pull(c) for c in (0, 1, 2)}
    for client in (2, 0):
        assert world.push(client, orders[client])
    assert list(future.result(30).by_client) == [0, 2]
    with pytest.raises(Superseded):
        world.push(1, orders[1])


def test_a_round_takes_no_more_uploads_than_it_wants(world):
    """The third comes before the engine's thread has closed the trip."""
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2, enough=2))
    orders = {c: world.pull(c) for c in (0, 1, 2)}
    with world.cohort._lock:
        assert [world.push(c, orders[c]) for c in (2, 0, 1)] == [True, True, False]
    assert list(future.result(30).by_client) == [0, 2]


# --- clients that are out -------------------------------------------------------------------------


def test_whoever_is_out_joins_again_only_once_the_run_goes_back(world):
    world.cohort.set_out({1: "an operator excluded it"})
    with pytest.raises(UnknownSession, match="client 1 has no session"):
        world.cohort.session(1, world.tokens[1])
    with pytest.raises(SetOut, match=r"client 1 takes no .*: an operator excluded it") as out:
        world.join(1, world.tokens[1])
    assert out.value.client == 1
    with pytest.raises(PayloadError, match="client 1 takes no part in this run any more"):
        world.cohort.check_known([0, 1])
    world.cohort.set_out({})
    world.join(1, world.tokens[1])
    told = [e.client for e in kept(world.events) if e.kind == "note"]
    assert told == ["1"], "whoever starts clients learns that it is needed again"


def test_nobody_waits_for_whoever_is_out(tmp_path):
    world = World(tmp_path, out={1: "an operator retired it"})
    world.join_all((0, 2))
    assert [*world.cohort.gather()] == [0, 2]


def kept(events):
    """Return the events that were told so far."""
    events.close()
    return [*events.listen(from_start=True)]
