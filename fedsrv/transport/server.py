"""The gRPC server of a coordinator: its handlers, and its threads."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from fedmodels.errors import PayloadError
from fedmodels.times import KEEPALIVE_S
from fedpb import SERVICE
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.transport.listening import listen_at, stop_server
from fedsrv.transport.service import MAX_WATCHERS

__all__ = ["start_server", "stop_server"]


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
    service.complaints.open()
    handlers = {SERVICE: _handlers(service)}
    return listen_at(
        address, credentials, handlers, service.gate, service.health, threads, keepalive_s
    )
