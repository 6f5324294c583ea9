"""Runs that go on without a client: one that never came, and one that did not come back."""

import os
import shutil
import signal

import pytest

from fedcli.data.store.growing import add_task
from fedsrv.progress.watching import steer
from fedtide.inprocess import run_in_process
from tests.conftest import records_of, tiny_experiment
from tests.fedcli.data.test_growing import images
from tests.fedcli.data.test_own_data import own
from tests.integration.conftest import tables
from tests.integration.harness import reached

pytestmark = pytest.mark.loopback

EXPERIMENT = tables(
    "held", schedule={"rounds": 2, "clients": 3}, server={"min_clients": 2, "deadline_s": 5.0}
)
LEASE_S = 5.0
"""More than twice as long as clients that are at work say nothing."""


def test_a_client_never_joins(loopback):
    run = loopback(EXPERIMENT)
    run.lease_s = LEASE_S
    summary = run.run("0", "2")
    assert summary["clients_missing"] == ["1"]
    assert [r["cohort"] for r in records_of(run.out)] == [[0, 2]] * 4


def test_a_client_is_gone_when_the_coordinator_comes_back(loopback, steer):
    (steer / "aggregate-1").touch()
    run = loopback(EXPERIMENT)
    run.lease_s = LEASE_S
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    reached(steer / "aggregate-1.reached")
    server.kill()
    clients[1].kill()
    server = run.serve()
    summary = run.finish(server, clients[0], clients[2])
    assert summary["clients_missing"] == ["1"]
    records = records_of(run.out)
    assert len(records) == 4
    assert records[-1]["cohort"] == [0, 2]


def test_a_client_that_is_stopped_for_longer_than_its_lease_comes_back(loopback, tmp_path):
    """An open run learns of others meanwhile; what it owes the stopped client comes later."""
    for client in range(2):
        own(tmp_path / "own", client, class_names=["a", "b"])
    schedule = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2}
    experiment = tiny_experiment(
        method="fedper", net={"name": "mlp", "hidden": [4]}, schedule=schedule,
        server={"min_clients": 1, "deadline_s": 2.0},
    ).model_copy(update={"scenario": None, "data": None})  # fmt: skip
    run = loopback(experiment)
    run.lease_s = 1.5
    server = run.serve()
    clients = [run.join(str(client), data=tmp_path / "own") for client in range(2)]
    server.wait_kind("resting")
    os.kill(clients[1].pid, signal.SIGSTOP)
    for client in range(2):
        add_task(tmp_path / "own", client, images(tmp_path / f"{client}", "a", "b"))
        server.wait_kind("commit", interaction=client + 1)
        if client == 0:
            os.kill(clients[1].pid, signal.SIGCONT)
    steer(f"127.0.0.1:{run.port}", close=True)
    run.finish(server, *clients)
    records = records_of(run.out)
    assert [record["cohort"] for record in records] == [[0, 1], [0], [0, 1]]
    assert [g["tasks"] for r in records for g in r["growths"]][1:] == [[[0, 2]], [[1, 2]]]


def test_with_wait_all_a_client_that_was_killed_changes_nothing(loopback, tmp_path):
    """It comes back after its lease; bits and rounds are those of a run that nothing disturbs."""
    for client in range(2):
        own(tmp_path / "own", client, class_names=["a", "b"])
        for task in range(2):
            add_task(tmp_path / "own", client, images(tmp_path / f"{client}-{task}", "a", "b"))
    schedule = {"open": True, "order": "tasks_outer", "rounds": 2, "clients": 2, "wait": "all"}
    experiment = tiny_experiment(
        method="fedper", net={"name": "mlp", "hidden": [4]}, schedule=schedule,
    ).model_copy(update={"scenario": None, "data": None})  # fmt: skip
    alone = run_in_process(experiment, tmp_path / "own", tmp_path / "alone")
    run = loopback(experiment)
    run.lease_s = 1.5
    server = run.serve()
    clients = [run.join(str(client), data=tmp_path / "own") for client in range(2)]
    server.wait_kind("commit", interaction=1)
    clients[1].kill()
    server.wait_kind("gone")
    clients[1] = run.join("1", data=tmp_path / "own")
    server.wait_kind("resting")
    steer(f"127.0.0.1:{run.port}", close=True)
    summary = run.finish(server, *clients)
    assert summary["state_sha256"] == alone["state_sha256"]
    assert len(records_of(run.out)) == len(records_of(tmp_path / "alone")) == 6


def test_a_site_restored_from_a_backup_goes_on_once_it_is_recovered(loopback, tmp_path):
    """With commands as its owner types them: the lost month is set aside, the new one learned."""
    data, backup = tmp_path / "own", tmp_path / "backup"
    for client in range(2):
        own(data, client, class_names=["a", "b"])
    schedule = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2}
    experiment = tiny_experiment(
        method="fedavg", net={"name": "mlp", "hidden": [4]}, schedule=schedule
    ).model_copy(update={"scenario": None, "data": None})
    run = loopback(experiment)
    server = run.serve()
    clients = [run.join(str(client), data=data) for client in range(2)]
    server.wait_kind("commit", interaction=0)
    shutil.copytree(data, backup)
    add_task(data, 1, images(tmp_path / "may", "a", "b"))
    server.wait_kind("commit", interaction=1)
    clients[1].kill()
    shutil.rmtree(data / "1")
    shutil.copytree(backup / "1", data / "1")
    add_task(data, 1, images(tmp_path / "june", "a", "b"))
    refused = run.join("1", data=data)
    assert refused.wait() != 0
    assert "has other data as its task 1 than the run learned" in refused.output()
    words = ("--client-id", 1, "--data", data, "--server", f"127.0.0.1:{run.port}")
    status, said = run.fork_server.typed(tmp_path, "fedcli", "recover", *map(str, words))
    assert (status, said.count("the data of task 1 are lost: set aside")) == (0, 1), said
    clients[1] = run.join("1", data=data)
    server.wait_kind("commit", interaction=2)
    steer(f"127.0.0.1:{run.port}", close=True)
    run.finish(server, *clients)
    grown = [g["tasks"] for record in records_of(run.out) for g in record["growths"]]
    assert grown == [[[0, 1], [1, 1]], [[1, 2]], [[1, 3]]]


def test_a_site_without_its_states_starts_over_once_it_counts_as_gone(loopback, tmp_path):
    """It begins anew where its method keeps a state, and nobody waits for what it lost."""
    for client in range(2):
        own(tmp_path / "own", client, class_names=["a", "b"])
        add_task(tmp_path / "own", client, images(tmp_path / f"{client}", "a", "b"))
    schedule = {"open": True, "order": "tasks_outer", "rounds": 1, "clients": 2, "wait": "all"}
    experiment = tiny_experiment(
        method="fedper", net={"name": "mlp", "hidden": [4]}, schedule=schedule
    ).model_copy(update={"scenario": None, "data": None})  # fmt: skip
    run = loopback(experiment)
    run.lease_s = 1.5
    server = run.serve()
    clients = [run.join(str(client), data=tmp_path / "own") for client in range(2)]
    server.wait_kind("resting")
    clients[1].kill()
    shutil.rmtree(run.out / "clients" / "1")
    server.wait_kind("gone")
    lost = run.join("1", data=tmp_path / "own")
    assert lost.wait() != 0
    assert "--start-over" in lost.output()
    clients[1] = run.join("1", "--start-over", data=tmp_path / "own")
    add_task(tmp_path / "own", 0, images(tmp_path / "june", "a", "b"))
    server.wait_kind("commit", interaction=2)
    steer(f"127.0.0.1:{run.port}", close=True)
    summary = run.finish(server, *clients)
    assert summary["clients_started_over"] == [1]
