"""The options of a channel to a coordinator, a client's or a relay's."""

from __future__ import annotations

KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 20_000, 10_000
"""After so long without a byte a server is asked whether it is there, and has so long to answer."""


def channel_options() -> list[tuple[str, int]]:
    """Return gRPC's options: a silent server is noticed, and connected again within two seconds."""
    return [
        ("grpc.max_receive_message_length", 4 << 20),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # of pings that measure, too
        ("grpc.http2.max_pings_without_data", 0),  # else once a minute, after two without data
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_retries", 0),
    ]
