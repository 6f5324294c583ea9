"""What ``min_clients`` and ``deadline_s`` mean at every point, and for whom a run says it waits."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedmodels.errors import ConfigError, RunFailed, RunStopped
from fedmodels.facts.config_file import parse_experiment
from fedmodels.tensors.bundle import EVALUATOR
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import AnyOf, TooFewOrders, fewest_alive
from fedsrv.engine.rounds import Engine
from fedsrv.parts import parts_of
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.waiting import ClientWait, WaitNotice
from fedtide.inprocess import InProcessCohort
from tests.conftest import tiny_experiment
from tests.fedmodels.methods.test_conformance import experiment_for
from tests.fedsrv.transport.test_cohort import World, trip_to, until, values

LEASE_S = RemoteCohort.lease_s
EXPERIMENT = tiny_experiment(server={"min_clients": 2, "deadline_s": 300.0})
"""Of three clients."""


class Clock:
    """A clock that goes when a test says so."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def world(tmp_path, clock):
    made = World(tmp_path, deadline_s=300.0, min_clients=2, clock=clock)
    yield made
    made.cohort.stop("the test is over")
    made.engine.shutdown()


def pass_time(world, clock, seconds):
    clock.now += seconds
    with world.cohort.changed:
        world.cohort.changed.notify_all()


def stays(future):
    """Tell whether the engine goes on waiting when it has looked again."""
    with pytest.raises(TimeoutError):
        future.result(0.05)
    return True


def waiting(world):
    return [e.detail for e in list(world.events._kept) if e.kind == "waiting"]


# --- the start ------------------------------------------------------------------------------------


def test_the_run_starts_without_a_client_that_never_joins(world, clock):
    gathered = world.engine.submit(world.cohort.gather)
    world.join_all([0, 2])
    pass_time(world, clock, 299)
    assert stays(gathered)
    pass_time(world, clock, 2)
    assert list(gathered.result(30)) == [0, 2]


def test_an_open_run_that_goes_on_waits_a_lease_for_who_does_not_come_again(world, clock):
    """It knows its clients. It waited for the whole deadline, an hour unless the config says so."""
    world.cohort.class_names = ("a", "b")
    gathered = world.engine.submit(world.cohort.gather)
    world.join(0)
    pass_time(world, clock, LEASE_S + 1)
    assert stays(gathered), "two are needed"
    world.join(2)
    assert list(gathered.result(30)) == [0, 2]


def test_an_open_run_goes_on_with_clients_that_it_did_not_begin_with(world, clock):
    """It waited without end where too few of its first ones were left."""
    world.cohort.class_names = ("a", "b")
    world.cohort._members = [0, 1]
    gathered = world.engine.submit(world.cohort.gather)
    world.join_all([1, 2])
    assert stays(gathered), "client 0 may still come"
    pass_time(world, clock, LEASE_S - 1)
    until(lambda: waiting(world))
    assert waiting(world)[0]["line"].endswith("without them in 286 s, or once they count as gone")
    pass_time(world, clock, 2)
    assert list(gathered.result(30)) == [1, 2]


def test_the_run_does_not_start_with_fewer_than_it_needs(world, clock):
    gathered = world.engine.submit(world.cohort.gather)
    world.join_all([0])
    pass_time(world, clock, 1000)
    assert stays(gathered)
    world.join_all([1])
    assert list(gathered.result(30)) == [0, 1]


def test_gathering_again_costs_no_other_deadline(world, clock):
    gathered = world.engine.submit(world.cohort.gather)
    world.join_all([0, 2])
    pass_time(world, clock, 301)
    gathered.result(30)
    assert list(world.engine.submit(world.cohort.gather).result(30)) == [0, 2]


def test_without_a_deadline_everybody_is_gathered(tmp_path, clock):
    world = World(tmp_path, min_clients=2, clock=clock)
    gathered = world.engine.submit(world.cohort.gather)
    world.join_all([0, 2])
    pass_time(world, clock, 10_000)
    assert stays(gathered)
    world.join_all([1])
    assert len(gathered.result(30)) == 3


def test_a_round_waits_for_no_more_than_it_needs(world, clock):
    """Of a cohort that was drawn of those who are there and those who never came."""
    world.join_all([0])
    met = world.engine.submit(world.cohort.meet, (1, 2), 1)
    assert stays(met)
    world.join_all([2])
    assert list(met.result(30)) == [0, 2]


# --- trips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [rpc.ORDER_KIND_TRAIN, rpc.ORDER_KIND_EVALUATE, rpc.ORDER_KIND_FINISH]
)
def test_a_dead_client_does_not_cost_the_deadline(world, clock, kind):
    world.join_all()
    pass_time(world, clock, LEASE_S + 1)  # nobody was heard of; those who answer now are alive
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2, kind=kind))
    world.push(0, world.pull(0))
    world.push(2, world.pull(2), 2.0)
    assert values(future.result(30)) == {0: 0.0, 2: 2.0}


@pytest.mark.parametrize("kind", [rpc.ORDER_KIND_EVALUATE, rpc.ORDER_KIND_FINISH])
def test_the_evaluator_stands_for_no_client(world, clock, kind):
    """It has answered, and one client; two clients are needed."""
    world.join_all([0, 1, 2, EVALUATOR])
    future = world.send_and_receive(trip_to(0, 1, 2, EVALUATOR, needed=2, kind=kind))
    world.answer(0, EVALUATOR)
    pass_time(world, clock, 1000)
    assert stays(future)
    world.push(1, world.pull(1))
    assert list(future.result(30).by_client) == [0, 1, EVALUATOR]


def test_nobody_waits_for_ever_for_an_evaluator(world, clock):
    world.join_all([0, 1, 2, EVALUATOR])
    future = world.send_and_receive(trip_to(0, 1, EVALUATOR, needed=2, kind=rpc.ORDER_KIND_FINISH))
    world.answer(0, 1)
    assert stays(future)
    pass_time(world, clock, LEASE_S + 1)
    assert list(future.result(30).by_client) == [0, 1]


def test_without_min_clients_the_evaluator_is_needed_too(world):
    world.join_all([0, 1, EVALUATOR])
    future = world.send_and_receive(trip_to(0, 1, EVALUATOR, kind=rpc.ORDER_KIND_EVALUATE))
    world.answer(0, 1)
    world.push(EVALUATOR, world.pull(EVALUATOR), failure="its disk is full")
    with pytest.raises(RunFailed, match="its disk is full"):
        future.result(30)


def test_a_client_that_may_still_come_is_waited_for(world, clock):
    """Until a lease after it was last heard of."""
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    world.answer(0, 2)
    pass_time(world, clock, LEASE_S - 1)
    assert stays(future)
    pass_time(world, clock, 2)
    assert len(future.result(30).by_client) == 2


def test_a_client_that_never_came_back_to_a_new_server_is_dead_after_a_lease(world, clock):
    world.join_all([0, 1])
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    world.answer(0, 1)
    pass_time(world, clock, LEASE_S - 1)
    assert stays(future)
    pass_time(world, clock, 2)
    assert list(future.result(30).by_client) == [0, 1]


def test_a_living_client_has_until_the_deadline(world, clock):
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    world.answer(0, 2)
    with ThreadPoolExecutor(1) as pool:
        order = world.pull(1)
        pull = pool.submit(world.pull, 1, wait_s=3.0)  # its Pull stays open while it trains
        until(lambda: world.cohort.sessions[1].is_waiting)
        pass_time(world, clock, 299)
        assert stays(future)
        pass_time(world, clock, 2)
        assert list(future.result(30).by_client) == [0, 2]
        assert order.client_id == "1"
        world.cohort.wake()
        pull.cancel()


def test_a_dead_client_is_waited_for_while_it_is_needed(world, clock):
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=3))
    world.answer(0, 2)
    pass_time(world, clock, 10_000)
    assert stays(future)
    world.tokens[1] = world.join(1)
    world.push(1, world.pull(1))
    assert len(future.result(30).by_client) == 3


def test_without_a_deadline_a_dead_client_is_waited_for(tmp_path, clock):
    world = World(tmp_path, min_clients=2, clock=clock)
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2))
    world.answer(0, 2)
    pass_time(world, clock, 10_000)
    assert stays(future)
    world.cohort.stop("the test is over")


# --- an evaluation asks a part of the clients -----------------------------------------------------

SCORES = rpc.ORDER_KIND_EVALUATE


@pytest.mark.parametrize(("asked", "answers"), [((0, 1), [0]), ((1,), [])])
def test_an_evaluation_does_not_wait_for_ever_for_the_dead_while_enough_live(
    world, clock, asked, answers
):
    """Of three clients one may be missing: it is among those whose uploads ended a round."""
    world.join_all()
    least = fewest_alive(EXPERIMENT, asked)
    future = world.send_and_receive(trip_to(*asked, needed=len(asked), least=least, kind=SCORES))
    world.answer(*answers)
    pass_time(world, clock, LEASE_S - 1)
    assert stays(future)
    pass_time(world, clock, 2)
    assert list(future.result(30).by_client) == answers


def test_an_evaluation_waits_for_the_dead_while_too_few_live(world, clock):
    world.join_all()
    least = fewest_alive(EXPERIMENT, (0, 1))
    future = world.send_and_receive(trip_to(0, 1, needed=2, least=least, kind=SCORES))
    pass_time(world, clock, 1000)
    assert stays(future)
    world.tokens[1] = world.join(1)
    world.push(1, world.pull(1))
    assert list(future.result(30).by_client) == [1]


def test_an_evaluation_waits_for_the_living_until_as_many_answered_as_suffice(world, clock):
    world.join_all()
    least = fewest_alive(EXPERIMENT, (0, 1))
    future = world.send_and_receive(trip_to(0, 1, needed=2, least=least, kind=SCORES))
    world.push(0, world.pull(0))
    world.cohort.sessions[1].seen = math.inf
    pass_time(world, clock, 1000)
    assert stays(future), "client 1 lives, and two answers are needed"
    world.push(1, world.pull(1))
    assert len(future.result(30).by_client) == 2


def test_one_client_that_cannot_score_does_not_end_an_evaluation_of_two(world):
    world.join_all()
    for failing, ends in (((1,), True), ((0, 1), False)):
        least = fewest_alive(EXPERIMENT, (0, 1))
        future = world.send_and_receive(trip_to(0, 1, needed=2, least=least, kind=SCORES))
        for client in (0, 1):
            world.push(client, world.pull(client), failure="no memory" * (client in failing))
        if ends:
            assert list(future.result(30).by_client) == [0]
        else:
            with pytest.raises(RunFailed, match="no memory"):
                future.result(30)


@pytest.mark.parametrize(
    ("min_clients", "asked", "least"),
    [(None, (0, 1), None), (2, (0, 1), 1), (2, (0, 1, 2), 2), (1, (0, 1), 0), (2, (EVALUATOR,), 0)],
)
def test_as_many_may_be_missing_of_those_asked_as_of_the_run(min_clients, asked, least):
    experiment = tiny_experiment(server={"min_clients": min_clients} if min_clients else {})
    assert fewest_alive(experiment, asked) == least


# --- asynchronous: who trains in place of the dead ------------------------------------------------


def taking(world, needed=2, idle=(2,)):
    flush = AnyOf(1, 1, 2, needed, {}, idle)
    return world.engine.submit(world.cohort.take, flush)


def test_others_train_in_place_of_the_dead(world, clock):
    world.join_all()
    world.cohort.send(trip_to(0, 1, interaction=1))
    world.push(0, world.pull(0))
    future = taking(world)
    pass_time(world, clock, LEASE_S + 1)
    assert stays(future), "client 2 is dead as well"
    world.tokens[2] = world.join(2)
    with pytest.raises(TooFewOrders) as starved:
        future.result(30)
    assert (starved.value.idle, starved.value.short) == ([2], 1)
    world.cohort.send(trip_to(2, interaction=1))
    future = taking(world, idle=())
    world.push(2, world.pull(2), 2.0)
    found = future.result(30)
    assert values(found) == {0: 0.0, 2: 2.0}
    assert found.under_way == {1: 1}


def test_others_train_in_place_of_who_failed(world):
    world.join_all()
    world.cohort.send(trip_to(0, 1, interaction=1))
    future = taking(world)
    world.push(1, world.pull(1), failure="no memory")
    with pytest.raises(TooFewOrders):
        future.result(30)


def test_nobody_trains_in_place_of_a_client_that_may_still_answer(tmp_path, clock):
    world = World(tmp_path, min_clients=2, clock=clock)  # without a deadline
    world.join_all()
    world.cohort.send(trip_to(0, 1, interaction=1))
    world.push(0, world.pull(0))
    future = taking(world)
    pass_time(world, clock, 1000)
    world.tokens[2] = world.join(2)
    assert stays(future)
    world.cohort.stop("the test is over")


# --- what is said ---------------------------------------------------------------------------------


def test_it_is_said_for_whom_once_and_then_each_minute(world, clock, caplog):
    world.join_all([0])
    gathered = world.engine.submit(world.cohort.gather)
    pass_time(world, clock, 9)
    assert stays(gathered)
    assert waiting(world) == []
    for seconds, lines in ((2, 1), (30, 1), (29, 1), (2, 2)):
        pass_time(world, clock, seconds)
        until(lambda lines=lines: len(waiting(world)) == lines)
        assert stays(gathered)
    told = waiting(world)
    assert [w["seconds"] for w in told] == [11, 72]
    assert told[0]["clients"] == ["1", "2"]
    assert told[0]["line"] == (
        "gathering the run's clients: waiting for clients 1, 2 (not connected) for 11 s; "
        "min_clients does not allow fewer"
    )
    assert not caplog.text, "who narrates the events logs the line; it stood there twice"


def test_a_client_whose_data_are_refused_is_named_with_the_reason(world, clock):
    """It stays out by itself, and everybody waited for it without a word why."""
    world.join_all([0])
    gathered = world.engine.submit(world.cohort.gather)
    with world.cohort.changed:
        world.cohort._attendance.refused(2, "client 2 has the class 'Wolf'")
    pass_time(world, clock, 11)
    until(lambda: waiting(world))
    assert stays(gathered)
    assert waiting(world)[0]["line"].startswith(
        "gathering the run's clients: waiting for client 1 (not connected) and client 2 (refused: "
        "client 2 has the class 'Wolf') for 11 s"
    )


@pytest.mark.parametrize(("needed", "goes_on"), [(2, True), (3, False)])
def test_a_round_without_a_deadline_goes_on_without_whom_an_operator_takes_out(
    needed, goes_on, tmp_path, clock
):
    """If it is away and others are enough; who is there still answers."""
    world = World(tmp_path, min_clients=needed, clock=clock)
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=needed, interaction=4))
    world.cohort.go_on_without([1, 2])
    world.answer(0, 2)
    pass_time(world, clock, 1000)
    world.cohort.sessions[1].seen = -math.inf
    with world.cohort.changed:
        world.cohort.changed.notify_all()
    if goes_on:
        assert {*future.result(30).by_client} == {0, 2}
    else:
        assert stays(future)
        world.cohort.stop("the test is over")


def test_clients_at_work_are_named_after_a_minute(world, clock):
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2, interaction=4))
    world.answer(0, 2)
    world.cohort.sessions[1].seen = math.inf
    pass_time(world, clock, 59)
    assert stays(future)
    assert waiting(world) == []
    pass_time(world, clock, 2)
    until(lambda: waiting(world))
    assert stays(future)
    assert [w["line"] for w in waiting(world)] == [
        "training, round 5, interaction 5: waiting for client 1 (at work) for 61 s; "
        "it continues without them in 239 s"
    ]


def test_who_got_an_order_and_tells_of_no_work_is_named_so(world, clock):
    """It was said to be at work for ever; a beat of another client of its process counts."""
    world.join_all()
    future = world.send_and_receive(trip_to(0, 1, 2, needed=2, interaction=4))
    world.answer(0, 2)
    world.pull(1)
    session = world.cohort.sessions[1]
    session.seen = math.inf
    for lines in (1, 2):
        pass_time(world, clock, 61)
        until(lambda lines=lines: len(waiting(world)) == lines)
        assert stays(future)
        world.cohort.works(session)
    first, second = (w["line"] for w in waiting(world))
    assert "waiting for client 1 (connected, and telling of no work: a result may be on" in first
    assert "waiting for client 1 (connected" in second, "its beat was 61 s ago again"
    pass_time(world, clock, 30)
    world.cohort.works(session)
    pass_time(world, clock, 31)
    until(lambda: len(waiting(world)) == 3)
    assert stays(future)
    assert "waiting for client 1 (at work) for 183 s" in waiting(world)[2]["line"]


# --- the config -----------------------------------------------------------------------------------


def test_a_deadline_alone_is_refused():
    text = (
        "[data]\nname='digits'\n[scenario]\nkind='iid'\n[net]\nname='mlp'\n[method]\nname='fedavg'"
    )
    with pytest.raises(ConfigError, match=r"deadline_s = 5 changes nothing .* give min_clients"):
        parse_experiment(text, overrides=("server.deadline_s=5",))
    parse_experiment(text, overrides=("server.deadline_s=5", "server.min_clients=2"))


# --- late joiners ---------------------------------------------------------------------------------


class LateCohort(InProcessCohort):
    """A cohort that one client joins late."""

    def __init__(self, *args, late, **options):
        super().__init__(*args, **options)
        self.late, self.met = late, 0

    def gather(self):
        return {c: text for c, text in super().gather().items() if c != 1 or self.met >= self.late}

    def meet(self, clients, needed):
        self.met += 1
        assert needed == 2
        return self.gather()


@pytest.mark.parametrize(
    "method", ["fedavg", "gldp", "fedpac", "pfedgraph-replay", "pfedgrp", "fedcil", "target"]
)
def test_a_late_client_takes_part_from_the_next_interaction_on(method, digits, tmp_path):
    quorum = {"server": {"min_clients": 2, "deadline_s": 5.0}, "schedule": {"rounds": 2}}
    experiment = experiment_for((method, {}), **quorum)
    store = Store(tmp_path / "run", experiment, False)
    cohort = LateCohort(experiment, digits, tmp_path / "clients", late=3)
    summary = Engine(experiment, cohort, store, EventLog(), parts_of(store, EventLog())).run()
    records = [record for record, _ in store.ledger.records()]
    store.close()
    assert [r["cohort"] for r in records] == [[0, 2], [0, 2], [0, 1, 2], [0, 1, 2]]
    assert "1" in records[-1]["clients"]
    assert "clients_missing" not in summary
    assert cohort.met == 3, "when everybody is there, nobody is looked for"


def test_a_client_that_never_comes_is_missing_in_the_end(digits, tmp_path):
    experiment = tiny_experiment(server={"min_clients": 2, "deadline_s": 5.0})
    store = Store(tmp_path / "run", experiment, False)
    cohort = LateCohort(experiment, digits, tmp_path / "clients", late=99)
    summary = Engine(experiment, cohort, store, EventLog(), parts_of(store, EventLog())).run()
    store.close()
    assert summary["clients_missing"] == ["1"]


def test_the_schedule_stays_what_it_was_when_the_run_began(digits, tmp_path):
    """Whoever came late, with another number of tasks: interactions keep their numbers."""
    experiment = tiny_experiment()
    store = Store(tmp_path / "run", experiment, False)
    assert store.fixed("tasks", {0: 2, 1: 2, 2: 2}) == {0: 2, 1: 2, 2: 2}
    store.close()
    store = Store(tmp_path / "run", experiment, True)
    assert store.fixed("tasks", {0: 2, 1: 7, 2: 2}) == {0: 2, 1: 2, 2: 2}
    store.close()


@pytest.mark.parametrize(("connected", "waits"), [(True, 5), (False, 0)])
def test_a_run_that_is_to_stop_waits_for_those_at_work_and_not_for_long(clock, connected, waits):
    begun, looks = clock.now, []

    class Looking:
        def wait(self, seconds):
            looks.append(seconds)
            clock.now += 1

        def notify_all(self):
            pass

    patience = ClientWait(Looking(), lambda c: connected, lambda c: False, None, clock)
    patience.stop(RunStopped("as asked"), 5.0)
    notice = WaitNotice("training", EventLog(), clock)
    with pytest.raises(RunStopped, match="as asked"):
        patience.wait(notice, lambda: [1], lambda: False, lambda: False)
    assert (clock.now - begun, len(looks)) == (waits, waits)
    patience.wait(notice, lambda: [1], lambda: True, lambda: False)  # what is done is done
    with pytest.raises(RunStopped):
        patience.check_begin()
