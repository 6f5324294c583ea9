"""Trips under way: the encoded payload of their orders, and the results so far.

A relay passes on the uploads of its clients. Where the mean of the weights is all that the method
reads, it adds the weights up and sends their sum once for a group: the clients of a trip that share
the relay. The root forms the groups when the trip begins, by the relays of the sessions. So they do
not depend on who comes first, and neither do the bits of the mean.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import torch

from fedmodels.errors import PayloadError
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.differences import Measured
from fedpb.codec import Encoded, encode
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import (
    Answer,
    Answers,
    BufferedUploads,
    RelayedSum,
    TooFewOrders,
    Trip,
    stamped,
    too_few,
)
from fedsrv.engine.reduction import StreamingMean, mean_with_sums
from fedsrv.transport.sessions import Caller, Presence, Superseded

LEFT_OUT_S = 15.0
"""Time in which a client that a sum left out must come whole: it brings its upload again where the
relay never heard that the first one came."""
SUM_S, SUM_BYTES_PER_S = 90.0, 16 << 10
"""Time for a sum: that of a Push of its size, and half a minute to begin it."""
WEIGHTS, ONLY_SCORED = "weights/", "weights/eval/"
T = TypeVar("T")


@dataclass
class OverdueSums:
    """What the relays of one trip owe; used while the cohort holds its lock."""

    num_bytes: int
    """The most bytes of a sum."""
    _left_out: dict[int, float] = field(default_factory=dict)
    """Clients that a sum of their relay left out, and when it came."""
    _complete: dict[tuple[int, ...], float] = field(default_factory=dict)
    """Since when each group waits for nothing but its sum."""

    def leave_out(self, clients: Collection[int], now: float) -> None:
        """Note that a sum came without these clients, who had brought all but their weights."""
        self._left_out |= dict.fromkeys(clients, now)

    def joined_again(self, client: ClientId) -> None:
        """Give a client and its relay time again: either of them may have been restarted."""
        if isinstance(client, int):
            self._left_out.pop(client, None)
            self._complete = {g: since for g, since in self._complete.items() if client not in g}

    def failures(
        self,
        owed: Collection[tuple[int, ...]],
        unanswered: Callable[[int], bool],
        is_there: Callable[[ClientId], bool],
        now: float,
    ) -> Iterator[tuple[int, str]]:
        """Yield the clients whose weights will not come any more, and what their relay did.

        Args:
            owed: the groups that wait for nothing but a sum: all others of it have answered.
            unanswered: tells whether a client's result is still incomplete.
            is_there: tells whether a client is connected, and so its relay.
            now: the time on the monotonic clock.
        """
        for client, since in self._left_out.items():
            if unanswered(client) and is_there(client) and now - since >= LEFT_OUT_S:
                yield client, "left it out of its sum"
        there = {group for group in owed if all(map(is_there, group))}
        self._complete = {group: self._complete.get(group, now) for group in there}
        limit = SUM_S + self.num_bytes / SUM_BYTES_PER_S
        for group, since in self._complete.items():
            if now - since >= limit:
                yield from ((client, "brought no sum") for client in group)


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
    moved_by: dict[tuple[int, ...], Measured] = field(default_factory=dict)
    """How far the mean behind each sum lies from what its clients were given."""
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

    @property
    def _count(self) -> Callable[[Bundle], float]:
        assert self.trip.count is not None, "nothing is summed that has no count"
        return self.trip.count

    def check_promise(self, client: ClientId, upload: Bundle) -> None:
        """Check that an upload without weights counts what an earlier one said.

        Raises:
            PayloadError: it counts something else, so that no sum can fit both.
        """
        held = self.promised.get(client)
        if held is not None and self._count(held.upload) != self._count(upload):
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
        return sum(self._count(self.promised[client].upload) for client in group)

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
        check_enough(found, self.has_enough(), self.trip.sample.round, self._needed)
        if self.sums:
            dtypes = dtypes_of_weights(self.trip.spec)
            found.mean = mean_with_sums(found.by_client, self.sums, self._count, dtypes)
            found.relayed = [
                RelayedSum(self.relays[group[0]], group, self.moved_by.get(group))
                for group in self.sums
            ]
        else:
            found.mean = self.folding.finish(self.results)
        found.wire_up = sum(result.wire_up for result in found.by_client.values())
        return found

    @property
    def _needed(self) -> int:
        return len(self.trip.orders) if self.trip.needed is None else self.trip.needed

    def has_enough(self) -> bool:
        """Tell whether the results suffice to close the trip."""
        nobody_comes = all(c in self.gone for c in self.missing() if c != EVALUATOR)
        return self._suffice(self.results, self.trip.least if nobody_comes else None)

    def _suffice(self, clients: Collection[ClientId], least: int | None = None) -> bool:
        """Tell whether these clients would be enough; the evaluator stands in for no client.

        ``least`` of them are enough; ``trip.needed`` unless it is given.
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


def check_enough(found: Answers, enough: bool, round: int, needed: int) -> None:
    """Check that a trip brought enough results, as many as needed.

    Raises:
        TooFewClients: names the first client that failed, and counts the others.
    """
    if not enough:
        raise too_few(found.failed, round, "upload", needed)


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

    The number of a relay's sum is that of any order of the trip.
    """
    numbers = (one.trip for one in orders) if header.members else (order.trip,)
    same = header.kind == order.kind and header.interaction == order.interaction
    return same and header.trip in numbers


@dataclass(frozen=True)
class GroupSum:
    """The sum of some clients' weights, as their relay brought it."""

    clients: tuple[int, ...]
    weights: Weights
    """In float64, by name; none where nothing counts."""
    num_bytes: int
    wire_up: int
    cosines: Mapping[str, float] = field(default_factory=dict)
    """Between each client's difference and their mean, by client id, as the relay says."""
    moved: Measured | None = None
    """How far the mean behind it lies from what the clients were given; None where nothing counts.
    The coordinator measures it."""


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
        self, caller: Caller, most_ahead: int, most: int
    ) -> tuple[list[ClientId], OpenTrip, int] | None:
        """Return whose orders a caller gets next, and how many of the same trip follow them.

        The orders have one payload, and there are ``most`` at most. None if there are none, or if
        the caller has ``most_ahead`` orders that it did not answer. A relay may have any number: it
        answers them together.
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
        if trip is not None:
            trip.overdue.joined_again(client)
        if trip is not None and client in trip.groups and relay != trip.relays[client]:
            left = {c: g for c, g in trip.groups.items() if c != client}
            trip.groups = {c: tuple(m for m in g if m != client) for c, g in left.items()}
            trip.moved.add(client)

    def keep_sum(self, trip: OpenTrip, found: GroupSum, now: float) -> Mapping[ClientId, Answer]:
        """Add a relay's sum; return its clients' results, now whole; none if it came too late."""
        late = trip not in self._all() or any(map(trip.answered, found.clients))
        if late or not trip.promised.keys() >= {*found.clients}:
            return {}
        whole: dict[ClientId, Answer] = {}
        for client in found.clients:
            whole[client] = answer = replace(trip.promised.pop(client), is_promise=False)
            if answer.measured is not None:
                cosine = found.cosines.get(str(client))
                answer.measured = replace(answer.measured, cosine=cosine)
        left = trip.group_left(found.clients[0])
        trip.overdue.leave_out([c for c in left if c in trip.promised], now)
        first = whole[found.clients[0]]
        first.logical_up, first.wire_up = (
            first.logical_up + found.num_bytes,
            first.wire_up + found.wire_up,
        )
        trip.sums[found.clients] = found.weights
        if found.moved is not None:
            trip.moved_by[found.clients] = found.moved
        return whole

    # --- lasting trips ----------------------------------------------------------------------------

    def at_work(self) -> list[ClientId]:
        """Return the clients with unanswered orders of lasting trips."""
        return [client for trip in self._lasting for client in trip.missing()]

    def ready(self, flush: BufferedUploads) -> list[tuple[int, OpenTrip]]:
        """Return the results that a flush would take now, by client and trip."""
        if flush.wanted:
            return [each for each in self._arrived if _is_wanted(flush, *each)]
        return self._arrived[: flush.size]

    def is_decided(self, flush: BufferedUploads) -> bool:
        """Tell whether more time brings a flush nothing: it is full, or nobody is left for it."""
        left = [(client, trip) for trip in self._lasting for client in trip.missing()]
        if flush.wanted:
            left = [each for each in left if _is_wanted(flush, *each)]
        ready = len(self.ready(flush))
        return ready == flush.size or not left or ready + len(left) < flush.needed

    def starved(
        self, flush: BufferedUploads, who: Presence, *, dead_count: bool
    ) -> TooFewOrders | None:
        """Return who may train in place of those that failed or died; None while enough are left.

        With ``dead_count`` a dead client counts as gone; else it is waited for.
        """
        at_work = self.at_work()
        gone = who.dead(at_work) if dead_count else ()
        short = flush.needed - len(self.ready(flush))
        idle = [client for client in flush.idle if who.is_there(client)]
        return TooFewOrders(idle, short) if idle and short > len(at_work) - len(gone) else None

    def take(self, flush: BufferedUploads) -> Answers:
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
        found.by_client, found.failed = by_id(found.by_client), by_id(found.failed)
        found.wire_up = sum(result.wire_up for result in found.by_client.values())
        found.under_way = {
            client: trip.trip.sample.interaction
            for trip in self._lasting
            for client in trip.trip.orders
            if client not in trip.taken and isinstance(client, int)
        }
        return found


def _is_wanted(flush: BufferedUploads, client: ClientId, trip: OpenTrip) -> bool:
    """Tell whether a flush wants a client's result of this trip."""
    interaction = trip.trip.sample.interaction
    return isinstance(client, int) and flush.wanted.get(client) == interaction


# --- groups of clients behind a relay -------------------------------------------------------------


def groups_of(trip: Trip, relays: Mapping[ClientId, str]) -> dict[int, tuple[int, ...]]:
    """Return the groups of a trip's clients: of each one in a group, the ascending ids of it.

    A client that is alone with its relay sends its upload whole.

    Args:
        trip: it has groups if it orders training, waits for all results, and its uploads' weights
            travel as they are, have one floating-point dtype, and count in the mean alone.
        relays: of each client behind a relay, which one.
    """
    if not relays or not _may_be_summed(trip):
        return {}
    by_relay: dict[str, list[int]] = {}
    for client in sorted(c for c in trip.orders if isinstance(c, int) and c in relays):
        by_relay.setdefault(relays[client], []).append(client)
    groups = [tuple(found) for found in by_relay.values() if len(found) > 1]
    return {client: group for group in groups for client in group}


def _may_be_summed(trip: Trip) -> bool:
    weights = dtypes_of_weights(trip.spec)
    floats = {dtype for dtype in weights.values() if dtype.is_floating_point}
    return (
        trip.sample.kind == rpc.ORDER_KIND_TRAIN
        and trip.count is not None
        and (trip.enough is None or trip.enough >= len(trip.orders))
        and not trip.compression.returned
        and len(floats) == 1
        and not any(f"{WEIGHTS}{name}".startswith(ONLY_SCORED) for name in weights)
        and not any(key.startswith(WEIGHTS) for key in trip.spec.optional)
    )


def dtypes_of_weights(spec: BundleSpec) -> dict[str, torch.dtype]:
    """Return the dtypes of an upload's weights, by name."""
    stated = spec.required.items()
    return {key.removeprefix(WEIGHTS): t.dtype for key, t in stated if key.startswith(WEIGHTS)}


def rest_spec(spec: BundleSpec) -> BundleSpec:
    """Return the specification of an upload without its weights."""
    rest = {key: one for key, one in spec.required.items() if not key.startswith(WEIGHTS)}
    return BundleSpec(rest, spec.optional)
