"""A relay of one run after the other, and of none but one at a time."""

from __future__ import annotations

import itertools
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from fedmodels.errors import ConfigError, LinkError
from fedmodels.host.staying import NEW_RUNS
from fedmodels.times import FIRST_PAUSE_S, LAST_PAUSE_S
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import description_pb2 as pb
from fedpb.v1.table_pb2 import Table
from fedplugins.relays.relaying import Relaying, RunGone
from fedplugins.relays.service import RelayService
from fedplugins.relays.staying import relay_runs
from fedplugins.relays.trips import Delivery, RelayedTrips
from fedplugins.relays.uplink import Uplink
from fedsrv.cli import app
from fedsrv.progress.events import HAS_FAILED, EventLog
from fedsrv.transport.refusals import NotReady, RunOver, WrongRun
from fedsrv.transport.spool import Spool
from tests.conftest import tiny_experiment

DESCRIBED = pb.ClientDescription(input_shape=[1, 8, 8], num_classes=10)


def relayed(*ends: Exception | None) -> tuple[list[str], list[float]]:
    """Return at which addresses relays begin that end so, and the pauses between them."""
    places, pauses, left = list[str](), list[float](), [*ends]

    def relay(address, on_ready):
        places.append(address)
        if not left:
            raise KeyboardInterrupt
        if isinstance(left[0], ConfigError):
            raise left.pop(0)
        on_ready(address or "127.0.0.1:4000")
        if (end := left.pop(0)) is not None:
            raise end

    with pytest.raises(KeyboardInterrupt):
        relay_runs(relay, pauses.append)
    return places, pauses


def test_the_next_run_is_relayed_at_once_and_at_the_same_address():
    places, pauses = relayed(None, RunGone("the run has failed"), None)
    assert places == ["", *["127.0.0.1:4000"] * 3]
    assert pauses == []


def test_after_a_fault_a_relay_begins_again_after_a_longer_time_each_time():
    refused, away = LinkError("the coordinator refuses this relay"), ConfigError("no relay.pem")
    first = FIRST_PAUSE_S
    assert relayed(refused, away, OSError(28, "no room"))[1] == [first, 2 * first, 4 * first]
    assert relayed(refused, refused, None, refused)[1] == [first, 2 * first, first]
    assert relayed(*[refused] * 20)[1][-1] == LAST_PAUSE_S


def test_a_coordinator_that_names_run_after_run_has_one_relayed_a_minute():
    """It would have a relay begin anew without end, as fast as sites ask what is served."""
    clock, begun = [0.0], list[float]()

    def relay(address, on_ready):
        begun.append(clock[0])
        clock[0] += 0.1
        if clock[0] > 1800 or len(begun) > 1000:
            raise KeyboardInterrupt
        on_ready(address or "127.0.0.1:4000")
        raise RunGone("run a is not served any more, and run b is")

    def wait(seconds):
        clock[0] += seconds

    with pytest.raises(KeyboardInterrupt):
        relay_runs(relay, wait, lambda: clock[0])
    assert NEW_RUNS + 20 < len(begun) <= NEW_RUNS + 30 + 1


def test_what_keeps_the_first_relay_from_beginning_ends_the_command():
    with pytest.raises(ConfigError, match="no relay"):
        relayed(ConfigError("no relay.pem"))


def test_each_run_is_relayed_by_the_conditions_of_the_command(tmp_path, monkeypatch):
    """Who may join, whose code may run and the log; certificates are read again."""
    served, read = list[tuple[object, ...]](), itertools.count()
    shown = list[object]()

    def serve(clients, above, listen, telling, code, log_place, on_ready):
        served.append((clients, above.credentials, listen.address, code, log_place))
        shown.append(listen.credentials)
        if len(served) == 3:
            raise KeyboardInterrupt
        on_ready("127.0.0.1:4000")
        raise RunGone("it has failed")

    monkeypatch.setattr("fedplugins.relays.relaying.serve_relay", serve)
    monkeypatch.setattr("fedplugins.relays.staying.places_behind", lambda *given: [])
    monkeypatch.setattr(
        "fedsrv.identity.tls.caller_credentials", lambda *files: (next(read), *files[:3])
    )
    monkeypatch.setattr("fedsrv.identity.tls.server_credentials", lambda *files: (served[:], files))
    files = Path("ca.pem"), Path("relay.pem"), Path("relay.key")
    words = ["--up-ca", "ca.pem", "--up-cert", "relay.pem", "--up-key", "relay.key", "--stay"]
    words += ["--up", "host:1", "--clients", "0-1", "--code", "own.py", "--audit", str(tmp_path)]
    words += ["--tls-cert", "relay.pem", "--tls-key", "relay.key"]
    CliRunner().invoke(app, ["relay", *words])
    same = [Path("own.py")], tmp_path
    assert served == [
        (range(2), (0, *files), "127.0.0.1:0", *same),
        (range(2), (1, *files), "127.0.0.1:4000", *same),
        (range(2), (2, *files), "127.0.0.1:4000", *same),
    ]
    listening = (Path("relay.pem"), Path("relay.key"), None)
    assert shown == [(served[:n], listening) for n in range(3)], "read for each run"


def test_a_relay_of_one_run_says_how_to_go_on_with_the_next(monkeypatch):
    """As where its run was withdrawn from a queue, and another one is served."""

    def serve(*_):
        raise RunGone("run aaaaaaaa is not served any more, and run bbbbbbbb is")

    monkeypatch.setattr("fedplugins.relays.relaying.serve_relay", serve)
    found = CliRunner().invoke(app, ["relay", "--up", "host:1", "--clients", "0-1"]).exception
    assert isinstance(found, RunGone)
    assert str(found) == (
        "run aaaaaaaa is not served any more, and run bbbbbbbb is; with --stay, a relay continues "
        "with the next run that is served at host:1"
    )


class Above:
    """A coordinator; a test says which run it serves."""

    address, run_id, zstd = "coordinator:1", "a" * 32, False
    experiment = Table()

    def prepare(self, request):
        return rpc.PrepareResponse(run_id=self.run_id)

    def join(self, request):
        token = b"x" * 16
        return rpc.JoinResponse(run_id=self.run_id, token=token, experiment=self.experiment)

    def join_several(self, request):
        return rpc.JoinSeveralResponse(joined=self.join(request))


@pytest.fixture
def relay(tmp_path, monkeypatch):
    """Return a relay's service, the coordinator above, and the other runs that it saw."""
    trips = RelayedTrips(range(2), Spool(tmp_path, 1 << 20), EventLog(), clock=lambda: 7.0)
    seen, above = list[tuple[str, str]](), Above()
    found = RelayService(
        range(2), trips, EventLog(), above, on_other_run=lambda *runs: seen.append(runs)
    )
    found.refuse = lambda context, error: (_ for _ in ()).throw(error)
    learn = found._learn
    monkeypatch.setattr(found, "_learn", lambda *given: None)
    return SimpleNamespace(service=found, above=above, seen=seen, trips=trips, learn=learn)


def join(relay, client):
    token = client.encode() * 16
    request = rpc.JoinRequest(client_id=client, token=token, description=DESCRIBED)
    return relay.service.join(request, None)


def join_several(relay, client):
    one = rpc.Joining(client_id=client, token=client.encode() * 16)
    request = rpc.JoinSeveralRequest(clients=[one], descriptions=[DESCRIBED])
    return relay.service.join_several(request, None)


@pytest.mark.parametrize("joins", [join, join_several])
def test_a_relay_leaves_its_run_when_another_one_is_joined(relay, joins):
    """What it knows of the first run, as the sizes of uploads, is not said of the second."""
    joins(relay, "0")
    relay.above.run_id = "b" * 32
    with pytest.raises(NotReady):
        joins(relay, "1")
    assert relay.seen == [("a" * 32, "b" * 32)]
    assert [*relay.trips.below.sessions] == [0]


def test_a_relay_learns_of_another_run_from_a_site_that_asks_what_is_served(relay):
    ask = rpc.PrepareRequest(client_id="1")
    assert relay.service.prepare(ask, None).run_id == "a" * 32
    relay.above.run_id = "b" * 32
    assert relay.service.prepare(ask, None).run_id == "b" * 32
    assert relay.seen == []  # nobody had joined
    join(relay, "0")
    relay.above.run_id = "c" * 32
    assert relay.service.prepare(ask, None).run_id == "c" * 32
    assert relay.seen == [("b" * 32, "c" * 32)]


@pytest.mark.parametrize("joins", [join, join_several])
def test_a_run_that_goes_on_with_a_shorter_deadline_has_its_sums_in_time(relay, joins, monkeypatch):
    """The relay kept the first one: its sums came when nobody waited for them any more."""
    monkeypatch.setattr(relay.service, "_learn", relay.learn)
    orders = {
        c: rpc.Order(kind=rpc.ORDER_KIND_TRAIN, client_id=str(c), interaction=1, trip=1, issue=1)
        for c in range(2)
    }
    for deadline_s in (100.0, 10.0, 1000.0):
        made = tiny_experiment(server={"deadline_s": deadline_s, "min_clients": 2})
        relay.above.experiment = table_of(made.to_dict())
        for client in "01":
            joins(relay, client)
        relay.trips.recall()
        relay.trips.begin(Delivery(1, orders, group=(0, 1)))
        with relay.trips.changed:
            assert relay.trips.group.until == 7.0 + 0.8 * deadline_s


def ended(tmp_path: Path, why: Exception | None) -> None:
    """Let a relay run until its run has ended; None: another run is served."""
    trips = RelayedTrips(range(2), Spool(tmp_path, 1 << 20), EventLog())
    with closing(Uplink("127.0.0.1:1")) as uplink:
        relaying = Relaying(trips, uplink)
        if why is None:
            end = lambda: relaying.leave("a" * 32, "b\x1b" * 16)  # noqa: E731
        else:
            end = lambda: relaying._end(why)  # noqa: E731
        threading.Thread(target=end).start()
        relaying.run()


def test_how_a_run_ended(tmp_path):
    ended(tmp_path, RunOver("the run is over"))
    with pytest.raises(RunGone, match=r"^the disk is full$"):
        ended(tmp_path, WrongRun(f"{HAS_FAILED}the disk is full"))
    with pytest.raises(RunGone, match=r"^run aaaaaaaa is not served any more, and run b\\x1bb"):
        ended(tmp_path, None)
    with pytest.raises(LinkError, match="refuses") as refused:
        ended(tmp_path, WrongRun("it refuses this relay"))
    assert not isinstance(refused.value, RunGone)


def test_behind_a_front_the_oldest_run_is_relayed_as_long_as_it_is_served(monkeypatch):
    """A front that does not answer, or serves nothing, says nothing of it."""
    served, now = list[str](), [[2, 1], [2, 1], [], [1], [1]]

    def serve(clients, above, listen, telling, code, log_place, on_ready):
        served.append(above.address)
        if len(served) == 2:
            raise KeyboardInterrupt
        on_ready("127.0.0.1:4000")
        assert [above.is_served() for _ in range(3)] == [True, True, False]
        raise RunGone("the queue serves no run there any more")

    monkeypatch.setattr("fedplugins.relays.relaying.serve_relay", serve)
    monkeypatch.setattr("fedplugins.relays.staying.places_behind", lambda *given: now.pop(0))
    CliRunner().invoke(app, ["relay", "--up", "hub:5055", "--clients", "0-1", "--stay"])
    assert served == ["hub:5057", "hub:5056"]


def test_a_relay_leaves_a_run_that_the_front_serves_no_more(tmp_path):
    trips = RelayedTrips(range(2), Spool(tmp_path, 1 << 20), EventLog())
    with closing(Uplink("127.0.0.1:1")) as uplink:
        relaying = Relaying(trips, uplink)
        relaying.leave_unless(lambda: False)
        with pytest.raises(RunGone, match="serves no run there any more"):
            relaying.run()


def test_a_relay_that_took_a_front_for_a_coordinator_begins_anew(relay):
    relay.above.prepare = lambda request: rpc.PrepareResponse(places=[1])
    with pytest.raises(NotReady):
        relay.service.prepare(rpc.PrepareRequest(client_id="1"), None)
    assert relay.seen == [("", "")]
