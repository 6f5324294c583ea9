"""What an operator wants of a run, over the Steer call. It does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc

from fedmodels.errors import LinkError
from fedmodels.printable import printable
from fedpb import SERVICE
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.identity.tls import caller_channel, silence_of
from fedsrv.monitor.watch import CONNECT_S


def steer(
    address: str,
    credentials: grpc.ChannelCredentials | None = None,
    *,
    retire: Sequence[str] = (),
    forget: bool = False,
    close: bool = False,
    now: bool = False,
    exclude: Sequence[str] = (),
    within_s: float = CONNECT_S,
) -> None:
    """Let clients retire from an open run, or end it; exclude clients from any run.

    Args:
        address: HOST:PORT of the coordinator.
        credentials: of an operator, if the coordinator serves TLS.
        retire: ids of clients that leave for good.
        forget: drop what the server's state holds of these clients alone, too.
        close: end the run once nothing is left to learn.
        now: end it after the round under way.
        exclude: ids of clients that are set aside.
        within_s: how long the answer may take.

    Raises:
        LinkError: nobody answers, the coordinator refuses, or its certificate is not trusted.
    """
    request = rpc.SteerRequest(retire=retire, forget=forget, close=close, now=now, exclude=exclude)
    with caller_channel(address, credentials) as channel:
        call: Any = channel.unary_unary(
            f"/{SERVICE}/Steer", rpc.SteerRequest.SerializeToString, rpc.SteerResponse.FromString
        )
        try:
            call(request, timeout=within_s, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise LinkError(silence_of(address, credentials)) from None
            line = f"{printable(error.details() or '')} ({error.code().name})"
            raise LinkError(f"{address}: {line}") from None
