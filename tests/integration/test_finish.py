"""The end of a run: nobody leaves before it is committed, whoever is killed on the way there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.conftest import Loopback, tables
from tests.integration.harness import Coordinator, reached

pytestmark = pytest.mark.loopback

EXPERIMENT = tables("held", schedule={"rounds": 1, "clients": 3})


def finish(run: Loopback, server: Coordinator, *clients: Any) -> None:
    """Wait for everybody; nobody is missing, and the bits are those of the run in one process."""
    assert "clients_missing" not in run.finish_as_alone(server, *clients)


def finished(server: Coordinator, *clients: int) -> None:
    """Wait until the results of these clients' last orders were taken."""
    left = {str(c) for c in clients}
    ordered: set[str] = set()

    def last(event: dict[str, Any]) -> bool:
        if event.get("kind") == "order" and event["detail"]["order"] == 3:
            ordered.add(event["client"])
        if event.get("kind") == "upload" and event["client"] in ordered:
            left.discard(event["client"])
        return not left

    server.wait_for(last)


def begin(run: Loopback) -> tuple[Coordinator, dict[int, Any]]:
    server = run.serve()
    return server, {c: run.join(str(c)) for c in range(3)}


def test_the_coordinator_is_killed_while_clients_finish(loopback, steer):
    """Two clients had brought their last result: it died with the coordinator."""
    (steer / "finish-1").touch()
    run = loopback(EXPERIMENT)
    run.lease_s = 5.0
    server, clients = begin(run)
    reached(steer / "finish-1.reached")
    finished(server, 0, 2)
    server.kill()
    clients[1].kill()
    server = run.serve()
    clients[1] = run.join("1")
    finish(run, server, *clients.values())


@pytest.mark.parametrize("point", ["before-end", "after-end", "leave-1"])
def test_the_coordinator_is_killed_at_the_end(point, loopback, steer):
    """Before the end is committed, before anybody is told of it, and when some know it already."""
    (steer / point).touch()
    run = loopback(EXPERIMENT)
    run.lease_s = 5.0  # it waits so long for a client that was told of the end, and has left
    server, clients = begin(run)
    reached(steer / f"{point}.reached")
    server.kill()
    server = run.serve()
    finish(run, server, *clients.values())


def test_a_client_that_has_finished_is_killed(loopback, steer):
    (steer / "before-end").touch()
    run = loopback(EXPERIMENT)
    server, clients = begin(run)
    reached(steer / "before-end.reached")
    for client in clients.values():
        client.kill()
    server.kill()
    server = run.serve()
    clients = {c: run.join(str(c)) for c in range(3)}
    finish(run, server, *clients.values())


def test_a_finished_run_tells_clients_that_come_later(loopback):
    """The coordinator says why it waits, and ends as soon as all clients have come and left."""
    run = loopback(EXPERIMENT)
    run.run("0", "1", "2")
    server = run.serve()
    finish(run, server, *(run.join(str(c)) for c in range(3)))
    told = "had finished before: it waits up to 15 s to tell clients that were away at its end"
    assert told in server.log.read_text()
