"""What hides a client, or its examples, and what a site itself requires of that."""

from __future__ import annotations

import math

from fedcli.runtime.client_part import Client
from fedpb.v1 import coordinator_pb2 as rpc

FAILED = "failed"
"""What a charge says was made, of a training that failed: an answer without an upload."""


def coarse(seconds: float) -> float:
    """Return seconds as they leave where noise hides a client: up to a power of two, from 1 on."""
    return float(2 ** max(0, math.ceil(math.log2(max(seconds, 1.0)))))


def blur(client: Client, order: rpc.Order, report: rpc.Report) -> None:
    """Tell less by a report: how long a training took, and no digest that a guess is checked by."""
    if order.kind == rpc.ORDER_KIND_TRAIN:
        report.seconds = coarse(report.seconds)
    if report.state_sha256:
        report.state_sha256 = client.states.secret().keyed(report.state_sha256)
