"""A trip under way: the encoded payload of its orders, and the results so far."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from fedmodels.errors import ClientFailed
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId
from fedpb.codec import Encoded, encode
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Trip
from fedsrv.engine.folding import Folding


@dataclass
class OpenTrip:
    """A trip under way, with the results so far."""

    trip: Trip
    common: Encoded
    personal: dict[ClientId, Encoded]
    folding: Folding
    results: dict[ClientId, Answer] = field(default_factory=dict)
    failed: dict[ClientId, str] = field(default_factory=dict)
    issue: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    wire_down: int = 0

    @classmethod
    def of(cls, trip: Trip, kept_bytes: int) -> Self:
        """Encode a trip's payload; uploads of more than ``kept_bytes`` in all may be folded."""
        folding = Folding(trip.orders, trip.count, kept_bytes)
        zstd = trip.compression.zstd
        common = encode(trip.sent, zstd=zstd)
        return cls(trip, common, _encoded_once(trip.personal, zstd=zstd), folding)

    def answered(self, client: ClientId) -> bool:
        """Tell whether a client has sent a result or failed."""
        return client in self.results or client in self.failed

    def keep(self, client: ClientId, result: Answer) -> None:
        """Add a client's result."""
        encoded = self.personal.get(client)
        result.logical_down = self.common.num_bytes + (encoded.num_bytes if encoded else 0)
        self.results[client] = result
        self.folding.add_answer(result, self.results, self.failed)

    def is_complete(self) -> bool:
        """Tell whether every client answered."""
        return len(self.results) + len(self.failed) == len(self.trip.orders)

    @property
    def needed(self) -> int:
        """Return the number of results that suffice to close the trip."""
        return len(self.trip.orders) if self.trip.needed is None else self.trip.needed


def _encoded_once(bundles: Mapping[ClientId, Bundle], *, zstd: bool) -> dict[ClientId, Encoded]:
    """Encode every bundle; clients that get the same object share the encoding."""
    by_object: dict[int, Encoded] = {}
    for bundle in bundles.values():
        if id(bundle) not in by_object:
            by_object[id(bundle)] = encode(bundle, zstd=zstd)
    return {client: by_object[id(bundle)] for client, bundle in bundles.items()}


def answers(header: rpc.PushHeader, order: rpc.Order) -> bool:
    """Tell whether a result answers an order, also one issued again after a crash."""
    same = header.kind == order.kind and header.interaction == order.interaction
    return same and (order.kind == rpc.ORDER_KIND_TRAIN or header.trip == order.trip)


def by_id(item: tuple[ClientId, object]) -> tuple[bool, int]:
    """Sort clients ascending, the evaluator last."""
    client = item[0]
    return (True, 0) if client == EVALUATOR else (False, int(client))


def what_for(trip: Trip) -> str:
    """Return a trip's purpose in words, for log lines."""
    sample = trip.sample
    kinds = {rpc.ORDER_KIND_TRAIN: "training", rpc.ORDER_KIND_EVALUATE: "evaluation"}
    kind = kinds.get(sample.kind, "end")
    return f"{kind}, round {sample.round}, interaction {sample.interaction}"


def why_failed(trip: Trip, failed: Mapping[ClientId, str]) -> str:
    """Return the line that names the first client of a trip that failed, and counts the others."""
    client, reason = next(iter(failed.items()))
    others = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
    return str(ClientFailed(client, trip.sample.round, "upload", reason)) + others
