"""Uploads under masks over the wire: a relay between, and everybody is killed."""

import pytest

from tests.conftest import records_of
from tests.integration.conftest import tables
from tests.integration.harness import reached

pytest.importorskip("Crypto.Protocol.SecretSharing", reason="needs the extra secure-sum")
pytestmark = pytest.mark.loopback


def test_everybody_is_killed_while_some_masked_uploads_have_come(
    loopback, partition, steer, whole_run
):
    """Two clients behind a relay, one without; private heads, so that states must be there."""
    experiment = tables(
        "held", schedule={"rounds": 1, "clients": 3}, privacy={"secure_sum": True},
        evaluate={"every": 0},
    )  # fmt: skip
    point = steer / "train-1-1"
    point.touch()
    run = loopback(experiment)
    server, relay = run.serve(), run.relay("0-1")
    ports = {"0": relay.port, "1": relay.port, "2": None}
    clients = {c: run.join(c, port=port) for c, port in ports.items()}
    reached(steer / "train-1-1.reached")
    server.wait_kind("upload", client="2", interaction=1)
    for process in (server, relay, *clients.values()):
        process.kill()
    point.unlink()
    server = run.serve()
    run.relay("0-1", port=relay.port)
    run.finish_as_alone(server, *(run.join(c, port=port) for c, port in ports.items()))
    record = records_of(run.out)[1]
    said = {"groups": [[0, 1, 2]], "thresholds": [2], "unopened": []}
    assert record["secure_sum"].items() >= said.items()
    assert (
        record["bytes"]["up"] == records_of(whole_run(experiment, partition).out)[1]["bytes"]["up"]
    )
    assert not [*(run.out / "server").glob("sum-*")]
