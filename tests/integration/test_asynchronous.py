"""Asynchronous rounds between real processes: slow clients, kills, and the same bits again."""

from __future__ import annotations

import re
from typing import Any

import pytest

from fedtide.inprocess import run_in_process
from tests.conftest import arrivals_of, records_of
from tests.integration.conftest import tables
from tests.integration.harness import reached
from tests.runs import assert_same

pytestmark = pytest.mark.loopback


def experiment(method: str = "held-whole", **schedule: Any) -> dict[str, Any]:
    """Return eight interactions of three clients; a round ends with the first upload."""
    at_once = {"order": "asynchronous", "rounds": 4, "clients": 3, "buffer": 1, **schedule}
    return tables(method, schedule=at_once)


@pytest.mark.parametrize(
    ("method", "victims"), [("held-whole", "coordinator"), ("held", "everybody")]
)
def test_recorded_arrivals_bring_the_same_bits_whoever_is_killed(
    method, victims, loopback, partition, tmp_path, steer
):
    """The kill comes while orders of three interactions are under way."""
    first = tmp_path / "first"
    expected = run_in_process(experiment(method), partition, first)
    (steer / "aggregate-3").touch()
    run = loopback(experiment(method, arrivals=str(first)))
    server = run.serve()
    clients = [run.join(str(c)) for c in range(3)]
    reached(steer / "aggregate-3.reached")
    server.kill()
    if victims == "everybody":
        for client in clients:
            client.kill()
    server = run.serve()
    if victims == "everybody":
        clients = [run.join("0-1"), run.join("2")]
    assert_same(run.finish(server, *clients), expected)
    assert arrivals_of(run.out) == arrivals_of(first)
    if victims == "coordinator":  # who lives sends what it has, and does not train again
        trained = [re.findall(r"round (\d+), task \d+: loss", c.output()) for c in clients]
        assert trained == [[*dict.fromkeys(rounds)] for rounds in trained]


def test_a_power_loss_is_made_up_for_in_the_recorded_order(loopback, partition, tmp_path, steer):
    """The disks have kept up to interaction 1; clients hold private states."""
    (steer / "sync-limit").write_text("1")
    (steer / "aggregate-4").touch()
    run = loopback(experiment("held"))
    server = run.serve()
    clients = [run.join(str(c)) for c in range(3)]
    reached(steer / "aggregate-4.reached")
    for process in (server, *clients):
        process.kill()
    before = arrivals_of(run.out)
    for file in [*(run.out / "clients").rglob("state-*"), *(run.out / "server").glob("state-*")]:
        if int(file.stem[-8:]) > 1:
            file.unlink()
    (steer / "sync-limit").unlink()
    server = run.serve()
    clients = [run.join(str(c)) for c in range(3)]
    assert server.wait_kind("commit")["interaction"] <= 2
    summary = run.finish(server, *clients)
    assert arrivals_of(run.out)[: len(before)] == before
    again = run_in_process(experiment("held", arrivals=str(run.out)), partition, tmp_path / "again")
    assert_same(again, summary)


def test_a_slow_client_holds_up_nobody_and_a_kill_loses_no_order(
    loopback, partition, tmp_path, steer
):
    """Client 2 is stuck in its first order; the others go on, also with a new coordinator."""
    for point in ("train-2-0", "aggregate-3", "aggregate-4"):
        (steer / point).touch()
    run = loopback(experiment())
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    for point in ("train-2-0", "aggregate-3"):
        reached(steer / f"{point}.reached")
    server.wait_kind("commit", interaction=2)
    server.kill()
    committed = records_of(run.out)
    assert [2, 0] in committed[-1]["under_way"]
    server = run.serve()
    order = server.wait_kind("order", client="2")
    (steer / "aggregate-4").unlink()
    assert order["interaction"] == 0, "its order of interaction 0 is given again"
    clients[2].kill()
    clients[2] = run.join("2")
    summary = run.finish(server, *clients.values())
    assert records_of(run.out)[: len(committed)] == committed
    again = run_in_process(experiment(arrivals=str(run.out)), partition, tmp_path / "again")
    assert_same(again, summary)
