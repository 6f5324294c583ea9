"""The engine's view of its clients: give orders to a cohort, get results back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed, TooFewClients
from fedmodels.facts.position import Interaction, Round
from fedmodels.facts.run_classes import RunClasses
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.differences import Measured, TrainingBase
from fedmodels.tensors.uploads import Summed
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.state.record import Record

if TYPE_CHECKING:
    from fedpb.peer_certificates import PeerCertificates

Allocate = Callable[[int], memoryview]
"""Returns a buffer of so many bytes."""


@dataclass(frozen=True)
class UploadForm:
    """What an upload must be, and what is made of it; its functions are called from any thread."""

    spec: BundleSpec = field(default_factory=BundleSpec)
    """The specification of an upload as it travels."""
    count: Callable[[Bundle], float] | None = None
    """Returns the coefficient of an upload in the mean; None if the method reads single uploads."""
    check_report: Callable[[ClientId, rpc.Order, rpc.Report], None] = lambda *_: None
    """Raises PayloadError for a report with impossible numbers, or beyond its order."""
    check_upload: Callable[[ClientId, Bundle], None] = lambda *_: None
    """Raises PayloadError for an upload with impossible values."""
    restore: Callable[[Bundle, Allocate], Bundle] | None = None
    """Makes what the method reads of an upload, or raises PayloadError for impossible values; None
    where uploads travel as they are."""
    measures: bool = False
    """Whether it is kept how far an upload lies from what its client was given."""


@dataclass(frozen=True)
class AllOf:
    """When enough results of one trip are there: all of them, unless fewer will do."""

    needed: int | None = None
    """Clients whose results suffice after the deadline or after failures, the evaluator left out;
    all results unless given."""
    enough: int | None = None
    """Results that close the trip at once; by default all."""
    least: int | None = None
    """Clients whose results suffice where all others of the trip failed or are dead; as many as are
    needed unless given."""

    def is_full(self, results: Collection[ClientId]) -> bool:
        """Tell whether no more results are wanted."""
        return self.enough is not None and len(results) >= self.enough

    def is_decided(
        self,
        asked: Collection[ClientId],
        results: Collection[ClientId],
        failed: Collection[ClientId],
    ) -> bool:
        """Tell whether every client that was asked answered, or too many of them failed."""
        left = [client for client in asked if client not in failed]
        reached = self._suffice(left, asked, self.least)
        return self.is_full(results) or len(left) == len(results) or not reached

    def has_enough(
        self,
        asked: Collection[ClientId],
        results: Collection[ClientId],
        missing: Collection[ClientId],
        gone: Collection[ClientId],
    ) -> bool:
        """Tell whether the results suffice without those that are missing, some of them dead."""
        nobody_comes = all(c in gone for c in missing if c != EVALUATOR)
        return self._suffice(results, asked, self.least if nobody_comes else None)

    def _suffice(
        self, clients: Collection[ClientId], asked: Collection[ClientId], least: int | None
    ) -> bool:
        """Tell whether these clients would be enough; the evaluator stands in for no client.

        ``least`` of them are enough; as many as are needed unless it is given.
        """
        if self.needed is None:
            return len(clients) == len(asked)
        enough = self.needed if least is None else least
        return sum(isinstance(client, int) for client in clients) >= enough


@dataclass(frozen=True)
class AnyOf:
    """When enough results of lasting trips are there: any so many of them, or those of some."""

    interaction: Interaction
    round: Round
    size: int
    """Results that are enough at once."""
    needed: int
    """Results that suffice after the deadline or after failures."""
    wanted: Mapping[int, Interaction] = field(default_factory=dict)
    """The clients whose results are wanted, and the interaction of each one's order. Where it is
    empty, the results that come first are taken."""
    idle: Collection[int] = ()
    """Clients without an order, who may get one where too few of those with orders are left."""

    def wants(self, client: ClientId, interaction: Interaction) -> bool:
        """Tell whether the result of a client's order may count."""
        return not self.wanted or (
            isinstance(client, int) and self.wanted.get(client) == interaction
        )

    def is_decided(self, ready: int, left: int) -> bool:
        """Tell whether more time brings nothing, with so many there and so many under way."""
        return ready == self.size or not left or ready + left < self.needed


@dataclass(frozen=True)
class Trip:
    """One trip to clients and back: the order each gets, and the payload."""

    orders: Mapping[ClientId, rpc.Order]
    common: Bundle
    """The part of the payload that everybody gets."""
    personal: Mapping[ClientId, Bundle] = field(default_factory=dict)
    """The part of the payload for a client alone, of clients that have one."""
    form: UploadForm = field(default_factory=UploadForm)
    """Of what comes back."""
    until: AllOf = field(default_factory=AllOf)
    """When enough of it is there; of lasting trips, whoever takes results says so."""
    travels: Bundle | None = None
    """The common part as it travels, where it does not travel as it is."""
    zstd: bool = False
    """Whether its frames are compressed, without loss."""

    @property
    def interaction(self) -> Interaction:
        """Return the interaction that its orders are of."""
        return Interaction(self.sample.interaction)

    @property
    def round(self) -> Round:
        """Return the round that its orders are of."""
        return Round(self.sample.round)

    @property
    def sent(self) -> Bundle:
        """Return the common part as it travels."""
        return self.common if self.travels is None else self.travels

    def measured(self, client: ClientId, upload: Bundle) -> Measured | None:
        """Return how far an upload lies from what its client was given; None if nobody asks."""
        if not self.form.measures:
            return None
        own = self.personal.get(client)
        if own is None or not (len(own.weights) or own.prototypes):
            return self.given.measured(upload)
        return TrainingBase(self.common, own).measured(upload)

    @cached_property
    def given(self) -> TrainingBase:
        """Return what everybody was given to train from."""
        return TrainingBase(self.common)

    @property
    def sample(self) -> rpc.Order:
        """Return one of the orders; orders of a trip differ in the client only."""
        return next(iter(self.orders.values()))


def fewest_alive(experiment: Experiment, asked: Collection[ClientId]) -> int | None:
    """Return how many clients suffice for an evaluation where all others that it asks are gone.

    As many clients of the run may be missing as ``min_clients`` allows, and an evaluation may ask
    none but these: after an asynchronous round it asks the few whose uploads ended the round.
    """
    most = experiment.server.min_clients
    count = sum(isinstance(client, int) for client in asked)
    return None if most is None else max(0, count - (experiment.schedule.clients - most))


@dataclass
class Answer:
    """The answer of one client."""

    upload: Bundle
    report: rpc.Report
    logical_up: int = 0
    """What the upload's tensors hold, in bytes."""
    logical_down: int = 0
    """What the payload's tensors held, in bytes."""
    wire_up: int = 0
    """What the messages that brought the upload held, in bytes."""
    measured: Measured | None = None
    """How far the upload lies from what its client was given."""


class AddedUp(Protocol):
    """What somebody added up of the uploads on their way, who alone has seen them one by one."""

    def far_out(self, results: Answers) -> dict[int, str]:
        """Return the clients whose uploads, or whose sum, lie too far out, and why."""
        ...

    def again(self) -> Self:
        """Return what judges sums alone: single uploads are judged once."""
        ...

    def stand_out(
        self, results: Answers, liars: int | None, record: Record
    ) -> tuple[dict[int, str], list[int]]:
        """Return whose uploads stand out and in what, and on whom all agree but ``liars``.

        The record says which sums stand out.
        """
        ...


@dataclass
class Answers:
    """The answers to a trip in client-id order, and the bytes that crossed the wire."""

    by_client: dict[ClientId, Answer]
    failed: dict[ClientId, str]
    wire_down: int = 0
    wire_up: int = 0
    mean: Weights | None = None
    """The mean of the uploads' weights, if it was computed on arrival; uploads are without them."""
    sums: Sequence[Summed] | None = None
    """Results of secure sums, one for each group or one in all; uploads then hold scalars alone."""
    arrivals: dict[int, Interaction] = field(default_factory=dict)
    """Of a flush: the interaction of each client's order, in the order of arrival."""
    under_way: dict[int, Interaction] = field(default_factory=dict)
    """Of a flush: the interaction of each client's order that is not answered yet."""
    aside: dict[int, Measured] = field(default_factory=dict)
    """What is kept of uploads that came and do not count."""
    added: AddedUp | None = None
    """What was added up on its way, if anything was."""

    def measured(self) -> dict[int, Measured]:
        """Return what is kept of the uploads that count, by client."""
        found = ((c, a.measured) for c, a in self.by_client.items() if isinstance(c, int))
        return {client: one for client, one in found if one is not None}

    def forget_measured(self) -> None:
        """Keep nothing of single uploads, where noise hides them."""
        for answer in self.by_client.values():
            answer.measured = None
        self.added = None

    def after(self, first: Answers) -> Answers:
        """Return these answers as those to a second try, without clients that failed before it."""
        return replace(
            self,
            failed={**first.failed, **self.failed},
            wire_down=first.wire_down + self.wire_down,
            wire_up=first.wire_up + self.wire_up,
            aside={**first.aside, **self.aside},
        )

    def beside(self, first: Answers) -> Answers:
        """Return the answers of two flushes as those of one."""
        both = {**first.by_client, **self.by_client}
        return replace(
            self.after(first),
            by_client={client: both[client] for client in sorted(both, key=int)},
            arrivals={**first.arrivals, **self.arrivals},
        )

    def set_aside(self, client: ClientId, why: str) -> None:
        """Let an upload not count, as if its client had failed."""
        answer = self.by_client.pop(client, None)
        self.failed[client] = why
        if answer is not None and answer.measured is not None and isinstance(client, int):
            self.aside[client] = answer.measured


def first_failure(failed: Mapping[Any, str], round: Round, stage: str) -> str:
    """Return a line that names the first client that failed, and counts the others."""
    client, reason = next(iter(failed.items()))
    others = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
    return f"{ClientFailed(client, round, stage, reason)}{others}"


def too_few(failed: Mapping[Any, str], round: Round, stage: str, needed: int) -> TooFewClients:
    """Return the error of a run that has too few results to go on; its line says what to do."""
    client = next(iter(failed))
    without = f", and --resume --without {client} continues without client {client}"
    advice = (
        f"; the run needs {needed} clients here ([server] min_clients, all of them without it): "
        f"--resume tries again{without if isinstance(client, int) else ''}"
    )
    return TooFewClients(first_failure(failed, round, stage), failed, advice)


class StateLost(Exception):
    """A client came back without its required private state; the run has to roll back."""

    def __init__(self, client: int, versions: Sequence[int]) -> None:
        held = ", ".join(str(version + 1) for version in versions) or "none"
        super().__init__(f"client {client} holds private states of interactions {held} only")
        self.client = client


class TooFewOrders(Exception):
    """Too few of the clients with lasting orders are left for a flush, and others are there."""

    def __init__(self, idle: Sequence[int], short: int) -> None:
        super().__init__(f"{short} more clients have to train")
        self.idle, self.short = idle, short
        """Clients that are there and have no order, and how many of them must train."""


@dataclass(frozen=True)
class News:
    """What the clients of an open run have said by now."""

    number: int
    """Counts what was said, by the operator as well."""
    descriptions: Mapping[int, str]
    """client.json of each client that has joined."""
    away: Collection[int] = ()
    """Clients that have joined and are not connected now."""


HoldsState = Callable[[int, Sequence[int]], bool]
"""Tells whether a client with these private states holds the required one. Raises
:class:`LossTooLarge` if the run may not go back to any of these states."""


class Cohort(Protocol):
    """Clients that can be sent on a trip."""

    peers: PeerCertificates | None
    """Checks the certificates that clients show one another; None where they have none."""

    def gather(self) -> Mapping[int, str]:
        """Wait for the run's clients; return their descriptions (client.json) by id."""
        ...

    def meet(self, clients: Sequence[int], needed: int) -> Mapping[int, str]:
        """Wait until ``needed`` of these clients have joined; return all descriptions."""
        ...

    def set_out(self, why: Mapping[int, str]) -> None:
        """Let these clients, and no others, know that they take no part from now on, and why."""
        ...

    def begin(self, classes: RunClasses) -> None:
        """Take the classes of an open run: those that it began with, and what became of them."""
        ...

    def news(self) -> News:
        """Return what was said by now; for open runs."""
        ...

    def rest(self, number: int, seconds: float | None) -> None:
        """Wait until more was said than in the news of this number, or some seconds have passed."""
        ...

    def has_evaluator(self) -> bool:
        """Tell whether an evaluator scores the global model on the global test set."""
        ...

    def versions(self) -> Mapping[int, Sequence[int]]:
        """Return which private states each client says it holds."""
        ...

    def require(self, holds: HoldsState, last_trained: Mapping[int, int], safe: int) -> None:
        """Set which private states suffice, when each client last trained, and the watermark.

        A client that joined before with too great a loss has to join again, and learns what to do.
        """
        ...

    def starting_over(self) -> Sequence[int]:
        """Return the clients that go on from their initial state; each appears in one call only."""
        ...

    def send_and_receive(self, trip: Trip) -> Answers:
        """Give the orders, wait for the results, and return them."""
        ...

    def send(self, *trips: Trip) -> None:
        """Give the orders of lasting trips, and wait for none of them."""
        ...

    def take(self, until: AnyOf) -> Answers:
        """Wait for results of lasting trips, take them out of the trips, and return them.

        Failures of lasting trips since the last flush come with them. A client has one order of
        lasting trips at a time.

        Raises:
            TooFewOrders: those that are left are too few, and idle clients are there.
        """
        ...

    def recall(self, clients: Collection[int] | None = None) -> None:
        """End the lasting trips of some clients, or all; nobody wants their results any more."""
        ...

    def commit(self, interaction: Interaction, watermark: Interaction) -> None:
        """Remember the last commit and the watermark; orders carry both to the clients."""
        ...

    def durable(self) -> Interaction | None:
        """Return the interaction up to which every client's state is safe; None: all are safe."""
        ...


def stamped(order: rpc.Order, committed: Interaction, watermark: Interaction) -> rpc.Order:
    """Return a copy of an order that says what is committed and what is safe.

    To an order to train, or one of a secure sum, nothing counts as committed from its own
    interaction on: its client keeps the result until a later order says that the interaction is
    committed.
    """
    found = rpc.Order()
    found.CopyFrom(order)
    trains = order.kind == rpc.ORDER_KIND_TRAIN or order.kind in WITHOUT_PAYLOAD
    found.committed = min(committed, order.interaction - 1) if trains else committed
    found.durable = watermark
    return found
