"""Uploads under masks over mutual TLS: a relay between, and everybody is killed."""

import pytest

from fedsrv.identity.certificates import init_authority, issue
from tests.conftest import records_of
from tests.integration.conftest import tables
from tests.integration.harness import reached
from tests.integration.test_relay import up_options
from tests.integration.test_tls_run import client_options, server_options
from tests.runs import assert_same

pytestmark = pytest.mark.loopback
TABLES = {"schedule": {"rounds": 1, "clients": 3}, "evaluate": {"every": 0}}


def test_everybody_is_killed_while_some_masked_uploads_have_come(
    loopback, partition, steer, whole_run, tmp_path
):
    """Two clients behind a relay, one without; private heads, so that states must be there.

    Clients sign their keys, the relay passes signatures on, and the bits are those of a run in one
    process whose clients sign nothing.
    """
    certs = tmp_path / "certs"
    init_authority(certs)
    for identity in ("server", "relay:0-1", "0", "1", "2"):
        issue(certs, identity)
    point = steer / "train-1-1"
    point.touch()
    run = loopback(tables("held", **TABLES, privacy={"secure_sum": True}))
    server, up = run.serve(*server_options(certs)), up_options(certs, "relay-0-1")
    up[up.index("--tls-cert") :] = server_options(certs)
    relay = run.relay("0-1", *up)
    ports = {"0": relay.port, "1": relay.port, "2": None}

    def join(client):
        options = client_options(certs, f"client-{client}")
        return run.join(client, *options, "--min-cohort", "3", port=ports[client])

    clients = [join(client) for client in ports]
    reached(steer / "train-1-1.reached")
    server.wait_kind("upload", client="2", interaction=1)
    for process in (server, relay, *clients):
        process.kill()
    point.unlink()
    server = run.serve(*server_options(certs))
    run.relay("0-1", *up, port=relay.port)
    found = run.finish(server, *map(join, ports))
    trusting = tables("held", **TABLES, privacy={"secure_sum": {"trust": "coordinator"}})
    alone = whole_run(trusting, partition)
    assert_same(found, alone.summary)
    record, other = records_of(run.out)[1], records_of(alone.out)[1]
    assert record["secure_sum"] == other["secure_sum"]
    assert (record["secure_sum"]["groups"], record["secure_sum"]["unopened"]) == ([[0, 1, 2]], [])
    assert record["bytes"]["up"] == other["bytes"]["up"]
    assert not [*(run.out / "server").glob("sum-*")]
