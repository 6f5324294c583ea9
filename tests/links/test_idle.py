"""Links on which nothing moves: they are kept, and one that is dead is noticed."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc

from fedcli.runtime import link as link_module
from fedcli.runtime.link import Link, Membership
from fedmodels.errors import LinkError
from fedpb import PROTOCOL, SERVICE, channels
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.progress.events import EventLog
from fedsrv.transport import gate, service
from fedsrv.transport import listening as transport_server
from fedsrv.transport.refusals import AlreadyConnected
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.links.proxy import Fate, Proxy

COUNTS = [1, 1]
PROFILE = json.dumps(
    {
        "format": 1,
        "input_shape": [4],
        "num_classes": 2,
        "tasks": [{"train": COUNTS, "test": COUNTS}],
    }
)


@contextmanager
def served(cohort: RemoteCohort, events: EventLog) -> Iterator[int]:
    """Serve a cohort; give the port."""
    made = Service("run", {}, cohort, events)
    server, port = start_server(made, "127.0.0.1:0", None)
    try:
        yield port
    finally:
        cohort.wake()
        stop_server(server)
        made.gate.close()
        made.complaints.close()


def test_a_gate_that_closes_waits_for_its_last_look(monkeypatch):
    """Else what the look stores would meet a run that is closed."""
    monkeypatch.setattr(gate, "CALLS_LOOK_S", 0.001)
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def look():
        begun.set()
        may_end.wait(10)
        ended.set()

    made = gate.Gate(1, look=look)
    made.start()
    assert begun.wait(10)
    threading.Timer(0.05, may_end.set).start()
    made.close()
    assert ended.is_set()


@pytest.fixture
def cohort(tmp_path: Path) -> RemoteCohort:
    return RemoteCohort(2, Spool(tmp_path, 1 << 20), EventLog(), admission=Admission({}))


def test_ten_idle_minutes_cost_a_waiting_client_nothing(cohort):
    tokens = [cohort.join(c, PROFILE, bytes([c + 1]) * 16, ()) for c in (0, 1)]
    members = [cohort.session(c, tokens[c]) for c in (0, 1)]
    stop = threading.Event()
    waits = threading.Thread(
        target=cohort.next_orders,
        args=(cohort.caller({0: members[0]}, {0: 0}), lambda: not stop.is_set()),
    )
    waits.start()
    while not members[0].is_waiting:
        stop.wait(0.001)
    for member in members:  # nothing was heard for ten minutes
        member.seen -= 600.0
    with pytest.raises(AlreadyConnected):  # it waits: its link is kept alive, its id is taken
        cohort.join(0, PROFILE, b"another's", ())
    cohort.join(1, PROFILE, b"another's", ())  # this one does not even wait: it is gone
    assert cohort.sessions[0] is members[0]
    stop.set()
    cohort.wake()
    waits.join(10)
    assert not waits.is_alive()


def test_pings_are_more_frequent_than_idle_links_are_cut_and_rarer_than_a_server_bears(
    monkeypatch, cohort
):
    """Routers forget idle connections, the strictest usual ones after a minute."""
    seen: dict[str, dict[str, int]] = {}
    made, begun = grpc.insecure_channel, grpc.server

    def channel(address: str, options: list[tuple[str, int]]) -> grpc.Channel:
        seen["client"] = dict(options)
        return made(address, options)

    def server(pool: object, options: list[tuple[str, int]], **more: object) -> grpc.Server:
        seen["server"] = dict(options)
        return begun(pool, options=options, **more)

    monkeypatch.setattr(grpc, "insecure_channel", channel)
    monkeypatch.setattr(service.grpc, "server", server)
    Link("127.0.0.1:9").close()
    with served(cohort, EventLog()):
        pass
    asks_ms = seen["client"]["grpc.keepalive_time_ms"]
    assert asks_ms + seen["client"]["grpc.keepalive_timeout_ms"] <= 60_000
    assert seen["client"]["grpc.http2.max_pings_without_data"] == 0  # as many as it takes
    bears_ms = seen["server"]["grpc.http2.min_ping_interval_without_data_ms"]
    assert 2 * bears_ms <= asks_ms
    assert seen["server"]["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.loopback
def test_a_link_on_which_nothing_moves_outlives_its_pings(monkeypatch, cohort):
    """A server ends a connection after the third ping that came sooner than it bears them."""
    monkeypatch.setattr(channels, "KEEPALIVE_MS", 400)
    monkeypatch.setattr(transport_server, "BORNE_PING_MS", 100)
    events = EventLog()
    with (
        served(cohort, events) as port,
        grpc.insecure_channel(
            f"127.0.0.1:{port}", options=channels.channel_options("127.0.0.1:9")
        ) as channel,
    ):
        watch = channel.unary_stream(f"/{SERVICE}/Watch")
        with pytest.raises(grpc.RpcError) as ended:
            list(watch(b"", timeout=4.0))  # ten pings
        events.close()
    assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED, ended.value.details()


def test_grpc_knows_every_option_of_a_server_and_a_channel(monkeypatch, cohort):
    """One that it does not know is passed over in silence."""
    names = {name for name, _ in channels.channel_options("127.0.0.1:9")}
    begun = grpc.server

    def server(pool: object, options: list[tuple[str, int]], **more: object) -> grpc.Server:
        names.update(name for name, _ in options)
        return begun(pool, options=options, **more)

    monkeypatch.setattr(service.grpc, "server", server)
    with served(cohort, EventLog()):
        pass
    known = Path(cygrpc.__file__).read_bytes()
    assert [name for name in sorted(names) if name.encode() not in known] == []


@pytest.fixture
def proxy(cohort: RemoteCohort) -> Iterator[Proxy]:
    """Return a good link to a server with this cohort."""
    with served(cohort, EventLog()) as port:
        made = Proxy(port, lambda number: Fate())
        yield made
        made.close()


@pytest.mark.loopback
def test_a_link_that_fell_silent_is_noticed_and_made_anew(proxy, cohort, monkeypatch, caplog):
    """No end, no reset: nothing arrives any more, as behind a router that lost its table."""
    monkeypatch.setattr(channels, "KEEPALIVE_MS", 1000)
    monkeypatch.setattr(channels, "PONG_MS", 1000)
    told = threading.Event()
    monkeypatch.setattr(link_module.log, "warning", lambda *_: told.set())
    caplog.set_level(logging.WARNING)
    link = Link(f"127.0.0.1:{proxy.port}")
    asked = rpc.JoinRequest(
        client_id="0", description=description_of(PROFILE), token=b"own", protocol=PROTOCOL
    )
    member = Membership(0, "run", link.join(asked).token)
    waiting = rpc.Waiting(client_id="0", token=member.token, durable=-1)
    asked_twice, pulls = threading.Event(), list[int]()

    def waits_for() -> list[rpc.Waiting]:
        pulls.append(1)
        if len(pulls) == 2:
            asked_twice.set()
        return [waiting]

    def pull() -> None:
        with pytest.raises(LinkError, match="closed"):
            link.pull(waits_for, lambda client: {})

    thread = threading.Thread(target=pull)
    thread.start()
    while not cohort.session(0, member.token).is_waiting:
        told.wait(0.01)
    proxy.silent.set()
    assert told.wait(30)
    proxy.silent.clear()
    assert asked_twice.wait(30)
    while proxy.done["connections"] < 2:
        told.wait(0.01)
    link.close()
    thread.join(10)
    assert not thread.is_alive()
