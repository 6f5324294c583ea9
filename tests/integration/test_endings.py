"""How a run ends before its end: it fails, it is drained, a client is stopped."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import threading
from contextlib import closing

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedpb import SERVICE
from fedsrv.progress.events import Event
from fedsrv.progress.watching import watched
from tests.integration.conftest import Loopback, tables
from tests.integration.harness import reached, until

pytestmark = pytest.mark.loopback

EXPERIMENT = tables("held", schedule={"rounds": 2, "clients": 3})
STOPPED = 128 + signal.SIGTERM


def committed(run: Loopback) -> int:
    """Count the records, which are the commits; lines of rounds.jsonl wait for the scores."""
    with closing(sqlite3.connect(run.out / "run.db")) as db:
        return int(db.execute("SELECT count(*) FROM interactions").fetchone()[0])


def test_clients_are_told_that_the_run_failed_and_exit(loopback):
    diverges = {**EXPERIMENT["training"], "lr": 1e30}
    run = loopback({**EXPERIMENT, "training": diverges})
    server = run.serve()
    heard = list[Event]()
    watched_run = watched(f"127.0.0.1:{run.port}")
    watching = threading.Thread(target=lambda: heard.extend(watched_run))
    watching.start()
    clients = [run.join(name) for name in ("0-1", "2")]
    assert server.wait() == 1
    watching.join(30)
    assert heard[-1].kind == "ended"
    assert heard[-1].detail["reason"].startswith("the run has failed: client ")
    assert server.error().count("the run has failed") == 0  # its own last line says it
    assert [client.wait() for client in clients] == [1, 1]
    line = clients[1].output().splitlines()[-1]
    assert line.startswith("error: pull: the run has failed: client ")
    assert "(FAILED_PRECONDITION)" in line


def test_sigterm_lets_the_interaction_end_and_resume_comes_to_the_same(
    loopback, partition, tmp_path, steer
):
    for point in ("aggregate-1", "train-0-2"):
        (steer / point).touch()
    run = loopback(EXPERIMENT)
    server = run.serve()
    clients = [run.join(str(c), "--json") for c in range(3)]
    reached(steer / "aggregate-1.reached")
    server.kill()
    server = run.serve()
    server.wait_kind("commit", interaction=1)
    reached(steer / "train-0-2.reached")
    server.process.send_signal(signal.SIGTERM)
    server.wait_kind("draining")
    with grpc.insecure_channel(f"127.0.0.1:{run.port}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=30)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    (steer / "train-0-2").unlink()
    assert server.wait() == STOPPED
    assert "stopped as asked: the same command with --resume" in server.error()
    assert committed(run) == 3
    run.finish_as_alone(run.serve(), *clients)
    said = [json.loads(line) for line in clients[0].output().splitlines()]
    assert {"joined", "trained", "scored", "finished", "log"} <= {each["kind"] for each in said}


def test_sigterm_while_it_waits_for_clients_ends_it_at_once(loopback):
    run = loopback(EXPERIMENT)
    server = run.serve()
    client = run.join("0")
    server.wait_kind("joined", client="0")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == STOPPED
    os.kill(client.pid, signal.SIGTERM)
    assert client.wait() == STOPPED


def test_a_client_that_is_stopped_leaves_with_a_line(loopback):
    run = loopback(EXPERIMENT)
    server = run.serve()
    client = run.join("0-1")
    until(lambda: "waiting for orders" in client.output(), "it waits for no orders")
    os.kill(client.pid, signal.SIGTERM)
    gone = [server.wait_kind("left") for _ in range(2)]  # in any order
    assert {event["client"] for event in gone} == {"0", "1"}
    assert all(event["detail"] == {"reason": "stopped"} for event in gone)
    assert client.wait() == STOPPED
    said = client.output()
    assert said.splitlines()[-1].endswith("leaves the run; the same command rejoins")
    assert "Traceback" not in said
    run.finish(server, run.join("0-1"), run.join("2"))
