"""The option ``--grpc`` of ``fedcli serve-model``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedplugins.serving.services import Ending, Service

if TYPE_CHECKING:
    from fedplugins.serving.model_server import ModelServer


def _begin(server: ModelServer, host: str, port: int) -> tuple[int, Ending]:
    from fedplugins.serving.grpc_service import begin

    return begin(server, host, port)


GRPC = Service(
    "--grpc", "The Open Inference Protocol over gRPC, too; loopback unless HOST:PORT.", _begin
)
