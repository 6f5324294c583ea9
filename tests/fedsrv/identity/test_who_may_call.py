"""Every call of the service by everybody who must not make it, at a coordinator and at a relay."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from fedpb import SERVICE
from fedpb.frames import packed
from fedpb.identities import role_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import front_pb2
from fedplugins.relays.service import RelayService
from fedplugins.relays.trips import RelayedTrips
from fedplugins.relays.uplink import Uplink
from fedsrv.coordinator import Listen
from fedsrv.identity import certificates as certs
from fedsrv.identity.certificates import revoke
from fedsrv.identity.roles import MAY
from fedsrv.progress.events import EventLog
from fedsrv.transport.server import start_server, stop_server
from fedsrv.transport.service import Service
from fedsrv.transport.spool import Spool
from tests.sizes import ROOT

METHODS = rpc.DESCRIPTOR.services_by_name["CoordinatorService"].methods
CALLS = [method.name for method in METHODS]
ROLES = {"client": "3", "relay": "relay:3-4", "evaluator": "evaluator", "watcher": "watcher",
         "operator": "operator"}  # fmt: skip
PLACES = ("coordinator", "relay")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority with certificates of every kind; those of clients 0 and 1 are of no use."""
    root = tmp_path_factory.mktemp("ours")
    certs.init_authority(root)
    for identity in ("server", "1", "2", "5", *ROLES.values()):
        certs.issue(root, identity)
    then = SimpleNamespace(now=lambda zone: datetime.now(zone) - timedelta(days=1000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certs, "datetime", then)
        certs.issue(root, "0")
    certs.init_authority(root / "theirs")
    certs.issue(root / "theirs", "2")
    assert revoke(root, "1")[0].startswith("revoked: fedtide:client:1, serial ")
    return root


@pytest.fixture(scope="module")
def places(ours: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """The ports of a coordinator and of a relay that ask for certificates; nobody has joined."""
    files = ours / "server.pem", ours / "server.key", ours / "ca.pem"
    listens = [Listen.given("127.0.0.1:0", *files, False) for _ in PLACES]
    cohort: Any = SimpleNamespace(
        num_clients=8, most_present=8, present=dict, look_after=lambda: None
    )
    events = EventLog()
    scratch = tmp_path_factory.mktemp("relay")
    trips = RelayedTrips(range(8), Spool(scratch, 1 << 20), events)
    uplink = Uplink("127.0.0.1:1")
    services: dict[str, Any] = {
        "coordinator": Service("run", {}, cohort, events, guard=listens[0].guard()),
        "relay": RelayService(range(8), trips, events, uplink, guard=listens[1].guard()),
    }
    started = {
        name: start_server(service, listen.address, listen.credentials)
        for (name, service), listen in zip(services.items(), listens, strict=True)
    }
    yield {name: port for name, (_, port) in started.items()}
    events.close()
    for name, (server, _) in started.items():
        stop_server(server)
        services[name].gate.close()
        services[name].complaints.close()
    uplink.close()


def channel(ours: Path, port: int, stem: str | None, root: Path | None = None) -> grpc.Channel:
    place = root or ours
    pems = [(place / f"{stem}.{end}").read_bytes() for end in ("key", "pem")] if stem else []
    keys = grpc.ssl_channel_credentials((ours / "ca.pem").read_bytes(), *pems)
    return grpc.secure_channel(f"127.0.0.1:{port}", keys)


def refused(link: grpc.Channel, call: str, client: str = "2") -> tuple[grpc.StatusCode, str]:
    """Make a call for a client; return the code and the line with which it ends."""
    method = METHODS[CALLS.index(call)]
    name = f"/{SERVICE}/{call}"
    push = rpc.PushRequest(header=rpc.PushHeader(client_id=client))
    found: Any
    try:
        if call == "Push":
            link.stream_unary(name)(iter([push.SerializeToString()]), timeout=20)
        elif call == "PushSeveral":
            answer = link.unary_unary(name)(packed([push.SerializeToString()]), timeout=20)
            (found,) = rpc.PushSeveralResponse.FromString(answer).outcomes
            codes = {code.value[0]: code for code in grpc.StatusCode}
            return codes[found.code], found.line
        else:
            request: Any = getattr(rpc, method.input_type.name)()
            fields = method.input_type.fields_by_name
            if "client_id" in fields:
                request.client_id = client
            for group in {"clients", "waiting"} & set(fields):
                getattr(request, group).add(client_id=client)
            if method.server_streaming:
                next(link.unary_stream(name)(request.SerializeToString(), timeout=20))
            else:
                link.unary_unary(name)(request.SerializeToString(), timeout=20)
    except grpc.RpcError as error:
        found = error
        return found.code(), found.details()
    raise AssertionError(f"{call} was answered")


def test_every_call_says_who_may_make_it():
    of_front = front_pb2.DESCRIPTOR.services_by_name["FrontService"].methods
    assert list(MAY) == [*CALLS, *(method.name for method in of_front)]
    assert role_of("fedtide:relay:x") == role_of("fedtide:clients:0") == role_of("operator") == ""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["no certificate", "of another authority", "expired"])
def test_no_call_passes_the_handshake(ours, places, place, kind):
    stem = {"no certificate": None, "expired": "client-0"}.get(kind, "client-2")
    theirs = ours / "theirs" if kind == "of another authority" else None
    with channel(ours, places[place], stem, theirs) as link:
        codes = {call: refused(link, call)[0] for call in CALLS}
    assert codes == dict.fromkeys(CALLS, grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("place", PLACES)
def test_no_call_takes_a_revoked_certificate(ours, places, place):
    with channel(ours, places[place], "client-1") as link:
        for call in [*CALLS, "Health"]:
            if call == "Health":
                with pytest.raises(grpc.RpcError) as caught:
                    link.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20)
                code, line = caught.value.code(), caught.value.details()
            else:
                code, line = refused(link, call, "1")
            assert code == grpc.StatusCode.PERMISSION_DENIED, call
            assert line.startswith("the certificate of fedtide:client:1 was revoked on 20"), call


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("role", ROLES)
def test_no_call_passes_for_another_client_or_another_role(ours, places, place, role):
    """Everybody asks for client 2, whom none of these certificates names."""
    stem = "client-3" if role == "client" else ROLES[role].replace(":", "-")
    with channel(ours, places[place], stem) as link:
        for call in CALLS:
            if role not in MAY[call]:
                code, line = refused(link, call)
                assert code == grpc.StatusCode.PERMISSION_DENIED, call
                assert f"may not call {call}: that takes a certificate as" in line
            elif call not in ("Watch", "Steer"):
                code, line = refused(link, call)
                assert code == grpc.StatusCode.PERMISSION_DENIED, call
                assert line.endswith("does not cover 2"), call


def test_a_relay_joins_for_its_clients_alone(ours, places):
    for port in places.values():
        with channel(ours, port, "relay-3-4") as link:
            code, line = refused(link, "Join", "3")
            assert code == grpc.StatusCode.PERMISSION_DENIED
            assert line == "fedtide:relay:3-4 passes clients on, and is none itself"


def test_an_evaluator_may_ask_what_the_run_is(ours, places):
    """So that its owner can have rules as well, and let it stay for one run after the other."""
    with channel(ours, places["coordinator"], "evaluator") as link:
        code, line = refused(link, "Prepare", "evaluator")
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert line.startswith("this server speaks protocol")


def test_a_call_under_way_ends_when_its_certificate_is_revoked(ours, places):
    with channel(ours, places["coordinator"], "watcher") as link:
        health = "/grpc.health.v1.Health/Watch"
        watched = link.unary_stream(health)(b"", timeout=20)
        next(watched)
        revoke(ours, "watcher")
        with pytest.raises(grpc.RpcError) as ended:
            list(watched)
        assert ended.value.code() == grpc.StatusCode.CANCELLED
        again = link.unary_stream(health)(b"", timeout=20)
        with pytest.raises(grpc.RpcError, match="fedtide:watcher was revoked on"):
            next(again)


def test_the_docs_say_who_may_call():
    """The table of docs/security.md is that of the code."""
    table = (ROOT / "docs" / "security.md").read_text()
    roles = [*ROLES]
    assert "| call | " + " | ".join(roles) + " |" in table
    for call, may in MAY.items():
        row = " | ".join("yes" if role in may else "" for role in roles)
        assert f"| {call} | {row} |" in table, call
