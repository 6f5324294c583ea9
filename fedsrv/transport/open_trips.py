"""Trips under way: the encoded payload of their orders, and the results so far."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from fedmodels.facts.position import Interaction, Round
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId
from fedpb.codec import Encoded, encode
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import (
    Answer,
    Answers,
    AnyOf,
    TooFewOrders,
    Trip,
    stamped,
    too_few,
)
from fedsrv.transport.intake import Intake, Through
from fedsrv.transport.refusals import NotReady
from fedsrv.transport.sessions import Caller, Presence

T = TypeVar("T")
ISSUED_ANEW = "the order was issued again; send the result of the new one"


@dataclass(eq=False)
class OpenTrip:
    """A trip under way, with the results so far."""

    trip: Trip
    common: Encoded
    personal: dict[ClientId, Encoded]
    intake: Intake
    """What becomes of the uploads that come."""
    results: dict[ClientId, Answer] = field(default_factory=dict)
    failed: dict[ClientId, str] = field(default_factory=dict)
    taken: set[ClientId] = field(default_factory=set)
    """Clients whose results or failures were taken out of a lasting trip."""
    gone: Collection[ClientId] = ()
    """Clients that have not answered and were dead when somebody last looked."""
    issue: int = field(default_factory=lambda: secrets.randbits(63) | 1)
    wire_down: int = 0

    @classmethod
    def of(
        cls,
        trip: Trip,
        kept_bytes: int | None = None,
        through: Mapping[ClientId, Through] | None = None,
    ) -> Self:
        """Encode a trip's payload.

        Args:
            trip: what to send.
            kept_bytes: uploads of more in all may be folded. Unless it is given, every upload stays
                whole: those of a lasting trip count one by one.
            through: through whom clients joined that joined through somebody.
        """
        common = encode(trip.sent, zstd=trip.zstd)
        personal = _encoded_once(trip.personal, zstd=trip.zstd)
        trip = replace(trip, orders=numbered(trip.orders, common, personal))
        other = next(iter(through.values())).intake(trip, through) if through else None
        return cls(trip, common, personal, other or Intake(trip, kept_bytes))

    def issued(
        self,
        clients: Sequence[ClientId],
        behind: int,
        committed: Interaction,
        watermark: Interaction,
    ) -> list[rpc.Order]:
        """Return the orders of clients of one process as they are sent; ``behind`` more follow."""
        found = []
        for place, client in enumerate(clients, 1):
            order = stamped(self.trip.orders[client], committed, watermark)
            order.issue, order.following = self.issue, len(clients) - place + behind
            found.append(order)
        return found

    def answered(self, client: ClientId) -> bool:
        """Tell whether a client has sent a result or failed."""
        return client in self.intake.answered

    def check_issue(self, header: rpc.PushHeader) -> None:
        """Check that what somebody passes on is of this issue of the orders; NotReady if not.

        The same work has the same number after a crash, and so a client's own upload counts that
        comes late. Promises and sums rest on one another: they are of one issue.
        """
        if header.issue not in (0, self.issue):
            raise NotReady(ISSUED_ANEW)

    def fail(self, client: ClientId, why: str) -> None:
        """Note why a client brings no result."""
        self.failed[client] = why
        self.intake.answered.add(client)

    def keep(self, client: ClientId, result: Answer) -> None:
        """Add a client's result, which is whole."""
        encoded = self.personal.get(client)
        result.logical_down = self.common.num_bytes + (encoded.num_bytes if encoded else 0)
        self.results[client] = result
        self.intake.answered.add(client)
        self.intake.add(result, self.results, self.failed)

    def missing(self) -> list[ClientId]:
        """Return the clients that have not answered."""
        return [client for client in self.trip.orders if not self.answered(client)]

    def is_decided(self) -> bool:
        """Tell whether every client answered, or too many of them failed."""
        return self.trip.until.is_decided(self.trip.orders, self.results, self.failed)

    def end(self) -> Answers:
        """Return the answers, once the trip is closed; TooFewClients names those that failed."""
        found = Answers(by_id(self.results), by_id(self.failed), self.wire_down)
        needed = self.trip.until.needed
        needed = len(self.trip.orders) if needed is None else needed
        check_enough(found, self.has_enough(), self.trip.round, needed)
        self.intake.end(found)
        found.wire_up = sum(result.wire_up for result in found.by_client.values())
        return found

    def has_enough(self) -> bool:
        """Tell whether the results suffice to close the trip."""
        return self.trip.until.has_enough(self.trip.orders, self.results, self.missing(), self.gone)


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


def check_enough(found: Answers, enough: bool, round: Round, needed: int) -> None:
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

    After a crash the same work has the same number, and other work has another. Orders that are
    passed on keep theirs.
    """
    found = dict(orders)
    for client, order in orders.items():
        if not order.trip:
            own = personal[client].digest if client in personal else b""
            more = [part for field, part in order.ListFields() if field.message_type is not None]
            each = chain.from_iterable([p] if isinstance(p, Message) else p for p in more)
            besides = b"".join(part.SerializeToString(deterministic=True) for part in each)
            sha = hashlib.sha256(b"%d:" % order.base + common.digest + own + besides)
            found[client] = numbered = rpc.Order()
            numbered.CopyFrom(order)
            numbered.trip = int.from_bytes(sha.digest()[:8]) >> 1 | 1
    return found


def answers(header: rpc.PushHeader, order: rpc.Order, orders: Iterable[rpc.Order]) -> bool:
    """Tell whether a result answers a client's order, also one issued again after a crash.

    What several clients bring together has the number of any order of the trip.
    """
    numbers = (one.trip for one in orders) if header.members else (order.trip,)
    same = header.kind == order.kind and header.interaction == order.interaction
    return same and header.trip in numbers


class OpenTrips:
    """All trips under way: those that end as a whole, and lasting ones.

    Used while the cohort holds its lock.
    """

    def __init__(self) -> None:
        self.current: OpenTrip | None = None
        """The trip that the engine waits for as a whole."""
        self.lasting: list[OpenTrip] = []
        """Trips out of which results are taken."""
        self._arrived: list[tuple[int, OpenTrip]] = []
        """Clients with a result in a lasting trip, in the order in which the results came."""
        self.has_opened = False
        """Whether this process has opened a trip yet."""

    def open(self, trip: OpenTrip) -> None:
        """Begin the trip that the engine waits for."""
        self.current, self.has_opened = trip, True

    def add_lasting(self, trips: Sequence[OpenTrip]) -> None:
        """Begin lasting trips beside those under way."""
        self.lasting += trips
        self.has_opened = True

    def recall(self, clients: Collection[int] | None = None) -> list[tuple[ClientId, int]]:
        """End the lasting trips of some clients, or all of them.

        Returns those of some clients, each with the issue of the trip, which may go on for others.
        """
        if clients is None:
            self.lasting, self._arrived = [], []
            return []
        found = list[tuple[ClientId, int]]()
        for trip in self.lasting:
            for client in trip.trip.orders.keys() & {*clients}:
                trip.results.pop(client, None)
                trip.failed.pop(client, None)
                trip.intake.answered.add(client)
                trip.taken.add(client)
                found.append((client, trip.issue))
        self._arrived = [(client, trip) for client, trip in self._arrived if client not in clients]
        self._forget_taken()
        return found

    def _forget_taken(self) -> None:
        """Drop the lasting trips that nothing is to be taken out of any more."""
        self.lasting = [trip for trip in self.lasting if len(trip.taken) < len(trip.trip.orders)]

    def all(self) -> list[OpenTrip]:
        """Return all trips under way."""
        return self.lasting if self.current is None else [*self.lasting, self.current]

    def waits_for(self, client: ClientId, trip: OpenTrip) -> bool:
        """Tell whether a trip is under way for a client, who may have answered."""
        return trip in self.all() and client not in trip.taken

    def are_done_with(self, interaction: Interaction) -> bool:
        """Tell whether no lasting trip of this interaction is under way; false before the first."""
        found = any(trip.trip.interaction == interaction for trip in self.lasting)
        return self.has_opened and not found

    def next_for(
        self, caller: Caller, most_ahead: int, most: int
    ) -> tuple[list[ClientId], OpenTrip, int] | None:
        """Return whose orders a caller gets next, and how many of the same trip follow them.

        The orders have one payload, and there are ``most`` at most. None if there are none, or if
        the caller has ``most_ahead`` orders that it did not answer. Who passes orders on may have
        any number.
        """
        trips = {trip.issue: trip for trip in self.all()}
        left = caller.left_of({issue: trip.missing for issue, trip in trips.items()})
        ahead = sum(len(one.ahead) for one in left.values())
        caller.is_full = ahead >= most_ahead and not caller.passes_on
        issue = next((issue for issue, one in left.items() if one.fresh), None)
        if caller.is_full or issue is None:
            return None
        trip = trips[issue]
        most = 1 if trip.personal else most
        clients = caller.take(issue, most if caller.passes_on else min(most, most_ahead - ahead))
        return clients, trip, len(left[issue].fresh)

    def answered_by(self, client: ClientId, header: rpc.PushHeader) -> OpenTrip | None:
        """Return the trip whose order a result answers; None if there is none."""
        for trip in self.all():
            orders = trip.trip.orders
            if client in orders and answers(header, orders[client], orders.values()):
                return trip
        return None

    def keep(
        self, client: ClientId, trip: OpenTrip, arrived: Any, now: float
    ) -> Mapping[ClientId, Answer | str] | None:
        """Add what a client brought first for its order, or why it failed.

        Returns the results that are whole now, and failures, by client; None of what came too late.
        """
        is_full = trip is self.current and trip.trip.until.is_full(trip.results)
        if is_full or trip.answered(client) or trip not in self.all():
            return None
        if isinstance(arrived, str):
            trip.fail(client, arrived)
            return {client: arrived}
        found = trip.intake.keep(client, arrived, now)
        for one, result in (found or {}).items():
            trip.keep(one, result)
            if trip is not self.current:
                assert isinstance(one, int), "the evaluator gets no lasting orders"
                self._arrived.append((one, trip))
        return found

    def moved(self, client: ClientId, through: Through | None) -> list[ClientId]:
        """Note that a client joins again, maybe through somebody else; return whom it left."""
        return [one for trip in self.all() for one in trip.intake.moved(client, through)]

    # --- lasting trips ----------------------------------------------------------------------------

    def at_work(self) -> list[ClientId]:
        """Return the clients with unanswered orders of lasting trips."""
        return [client for trip in self.lasting for client in trip.missing()]

    def ready(self, until: AnyOf) -> list[tuple[int, OpenTrip]]:
        """Return the results that would be taken now, by client and trip."""
        return [each for each in self._arrived if _is_wanted(until, *each)][: until.size]

    def is_decided(self, until: AnyOf) -> bool:
        """Tell whether more time brings nothing: enough are there, or nobody is left."""
        at_work = ((client, trip) for trip in self.lasting for client in trip.missing())
        left = sum(_is_wanted(until, *each) for each in at_work)
        return until.is_decided(len(self.ready(until)), left)

    def starved(self, until: AnyOf, who: Presence, *, dead_count: bool) -> TooFewOrders | None:
        """Return who may train in place of those that failed or died; None while enough are left.

        With ``dead_count`` a dead client counts as gone; else it is waited for.
        """
        at_work = self.at_work()
        gone = who.dead(at_work) if dead_count else ()
        short = until.needed - len(self.ready(until))
        idle = [client for client in until.idle if who.is_there(client)]
        return TooFewOrders(idle, short) if idle and short > len(at_work) - len(gone) else None

    def take(self, until: AnyOf) -> Answers:
        """Take the results that are ready, and all failures, out of their trips."""
        found, ready = Answers({}, {}), self.ready(until)
        for client, trip in ready:
            found.by_client[client] = trip.results.pop(client)
            found.arrivals[client] = trip.trip.interaction
            trip.taken.add(client)
        self._arrived = [each for each in self._arrived if each not in ready]
        for trip in self.lasting:
            found.failed |= trip.failed
            trip.taken |= trip.failed.keys()
            trip.failed.clear()
            found.wire_down, trip.wire_down = found.wire_down + trip.wire_down, 0
        self._forget_taken()
        found.by_client, found.failed = by_id(found.by_client), by_id(found.failed)
        found.wire_up = sum(result.wire_up for result in found.by_client.values())
        found.under_way = {
            client: trip.trip.interaction
            for trip in self.lasting
            for client in trip.trip.orders
            if client not in trip.taken and isinstance(client, int)
        }
        return found


def _is_wanted(until: AnyOf, client: ClientId, trip: OpenTrip) -> bool:
    """Tell whether a client's result of this trip may count."""
    return until.wants(client, trip.trip.interaction)
