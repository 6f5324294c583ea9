"""What is refused, with which line or code, while the run goes on."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fedmodels.tensors.bundle import Bundle
from fedpb import PROTOCOL
from fedpb.codec import encode
from fedpb.tables import description_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1 import coordinator_pb2_grpc
from fedpb.v1.description_pb2 import ClientDescription
from fedpb.v1.table_pb2 import Entry, Table, Value
from tests.conftest import records_of
from tests.integration.conftest import Loopback, tables
from tests.integration.harness import Coordinator, until, write_config

pytestmark = pytest.mark.loopback

NO_SCALE = ClientDescription(format=1, input_shape=[4], num_classes=2, scale=math.nan)
_SEED = Entry(key="seed", value=Value(integer=1))
TWICE = ClientDescription(format=1, partition=Table(entries=[_SEED, _SEED]))
TOLERANT = tables("fedavg", server={"min_clients": 2})


class PlainClient:
    """A client made of the generated stubs alone, as another language would have it."""

    def __init__(self, run: Loopback, client: str = "2") -> None:
        self.channel = grpc.insecure_channel(f"127.0.0.1:{run.port}")
        self.stub = coordinator_pb2_grpc.CoordinatorServiceStub(self.channel)
        self.client = client
        self.description = (run.partition / client / "client.json").read_text()
        self.token = b""

    def join(self, **more: Any) -> rpc.JoinResponse:
        request = {"client_id": self.client, "protocol": PROTOCOL}
        request["description"] = description_of(self.description)
        reply = self.stub.Join(rpc.JoinRequest(**{**request, **more}), timeout=10)
        self.token = reply.token
        return reply

    def pull(self) -> tuple[rpc.PullHeader, list[rpc.PullResponse]]:
        """Return the header and the messages of the next order."""
        waiting = rpc.Waiting(client_id=self.client, token=self.token, durable=-1)
        call = self.stub.Pull(rpc.PullRequest(waiting=[waiting]), timeout=30)
        chunks = [next(call)]
        header = chunks[0].header
        size = sum(part.bundle.payload_bytes for part in header.parts)
        while sum(len(chunk.frame.payload) for chunk in chunks) < size:
            chunks.append(next(call))
        call.cancel()
        return header, chunks

    def leave(self) -> None:
        """Give the session back: else the coordinator waits for it until its lease is over."""
        self.stub.Leave(rpc.LeaveRequest(client_id=self.client, token=self.token), timeout=10)

    def push(self, order: rpc.Order, bundle: Bundle, **more: Any) -> rpc.PushResponse:
        return self.stub.Push(iter(self.chunks(order, bundle, **more)), timeout=10)

    def chunks(self, order: rpc.Order, bundle: Bundle, **more: Any) -> list[rpc.PushRequest]:
        encoded = encode(bundle)
        facts = {
            "client_id": self.client,
            "token": self.token,
            "kind": order.kind,
            "interaction": order.interaction,
            "trip": order.trip,
            "bundle": encoded.header,
        }
        frames = [rpc.PushRequest.FromString(chunk) for chunk in encoded.chunks()]
        return [rpc.PushRequest(header=rpc.PushHeader(**{**facts, **more})), *frames]


@pytest.fixture
def plain() -> Iterator[Callable[..., PlainClient]]:
    made: list[PlainClient] = []

    def make(run: Loopback, client: str = "2") -> PlainClient:
        made.append(PlainClient(run, client))
        return made[-1]

    yield make
    for one in made:
        one.channel.close()


def upload_of(run: Loopback) -> Bundle:
    """Return an upload as the method wants it."""
    from fedmodels.tensors.bundle import Problem
    from fedmodels.training.run import RunFacts

    weights = RunFacts(run.experiment, Problem((1, 8, 8), 10)).initial_weights
    return Bundle(weights=dict(weights), scalars={"num_examples": 5.0})


def poisoned(bundle: Bundle) -> Bundle:
    weights = {**bundle.weights, "head/bias": torch.full((10,), float("nan"))}
    return Bundle(weights=weights, scalars=bundle.scalars)


BAD = {
    "nan": (grpc.StatusCode.INVALID_ARGUMENT, "holds NaN or infinite values"),
    "claim": (grpc.StatusCode.RESOURCE_EXHAUSTED, "the header claims 10737418240 bytes"),
    "unknown": (grpc.StatusCode.INVALID_ARGUMENT, "unexpected tensor 'weights/head/bia'"),
}
"""What is wrong with an upload, and what it is refused with."""


def test_a_bad_upload_fails_its_client_and_the_run_goes_on(loopback, plain):
    run = loopback({**TOLERANT, "evaluate": {"every": 0}})
    server = run.serve()
    clients = [run.join("0"), run.join("1")]
    bad = plain(run)
    bad.join()
    good = upload_of(run)
    for interaction, (spoil, (code, line)) in enumerate(BAD.items()):
        order = bad.pull()[0].order
        assert (order.kind, order.interaction) == (rpc.ORDER_KIND_TRAIN, interaction)
        chunks = bad.chunks(order, poisoned(good) if spoil == "nan" else good)
        if spoil == "claim":
            chunks[0].header.bundle.payload_bytes = 10 << 30
        elif spoil == "unknown":
            chunks[0].header.bundle.weights.tensors[-2].name = "head/bia"
        with pytest.raises(grpc.RpcError) as refused:
            bad.stub.Push(iter(chunks), timeout=10)
        assert refused.value.code() == code
        assert line in refused.value.details()
        failed = server.wait_kind("failed")
        assert failed["client"] == "2"
        assert "its upload was refused" in failed["detail"]["reason"]
    bad.pull()  # the run waits for its answer
    takes_over = run.join("2", states=run.root / "fresh")
    bad.stub.Leave(rpc.LeaveRequest(client_id="2", token=bad.token), timeout=10)
    if takes_over.wait() != 0:  # it may have tried before the session was given back
        takes_over = run.join("2", states=run.root / "fresh")
    run.finish(server, *clients, takes_over)
    for record, (_, line) in zip(records_of(run.out), BAD.values(), strict=False):
        assert record["cohort"] == [0, 1]
        assert line in record["failed"]["2"]


def test_below_min_clients_the_run_stops_and_names_the_client(loopback, plain):
    run = loopback(tables("fedavg"))
    server = run.serve()
    run.join("0-1")
    bad = plain(run)
    bad.join()
    order = bad.pull()[0].order
    with pytest.raises(grpc.RpcError):
        bad.push(order, poisoned(upload_of(run)))
    assert server.wait() == 1
    assert server.error() == (
        "error: client 2 failed in round 1 (upload): its upload was refused: "
        "tensor 'weights/head/bias' holds NaN or infinite values; the run needs 3 clients "
        "here ([server] min_clients, all of them without it): --resume tries again, and --resume "
        "--without 2 continues without client 2"
    )


def test_repeated_and_superseded_uploads(loopback, plain):
    run = loopback(tables("fedavg"))
    run.serve()
    client = plain(run)
    client.join()
    others = [plain(run, "0"), plain(run, "1")]
    for other in others:
        other.join()
    header, chunks = client.pull()
    order, (common,) = header.order, header.parts
    assert common.role == "common"
    assert sum(len(c.frame.payload) for c in chunks) == common.bundle.payload_bytes
    upload = upload_of(run)
    assert not client.push(order, upload).repeated_upload
    assert client.push(order, upload).repeated_upload
    order.interaction = 5
    with pytest.raises(grpc.RpcError) as refused:
        client.push(order, upload)
    assert refused.value.code() == grpc.StatusCode.ABORTED


def test_joining_is_refused_with_a_line(loopback, plain):
    run = loopback(tables("fedavg"))
    run.serve()
    client = plain(run)
    for change, code, line in (
        ({"client_id": "3"}, "INVALID_ARGUMENT", "'3' is none of this run's: 0 to 2"),
        ({"client_id": "../0"}, "INVALID_ARGUMENT", "is none of this run's"),
        ({"run_id": "feed"}, "FAILED_PRECONDITION", "belongs to run feed"),
        ({"protocol": 9}, "FAILED_PRECONDITION", "speaks protocol 7, the client 9: install one"),
        ({"description": None}, "INVALID_ARGUMENT", "malformed: format: Input should be 1"),
        ({"description": NO_SCALE}, "INVALID_ARGUMENT", "malformed: scale: Input should be"),
        ({"description": TWICE}, "INVALID_ARGUMENT", "key 'seed' comes twice in a table"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            client.join(**change)
        assert refused.value.code().name == code
        assert line in refused.value.details()


def test_another_problem_and_a_wrong_token(loopback, plain):
    run = loopback(tables("fedavg"))
    run.serve()
    plain(run, "0").join()
    plain(run, "2").join()  # two of three say what the problem is
    other = plain(run, "1")
    facts = {**json.loads(other.description), "input_shape": [3, 9, 9]}
    with pytest.raises(grpc.RpcError) as refused:
        other.join(description=description_of(json.dumps(facts)))
    assert "client 1 has inputs [3, 9, 9]" in refused.value.details()
    other.join()
    other.token = b"guessed"
    with pytest.raises(grpc.RpcError) as refused:
        other.pull()
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    beat = rpc.BeatRequest(client_id="1", token=b"guessed")
    with pytest.raises(grpc.RpcError) as refused:
        other.stub.Beat(beat, timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_a_taken_id_and_a_foreign_state_directory(loopback):
    run = loopback(tables("fedavg"))
    server = run.serve()
    clients = [run.join("0"), run.join("1")]
    server.wait_for(lambda e: e.get("kind") == "joined" and e["client"] == "1")
    second = run.join("1", states=run.root / "elsewhere")
    assert second.wait() == 1
    assert "error: client 1: client 1 is connected already; if that was a" in second.output()
    foreign = run.root / "foreign" / "2"
    foreign.mkdir(parents=True)
    (foreign / "session.json").write_text('{"run_id": "feedbeef", "token": "00"}')
    stranger = run.join("2", states=run.root / "foreign")
    assert stranger.wait() == 1
    assert "belongs to run feedbeef" in stranger.output()
    assert "give it another --state-dir" in stranger.output()
    run.finish(server, *clients, run.join("2"))


def test_a_missing_data_folder(loopback, tmp_path):
    run = loopback(tables("fedavg"))
    run.serve()
    client = run.join("0", data=tmp_path / "nowhere")
    assert client.wait() == 2  # as a wrong option
    last = client.output().splitlines()[-1]
    assert last.startswith("error: ")
    assert "nowhere/0 is not there" in last


def test_a_dead_server(loopback):
    run = loopback(tables("fedavg"))
    run.serve().kill()
    client = run.join("0", "--give-up-after", "1")
    assert client.wait() == 1
    assert "waiting for the server at 127.0.0.1" in client.output()
    assert "lost" not in client.output()
    assert "error: gave up: the server at 127.0.0.1" in client.output()


def test_directories_ports_and_addresses(loopback):
    run = loopback(tables("fedavg"))
    run.serve()

    def refused(out: Path, *more: str, port: int = 0) -> tuple[int, str]:
        other = Coordinator(run.config, out, *more, port=port, forks=run.fork_server)
        try:
            return other.wait(), other.error()
        finally:
            other.close()

    for more in ([], ["--resume"]):
        status, line = refused(run.out, *more)
        assert status == 1
        assert line.startswith(f"error: {run.out} is in use by another process; wait until")
    status, line = refused(run.root / "busy", port=run.port)
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{run.port}: the port is busy" in line
    status, line = refused(run.root / "open", "--listen", "0.0.0.0:0")
    assert status == 2
    assert "without TLS" in line
    assert run.coordinator is not None
    run.coordinator.kill()
    write_config(run.config, run.experiment.model_copy(update={"seed": 9}))
    status, line = refused(run.out, "--resume")
    assert status == 2
    assert "it differs in seed" in line


def test_more_listeners_than_threads_do_not_stop_the_run(loopback, plain):
    run = loopback(tables("fedavg"))
    server = run.serve()
    monitor = plain(run)
    first = monitor.stub.Watch(rpc.WatchRequest(from_start=True))
    clients = [run.join("0")]
    begin = [next(first).event.WhichOneof("what") for _ in range(2)]
    assert begin == ["present", "listening"]  # it has its place
    others = [monitor.stub.Watch(rpc.WatchRequest()) for _ in range(60)]
    clients += [run.join("1"), run.join("2")]
    events = [told.event.WhichOneof("what") for told in first]
    run.finish(server, *clients)
    assert {"joined", "order", "upload", "commit", "scores"} <= set(events)
    for watch in others:
        watch.cancel()  # those that were admitted have not been read to their end
    refused = [w for w in others if w.code() == grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert len(refused) >= 60 - 15


def test_health_and_reflection(loopback, plain):
    run = loopback(tables("fedavg"))
    run.serve()
    channel = plain(run).channel
    request = health_pb2.HealthCheckRequest(service="fedpb.v1.CoordinatorService")
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(iter([asked]), timeout=10)
    names = [s.name for s in next(iter(answers)).list_services_response.service]
    assert "fedpb.v1.CoordinatorService" in names


def test_the_first_to_join_does_not_say_what_the_problem_is(loopback, plain):
    """It is turned away when the others agree on another, and the run is that of honest clients."""
    run = loopback(tables("fedavg"))
    server = run.serve()
    first = plain(run)
    facts = {**json.loads(first.description), "class_names": []}
    facts["tasks"] = [{part: row[:3] for part, row in task.items()} for task in facts["tasks"]]
    other = {**facts, "input_shape": [3, 9, 9], "num_classes": 3}
    first.join(description=description_of(json.dumps(other)))
    clients = [run.join("0"), run.join("1")]
    turned = server.wait_kind("failed")
    assert turned["client"] == "2"
    assert turned["detail"]["reason"] == "turned away: most clients describe another problem"
    with pytest.raises(grpc.RpcError) as refused:
        first.pull()
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    first.description = json.dumps({**facts, "tasks": facts["tasks"] * 2000})
    with pytest.raises(grpc.RpcError) as refused:
        first.join()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    run.finish(server, *clients, run.join("2"))


def test_a_liar_among_honest_clients(loopback, plain):
    """It lies in its upload and in its report; the run is the one in which it says nothing."""

    def ended_with(name: str, answer: Callable[..., None]) -> tuple[str, list[Any]]:
        run = loopback({**TOLERANT, "schedule": {"clients": 3, "rounds": 1}}, name)
        server = run.serve()
        clients = [run.join("0"), run.join("1")]
        third = plain(run)
        third.join()
        while True:
            order = third.pull()[0].order
            answer(run, third, order)
            if order.kind == rpc.ORDER_KIND_FINISH:
                break
        third.leave()
        digest = run.finish(server, *clients)["state_sha256"]
        assert (run.out / "rounds.jsonl").stat().st_size < 50_000
        records = records_of(run.out)
        assert all("2" in record["failed"] for record in records)
        return digest, records

    def lies(run: Loopback, client: PlainClient, order: rpc.Order) -> None:
        zeros = [0] * 10
        far = rpc.Counts(
            view="global", rule="classifier", test_set="task/30000000",
            support=zeros, predicted=zeros, correct=zeros,
        )  # fmt: skip
        report, upload = rpc.Report(counts=[far], extra={"views": 1.0}), Bundle()
        if order.kind == rpc.ORDER_KIND_TRAIN:
            weights = {
                k: torch.full_like(t, 1e30) if t.is_floating_point() else t
                for k, t in upload_of(run).weights.items()
            }
            upload = Bundle(weights=weights, scalars={"num_examples": 1e300})
            report = rpc.Report(num_examples=5) if order.interaction else report
        with pytest.raises(grpc.RpcError) as refused:
            client.push(order, upload, report=report)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    def silence(run: Loopback, client: PlainClient, order: rpc.Order) -> None:
        client.push(order, Bundle(), failure="no")

    lied, honest = ended_with("lied", lies), ended_with("silent", silence)
    assert lied[0] == honest[0]
    metrics = ([r["metrics"] for r in records] for _, records in (lied, honest))
    assert next(metrics) == next(metrics)


def test_a_site_that_requires_more_privacy_trains_not_once_and_the_run_goes_on(loopback):
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    hiding = {
        "level": "example", "noise_multiplier": 1.0, "delta": 1e-3,
        "allow": ["announced", "examples", "loss", "scores"],
    }  # fmt: skip
    run = loopback({**TOLERANT, "net": {"name": "mlp", "hidden": [8]}, "privacy": hiding})
    coordinator = run.serve()
    wrong = run.join("2", "--require-privacy", "level=client,epsilon=1,delta=1e-3")
    assert wrong.wait() == 2
    assert 'level=client, and the run has [privacy] level = "example"' in wrong.output()
    ledger = run.root / "site.db"
    floor = ["--require-privacy", "level=example,epsilon=0.01,delta=1e-3", "--ledger", str(ledger)]
    unscored = run.join("2", *floor)
    assert unscored.wait() == 2
    assert "--scores N allows so many models" in unscored.output()
    floor += ["--scores", "100"]
    strict = run.join("2", *floor)
    until(lambda: "waiting for orders" in strict.output(), "client 2 has joined")
    run.finish(coordinator, strict, run.join("0-1"))
    records = records_of(run.out)
    assert [record["cohort"] for record in records] == [[0, 1]] * 4
    why = records[0]["failed"]["2"]
    assert why == "declined: a limit of privacy is reached; its own log says which"
    assert "beyond 0.01" in strict.output(), "what it has spent stays at the site"
    with closing(sqlite3.connect(ledger)) as db:
        assert db.execute("SELECT count(*) FROM trainings").fetchone() == (0,)
