"""Trips under way: the encoded payload of their orders, and the results so far."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from fedmodels.errors import ClientFailed, PayloadError, RunFailed
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedpb.codec import Encoded, encode
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Answers, Flush, Trip, stamped
from fedsrv.engine.folding import Folding, mean_with_sums
from fedsrv.transport.order_numbers import answers, numbered
from fedsrv.transport.relayed import dtypes_of_weights, groups_of, rest_spec
from fedsrv.transport.sessions import MOST_AT_ONCE, Caller, Superseded

T = TypeVar("T")


@dataclass(eq=False)
class OpenTrip:
    """A trip under way, with the results so far."""

    trip: Trip
    common: Encoded
    personal: dict[ClientId, Encoded]
    folding: Folding
    results: dict[ClientId, Answer] = field(default_factory=dict)
    failed: dict[ClientId, str] = field(default_factory=dict)
    taken: set[ClientId] = field(default_factory=set)
    """Clients whose results or failures a flush took out of a lasting trip."""
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
        folding = Folding(trip.orders, count, kept_bytes or 0)
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
            raise PayloadError("it counts otherwise than the same upload did before")

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
        return self.is_full() or len(left) == len(self.results) or not self._suffice(left)

    def is_full(self) -> bool:
        """Tell whether no more results are wanted."""
        return self.trip.enough is not None and len(self.results) >= self.trip.enough

    def end(self) -> Answers:
        """Return the answers, once the trip is closed.

        Raises:
            RunFailed: too few clients answered; names those that failed.
        """
        found = Answers(_by_id(self.results), _by_id(self.failed), self.wire_down)
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
        return self._suffice(self.results)

    def _suffice(self, clients: Collection[ClientId]) -> bool:
        """Tell whether these would be enough; the evaluator is no client that others stand for."""
        if self.trip.needed is None:
            return len(clients) == len(self.trip.orders)
        return sum(isinstance(client, int) for client in clients) >= self.trip.needed


@dataclass(frozen=True)
class GroupSum:
    """The sum of some clients' weights, as their relay brought it."""

    clients: tuple[int, ...]
    weights: Weights
    """In float64, by name; none where nothing counts."""
    num_bytes: int
    wire_up: int


class OpenTrips:
    """All trips under way: one that the engine waits for as a whole, and lasting ones.

    Used while the cohort holds its lock.
    """

    def __init__(self) -> None:
        self.current: OpenTrip | None = None
        self._lasting: list[OpenTrip] = []
        self._arrived: list[tuple[int, OpenTrip]] = []
        """Clients with a result in a lasting trip, in the order in which the results came."""
        self.has_opened = False
        """Whether this process has opened a trip yet."""

    def open(self, trip: OpenTrip) -> None:
        """Begin the trip that the engine waits for."""
        self.current, self.has_opened = trip, True

    def add_lasting(self, trips: Sequence[OpenTrip]) -> None:
        """Begin lasting trips beside those under way."""
        self._lasting += trips
        self.has_opened = True

    def recall(self) -> None:
        """End all lasting trips."""
        self._lasting, self._arrived = [], []

    def _all(self) -> list[OpenTrip]:
        return self._lasting if self.current is None else [*self._lasting, self.current]

    def has_any(self) -> bool:
        """Tell whether any trip is under way."""
        return bool(self._all())

    def are_done_with(self, interaction: int) -> bool:
        """Tell whether no lasting trip of this interaction is under way; false before the first."""
        found = any(trip.trip.sample.interaction == interaction for trip in self._lasting)
        return self.has_opened and not found

    def next_for(
        self, caller: Caller, most_ahead: int, most: int = MOST_AT_ONCE
    ) -> tuple[list[ClientId], OpenTrip, int] | None:
        """Return whose orders a caller gets next, and how many of the same trip follow them.

        They have one payload. None if there are none, or if the caller has ``most_ahead`` orders
        that it did not answer. A relay may have any number: it answers them together.
        """
        trips = {trip.issue: trip for trip in self._all()}
        left = caller.left_of({issue: trip.missing for issue, trip in trips.items()})
        ahead = sum(len(one.ahead) for one in left.values())
        caller.is_full = ahead >= most_ahead and not caller.is_relay
        issue = next((issue for issue, one in left.items() if one.fresh), None)
        if caller.is_full or issue is None:
            return None
        trip = trips[issue]
        most = 1 if trip.personal else most
        clients = caller.take(issue, most if caller.is_relay else min(most, most_ahead - ahead))
        return clients, trip, len(left[issue].fresh)

    def answered_by(self, client: ClientId, header: rpc.PushHeader) -> OpenTrip | None:
        """Return the trip whose order a result answers; None if there is none."""
        for trip in self._all():
            orders = trip.trip.orders
            if client in orders and answers(header, orders[client], orders.values()):
                return trip
        return None

    def keep(self, client: ClientId, trip: OpenTrip, result: Answer | str) -> bool:
        """Add the first result of an order, or the reason of its failure; False for a later one."""
        if trip.answered(client) or trip not in self._all() or trip.is_full():
            return False
        if isinstance(result, str):
            trip.failed[client] = result
            return True
        if result.is_promise:
            trip.promised[client] = result
            return True
        trip.keep(client, result)
        if trip is not self.current:
            assert isinstance(client, int), "the evaluator gets no lasting orders"
            self._arrived.append((client, trip))
        return True

    def regroup(self, client: ClientId, relay: str) -> None:
        """Take a client that joins elsewhere out of its group: it brings its upload whole."""
        trip = self.current
        if trip is not None and client in trip.groups and relay != trip.relays[client]:
            left = {c: g for c, g in trip.groups.items() if c != client}
            trip.groups = {c: tuple(m for m in g if m != client) for c, g in left.items()}
            trip.moved.add(client)

    def keep_sum(self, trip: OpenTrip, found: GroupSum) -> Mapping[ClientId, Answer]:
        """Add a relay's sum; return its clients' results, now whole; none if it came too late."""
        late = trip not in self._all() or any(map(trip.answered, found.clients))
        if late or not trip.promised.keys() >= {*found.clients}:
            return {}
        whole: dict[ClientId, Answer] = {
            c: replace(trip.promised.pop(c), is_promise=False) for c in found.clients
        }
        first = whole[found.clients[0]]
        first.logical_up, first.wire_up = (
            first.logical_up + found.num_bytes,
            first.wire_up + found.wire_up,
        )
        trip.sums[found.clients] = found.weights
        return whole

    # --- lasting trips ----------------------------------------------------------------------------

    def at_work(self) -> list[ClientId]:
        """Return the clients with unanswered orders of lasting trips."""
        return [client for trip in self._lasting for client in trip.missing()]

    def ready(self, flush: Flush) -> list[tuple[int, OpenTrip]]:
        """Return the results that a flush would take now, by client and trip."""
        if flush.wanted:
            return [each for each in self._arrived if _is_wanted(flush, *each)]
        return self._arrived[: flush.size]

    def is_decided(self, flush: Flush) -> bool:
        """Tell whether more time brings a flush nothing: it is full, or nobody is left for it."""
        left = [(client, trip) for trip in self._lasting for client in trip.missing()]
        if flush.wanted:
            left = [each for each in left if _is_wanted(flush, *each)]
        ready = len(self.ready(flush))
        return ready == flush.size or not left or ready + len(left) < flush.needed

    def take(self, flush: Flush) -> Answers:
        """Take the results that are ready for a flush, and all failures, out of their trips."""
        found, ready = Answers({}, {}), self.ready(flush)
        for client, trip in ready:
            found.by_client[client] = trip.results.pop(client)
            found.arrivals[client] = trip.trip.sample.interaction
            trip.taken.add(client)
        self._arrived = [each for each in self._arrived if each not in ready]
        for trip in self._lasting:
            found.failed |= trip.failed
            trip.taken |= trip.failed.keys()
            trip.failed.clear()
            found.wire_down, trip.wire_down = found.wire_down + trip.wire_down, 0
        self._lasting = [trip for trip in self._lasting if len(trip.taken) < len(trip.trip.orders)]
        found.by_client, found.failed = _by_id(found.by_client), _by_id(found.failed)
        found.wire_up = sum(result.wire_up for result in found.by_client.values())
        found.under_way = {
            client: trip.trip.sample.interaction
            for trip in self._lasting
            for client in trip.trip.orders
            if client not in trip.taken and isinstance(client, int)
        }
        return found


def _is_wanted(flush: Flush, client: ClientId, trip: OpenTrip) -> bool:
    """Tell whether a flush wants a client's result of this trip."""
    interaction = trip.trip.sample.interaction
    return isinstance(client, int) and flush.wanted.get(client) == interaction


def _encoded_once(bundles: Mapping[ClientId, Bundle], *, zstd: bool) -> dict[ClientId, Encoded]:
    """Encode every bundle; clients that get the same object share the encoding."""
    by_object: dict[int, Encoded] = {}
    for bundle in bundles.values():
        if id(bundle) not in by_object:
            by_object[id(bundle)] = encode(bundle, zstd=zstd)
    return {client: by_object[id(bundle)] for client, bundle in bundles.items()}


def _by_id(found: Mapping[ClientId, T]) -> dict[ClientId, T]:
    """Return what clients brought, by ascending id, the evaluator's last."""
    clients: list[ClientId] = sorted(c for c in found if isinstance(c, int))
    return {c: found[c] for c in (*clients, EVALUATOR) if c in found}


def what_for(trip: Trip) -> str:
    """Return a trip's purpose in words, for log lines."""
    sample = trip.sample
    kinds = {rpc.ORDER_KIND_TRAIN: "training", rpc.ORDER_KIND_EVALUATE: "evaluation"}
    kind = kinds.get(sample.kind, "end")
    return f"{kind}, round {sample.round}, interaction {sample.interaction}"


def check_enough(found: Answers, enough: bool, round: int) -> None:
    """Check that a trip brought enough results.

    Raises:
        RunFailed: names the first client that failed, and counts the others.
    """
    if enough:
        return
    client, reason = next(iter(found.failed.items()))
    others = f" ({len(found.failed) - 1} more failed)" if len(found.failed) > 1 else ""
    raise RunFailed(str(ClientFailed(client, round, "upload", reason)) + others)
