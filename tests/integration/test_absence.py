"""Runs that go on without a client: one that never came, and one that did not come back."""

import pytest

from tests.conftest import records_of
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
