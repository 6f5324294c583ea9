"""A gRPC server that listens: its threads, its health, and what connections may do."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fedmodels.errors import RunFailed
from fedmodels.times import ANSWERED_S, BORNE_PING_MS, KEEPALIVE_S, PONG_MS
from fedsrv.transport.gate import Gate

MAX_WAITING = 1000
"""Calls that may wait for a thread."""


def _options(keepalive_ms: int) -> list[tuple[str, int]]:
    """Return the options of the server; a link without an answer ends."""
    answered_ms = min(keepalive_ms, int(ANSWERED_S * 1000))
    pong_ms = min(PONG_MS * answered_ms // int(ANSWERED_S * 1000), PONG_MS)
    return [
        ("grpc.max_concurrent_streams", 100),  # of one connection
        ("grpc.keepalive_time_ms", keepalive_ms),  # a stopped client answers none
        ("grpc.keepalive_timeout_ms", answered_ms),  # as TCP_USER_TIMEOUT
        ("grpc.http2.ping_timeout_ms", pong_ms),  # an answer waits behind data
        ("grpc.http2.settings_timeout", pong_ms),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),  # else a busy port would be shared in silence
        ("grpc.max_receive_message_length", 4 << 20),
        ("grpc.http2.bdp_probe", 0),  # it lets whole uploads pile up in gRPC, one per caller
        ("grpc.http2.lookahead_bytes", 2 << 20),  # 40 MB/s a caller at 50 ms there and back
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", BORNE_PING_MS),
    ]


def listen_at(
    address: str,
    credentials: grpc.ServerCredentials | None,
    services: Mapping[str, grpc.GenericRpcHandler],
    gate: Gate,
    its_health: health.HealthServicer,
    threads: int,
    keepalive_s: float = KEEPALIVE_S,
) -> tuple[grpc.Server, int]:
    """Start listening; return the server and its port.

    Args:
        address: where.
        credentials: of TLS, if it serves that.
        services: the handlers of each service, by its full name.
        gate: what every call passes first; it starts.
        its_health: says that the server and each service serve.
        threads: for calls under way.
        keepalive_s: how often a silent connection is pinged.

    Raises:
        RunFailed: the address is not free.
    """
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="rpc"),
        interceptors=[gate],
        maximum_concurrent_rpcs=threads + MAX_WAITING,
        options=_options(int(keepalive_s * 1000)),
    )
    server.add_generic_rpc_handlers(tuple(services.values()))
    health_pb2_grpc.add_HealthServicer_to_server(its_health, server)
    for name in ("", *services):
        its_health.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server
    )
    try:
        add = server.add_secure_port if credentials else server.add_insecure_port
        port = add(address, credentials) if credentials else add(address)
    except RuntimeError:
        port = 0
    if not port:
        raise RunFailed(
            f"cannot listen on {address}: the port is busy or the address is not this machine's; "
            "give another --listen"
        )
    gate.start()
    server.start()
    return server, port


def stop_server(server: grpc.Server, grace_s: float = 1.0) -> None:
    """Let calls under way end, then stop."""
    done: threading.Event = server.stop(grace_s)
    done.wait()
