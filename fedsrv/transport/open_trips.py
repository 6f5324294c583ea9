"""All trips under way, and the callers that wait for their orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedmodels.tensors.bundle import ClientId, Weights
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Answers, BufferedUploads, TooFewOrders
from fedsrv.transport.open_trip import OpenTrip, answers, by_id
from fedsrv.transport.sessions import Caller, Presence


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

        Args:
            flush: names the idle clients.
            who: tells which clients are there.
            dead_count: whether a dead client counts as gone; else it is waited for.
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
