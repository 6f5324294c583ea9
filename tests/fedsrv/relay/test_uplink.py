"""A relay's calls to the coordinator above it."""

import socket

from fedsrv.relay.uplink import Uplink


def test_a_relay_sees_that_nobody_is_above_it():
    with socket.socket() as taken:  # bound and not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        uplink = Uplink(f"127.0.0.1:{taken.getsockname()[1]}")
        assert "Connection refused" in uplink.check()
        uplink.close()
