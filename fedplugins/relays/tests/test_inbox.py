"""A relay between clients and a coordinator that is played: what it tells, keeps and sums."""

import math
from types import SimpleNamespace

import grpc
import pytest
import torch

from fedmodels.errors import ConfigError, PayloadTooLarge
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, Problem
from fedmodels.tensors.bundle_spec import BundleSpec, scalar_spec
from fedmodels.times import QUIET_S, transfer_s
from fedmodels.training.run import RunFacts
from fedpb import AGAIN_AFTER, CROWDED, SET_OUT
from fedpb.codec import encode
from fedpb.frames import MESSAGE_BYTES
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.relaying import Relaying
from fedplugins.relays.service import RelayService
from fedplugins.relays.trips import SUMS_BY, Delivery, PassedOn, RelayedRun, RelayedTrips
from fedplugins.relays.uplink import CoordinatorUnreachable, meaning_of
from fedsrv.progress.events import EventLog
from fedsrv.transport.refusals import NotReady, RunOver, SetOut, Superseded, UnknownSession
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool
from tests.conftest import tiny_experiment
from tests.fedsrv.transport.test_results_of_pushes import Context, Refused

PROBLEM = Problem((1, 8, 8), 10)
SPEC = BundleSpec.of(Bundle({"w": torch.ones(2)})) | scalar_spec("num_examples")
COUNTS = {3: 2.0, 4: 6.0, 5: 1.0}
WEIGHTS = {3: [1.0, -2.0], 4: [0.5, 8.0], 5: [0.0, 0.0]}


class Failed(grpc.RpcError):
    """A call that the coordinator above ended."""

    def __init__(self, code, line="no", metadata=()):
        super().__init__(line)
        self._code, self._line, self._metadata = code, line, metadata

    def code(self):
        return self._code

    def details(self):
        return self._line

    def trailing_metadata(self):
        return self._metadata


class Above:
    """The coordinator above: takes everything, unless it is told to refuse."""

    address, zstd = "above:1", False

    def __init__(self):
        self.told = []
        self.fails = []
        self.repeated = False

    def push(self, header, upload):
        if self.fails:
            raise meaning_of(self.fails.pop(0))
        self.told.append((header, upload))
        return rpc.PushResponse(repeated_upload=self.repeated)


class World:
    """A relay for clients 3 to 5, who have orders of one trip."""

    def __init__(self, directory, deadline_s=None):
        self.now = 100.0
        self.events = EventLog()
        spool = Spool(directory, 1 << 20)
        self.trips = RelayedTrips(range(3, 6), spool, self.events, clock=lambda: self.now)
        self.cohort = self.trips.below
        self.above = Above()
        self.service = RelayService(range(3, 6), self.trips, self.events, self.above)
        server = {"deadline_s": deadline_s, "min_clients": 2} if deadline_s else {}
        run = RelayedRun(RunFacts(tiny_experiment(server=server), PROBLEM), make("fedavg"))
        run.__dict__["upload_spec"] = SPEC  # of a smaller net
        for client in COUNTS:
            self.trips.learn(client, run)
        self.tokens = {c: self.cohort.join(c, "", bytes([c]), ()) for c in COUNTS}
        self.relaying = Relaying(self.trips, self.above)

    def begin(self, issue=7, group=(3, 4, 5), clients=(3, 4, 5), interaction=2):
        orders = {
            c: rpc.Order(
                kind=rpc.ORDER_KIND_TRAIN,
                client_id=str(c),
                interaction=interaction,
                trip=9,
                issue=issue,
            )
            for c in clients
        }
        self.trips.begin(Delivery(issue, orders, group=group))
        return self

    def push(self, client, weights=None, interaction=2, meanwhile=lambda: None, **more):
        header = rpc.PushHeader(
            client_id=str(client), token=self.tokens[client], kind=rpc.ORDER_KIND_TRAIN,
            interaction=interaction, trip=9, **more,
        )  # fmt: skip
        held = {"w": torch.tensor(WEIGHTS[client])} if weights is None else weights
        bundle = Bundle(held, scalars={"num_examples": COUNTS[client]})
        if more.get("failure"):
            bundle = Bundle()
        encoded = encode(bundle)
        header.bundle.CopyFrom(encoded.header)
        head = rpc.PushRequest(header=header).SerializeToString()

        def messages():
            yield head
            meanwhile()
            yield from encoded.chunks()

        return self.service.push(messages(), Context())

    def ready(self):
        with self.cohort.changed:
            group = self.trips.group
            return group is not None and group.is_ready(self.now, self.cohort.presence.dead)

    def send(self):
        """Send the sum, as the thread of the relay does."""
        with self.cohort.changed:
            group = self.trips.ready_group()
        assert group is not None, "somebody is missing"
        self.relaying._send(group)
        return self.above.told[-1]

    def know(self, **values):
        """Set what the relay knows, as one of its threads does."""
        with self.cohort.changed:
            for name, value in values.items():
                setattr(self.relaying, f"_{name}", value)

    def knows(self, name):
        with self.cohort.changed:
            return getattr(self.relaying, f"_{name}")

    def group(self):
        with self.cohort.changed:
            return self.trips.group

    def look(self):
        with self.cohort.changed:
            self.relaying._look_after_the_pull()


@pytest.fixture
def world(tmp_path):
    return World(tmp_path).begin()


def members(header):
    return [int(member.client_id) for member in header.members]


def test_all_but_the_weights_goes_up_at_once_and_then_one_sum(world):
    for client in (5, 3):
        world.push(client)
    for header, upload in world.above.told:
        assert header.summed
        assert not upload.weights
        assert upload.scalars == {"num_examples": COUNTS[int(header.client_id)]}
        assert header.token == world.tokens[int(header.client_id)]
        assert header.issue == 7, "that of the orders"
    assert not world.ready(), "client 4 is missing"
    world.push(4)
    assert world.ready()
    header, upload = world.send()
    assert members(header) == [3, 4, 5]
    assert [m.token for m in header.members] == [world.tokens[c] for c in (3, 4, 5)]
    assert (header.kind, header.interaction, header.issue) == (rpc.ORDER_KIND_TRAIN, 2, 7)
    assert upload.weights["w"].dtype == torch.float64
    assert upload.weights["w"].tolist() == [2 * 1.0 + 6 * 0.5, 2 * -2.0 + 6 * 8.0]


def test_fields_that_a_relay_does_not_know_go_up(world):
    """A client of a later version says more; what a relay alone may say does not come from it."""
    unknown = bytes([0xC2, 0x3E, 3]) + b"new"  # field 1000, three bytes
    header = rpc.PushHeader.FromString(rpc.PushHeader(kind=1).SerializeToString() + unknown)
    header.distance.weights, header.summed, header.issue = 1e9, True, 1
    trip = world.cohort._trips.all()[0]
    PassedOn(world.trips, world.above)._tell(header, trip, Bundle())
    ((told, _),) = world.above.told
    assert unknown in told.SerializeToString()
    assert not told.HasField("distance")
    assert not told.summed
    assert told.issue == 7


def test_the_coordinator_is_told_how_far_weights_lie_and_in_which_direction(world):
    """From what the clients were given, which is nothing here; the sum is (5, 44)."""
    for client in (3, 4, 5):
        world.push(client)
    told = {h.client_id: h.distance.weights for h, _ in world.above.told}
    assert told == pytest.approx({"3": 5**0.5, "4": 64.25**0.5, "5": 0.0})
    header, _ = world.send()
    cosines = {int(m.client_id): m.cosine for m in header.members if m.HasField("cosine")}
    size = math.hypot(5, 44)
    assert cosines == pytest.approx(
        {3: (5 - 88) / size / 5**0.5, 4: (2.5 + 352) / size / 64.25**0.5}
    )


@pytest.mark.parametrize(
    ("weights", "line"),
    [([1e9, 0.0], "beyond 1e[+]06"), ([float("inf"), 0.0], "NaN or infinite"), ([1.0], "w")],
)
def test_a_liar_is_left_out_and_the_coordinator_is_told(world, weights, line):
    with pytest.raises(Refused, match=line) as refused:
        world.push(4, {"w": torch.tensor(weights)})
    assert refused.value.code == grpc.StatusCode.INVALID_ARGUMENT
    (header, upload) = world.above.told.pop()
    assert header.failure.startswith("its upload was refused: ")
    assert not upload.weights
    world.push(3)
    world.push(5)
    assert members(world.send()[0]) == [3, 5]


def test_a_client_that_the_coordinator_refuses_is_left_out(world):
    world.above.fails = [Failed(grpc.StatusCode.INVALID_ARGUMENT, "more than were announced")]
    with pytest.raises(Refused, match="more than were announced"):
        world.push(4)
    world.push(3)
    world.push(5)
    assert members(world.send()[0]) == [3, 5]


def test_a_client_that_fails_is_left_out(world):
    world.push(4, failure="no memory")
    assert world.above.told[-1][0].failure == "no memory"
    world.push(3)
    world.push(5)
    assert members(world.send()[0]) == [3, 5]


def test_while_the_coordinator_is_away_a_client_comes_again(world):
    world.above.fails = [Failed(grpc.StatusCode.UNAVAILABLE, "connection refused")]
    with pytest.raises(Refused, match="the coordinator above is away: nothing listens there") as no:
        world.push(4)
    assert no.value.code == grpc.StatusCode.UNAVAILABLE
    for client in (3, 4, 5):
        assert not world.ready()
        world.push(client)
    assert members(world.send()[0]) == [3, 4, 5]


def test_an_upload_for_an_order_that_the_relay_let_go_of_meanwhile_comes_again(world):
    """It has no group any more, and must not go up whole, past the group of the new order."""

    def begin_anew():
        world.trips.recall()
        world.begin()

    with pytest.raises(Refused, match="issued again"):
        world.push(3, meanwhile=begin_anew)
    assert world.above.told == []
    for client in COUNTS:
        world.push(client)
    assert [*members(world.send()[0])] == [3, 4, 5]


def test_a_result_that_had_come_before_is_in_no_sum(world):
    """As of a client whose whole upload the coordinator took through another relay."""
    world.above.repeated = True
    world.push(4)
    world.above.repeated = False
    world.push(3)
    world.push(5)
    assert members(world.send()[0]) == [3, 5]


def test_who_comes_after_the_sum_passes_whole(tmp_path):
    world = World(tmp_path, deadline_s=10.0).begin()
    world.push(3)
    world.push(5)
    assert not world.ready()
    world.now += SUMS_BY * 10.0
    assert world.ready()
    assert members(world.send()[0]) == [3, 5]
    world.push(4)
    header, upload = world.above.told[-1]
    assert not header.summed
    assert upload.weights["w"].tolist() == WEIGHTS[4]


def test_a_client_of_the_relay_before_this_one_is_waited_for(tmp_path):
    """It hangs while the relay is restarted, and joins a minute later: the sum is the same."""
    world = World(tmp_path)
    world.cohort.sessions.pop(4)
    world.begin()
    world.push(3)
    world.push(5)
    world.now += 60.0
    assert not world.ready()
    world.cohort.join(4, "", world.tokens[4], ())
    world.begin(group=(), clients=(4,))
    world.push(4)
    assert members(world.send()[0]) == [3, 4, 5]


def test_a_client_that_leaves_its_group_unseen_is_waited_for_no_more(world):
    """It joined elsewhere before it came here: the Pull ends, and the next says who is left."""
    for client in (3, 5):
        world.push(client)
    relaying = world.relaying
    world.know(issues=dict.fromkeys((3, 5), 7))
    assert relaying._judge(Failed(grpc.StatusCode.ABORTED, "left its group"), 0, 0.1) == 0.1
    assert world.knows("issues") == {}
    assert world.knows("ended") is None
    assert world.group() is None
    world.begin(group=(3, 5), clients=(3, 5))
    for client in (3, 5):
        world.push(client)
    assert members(world.send()[0]) == [3, 5]


def test_a_client_that_joined_here_and_died_is_waited_for(world):
    world.push(3)
    world.push(5)
    world.now += 1000.0
    assert not world.ready()


def test_with_a_deadline_a_relay_waits_for_no_dead_client(tmp_path):
    """As the coordinator does; without this the relay kept its sum for four fifths of the time."""
    world = World(tmp_path, deadline_s=300.0).begin()
    world.push(3)
    world.push(5)
    world.now += RemoteCohort.lease_s - 1
    assert not world.ready()
    world.now += 2
    assert members(world.send()[0]) == [3, 5]


def test_a_relay_looks_again_when_its_time_is_over(tmp_path):
    """A look each second would miss a deadline of a second."""
    world = World(tmp_path, deadline_s=0.5)
    assert world.trips.due_in(1.0) == 1.0
    world.begin()
    assert world.trips.due_in(1.0) == pytest.approx(SUMS_BY * 0.5)
    world.push(3)
    world.now += SUMS_BY * 0.5
    assert members(world.send()[0]) == [3]
    assert world.trips.due_in(1.0) == 1.0


def test_a_sum_names_all_whose_weights_are_in_it(world):
    """The sessions end in the moment in which it is settled: its clients join again."""
    for client in COUNTS:
        world.push(client)
    with world.cohort.changed:
        group = world.trips.ready_group()
        world.cohort.sessions.clear()
    world.relaying._send(group)
    header, _ = world.above.told[-1]
    assert {int(m.client_id): m.token for m in header.members} == world.tokens


def test_a_sum_of_nobody_is_not_sent(world):
    for client in COUNTS:
        world.push(client, failure="no memory")
    assert world.send()[0].failure == "no memory", "the last thing that went up"


def test_without_a_group_uploads_pass_whole(tmp_path):
    world = World(tmp_path).begin(group=())
    world.push(3)
    header, upload = world.above.told[-1]
    assert not header.summed
    assert upload.weights["w"].tolist() == WEIGHTS[3]
    assert not world.ready()


def test_a_new_issue_begins_the_group_anew(world):
    """As after a restart of the coordinator: it has lost what it was told."""
    world.push(3)
    world.begin(issue=8)
    for client in COUNTS:
        world.push(client)
    header, upload = world.send()
    assert members(header) == [3, 4, 5]
    assert upload.weights["w"].tolist() == [5.0, 44.0]


def test_orders_that_come_in_two_batches_are_one_group(tmp_path):
    world = World(tmp_path).begin(clients=(3, 5))
    world.push(3)
    world.begin(clients=(4,), group=())
    world.push(4)
    world.push(5)
    assert members(world.send()[0]) == [3, 4, 5]


def test_orders_that_come_slowly_are_waited_for_while_they_come(world, monkeypatch):
    """Orders with a personal part each are messages of their own, and may take minutes in all.

    At 20 kB/s a message of a megabyte takes 52 s, and none of it shows before it is whole.
    """
    now, cancelled = [1000.0], []
    monkeypatch.setattr("fedplugins.relays.relaying.time.monotonic", lambda: now[0])
    relaying = world.relaying
    world.know(call=SimpleNamespace(cancel=lambda: cancelled.append(now[0])))
    world.know(pulled={c: s.token for c, s in world.cohort.live().items()})
    messages = relaying._noting([b""] * 3)
    for left in (2, 1):
        next(messages)
        order = rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=str(5 - left), issue=8)
        order.following = left
        relaying._add(order, {"common": Bundle()}, ())
        now[0] += 52.0
        world.look()
    assert not cancelled
    now[0] += QUIET_S + transfer_s(MESSAGE_BYTES)
    world.look()
    assert cancelled == [now[0]]


def test_the_limits_of_a_relay_are_those_of_its_clients(tmp_path):
    """And not of the ids before them."""
    clients = range(900_000, 900_010)
    trips = RelayedTrips(clients, Spool(tmp_path, 1 << 20), EventLog())
    cohort, service = trips.below, RelayService(clients, trips, EventLog(), Above())
    assert (cohort.most_present, cohort.num_clients) == (10, 900_010)
    assert service.gate.threads < 100


def test_a_sum_is_sent_again_until_the_coordinator_is_back(world, monkeypatch):
    for client in COUNTS:
        world.push(client)
    monkeypatch.setattr("fedplugins.relays.relaying.PAUSE_S", 0.001)
    world.above.fails = [Failed(grpc.StatusCode.UNAVAILABLE)] * 2
    assert members(world.send()[0]) == [3, 4, 5]
    assert not world.above.fails


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.INVALID_ARGUMENT])
def test_a_sum_that_is_refused_is_not_sent_again(world, code, caplog):
    for client in COUNTS:
        world.push(client)
    world.above.fails = [Failed(code, "not like this")]
    world.send()
    assert "the sum was refused: not like this" in caplog.text
    assert len(world.above.told) == 3
    assert {*world.cohort.live()} == {*COUNTS}


def test_a_client_that_brings_its_weights_past_the_relay_has_nobody_join_again(world):
    """Orders come once more and say who is left; the clients bring their uploads again."""
    for client in COUNTS:
        world.push(client)
    cancelled = list[int]()
    world.know(call=SimpleNamespace(cancel=lambda: cancelled.append(1)))
    world.know(pulled={c: s.token for c, s in world.cohort.live().items()})
    world.know(issues=dict.fromkeys(COUNTS, 7))
    world.look()
    assert not cancelled
    world.above.fails = [Failed(grpc.StatusCode.ABORTED, "client 4 came without it")]
    world.send()
    world.look()
    assert cancelled
    assert world.knows("issues") == {}
    for client in COUNTS:
        assert world.cohort.session(client, world.tokens[client])
    world.begin(group=(3, 5), clients=(3, 5))  # the same issue
    for client in (3, 5):
        world.push(client)
    assert members(world.send()[0]) == [3, 5]


def test_a_sum_that_comes_too_late_leaves_later_orders_alone(world, monkeypatch):
    """The interaction closed without it, and the orders of the next one came before the refusal."""
    for client in COUNTS:
        world.push(client)

    def refuse(header, upload):
        world.begin(issue=8, interaction=3)
        raise meaning_of(Failed(grpc.StatusCode.ABORTED, "interaction 2 closed without this sum"))

    with monkeypatch.context() as late:
        late.setattr(world.above, "push", refuse)
        world.send()
    for client in COUNTS:
        world.push(client, interaction=3)
    header, _ = world.send()
    assert header.interaction == 3
    assert members(header) == [3, 4, 5]


def test_a_client_brings_no_sum(world):
    header = rpc.PushHeader(kind=rpc.ORDER_KIND_TRAIN, interaction=2, trip=9)
    header.members.add(client_id="3", token=world.tokens[3])
    message = rpc.PushRequest(header=header).SerializeToString()
    with pytest.raises(Refused, match="no sums are accepted here"):
        world.service.push(iter([message]), Context())
    for client in COUNTS:
        world.push(client)
    assert members(world.send()[0]) == [3, 4, 5]


def test_the_weights_of_a_client_that_died_since_count(world):
    for client in COUNTS:
        world.push(client)
    world.now += 60.0
    assert not world.cohort.live()
    assert [m.token for m in world.send()[0].members] == [world.tokens[c] for c in (3, 4, 5)]


def test_a_coordinator_that_forgot_the_sessions_has_all_clients_join_again(world):
    """Their orders come once more, although the coordinator may have given them out already."""
    for client in COUNTS:
        world.push(client)
    world.know(issues=dict.fromkeys(COUNTS, 7))
    world.above.fails = [Failed(grpc.StatusCode.UNAUTHENTICATED)]
    world.send()
    with pytest.raises(UnknownSession):
        world.cohort.session(3, world.tokens[3])
    assert world.group() is None
    assert world.knows("issues") == {}


def test_whatever_goes_wrong_in_the_thread_that_pulls_ends_the_relay(world, monkeypatch):
    """Also where it looks what the end of a call means: clients would wait for ever for it."""

    def ends(*_):
        raise Failed(grpc.StatusCode.UNAVAILABLE)

    def fails(*_):
        raise ValueError("a fault of the program")

    world.above.pull = ends
    monkeypatch.setattr(world.relaying, "_judge", fails)
    world.relaying._pull_forever()
    assert "cannot continue: a fault of the program" in str(world.knows("ended"))


def test_what_failed_calls_mean():
    again = ((AGAIN_AFTER, "500"),)
    code = grpc.StatusCode
    for failed, kind in (
        (Failed(code.UNAVAILABLE), CoordinatorUnreachable),
        (Failed(code.DEADLINE_EXCEEDED), CoordinatorUnreachable),
        (Failed(code.UNAVAILABLE, metadata=again), NotReady),
        (Failed(code.RESOURCE_EXHAUSTED, CROWDED), NotReady),
        (Failed(code.RESOURCE_EXHAUSTED), PayloadTooLarge),
        (Failed(code.ABORTED), Superseded),
        (Failed(code.OUT_OF_RANGE), RunOver),
        (Failed(code.UNAUTHENTICATED), UnknownSession),
    ):
        assert type(meaning_of(failed)) is kind


def test_others_are_told_whom_the_relay_is_for(world):
    request = rpc.BeatRequest(client_id="2", token=b"x")
    with pytest.raises(Refused, match="this relay is for clients 3-5; '2' joins elsewhere"):
        world.service.beat(request, Context())


def test_a_problem_that_no_memory_holds_costs_nothing_until_an_order_comes():
    """The coordinator above gives none to a client whose problem is not the run's."""
    table = tiny_experiment(net={"name": "mlp", "hidden": [200_000]}).to_dict()
    run = RelayedRun.of(table, Problem((2**24,), 100_000), ())
    assert run.facts.problem.num_classes == 100_000
    with pytest.raises(ConfigError, match="cannot be built"):
        _ = run.payload_spec


def test_a_net_that_cannot_be_built_ends_the_relay_with_a_line(world, monkeypatch, caplog):
    def cannot(call):
        raise ConfigError("[net] cannot be built")

    world.above.pull = lambda request: None
    monkeypatch.setattr(world.relaying, "_read", cannot)
    world.relaying._pull_forever()
    assert str(world.knows("ended")).endswith("sent what does not fit: [net] cannot be built")
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("said", ["9" * 5000, "-1", "", "1.5", "two"])
def test_a_coordinator_that_sets_out_no_id_is_one_that_refuses(said):
    """A number of 5,000 digits is none that Python reads."""
    error = Failed(grpc.StatusCode.FAILED_PRECONDITION, "gone", ((SET_OUT, said),))
    assert not isinstance(meaning_of(error), SetOut)
    known = meaning_of(Failed(grpc.StatusCode.FAILED_PRECONDITION, "gone", ((SET_OUT, "7"),)))
    assert isinstance(known, SetOut)
    assert known.client == 7
