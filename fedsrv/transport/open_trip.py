"""A trip under way: the encoded payload of its orders, and the results so far."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from fedmodels.errors import ClientFailed, PayloadError, TooFewClients
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.codec import Encoded, encode
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Answers, Trip, stamped
from fedsrv.engine.streaming_mean import StreamingMean, mean_with_sums
from fedsrv.transport.relayed import OverdueSums, dtypes_of_weights, groups_of, rest_spec
from fedsrv.transport.sessions import Superseded

T = TypeVar("T")


@dataclass(eq=False)
class OpenTrip:
    """A trip under way, with the results so far."""

    trip: Trip
    common: Encoded
    personal: dict[ClientId, Encoded]
    folding: StreamingMean
    results: dict[ClientId, Answer] = field(default_factory=dict)
    failed: dict[ClientId, str] = field(default_factory=dict)
    taken: set[ClientId] = field(default_factory=set)
    """Clients whose results or failures a flush took out of a lasting trip."""
    gone: Collection[ClientId] = ()
    """Clients that have not answered and were dead when somebody last looked."""
    issue: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    wire_down: int = 0
    groups: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Of each client behind a relay: the clients whose weights come in one sum."""
    relays: Mapping[ClientId, str] = field(default_factory=dict)
    """The relays that the groups were made by."""
    moved: set[int] = field(default_factory=set)
    """Clients that have joined elsewhere since, and left their groups."""
    promised: dict[ClientId, Answer] = field(default_factory=dict)
    """Results that lack their weights until their group's sum comes."""
    sums: dict[tuple[int, ...], Weights] = field(default_factory=dict)
    """The sums so far, by the clients in each; without tensors where nothing counts."""
    overdue: OverdueSums = field(init=False)
    """The sums that relays owe."""

    def __post_init__(self) -> None:
        """Begin with no sum that is owed."""
        self.overdue = OverdueSums(2 * self.trip.spec.max_bytes)

    @classmethod
    def of(
        cls,
        trip: Trip,
        kept_bytes: int | None = None,
        relays: Mapping[ClientId, str] | None = None,
    ) -> Self:
        """Encode a trip's payload.

        Args:
            trip: what to send.
            kept_bytes: uploads of more in all may be folded. Unless it is given, every upload stays
                whole: those of a lasting trip count one by one.
            relays: of each client behind a relay, which one; their uploads are summed there, where
                the method allows it.
        """
        relays = relays or {}
        groups = groups_of(trip, relays)
        count = None if kept_bytes is None or groups else trip.count
        folding = StreamingMean(trip.orders, count, kept_bytes or 0)
        zstd = trip.compression.zstd
        common = encode(trip.sent, zstd=zstd)
        personal = _encoded_once(trip.personal, zstd=zstd)
        trip = replace(trip, orders=numbered(trip.orders, common, personal))
        return cls(trip, common, personal, folding, groups=groups, relays=relays)

    def issued(
        self, clients: Sequence[ClientId], behind: int, committed: int, watermark: int
    ) -> list[rpc.Order]:
        """Return the orders of clients of one process as they are sent; ``behind`` more follow."""
        found = []
        for place, client in enumerate(clients, 1):
            order = stamped(self.trip.orders[client], committed, watermark)
            order.issue, order.following = self.issue, len(clients) - place + behind
            found.append(order)
        return found

    def spec_of(self, client: ClientId, *, is_summed: bool) -> BundleSpec:
        """Return what a client's upload must hold; if its weights are summed, all but them.

        Raises:
            PayloadError: the client's weights are not to be summed.
        """
        if not is_summed:
            return self.trip.spec
        if not isinstance(client, int) or client not in self.groups:
            raise PayloadError(f"the weights of client {client} come whole in this trip")
        return rest_spec(self.trip.spec)

    def group_left(self, client: ClientId) -> list[int]:
        """Return the clients of a client's group whose weights a sum can still bring."""
        group = self.groups.get(client, ()) if isinstance(client, int) else ()
        return [member for member in group if not self.answered(member)]

    def check_promise(self, client: ClientId, upload: Bundle) -> None:
        """Check that an upload without weights counts what an earlier one said.

        Raises:
            PayloadError: it counts something else, so that no sum can fit both.
        """
        assert self.trip.count is not None, "nothing is summed that has no count"
        held = self.promised.get(client)
        if held is not None and self.trip.count(held.upload) != self.trip.count(upload):
            raise PayloadError("it counts differently than the same upload did before")

    def members(self, clients: Sequence[ClientId]) -> tuple[int, ...]:
        """Return the clients of a sum, ascending.

        Raises:
            PayloadError: they are not of one group, one appears twice, or one's upload is missing.
            Superseded: one has left the group.
        """
        group = tuple(sorted(c for c in clients if isinstance(c, int)))
        if not self.moved.isdisjoint(group):
            raise Superseded("a client of the sum has joined elsewhere")
        known = self.groups.get(group[0], ()) if group else ()
        if len({*group}) < len(clients) or not {*group} <= {*known}:
            raise PayloadError("the clients of the sum are not of one group")
        for client in group:
            if client not in self.promised:
                raise PayloadError(f"all but the weights of client {client} did not come")
        return group

    def owed(self) -> set[tuple[int, ...]]:
        """Return the clients of each group that wait for nothing but a sum of their relay."""
        left = {tuple(self.group_left(client)) for client in self.promised}
        return {group for group in left if all(client in self.promised for client in group)}

    def withheld(self, is_there: Callable[[ClientId], bool], now: float) -> list[tuple[int, str]]:
        """Return the clients whose weights will not come any more, and why in a line."""
        found = self.overdue.failures(self.owed(), lambda c: not self.answered(c), is_there, now)
        return [(client, f"its relay {self.relays[client]} {what}") for client, what in found]

    def total_of(self, group: Sequence[int]) -> float:
        """Return the sum of the coefficients of clients whose weights are summed."""
        assert self.trip.count is not None, "nothing is summed that has no count"
        return sum(self.trip.count(self.promised[client].upload) for client in group)

    def answered(self, client: ClientId) -> bool:
        """Tell whether a client has sent a result or failed."""
        return client in self.results or client in self.failed or client in self.taken

    def keep(self, client: ClientId, result: Answer) -> None:
        """Add a client's result."""
        encoded = self.personal.get(client)
        result.logical_down = self.common.num_bytes + (encoded.num_bytes if encoded else 0)
        self.results[client] = result
        self.folding.add_answer(result, self.results, self.failed)

    def missing(self) -> list[ClientId]:
        """Return the clients that have not answered."""
        return [client for client in self.trip.orders if not self.answered(client)]

    def is_decided(self) -> bool:
        """Tell whether every client answered, or too many of them failed."""
        left = [client for client in self.trip.orders if client not in self.failed]
        reached = self._suffice(left, self.trip.least)
        return self.is_full() or len(left) == len(self.results) or not reached

    def is_full(self) -> bool:
        """Tell whether no more results are wanted."""
        return self.trip.enough is not None and len(self.results) >= self.trip.enough

    def end(self) -> Answers:
        """Return the answers, once the trip is closed.

        Raises:
            TooFewClients: too few clients answered; names those that failed.
        """
        found = Answers(by_id(self.results), by_id(self.failed), self.wire_down)
        check_enough(found, self.has_enough(), self.trip.sample.round)
        if self.sums:
            assert self.trip.count is not None, "nothing is summed that has no count"
            dtypes = dtypes_of_weights(self.trip.spec)
            found.mean = mean_with_sums(found.by_client, self.sums, self.trip.count, dtypes)
        else:
            found.mean = self.folding.finish(self.results)
        found.wire_up = sum(result.wire_up for result in found.by_client.values())
        return found

    def has_enough(self) -> bool:
        """Tell whether the results suffice to close the trip."""
        nobody_comes = all(c in self.gone for c in self.missing() if c != EVALUATOR)
        return self._suffice(self.results, self.trip.least if nobody_comes else None)

    def _suffice(self, clients: Collection[ClientId], least: int | None = None) -> bool:
        """Tell whether these clients would be enough; the evaluator stands in for no client.

        Args:
            clients: who answered, or may.
            least: how many are enough; ``trip.needed`` unless given.
        """
        if self.trip.needed is None:
            return len(clients) == len(self.trip.orders)
        enough = self.trip.needed if least is None else least
        return sum(isinstance(client, int) for client in clients) >= enough


def _encoded_once(bundles: Mapping[ClientId, Bundle], *, zstd: bool) -> dict[ClientId, Encoded]:
    """Encode every bundle; clients that get the same object share the encoding."""
    by_object: dict[int, Encoded] = {}
    for bundle in bundles.values():
        if id(bundle) not in by_object:
            by_object[id(bundle)] = encode(bundle, zstd=zstd)
    return {client: by_object[id(bundle)] for client, bundle in bundles.items()}


def by_id(found: Mapping[ClientId, T]) -> dict[ClientId, T]:
    """Return what clients brought, by ascending id, the evaluator's last."""
    clients: list[ClientId] = sorted(c for c in found if isinstance(c, int))
    return {c: found[c] for c in (*clients, EVALUATOR) if c in found}


def what_for(trip: Trip) -> str:
    """Return a trip's purpose in words, for log lines."""
    sample = trip.sample
    kinds = {
        rpc.ORDER_KIND_TRAIN: "training", rpc.ORDER_KIND_EVALUATE: "evaluation",
        rpc.ORDER_KIND_ADVERTISE: "keys", rpc.ORDER_KIND_SHARE: "shares of secrets",
        rpc.ORDER_KIND_UNMASK: "opening the sum",
    }  # fmt: skip
    kind = kinds.get(sample.kind, "end")
    return f"{kind}, round {sample.round + 1}, interaction {sample.interaction + 1}"


def check_enough(found: Answers, enough: bool, round: int) -> None:
    """Check that a trip brought enough results.

    Raises:
        TooFewClients: names the first client that failed, and counts the others.
    """
    if enough:
        return
    client, reason = next(iter(found.failed.items()))
    others = f" ({len(found.failed) - 1} more failed)" if len(found.failed) > 1 else ""
    raise TooFewClients(str(ClientFailed(client, round, "upload", reason)) + others)


# --- the number of an order: what it works on, so that a result tells what it is of ---------------


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
            secure = order.secure_sum.SerializeToString(deterministic=True)  # else empty
            sha = hashlib.sha256(b"%d:" % order.base + common.digest + own + secure)
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
