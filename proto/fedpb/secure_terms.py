"""The terms of an attempt at a secure sum: all that must be the same to everybody."""

from __future__ import annotations

import hashlib
import struct

from fedmodels.tensors.bundle import Bundle, state_digest
from fedpb.signatures import statement
from fedpb.v1 import coordinator_pb2 as rpc


def terms_of(
    order: rpc.Order, settings: bytes, *, own_tasks: bool = False, of_one_state: bool = False
) -> bytes:
    """Return the digest of an attempt's terms, 32 bytes, by an order to share secrets.

    They are who takes part with which keys, the threshold, how numbers become integers, the
    payload, the round and task that everybody trains, the settings of the run, and how its
    classes have changed. With ``own_tasks`` clients are on tasks of their own, which are no terms.
    With ``of_one_state`` the interaction whose private states clients begin from is one: a fixed
    group counts as a whole or not at all.
    """
    asked, task = order.secure_sum, 0 if own_tasks else order.task
    numbers = (
        order.interaction, order.round, task, asked.threshold, asked.clients, asked.most,
    )  # fmt: skip
    said = statement(
        "terms", settings, asked.attempt, asked.payload, struct.pack(">qqqIId", *numbers),
        *(struct.pack(">Q", peer.client) + peer.channel_key for peer in asked.peers),
        *_classes_of(order), *([struct.pack(">q", order.base)] if of_one_state else []),
    )  # fmt: skip
    return hashlib.sha256(said).digest()


def _classes_of(order: rpc.Order) -> list[bytes]:
    """Return how a run's classes have changed; nothing where they have not."""
    if not (order.new_classes or order.class_changes):
        return []
    told = rpc.Order(new_classes=order.new_classes, class_changes=order.class_changes)
    return [told.SerializeToString(deterministic=True)]


def payload_digest(payload: Bundle) -> bytes:
    """Return the digest of what a client is given to train from, 32 bytes."""
    return bytes.fromhex(state_digest([("payload", payload)]))
