"""The trip that a relay's clients are on, and the group whose weights it adds up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.methods import make
from fedmodels.resolution import received_experiment
from fedmodels.tensors.bundle import Bundle, ClientId, Problem
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.training.compression import Compression
from fedmodels.training.method import Method
from fedmodels.training.private_uploads import spec_as_sent
from fedmodels.training.run import RunFacts
from fedmodels.training.secure_upload import SecureUpload
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Trip
from fedsrv.engine.streaming_mean import StreamingMean
from fedsrv.events import EventLog
from fedsrv.relay.group import Group
from fedsrv.transport.open_trip import OpenTrip
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool

SUMS_BY = 0.8
"""Part of the run's deadline after which a sum goes up without those that are missing."""
log = logging.getLogger(__name__)


@dataclass
class Delivery:
    """Orders that came together, and their payload."""

    issue: int = 0
    orders: dict[ClientId, rpc.Order] = field(default_factory=dict)
    common: Bundle = field(default_factory=Bundle)
    personal: dict[ClientId, Bundle] = field(default_factory=dict)
    group: tuple[int, ...] = ()
    """The clients whose weights are summed; empty if the coordinator above asked for none."""


@dataclass(frozen=True)
class RelayedRun:
    """What a run says of what travels to and from clients of one problem.

    The specs need a net. They are made when the first order comes, not when a client joins: a
    client may state a problem whose net no memory holds. The coordinator above gives such a client
    no order.
    """

    facts: RunFacts
    method: Method

    @cached_property
    def upload_spec(self) -> BundleSpec:
        """Return what an upload must hold."""
        secure = SecureUpload.of(self.method, self.facts)
        if secure is not None:
            return secure.spec
        return spec_as_sent(self.method, self.facts, self._compression)

    @cached_property
    def payload_spec(self) -> Mapping[str, BundleSpec]:
        """Return what the parts of a payload must hold, by role."""
        common, personal = self.method.payload_spec(self.facts)
        return {"common": self._compression.payload_spec(common), "personal": personal}

    @cached_property
    def _compression(self) -> Compression:
        return Compression.of(self.method, self.facts)

    @classmethod
    def of(cls, table: Mapping[str, Any], problem: Problem, code: Sequence[Path]) -> Self:
        """Return what an experiment says.

        Args:
            table: the resolved experiment, as the coordinator above sends it.
            problem: of the clients.
            code: custom files whose code may run, if the experiment asks for it.

        Raises:
            ConfigError: relays cannot carry this run.
        """
        experiment = received_experiment(table, "the coordinator's experiment", code)
        if experiment.schedule.order == "asynchronous":
            raise ConfigError(
                "asynchronous rounds take no relay: let the clients join the coordinator itself"
            )
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        return cls(RunFacts(experiment, problem), method)


class RelayedTrips:
    """Orders from above for the clients below, one trip at a time; used from many threads."""

    def __init__(
        self,
        clients: range,
        spool: Spool,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # the coordinator above has checked who joins
        self.below = RemoteCohort(
            clients.stop, spool, events, admission=None, most_present=len(clients), clock=clock
        )
        """The clients of the relay."""
        self.changed, self._clock = self.below.changed, clock
        self.group: Group | None = None
        self.joins = 0
        """How many times clients have begun to join."""
        self._runs: dict[ClientId, RelayedRun] = {}
        """What travels to and from each client that has joined, by the problem that it stated: the
        coordinator above turns those away later whose problem is not the run's."""
        self._issue = 0
        self._has_told_of_strangers = False
        self._grouped: set[OpenTrip] = set()
        """The trips of the group: several, where clients came late to the relay."""

    def learn(self, client: ClientId, run: RelayedRun) -> None:
        """Remember what travels to and from a client that joins."""
        with self.changed:
            self._runs[client] = run
            self.below.look_ahead(run.facts.experiment.training.together)

    def run_of(self, client: ClientId) -> RelayedRun:
        """Return what travels to and from a client.

        Raises:
            PayloadError: it has not joined here.
        """
        found = self._runs.get(client)
        if found is None:
            raise PayloadError(f"an order is for client {client}, who has not joined here")
        return found

    # --- orders -----------------------------------------------------------------------------------

    def begin(self, delivery: Delivery) -> None:
        """Give orders to the clients; those of an earlier issue end."""
        run = self.run_of(next(iter(delivery.orders)))
        trip = OpenTrip.of(_trip_of(delivery, run))
        sample = trip.trip.sample
        with self.changed:
            if delivery.issue != self._issue:
                self.recall()
                self._issue = delivery.issue
            if delivery.group and self.group is None:
                self.group = self._group_of(delivery.group, sample, run)
            if self.group is not None:
                self._grouped.add(trip)
            self.below.commit(sample.committed, sample.durable)
            self.below.add_lasting([trip])

    def recall(self) -> None:
        """End all trips and the group; the clients stay, and wait for orders."""
        with self.changed:
            self.below.recall()
            self.group, self._issue = None, 0
            self._grouped.clear()

    def forget(self) -> None:
        """End all sessions, as the coordinator above has forgotten them: clients join again."""
        with self.changed:
            self.recall()
            self.below.forget()

    # --- the group --------------------------------------------------------------------------------

    def _group_of(self, clients: tuple[int, ...], sample: rpc.Order, run: RelayedRun) -> Group:
        folding = StreamingMean(clients, run.method.count, self.below.spool.budget)
        deadline_s = run.facts.experiment.server.deadline_s
        wait_s = float("inf") if deadline_s is None else SUMS_BY * deadline_s
        now = self._clock()
        until = now + self.below.LEASE_S, now + wait_s
        return Group(sample, clients, folding, run.method.count, *until)

    def due_in(self, most: float) -> float:
        """Return how long the relay may wait until it looks at its group again, in seconds."""
        group = self.group
        left = group.until - self._clock() if group is not None and not group.is_closed else most
        return left if 0 < left < most else most

    def ready_group(self) -> Group | None:
        """Return the group whose sum can go up, and settle it; the caller holds the lock."""
        group, below = self.group, self.below
        if group is None or not group.is_ready(self._clock(), below.sessions, below.presence.dead):
            return None
        strangers = group.strangers(below.sessions)
        if strangers and self._clock() >= group.strangers_until:
            self._tell_of(strangers)
        group.is_closed = True
        return group

    def _tell_of(self, strangers: set[ClientId]) -> None:
        """Say once that the relay waited for clients that never came."""
        if not self._has_told_of_strangers:
            log.warning(
                "waited %.0f s for clients %s, who joined under this relay's name and never came "
                "here: if another relay has the same --clients, give each relay clients of its "
                "own, or every round waits as long",
                self.below.LEASE_S, ", ".join(map(str, sorted(strangers))),
            )  # fmt: skip
        self._has_told_of_strangers = True

    def group_for(self, client: ClientId, trip: OpenTrip) -> Group | None:
        """Return the group that may still take a client's weights; its result is on its way."""
        with self.changed:
            group = self.group if trip in self._grouped else None
            return group if group is not None and group.takes(client) else None

    # --- results ----------------------------------------------------------------------------------

    def told(
        self, client: ClientId, trip: OpenTrip, group: Group | None, result: Answer | str
    ) -> None:
        """Store what the coordinator above has been told of a client, or why it failed.

        Args:
            client: whose result.
            trip: what it answers.
            group: to which the client's weights are added; None if they went up whole.
            result: the answer, or the reason of a failure.
        """
        with self.changed:
            if group is not None:
                group.on_their_way.discard(client)
            if isinstance(result, str):
                if self.group is not None and trip in self._grouped:
                    self.group.failed.add(client)
            elif group is not None:
                group.keep(client, result)
            kept = result if isinstance(result, str) else Answer(Bundle(), result.report)
            self.below.end_result(client, trip, kept)

    def not_told(self, client: ClientId, group: Group | None) -> None:
        """Note that the coordinator above was away: the client brings its result again."""
        with self.changed:
            if group is not None:
                group.on_their_way.discard(client)
                self.changed.notify_all()


def _trip_of(delivery: Delivery, run: RelayedRun) -> Trip:
    sample = next(iter(delivery.orders.values()))
    trains = sample.kind == rpc.ORDER_KIND_TRAIN
    return Trip(
        delivery.orders,
        delivery.common,
        delivery.personal,
        run.upload_spec if trains else BundleSpec(),
        check_upload=_check,
        compression=Compression(zstd=run.facts.experiment.zstd),
    )


def _check(client: ClientId, upload: Bundle) -> None:
    """Check the numbers of an upload; once they are added up, nobody sees them again."""
    check_numbers(upload)
