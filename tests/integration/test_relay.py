"""A tree of coordinators: relays sum what their clients upload, and anybody may be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from fedmodels.facts.resolution import experiment_of
from fedpb import PROTOCOL
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import description_pb2 as pb
from fedpb.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from fedsrv.cli import main
from fedsrv.engine.schedule import steps
from fedsrv.identity.certificates import init_authority, issue
from fedtide.inprocess import run_in_process
from tests.conftest import arrivals_of, records_of
from tests.integration.conftest import Loopback, tables
from tests.integration.harness import Relay, reached
from tests.integration.test_tls_run import client_options, server_options
from tests.runs import assert_same

pytestmark = pytest.mark.loopback

EXPERIMENT = tables("held", schedule={"rounds": 3, "clients": 3})
"""Six interactions of all three clients, who hold private heads."""


def finish(run: Loopback, *clients: Any) -> dict[str, Any]:
    """Wait for everybody, relays included; return the summary."""
    assert run.coordinator is not None
    found = run.finish(run.coordinator, *clients)
    for relay in run.relays:
        assert relay.wait() in (0, -9), relay.output()
    return found


def uploaded(found: dict[str, Any]) -> int:
    total: int = found["bytes"]["up"]
    return total


def test_one_relay_has_the_flat_digest_and_two_bring_one_sum_each(loopback):
    run = loopback(EXPERIMENT)
    run.serve()
    relay = run.relay("0-2")
    found = finish(run, run.join("0-1", port=relay.port), run.join("2", port=relay.port))
    assert_same(found, run.alone)
    weights = uploaded(run.alone) - 18 * 8  # of three clients, six times, beside a count
    assert uploaded(found) == 18 * 8 + 2 * weights // 3, "one sum in float64 for three uploads"
    line = "with --stay, a relay continues with the next run that is served at 127.0.0.1:"
    assert f"this relay ends together with its run; {line}{run.port}" in relay.output()
    assert "WARNING" not in relay.output()
    assert "ERROR" not in relay.output()


def test_a_relay_and_a_client_without_one(loopback):
    """The sums of a group differ from the flat mean in the last bit of float64 at most."""
    run = loopback(EXPERIMENT)
    run.serve()
    relay = run.relay("1-2")
    found = finish(run, run.join("0"), run.join("1-2", port=relay.port))
    assert found["metrics"] == run.alone["metrics"]
    weights = uploaded(run.alone) - 18 * 8
    assert uploaded(found) == 18 * 8 + weights, "one sum in float64 for two uploads"
    assert found["bytes"]["wire_down"] < run.alone["bytes"]["down"]


def test_the_first_client_of_a_relay_lies_about_its_problem(loopback):
    """The coordinator turns it away; the relay goes on with what the others state."""
    run = loopback(EXPERIMENT)
    server, relay = run.serve(), run.relay("0-2")
    tasks = [pb.TaskCounts(train=[1] * 10, test=[1] * 10)]
    lie = pb.ClientDescription(format=1, input_shape=[3, 8, 8], num_classes=10, tasks=tasks)
    request = rpc.JoinRequest(client_id="0", token=b"x" * 16, protocol=PROTOCOL, description=lie)
    with grpc.insecure_channel(f"127.0.0.1:{relay.port}") as channel:
        CoordinatorServiceStub(channel).Join(request, timeout=30)
    clients = [run.join("1-2", port=relay.port)]
    server.wait_kind("failed", client="0")
    clients.append(run.join("0", port=relay.port))
    assert_same(finish(run, *clients), run.alone)


@pytest.mark.parametrize("victim", ["relay", "client", "coordinator", "everybody"])
def test_a_kill_during_training(victim, loopback, steer):
    """Client 1 trains when others' uploads of the interaction are with the relay already."""
    (steer / "train-1-2").touch()
    run = loopback(EXPERIMENT)
    server, relay = run.serve(), run.relay("0-2")
    clients = {c: run.join(str(c), port=relay.port) for c in range(3)}
    reached(steer / "train-1-2.reached")
    if victim in ("relay", "everybody"):
        relay.kill()
    if victim in ("coordinator", "everybody"):
        server.kill()
    for client in range(3) if victim == "everybody" else [1]:
        clients[client].kill()
    if victim in ("coordinator", "everybody"):
        run.serve()
    if victim in ("relay", "everybody"):
        run.relay("0-2", port=relay.port)
    for client in range(3) if victim == "everybody" else [1]:
        clients[client] = run.join(str(client), port=relay.port)
    assert_same(finish(run, *clients.values()), run.alone)


def test_a_relay_goes_on_without_a_client_that_is_late(loopback, steer):
    """At four fifths of the deadline the sum goes up; the late client counts no more."""
    experiment = {**EXPERIMENT, "server": {"min_clients": 2, "deadline_s": 5.0}}
    (steer / "train-1-2").touch()
    run = loopback(experiment)
    server, relay = run.serve(), run.relay("0-2")
    clients = {c: run.join(str(c), port=relay.port) for c in range(3)}
    reached(steer / "train-1-2.reached")
    server.wait_kind("commit", interaction=2)
    clients[1].kill()
    clients[1] = run.join("1", port=relay.port)
    finish(run, *clients.values())
    records = records_of(run.out)
    trained = [sorted(c for c, row in r["clients"].items() if "loss" in row) for r in records]
    assert trained[2] == ["0", "2"]
    assert trained[5] == ["0", "1", "2"]


@pytest.mark.parametrize("method", ["gldp", "pfedgraph"])
def test_a_method_that_sends_more_than_weights(method, loopback):
    """Prototypes go up for each client; what reads single uploads gets them whole."""
    run = loopback(tables(method, schedule={"rounds": 1, "clients": 3}))
    run.serve()
    relay = run.relay("0-2")
    assert_same(finish(run, run.join("0-2", port=relay.port)), run.alone)


def test_compressed_uploads_pass_whole(loopback):
    run = loopback({**EXPERIMENT, "compression": {"up": "int8", "down": "bfloat16"}})
    run.serve()
    relay = run.relay("0-2")
    found = finish(run, run.join("0-2", port=relay.port))
    assert_same(found, run.alone)
    assert uploaded(found) == uploaded(run.alone)


def test_cohorts_of_a_few_clients(loopback):
    """A group is the clients of a trip; a client alone brings its upload whole."""
    schedule = {"rounds": 3, "clients": 3, "per_round": 2}
    experiment = {**EXPERIMENT, "schedule": schedule}
    planned = steps(experiment_of(experiment), range(3), dict.fromkeys(range(3), 2))
    cohorts = [step.cohort for step in planned]
    assert (0, 1) in cohorts
    assert len({*cohorts}) > 1
    run = loopback(experiment)
    run.serve()
    relay = run.relay("0-1")
    found = finish(run, run.join("0-1", port=relay.port), run.join("2"))
    assert found["metrics"] == run.alone["metrics"]


def ends(relay: Relay | Any, line: str, status: int = 1) -> bool:
    return relay.wait() == status and line in relay.output()


def test_who_does_not_belong_is_told_so(loopback):
    run = loopback(EXPERIMENT)
    run.serve()
    relay = run.relay("0-1")
    line = "this relay is for clients 0-1; '2' joins elsewhere"
    assert ends(run.join("2", port=relay.port), line, status=2)
    above = Relay(run.fork_server, run.root / "second.log", f"127.0.0.1:{relay.port}", "0-1")
    run.relays.append(above)
    line = "a relay cannot stand behind another"
    assert ends(run.join("0", port=above.port), line, status=2)
    above.kill()
    relay.kill()


def test_asynchronous_rounds_pass_whole_and_the_relay_is_killed_amid_several(
    loopback, partition, tmp_path, steer
):
    """A round ends with the first upload, so orders of three rounds are under way at the kill."""
    schedule = {"order": "asynchronous", "rounds": 4, "clients": 3, "buffer": 1}
    experiment = tables("held", schedule=schedule)
    first = tmp_path / "first"
    expected = run_in_process(experiment, partition, first)
    (steer / "aggregate-3").touch()
    run = loopback({**experiment, "schedule": {**schedule, "arrivals": str(first)}})
    run.serve()
    relay = run.relay("0-2")
    clients = [run.join(str(c), port=relay.port) for c in range(3)]
    reached(steer / "aggregate-3.reached")
    relay.kill()
    (steer / "aggregate-3").unlink()
    run.relay("0-2", port=relay.port)
    found = finish(run, *clients)
    assert_same(found, expected)
    assert arrivals_of(run.out) == arrivals_of(first)
    assert uploaded(found) == uploaded(expected), "no sum, and none twice"
    assert len({begun for _, begun in records_of(run.out)[3]["under_way"]}) > 1


def test_a_run_that_fails_ends_its_relay(loopback, steer):
    (steer / "train-0-2").touch()
    run = loopback(EXPERIMENT)
    server, relay = run.serve(), run.relay("0-2")
    client = run.join("0-2", port=relay.port)
    server.wait_kind("commit", interaction=1)
    (run.out / "server").rename(run.root / "gone")  # the next state cannot be written
    (steer / "train-0-2").unlink()
    assert server.wait() != 0
    assert client.wait() == 1
    assert relay.wait() == 1, relay.output()
    assert "error: " in relay.output()


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an authority's directory; a relay's certificate is that of its clients."""
    root = tmp_path_factory.mktemp("certs")
    init_authority(root)
    for identity in ("server", "0-2", "0-1"):
        issue(root, identity)
    init_authority(root / "other")
    return root


def up_options(certs: Path, name: str, ca: Path | None = None) -> list[str]:
    return [
        "--up-ca", str(ca or certs / "ca.pem"), "--up-cert", str(certs / f"{name}.pem"),
        "--up-key", str(certs / f"{name}.key"), *server_options(certs),
    ]  # fmt: skip


def test_over_mutual_tls_a_relay_has_the_certificate_of_its_clients(loopback, certs):
    run = loopback(EXPERIMENT)
    run.serve(*server_options(certs))
    narrow = run.relay("0-2", *up_options(certs, "clients-0-1"))
    options = client_options(certs, "clients-0-2")
    refused = run.join("0-2", *options, port=narrow.port, states=run.root / "elsewhere")
    assert ends(refused, "fedtide:clients:0-1 does not cover 2 (PERMISSION_DENIED)")
    narrow.kill()
    relay = run.relay("0-2", *up_options(certs, "clients-0-2"), port=narrow.port)
    assert_same(finish(run, run.join("0-2", *options, port=relay.port)), run.alone)


def test_a_relay_that_does_not_trust_the_coordinator_ends_at_once(loopback, certs):
    run = loopback(EXPERIMENT)
    run.serve(*server_options(certs))
    log, up = run.root / "relay.log", f"127.0.0.1:{run.port}"
    options = up_options(certs, "clients-0-2", certs / "other" / "ca.pem")
    arguments = ["relay", "--up", up, "--clients", "0-2", *options]
    process = run.fork_server.start_fedsrv(arguments, log)
    assert process.wait() == 1
    process.close()
    assert "is not signed by the authority that --up-ca names" in log.read_text()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--clients", "5-2"], "--clients '5-2' is no range such as 0-24"),
        (["--clients", "0-2", "--up", "nowhere"], "--up"),
        (["--clients", "0-2", "--up-cert", "a.pem"], "--up-cert and --up-key belong together"),
        (["--clients", "0-2", "--listen", "0.0.0.0:0"], "without TLS"),
    ],
)
def test_wrong_options_get_one_line(options, line, capsys, monkeypatch):
    given = options if "--up" in options else ["--up", "127.0.0.1:9", *options]
    monkeypatch.setattr("sys.argv", ["fedsrv", "relay", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert line in said
    assert "\n" not in said
