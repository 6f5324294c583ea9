"""A monitor: whoever watches a run from outside, over the Watch call. It does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedmodels.errors import LinkError
from fedmodels.printable import printable
from fedpb import SERVICE
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.events import Event
from fedsrv.identity.tls import caller_channel, silence_of
from fedsrv.transport.event_messages import event_of

CONNECT_S = 10.0
"""A coordinator that is there answers sooner."""


def watched(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    seconds: float | None = None,
    connect_s: float = CONNECT_S,
) -> Iterator[Event]:
    """Yield the last events of a run, then new ones as they come, until it ends.

    Args:
        address: HOST:PORT of the coordinator.
        credentials: of a monitor, where it serves TLS.
        seconds: stop then, though the run goes on.
        connect_s: how long the coordinator may take to answer.

    Raises:
        LinkError: nobody answers, the coordinator refuses, or its certificate is not trusted.
    """
    with caller_channel(address, credentials) as channel:
        try:  # channel_ready_future would leave a thread that fails when the channel closes soon
            health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=connect_s, wait_for_ready=True
            )
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:  # any other code is an answer
                raise LinkError(silence_of(address, credentials)) from None
        watch: Any = channel.unary_stream(
            f"/{SERVICE}/Watch", rpc.WatchRequest.SerializeToString, rpc.WatchResponse.FromString
        )
        try:
            last = b""
            for answer in watch(rpc.WatchRequest(from_start=True), timeout=seconds):
                yield event_of(answer.event)
                if answer.head.link != last:
                    last = answer.head.link
                    yield Event("head", detail={"head": f"{answer.head.number}:{last.hex()}"})
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED or seconds is None:
                line = f"{printable(error.details() or '')} ({error.code().name})"
                raise LinkError(f"watching {address}: {line}") from None
