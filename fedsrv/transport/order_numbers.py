"""The number of an order: what it works on, so that a result tells what it is of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from fedmodels.tensors.bundle import ClientId
from fedpb.codec import Encoded
from fedpb.v1 import coordinator_pb2 as rpc


def numbered(
    orders: Mapping[ClientId, rpc.Order], common: Encoded, personal: Mapping[ClientId, Encoded]
) -> dict[ClientId, rpc.Order]:
    """Give orders the number of what they work on: the payload and the private state.

    After a crash the same work has the same number, and other work has another. A relay's orders
    have their number from above.
    """
    found = dict(orders)
    for client, order in orders.items():
        if not order.trip:
            own = personal[client].digest if client in personal else b""
            sha = hashlib.sha256(b"%d:" % order.base + common.digest + own)
            found[client] = numbered = rpc.Order()
            numbered.CopyFrom(order)
            numbered.trip = int.from_bytes(sha.digest()[:8]) >> 1 | 1
    return found


def answers(header: rpc.PushHeader, order: rpc.Order, orders: Iterable[rpc.Order]) -> bool:
    """Tell whether a result answers a client's order, also one issued again after a crash.

    Args:
        header: of the result, or of a relay's sum, whose number is that of any order of the trip.
        order: the client's.
        orders: all of the trip.
    """
    numbers = (one.trip for one in orders) if header.members else (order.trip,)
    same = header.kind == order.kind and header.interaction == order.interaction
    return same and header.trip in numbers
