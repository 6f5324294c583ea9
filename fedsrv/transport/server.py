"""The gRPC server of a coordinator: its handlers, its threads, and what connections may do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from fedmodels.errors import PayloadError, RunFailed
from fedmodels.times import ANSWERED_S, BORNE_PING_MS, KEEPALIVE_S
from fedpb import SERVICE
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.transport.service import MAX_WATCHERS

MAX_WAITING = 1000
"""Calls that may wait for a thread."""


def _handlers(service: Any) -> grpc.GenericRpcHandler:
    """Return the service's handlers; requests pass as raw bytes and are parsed where errors are."""

    def parsed(call: Any, kind: Any) -> Any:
        def answered(data: bytes, context: grpc.ServicerContext) -> Any:
            try:
                request = kind.FromString(data)
            except DecodeError:
                error = PayloadError(f"the {kind.DESCRIPTOR.name} cannot be parsed")
                return service.refuse(context, error)
            return call(request, context)

        return answered

    def unary(call: Any, request: Any, reply: Any) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(
            parsed(call, request), None, reply.SerializeToString
        )

    several = unary(service.join_several, rpc.JoinSeveralRequest, rpc.JoinSeveralResponse)
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Prepare": unary(service.prepare, rpc.PrepareRequest, rpc.PrepareResponse),
            "Join": unary(service.join, rpc.JoinRequest, rpc.JoinResponse),
            "JoinSeveral": several,
            "Beat": unary(service.beat, rpc.BeatRequest, rpc.BeatResponse),
            "Announce": unary(service.announce, rpc.AnnounceRequest, rpc.AnnounceResponse),
            "Leave": unary(service.leave, rpc.LeaveRequest, rpc.LeaveResponse),
            "Steer": unary(service.steer, rpc.SteerRequest, rpc.SteerResponse),
            "Pull": grpc.unary_stream_rpc_method_handler(parsed(service.pull, rpc.PullRequest)),
            "Push": grpc.stream_unary_rpc_method_handler(
                service.push, None, rpc.PushResponse.SerializeToString
            ),
            "PushSeveral": grpc.unary_unary_rpc_method_handler(
                service.push_several, None, rpc.PushSeveralResponse.SerializeToString
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                parsed(service.watch, rpc.WatchRequest), None, rpc.WatchResponse.SerializeToString
            ),
        },
    )


def _options(keepalive_ms: int) -> list[tuple[str, int]]:
    """Return the options of the server; a link without an answer ends."""
    answered_ms = min(keepalive_ms, int(ANSWERED_S * 1000))
    return [
        ("grpc.max_concurrent_streams", 100),  # of one connection
        ("grpc.keepalive_time_ms", keepalive_ms),  # a stopped client answers none
        ("grpc.keepalive_timeout_ms", answered_ms),
        ("grpc.http2.ping_timeout_ms", answered_ms),  # else a minute counts
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", 0),  # else a busy port would be shared in silence
        ("grpc.max_receive_message_length", 4 << 20),
        ("grpc.http2.bdp_probe", 0),  # it lets whole uploads pile up in gRPC, one per caller
        ("grpc.http2.lookahead_bytes", 2 << 20),  # 40 MB/s a caller at 50 ms there and back
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", BORNE_PING_MS),
    ]


def start_server(
    service: Any,  # a Service, or what answers the same calls
    address: str,
    credentials: grpc.ServerCredentials | None,
    keepalive_s: float = KEEPALIVE_S,
) -> tuple[grpc.Server, int]:
    """Start listening; return the server and its port. RunFailed if the address is not free."""
    # for each client a Pull and a Push, twice while one takes the place of another, the watchers,
    # and what the gate lets in besides; more than that wait their turn, up to a crowd
    threads = 4 * service.cohort.most_present + MAX_WATCHERS + service.gate.threads
    server = grpc.server(
        ThreadPoolExecutor(threads, thread_name_prefix="rpc"),
        interceptors=[service.gate],
        maximum_concurrent_rpcs=threads + MAX_WAITING,
        options=_options(int(keepalive_s * 1000)),
    )
    service.complaints.open()
    server.add_generic_rpc_handlers((_handlers(service),))
    health_pb2_grpc.add_HealthServicer_to_server(service.health, server)
    for name in ("", SERVICE):
        service.health.set(name, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(
        (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
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
    service.gate.start()
    server.start()
    return server, port


def stop_server(server: grpc.Server, grace_s: float = 1.0) -> None:
    """Let calls under way end, then stop."""
    done: threading.Event = server.stop(grace_s)
    done.wait()
