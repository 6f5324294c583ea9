"""A relay's calls to the coordinator above it."""

import socket

import pytest

from fedmodels.errors import LinkError
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.relaying import Relaying, Upstream, serve_relay
from fedplugins.relays.trips import RelayedTrips
from fedplugins.relays.uplink import Uplink
from fedsrv.coordinator import Listen
from fedsrv.progress.event_lines import EventPrinter
from fedsrv.progress.events import EventLog
from fedsrv.transport.spool import Spool


def test_a_relay_sees_that_nobody_is_above_it():
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        uplink = Uplink(f"127.0.0.1:{taken.getsockname()[1]}")
        assert uplink.check() == "nothing listens there (connection refused)"
        uplink.close()


class Relayed(Relaying):
    """A relay whose clients are there from the first moment on."""

    def _request(self):
        """Return a request until the relay ends; else its thread would stay busy for ever."""
        return None if self._why_ended() else (0, rpc.PullRequest())


def test_a_relay_leaves_a_coordinator_whose_certificate_was_revoked(tmp_path):
    """At its start, and whenever it makes a new link."""

    def refuses():
        raise LinkError("TLS: the certificate of the server was revoked")

    above = Upstream("127.0.0.1:1", check=refuses)
    with pytest.raises(LinkError, match="was revoked"):
        serve_relay(range(2), above, Listen(), EventPrinter(names_address=False, prints=False))
    trips = RelayedTrips(range(2), Spool(tmp_path, 1 << 20), EventLog())
    uplink = Uplink("127.0.0.1:1")
    with pytest.raises(LinkError, match="was revoked"):
        Relayed(trips, uplink, refuses).run()
    uplink.close()
