"""A client that lost everything is refused with what there is to choose from, and each works."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from fedsrv.state.ledger import Ledger
from tests.integration.conftest import Loopback, tables
from tests.integration.harness import Client, Coordinator, reached

pytestmark = pytest.mark.loopback

EXPERIMENT = tables("held", schedule={"rounds": 3, "clients": 3}, server={"max_rollback": 1})
"""Six interactions of all three clients."""


def broken_off(run: Loopback, steer: Path) -> None:
    """Run to interaction 4, kill everybody, and lose all that client 1 has.

    Everything up to interaction 3 was safe on every disk.
    """
    (steer / "aggregate-4").touch()
    server = run.serve()
    clients = [run.join(str(c)) for c in range(3)]
    reached(steer / "aggregate-4.reached")
    server.kill()
    for client in clients:
        client.kill()
    shutil.rmtree(run.out / "clients" / "1")
    with closing(Ledger(run.out / "run.db", strict=False, new=False)) as ledger:
        ledger.set_facts(watermark="3")


def refused(run: Loopback) -> tuple[Coordinator, list[Client]]:
    """Resume; return the coordinator and the two clients that are admitted."""
    server = run.serve()
    lost, *others = [run.join(str(c)) for c in (1, 0, 2)]
    assert lost.wait() == 1
    line = lost.output().splitlines()[-1]
    assert line.startswith("error: client 1: client 1 lost its private state")
    assert "--start-over" in line
    assert "server.max_rollback=4" in line
    return server, others


def test_it_may_start_over(loopback, steer):
    run = loopback(EXPERIMENT)
    broken_off(run, steer)
    server, others = refused(run)
    client = run.join("1", "--start-over")
    server.wait_kind("started-over", client="1")
    assert server.wait_kind("commit")["interaction"] == 4
    assert not [e for e in server.events if e["kind"] == "rollback"]
    assert run.finish(server, *others, client)["clients_started_over"] == [1]


def test_the_run_may_go_back_all_the_way(loopback, steer):
    run = loopback(EXPERIMENT)
    broken_off(run, steer)
    server, others = refused(run)
    server.kill()
    server = run.serve("--set", "server.max_rollback=4")
    run.finish_as_alone(server, *others, run.join("1"))
