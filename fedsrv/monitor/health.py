"""Whether a coordinator serves, asked over gRPC's health service.

Kubernetes' own gRPC probes speak no TLS, so a command asks. Probes start it every few seconds, so
it does not import torch.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedmodels.errors import LinkError
from fedsrv.identity.tls import caller_channel, distrust_of, silence_of

HEALTH_S = 5.0
"""A coordinator that is there answers sooner."""


def check_health(
    address: str, credentials: grpc.ChannelCredentials | None = None, within_s: float = HEALTH_S
) -> None:
    """Check that a coordinator serves.

    Args:
        address: HOST:PORT of the coordinator.
        credentials: of a monitor, if the coordinator serves TLS.
        within_s: how long the answer may take.

    Raises:
        LinkError: it does not answer, is about to end, or its certificate is not trusted.
    """
    with caller_channel(address, credentials) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=within_s, wait_for_ready=True
            )
        except grpc.RpcError as error:
            code = error.code()
            if code == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise LinkError(silence_of(address, credentials)) from None
            why = distrust_of(address, credentials) or f"no health of {address}: {code.name}"
            raise LinkError(why) from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise LinkError(f"{address} says {status}: it is about to end")
