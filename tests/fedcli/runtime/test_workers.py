"""Clients of a process are opened when they are selected, and few are open at a time."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import cast

import pytest
import torch

from fedcli.data.store.client_data import ClientData
from fedcli.runtime import worker, workers
from fedcli.runtime.enrolment import Enrolment
from fedcli.runtime.host import Host
from fedcli.runtime.link import Link, Membership
from fedcli.runtime.worker import Progress
from fedcli.runtime.workers import Workers
from fedmodels.errors import ConfigError, PayloadError
from fedmodels.tensors.bundle import Bundle, ClientId
from fedpb import PROTOCOL
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.client_profile import Profile
from fedsrv.progress.events import EventLog
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.conftest import tiny_experiment
from tests.liars import Caller, Refused


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch, digits: Path, tmp_path: Path) -> Workers:
    """Three clients, of which the last two are open."""
    monkeypatch.setattr(workers, "room_for_idle", lambda: 0)
    made = Workers([0, 1, 2], digits, tmp_path / "states", torch.device("cpu"))
    made.begin(tiny_experiment(method="local"))
    return made


def test_the_client_that_was_idle_for_the_longest_is_closed(few):
    first = few.of(0)
    first.stream.open(0)
    first.stream.train(0)
    few.of(1)
    assert few.of(0) is first
    few.of(2)
    assert set(few.open()) == {0, 2}
    few.of(1)
    assert set(few.open()) == {1, 2}
    assert first.stream.task is None  # its data are freed
    assert few.of(0) is not first
    assert few.of(0).net is first.net


def test_a_client_that_is_taken_again_is_open_all_the_while(few):
    """Another thread tells of its work, and ends it where nobody wants it any more."""
    few.of(0)
    seen = list[set[ClientId]]()
    other = threading.Thread(target=lambda: seen.append({*few.open()}))

    class Watched(dict):
        def pop(self, *given):
            found = super().pop(*given)
            other.start()
            other.join(0.2)
            return found

    few.__dict__["_open"] = Watched(few.__dict__["_open"])
    few.of(0)
    other.join()
    assert seen == [{0}]


@pytest.mark.parametrize("clients", [[1, 2, 0], [2, 1], [0, 2]])
def test_clients_of_a_process_have_nets_of_their_own(clients, digits, tmp_path):
    """Whichever of them is opened first, and again after the run's settings have changed."""
    made = Workers(clients, digits, tmp_path / "states", torch.device("cpu"))
    others = [{"name": "mlp", "hidden": [width]} for width in (8, 4)]
    made.begin(
        tiny_experiment(method="local", net={"name": "mlp", "hidden": [16], "by_client": others})
    )
    assert [made.of(client).net.width for client in clients] == [(16, 8, 4)[c] for c in clients]
    made.follow(table_of({"evaluate.last_tasks": 2}))
    assert [made.of(client).net.width for client in clients] == [(16, 8, 4)[c] for c in clients]
    assert len({id(made.of(client).set_ups.busy) for client in clients}) == 1


def test_a_net_that_cannot_be_built_shows_as_its_client_joins(digits, tmp_path):
    made = Workers([0, 1], digits, tmp_path / "states", torch.device("cpu"))
    net = {"name": "mlp", "by_client": [{"name": "torchvision", "model": "resnet1"}]}
    with pytest.raises(ConfigError, match="resnet1"):
        made.begin(tiny_experiment(method="local", net=net))


def test_idle_clients_are_open_while_there_is_room_for_what_they_hold(few, monkeypatch):
    sizes = iter((5, 7, 3, 9))
    monkeypatch.setattr(worker.Worker, "held_bytes", lambda self: next(sizes))
    few._room, few._last = 12, 1
    few.of(0)
    few.of(1)  # 0 holds 5
    few.of(1)
    few.of(2)  # 1 holds 7
    assert list(few.open()) == [0, 1, 2]
    few.of(0)  # 2 holds 3, and 5 are free again
    assert list(few.open()) == [1, 2, 0]
    few.of(2)  # 0 holds 9: 16 with the 7 of 1, who goes
    assert list(few.open()) == [0, 2]
    assert (few._idle, few._idle_bytes) == ({0: 9}, 9)


def test_what_an_open_client_holds(few):
    one, nothing = few.of(0), few.of(0).held_bytes()
    one.stream.open(0)
    x, y = one.stream.train(0)
    tested = one.stream.test(0)
    one.states.save(4, Bundle(weights={"w": torch.ones(2)}))
    data = sum(tensor.nbytes for tensor in (x, y, *tested))
    assert one.held_bytes() == nothing + data + 8
    one.close()
    assert one.held_bytes() == nothing


def test_a_closed_client_finds_its_private_state_again(few):
    state = Bundle(weights={"w": torch.ones(2)})
    few.of(0).states.save(4, state)
    few.of(1)
    few.of(2)
    assert few.versions(0) == [4]
    assert torch.equal(few.of(0).states.load(4, Bundle()).weights["w"], torch.ones(2))


def test_nothing_is_made_for_clients_that_never_worked(few, tmp_path):
    assert few.versions(1) == []
    assert few.durable(1) == -1
    assert [p.name for p in (tmp_path / "states").iterdir()] == ["0"]


class Beats:
    """A link that keeps what clients say to have on their disks; the first beat is lost."""

    is_arriving = False

    def __init__(self) -> None:
        self.told: queue.Queue[tuple[ClientId, int, int]] = queue.Queue()
        self.has_lost = False

    def beat(self, member: Membership, progress: Progress, durable: int) -> bool:
        self.told.put((member.client, progress.interaction, durable))
        arrived, self.has_lost = self.has_lost, True
        return arrived


def test_an_order_that_is_slow_to_come_beats_for_its_process(few, digits, tmp_path):
    """Else its clients look as dead as those of a broken link; before the first Pull, for none."""
    link = Beats()
    link.is_arriving = True
    host = Host([0, 1], cast(Link, link), digits, tmp_path / "states", torch.device("cpu"))
    host.workers, host.beat_every_s = few, 0.001
    member = Membership(0, "run", b"")
    host.enrolment.members[0] = member
    beats = threading.Thread(target=host._beat_forever)
    beats.start()
    try:
        with pytest.raises(queue.Empty):
            link.told.get(timeout=0.05)
        host._pulling_as = {0: member}
        assert link.told.get(timeout=20) == (0, -1, -1)
    finally:
        host._closed.set()
        beats.join()


def test_an_idle_client_says_once_what_became_safe_after_its_upload(few, digits, tmp_path):
    """Its next order may be far away, and until then the run would keep all states since."""
    link = Beats()
    host = Host([0, 1, 2], cast(Link, link), digits, tmp_path / "states", torch.device("cpu"))
    host.workers, host.beat_every_s = few, 0.001
    host.enrolment.members |= {c: Membership(c, "run", b"") for c in (0, 1, 2)}
    beats = threading.Thread(target=host._beat_forever)
    beats.start()
    try:
        few.of(0).states.save(4, Bundle(weights={"w": torch.ones(2)}))
        for other in (1, 2):  # the first one is closed meanwhile
            few.of(other)
        assert link.told.get(timeout=20) == (0, -1, 4)
        assert link.told.get(timeout=20) == (0, -1, 4), "the lost beat is told again"
        few.of(1).states.save(5, Bundle(weights={"w": torch.ones(2)}))
        assert link.told.get(timeout=20) == (1, -1, 5)
    finally:
        host._closed.set()
        beats.join()
    assert link.told.empty()


# --- joining together


class Direct:
    """A link without a network; it keeps the requests."""

    address = "here"

    def __init__(self, service: Service) -> None:
        self.service = service
        self.requests: list[rpc.JoinSeveralRequest] = []

    def join(self, request: rpc.JoinSeveralRequest) -> rpc.JoinResponse:
        self.requests.append(request)
        arrived = rpc.JoinSeveralRequest.FromString(request.SerializeToString())
        return self.service.join_several(arrived, Caller()).joined


@pytest.fixture
def service(tmp_path: Path) -> Service:
    spool = Spool(tmp_path / "spool", 1 << 20)
    cohort = RemoteCohort(3, spool, EventLog(), admission=Admission({}))
    return Service("run", {}, cohort, EventLog())


def test_clients_of_a_process_join_in_one_message(few, service, tmp_path, monkeypatch):
    def named(client: ClientId) -> ClientData:
        data = opened(client)
        data.file = data.file.model_copy(update={"name": "ann" if client == 1 else ""})
        return data

    link, opened = Direct(service), few.data
    monkeypatch.setattr(few, "data", named)
    enrolment = Enrolment(link, few, tmp_path / "states", start_over=False)  # type: ignore[arg-type]
    enrolment.join()
    (request,) = link.requests
    assert len(request.descriptions) == 1
    assert not request.descriptions[0].tasks
    assert [one.name for one in request.clients] == ["", "ann", ""]
    described = service.cohort.gather()
    admitted = Admission({})
    for client in range(3):
        admitted.check(client, described[client])
        assert service.cohort.session(client, enrolment.members[client].token).client_json
    assert [Profile.parse(c, described[c]).name for c in range(3)] == ["", "ann", ""]
    tasks = [service.cohort.admission._known[c] for c in range(3)]
    assert len(set(tasks)) == 3  # each has its own counts
    enrolment.rejoin({1: enrolment.members[1]})
    assert [one.client_id for one in link.requests[1].clients] == ["1"]
    assert [one.run_id for one in enrolment.members.values()] == ["run"] * 3


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"protocol": 1}, "this server speaks protocol"),
        ({"run_id": "another"}, "state directories belong to run another, this is run run"),
        ({"clients": [rpc.Joining(client_id="0")]}, "client 0 must bring a token"),
        (
            {"clients": [rpc.Joining(client_id="0", token=b"a", description=7)]},
            "client 0 names a description that is not there",
        ),
        ({"clients": [rpc.Joining(client_id="3", token=b"a")]}, "client id '3' is none of this"),
    ],
)
def test_a_lie_about_several_clients_is_refused(service, changes, line):
    request = rpc.JoinSeveralRequest(**{"protocol": PROTOCOL, **changes})  # type: ignore[arg-type]
    with pytest.raises((Refused, PayloadError), match=line):
        service.join_several(request, Caller())


def test_data_on_a_gpu_have_the_room_that_it_has_and_are_given_back(monkeypatch, digits, tmp_path):
    given, free = [], 8000.0
    monkeypatch.setattr(workers, "free_on", lambda device: free)
    monkeypatch.setattr(workers, "give_back", given.append)
    monkeypatch.setattr(worker.Worker, "held_bytes", lambda self: 600)
    device = torch.device("cpu")
    made = Workers([0, 1, 2], digits, tmp_path / "states", device)
    made.begin(tiny_experiment(schedule={"clients": 3}))
    for client in (0, 1, 2):
        made.of(client)
    assert (len(made.open()), given) == (3, [])  # 600 of 1000 bytes: an eighth of what is free
    made.of(0)
    assert (len(made.open()), given) == (3, [])
    free = 2000.0
    small = Workers([0, 1, 2], digits, tmp_path / "others", device)
    small.begin(tiny_experiment(schedule={"clients": 3}))
    for client in (0, 1, 2):
        small.of(client)
    assert (len(small.open()), given) == (2, [device])
