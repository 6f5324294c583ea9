"""The trip that a relay's clients are on, its results, and the group whose weights it adds up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fedmodels.errors import PayloadError
from fedmodels.facts.position import Interaction
from fedmodels.facts.resolution import received_experiment
from fedmodels.host.guarded import Guarded
from fedmodels.methods import make
from fedmodels.tensors.bundle import Bundle, ClientId, Problem, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.tensors.differences import STATISTICS, WEIGHTS, cosines
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import Wire
from fedpb.v1 import coordinator_pb2 as rpc
from fedplugins.relays.uplink import Uplink
from fedsrv.engine.cohort import Answer, Trip, UploadForm
from fedsrv.engine.reduction import StreamingMean
from fedsrv.progress.events import EventLog
from fedsrv.transport.intake import Push
from fedsrv.transport.open_trips import OpenTrip
from fedsrv.transport.refusals import NotReady, UnknownSession
from fedsrv.transport.remote_cohort import RemoteCohort
from fedsrv.transport.spool import Spool


@dataclass(eq=False)
class ClientGroup:
    """A group under way; used while the cohort holds its lock, but for :meth:`sums`."""

    order: rpc.Order
    """One of its orders: they differ in the client only."""
    clients: tuple[int, ...]
    folding: StreamingMean
    count: Callable[[Bundle], float]
    """Gives what an upload counts in the mean."""
    until: float
    """Time on the monotonic clock at which it goes on without anybody who is missing."""
    results: dict[ClientId, Answer] = field(default_factory=dict)
    failed: set[ClientId] = field(default_factory=set)
    """Clients that are not in the sum, whatever happened to them."""
    on_their_way: set[ClientId] = field(default_factory=set)
    """Clients whose results are just being told to the coordinator above."""
    tokens: Mapping[int, bytes] = field(default_factory=dict)
    """Of its clients' sessions, once the sum is settled: those of clients that died since too."""
    is_closed: bool = False
    """Whether the sum is settled; results that come later go up whole."""

    def takes(self, client: ClientId) -> bool:
        """Tell whether a client's weights may still be added; if so, its result is on its way."""
        if self.is_closed or client not in self.clients or client in self.failed:
            return False
        self.on_their_way.add(client)
        return True

    def keep(self, client: ClientId, result: Answer) -> None:
        """Add the result of a client that the coordinator above has been told of."""
        self.results[client] = result
        self.folding.add_answer(result, self.results, self.failed)

    def is_ready(
        self, now: float, dead: Callable[[Iterable[ClientId]], Collection[ClientId]]
    ) -> bool:
        """Tell whether the sum can go up: all have come, or it is time.

        A client that has not joined this relay yet is waited for like any other: it may have been
        with the relay before this one. The coordinator above knows where each session lives, and
        says so when one leaves the group.

        Args:
            now: the time on the monotonic clock.
            dead: returns those of some clients that are dead; with a deadline nobody waits for one.
        """
        if self.is_closed or self.on_their_way:
            return False
        missing = self.missing()
        if self.until < math.inf:
            missing -= {*dead(missing)}
        return not missing or (now >= self.until and bool(self.results))

    def missing(self) -> set[ClientId]:
        """Return the clients that have not answered."""
        everybody: set[ClientId] = {*self.clients}
        return everybody - self.results.keys() - self.failed

    def cosines(self) -> dict[int, float]:
        """Return the cosine between each client's difference and their mean; before the sums."""
        held = {c: r for c, r in self.results.items() if isinstance(c, int)}
        drawn = {c: r.measured.sketch for c, r in held.items() if r.measured is not None}
        sketches = {client: sketch for client, sketch in drawn.items() if sketch is not None}
        return cosines(sketches, {c: self.count(held[c].upload) for c in sketches}, {})

    def sums(self) -> Weights | None:
        """Return the weighted sums of all results, and drop their weights; None: nothing counts."""
        found = self.folding.sums(self.results)
        for result in self.results.values():
            result.upload = Bundle()
        return found


SUMS_BY = 0.8
"""Part of the run's deadline after which a sum goes up without those that are missing."""


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
    _grown: dict[int, RelayedRun] = field(default_factory=dict, compare=False)
    """By how many classes came since the run began."""

    def with_classes(self, new: int) -> RelayedRun:
        """Return what travels once so many classes have come.

        Raises:
            PayloadError: they are more than the run may get.
        """
        if not new:
            return self
        classes = self.facts.problem.num_classes + new
        if classes > self.facts.experiment.schedule.classes_to_come:
            raise PayloadError(f"an order names {new} new classes, which the run cannot have")
        grown = self._grown.get(new)
        if grown is None:
            self._grown.clear()  # no order goes back behind a growth
            grown = self._grown[new] = RelayedRun(self.facts.for_classes(classes), self.method)
        return grown

    @cached_property
    def upload_spec(self) -> BundleSpec:
        """Return what an upload must hold."""
        return self._wire.upload_spec(self.method.upload_spec(self.facts))

    @cached_property
    def payload_spec(self) -> Mapping[str, BundleSpec]:
        """Return what the parts of a payload must hold, by role."""
        common, personal = self.method.payload_spec(self.facts)
        return {"common": self._wire.payload_spec(common), "personal": personal}

    @property
    def hides_uploads(self) -> bool:
        """Whether an upload as it travels tells nothing of the model."""
        return self._wire.hides_uploads

    @cached_property
    def _wire(self) -> Wire:
        return Wire.of(self.method, self.facts)

    @classmethod
    def of(
        cls,
        table: Mapping[str, Any],
        problem: Problem,
        code: Sequence[Path],
        usual: Sequence[tuple[str, ...]] = (),
    ) -> Self:
        """Return what an experiment says.

        Args:
            table: the resolved experiment, as the coordinator above sends it.
            problem: of the clients.
            code: custom files whose code may run, if the experiment asks for it.
            usual: the keys of the table whose values are defaults.

        Raises:
            ConfigError: this installation cannot read the experiment.
        """
        experiment = received_experiment(table, "the coordinator's experiment", code, (), usual)
        method = make(experiment.method.name, **experiment.method.hyper_parameters())
        return cls(RunFacts(experiment, problem), method)


class RelayedTrips:
    """Orders from above for the clients below, one trip at a time; used from many threads."""

    group: Guarded[ClientGroup | None] = Guarded("changed")
    joins: Guarded[int] = Guarded("changed")
    """How many times clients have begun to join."""
    _issue: Guarded[int] = Guarded("changed")
    """That of the orders under way."""
    _grouped: Guarded[set[OpenTrip]] = Guarded("changed")
    """The trips of the group: several, where clients came late to the relay."""
    _runs: Guarded[dict[ClientId, RelayedRun]] = Guarded("changed")
    """What travels to and from each client that has joined, by the problem that it stated: the
    coordinator above turns those away later whose problem is not the run's."""

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
        self.group, self.joins, self._issue, self._grouped, self._runs = None, 0, 0, set(), {}

    def begin_join(self) -> None:
        """Note that clients begin to join."""
        with self.changed:
            self.joins += 1

    def joined_since(self, joins: int) -> bool:
        """Tell whether clients have begun to join since there were so many joins."""
        with self.changed:
            return self.joins != joins

    def learn(self, client: ClientId, run: RelayedRun) -> None:
        """Remember what travels to and from a client that joins."""
        with self.changed:
            self._runs[client] = run

    def run_of(self, client: ClientId, order: rpc.Order) -> RelayedRun:
        """Return what travels to and from a client for an order.

        Raises:
            PayloadError: it has not joined here, or the order names too many classes.
        """
        with self.changed:
            found = self._runs.get(client)
        if found is None:
            raise PayloadError(f"an order is for client {client}, who has not joined here")
        return found.with_classes(len(order.new_classes))

    # --- orders -----------------------------------------------------------------------------------

    def begin(self, delivery: Delivery) -> None:
        """Give orders to the clients; those of an earlier issue end, of the same clients or all."""
        run = self.run_of(*next(iter(delivery.orders.items())))
        trip = OpenTrip.of(_trip_of(delivery, run))
        sample = trip.trip.sample
        with self.changed:
            if run.facts.experiment.schedule.orders_last:
                self.below.recall([c for c in delivery.orders if isinstance(c, int)])
            elif delivery.issue != self._issue:
                self.recall()
                self._issue = delivery.issue
            if delivery.group and self.group is None:
                self.group = self._group_of(delivery.group, sample, run)
            if self.group is not None:
                self._grouped.add(trip)
            self.below.commit(Interaction(sample.committed), Interaction(sample.durable))
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

    def _group_of(
        self, clients: tuple[int, ...], sample: rpc.Order, run: RelayedRun
    ) -> ClientGroup:
        folding = StreamingMean(clients, run.method.count, self.below.spool.budget)
        deadline_s = run.facts.experiment.server.deadline_s
        wait_s = float("inf") if deadline_s is None else SUMS_BY * deadline_s
        return ClientGroup(sample, clients, folding, run.method.count, self._clock() + wait_s)

    def due_in(self, most: float) -> float:
        """Return how long the relay may wait until it looks at its group again, in seconds."""
        with self.changed:
            group = self.group
        left = group.until - self._clock() if group is not None and not group.is_closed else most
        return left if 0 < left < most else most

    def ready_group(self) -> ClientGroup | None:
        """Return the group whose sum can go up, and settle it; the caller holds the lock."""
        group, below = self.group, self.below
        if group is None or not group.is_ready(self._clock(), below.presence.dead):
            return None
        group.is_closed, group.tokens = True, below.tokens(group.clients)
        return group

    def group_for(self, client: ClientId, trip: OpenTrip) -> ClientGroup | None:
        """Return the group that may still take a client's weights; its result is on its way.

        A trip that was recalled has none any more. What comes of it would go up whole, past the
        group of the new orders.

        Raises:
            NotReady: the trip was recalled.
        """
        with self.changed:
            self.below.check_waits_for(client, trip)
            group = self.group if trip in self._grouped else None
            return group if group is not None and group.takes(client) else None

    # --- results ----------------------------------------------------------------------------------

    def told(
        self, client: ClientId, trip: OpenTrip, group: ClientGroup | None, result: Answer | str
    ) -> None:
        """Store what the coordinator above has been told of a client, or why it failed.

        Without a group the client's weights went up whole.
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

    def not_told(self, client: ClientId, group: ClientGroup | None) -> None:
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
        UploadForm(
            run.upload_spec if trains else BundleSpec(),
            check_upload=lambda _, upload: check_numbers(upload),  # nobody sees them again
            measures=trains and not run.hides_uploads,
        ),
        zstd=run.facts.experiment.zstd,
    )


class PassedOn:
    """Passes checked results on. The weights of a group stay here until their sum goes up.

    A client is answered once the coordinator above has taken all but its weights. It keeps its
    upload until the interaction is committed, so a relay that dies loses nothing.
    """

    def __init__(self, trips: RelayedTrips, uplink: Uplink) -> None:
        self.trips, self.uplink = trips, uplink

    def take(self, client: ClientId, trip: OpenTrip, push: Push, outcome: Answer | str) -> None:
        """Tell the coordinator above of a result, or why the client failed."""
        if isinstance(outcome, str):
            self._tell(push.header, trip, Bundle(), failure=outcome)
            return self.trips.told(client, trip, None, outcome)
        group = self.trips.group_for(client, trip)
        try:
            stays = outcome if group else None
            known = self._tell(push.header, trip, outcome.upload, stays=stays)
        except PayloadError as error:
            self.trips.told(client, trip, group, f"its upload was refused: {error}")
            raise
        except (NotReady, UnknownSession):  # the client brings it again, maybe after joining anew
            self.trips.not_told(client, group)
            raise
        except Exception as error:
            self.trips.told(client, trip, group, str(error))
            raise
        late = "the coordinator above had its result before"
        self.trips.told(client, trip, group, late if known and group else outcome)
        return None

    def _tell(
        self,
        header: rpc.PushHeader,
        trip: OpenTrip,
        upload: Bundle,
        *,
        stays: Answer | None = None,
        failure: str = "",
    ) -> bool:
        """Tell the coordinator above of a result; return whether it had it before.

        Args:
            header: what it began with. All of it goes up, but for what a relay alone may say.
            trip: with the order that it answers.
            upload: what goes up.
            stays: the answer whose weights stay here for a sum; None if nothing stays.
            failure: why there is no upload.

        Raises:
            Exception: what its answer means for the client's call.
        """
        told = rpc.PushHeader()
        told.CopyFrom(header)
        for name in ("bundle", "members", "distance"):
            told.ClearField(name)
        told.failure, told.summed = failure, stays is not None
        told.issue = trip.trip.sample.issue
        if stays is not None:
            assert stays.measured is not None, "a group trains"
            norms, upload = stays.measured.norms, replace(upload, weights={})
            told.distance.weights = norms.get(WEIGHTS, 0.0)
            told.distance.statistics = norms.get(STATISTICS, 0.0)
        return self.uplink.push(told, upload).repeated_upload
