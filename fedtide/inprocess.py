"""A cohort without a network: the client halves run in this process, through codec and frames."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from rich.console import Console

from fedcli.data.store.client_data import ClientData
from fedcli.data.store.commands import run_partition
from fedcli.runtime.patience import executed
from fedcli.runtime.worker import GivenOrder, Result
from fedcli.runtime.workers import Workers
from fedmodels.config.experiment import Experiment
from fedmodels.config.origin import data_and_scenario
from fedmodels.errors import ClientFailed, PayloadError
from fedmodels.facts.position import NONE_YET, Interaction
from fedmodels.facts.resolution import experiment_of
from fedmodels.facts.run_classes import RunClasses
from fedmodels.host.devices import device_of
from fedmodels.own.code_names import refuse_exits
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId
from fedmodels.tensors.packed_weights import lease
from fedmodels.training.fault import name_faults
from fedpb.codec import Receiver, encode, merged, read_chunk
from fedpb.failures import failed_by
from fedpb.orders import WITHOUT_PAYLOAD
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.coordinator import config_text, publish_lineage, set_aside, write_facts
from fedsrv.engine.admission import Admission
from fedsrv.engine.cohort import Answer, Answers, AnyOf, News, Trip, stamped
from fedsrv.engine.rounds import Engine
from fedsrv.launch.given_data import check_given_data, check_net
from fedsrv.parts import (
    admission_by,
    check,
    in_one_process,
    parts_of,
    server_data_for,
    with_digests,
)
from fedsrv.progress.events import EventLog, Hear
from fedsrv.state.decisions import RETIRE
from fedsrv.state.run_directory import (
    beginning,
    make_directory,
    refuse_existing,
)
from fedsrv.state.store import Store

if TYPE_CHECKING:
    from fedpb.peer_certificates import PeerCertificates

log = logging.getLogger(__name__)


def transported(bundle: Bundle, spec: Any) -> Bundle:
    """Send a bundle through the codec and back."""
    encoded = encode(bundle)
    receiver = Receiver(encoded.header, spec)
    for chunk in encoded.chunks():
        _, frame = read_chunk(chunk, rpc.PullHeader)
        assert frame is not None
        receiver.feed(frame)
    return receiver.finish()


class InProcessCohort:
    """Fulfils the engine's Cohort protocol with workers of this process, opened when selected."""

    peers: PeerCertificates | None = None
    """Nobody has a certificate here."""

    def __init__(
        self,
        experiment: Experiment,
        data: Path,
        states: Path,
        *,
        evaluator: bool = False,
        device: str = "cpu",
        arrival: random.Random | None = None,
        before: Callable[[rpc.Order], None] = lambda order: None,
        after: Callable[[Result], None] = lambda result: None,
        admission: Admission | None = None,
        began: Experiment | None = None,
    ) -> None:
        """Open nothing yet.

        With ``admission`` clients may come while the run goes on; without it all data are there.
        """
        ids: list[ClientId] = [*range(experiment.schedule.clients)]
        if evaluator:
            ids.append(EVALUATOR)
        self.workers = Workers(ids, data, states, device_of(device))
        self._experiment = experiment
        self._began = began or experiment
        """What clients are told when they join."""
        if admission is None:
            self.workers.begin(experiment)
        self._admission = admission
        self._read: dict[int, tuple[ClientData, str]] = {}
        """Clients' data as they were read last, and what they announce of them."""
        self._looked_at: dict[int, str] = {}
        """What clients described last, where they may come while the run goes on."""
        self._admitted: dict[int, str] = {}
        """What they described last of that which fits the run."""
        self.arrival, self.before, self.after = arrival, before, after
        self.committed = self.watermark = NONE_YET
        self._lasting: dict[ClientId, Trip] = {}
        """The lasting trip of each client that has an order; the oldest order comes first."""

    def gather(self) -> Mapping[int, str]:
        texts = {c: self._description(c) for c in self._numbered()}
        if self._admission is None:
            for client in (c for c, text in texts.items() if '"set_aside":true' in text):
                Admission({}).taken(client, texts[client])  # refuses
            return texts
        is_new = {c: text for c, text in texts.items() if self._looked_at.get(c) != text}
        self._looked_at |= is_new
        for client, text in is_new.items():
            self._admit(self._admission, client, text)
        for other in self._admission.settle() if is_new else ():
            self._leaves(other)
        return dict(self._admitted)

    def _description(self, client: int) -> str:
        """Return what a client announces; its data are read again where they were written anew."""
        held, text = self._read.get(client, (None, ""))
        if held is None or held.is_stale or not held.states_counts:
            held = self.workers.data(client)
            text = held.announcement(how=self._experiment.announced)
            self._read[client] = held, text
        return text

    def _admit(self, admission: Admission, client: int, text: str) -> None:
        """Take what a client describes, unless it does not fit."""
        try:
            text = admission.taken(client, text)
            admission.check_fits(client, text)
        except PayloadError as error:
            log.error("%s", error)
            return
        self._admitted[client] = text
        for other in admission.admit(client, text):
            self._leaves(other)

    def _leaves(self, client: ClientId) -> None:
        """Let a client take no part that has other inputs than most."""
        log.error("client %s has inputs of another shape than most clients", client)
        self._admitted.pop(int(client), None)

    def _numbered(self) -> Iterator[int]:
        """Yield the clients; those that have no data yet join later, where they may."""
        are_all = self._admission is None
        for client in self.workers.clients:
            if isinstance(client, int) and (are_all or self.workers.has_data(client)):
                yield client

    def meet(self, clients: Sequence[int], needed: int) -> Mapping[int, str]:
        return self.gather()

    def set_out(self, why: Mapping[int, str]) -> None:
        pass  # nobody waits for orders here

    def begin(self, classes: RunClasses) -> None:
        self.workers.begin(self._began, classes.first)
        if self._admission is not None:
            self._admission.follow(classes)

    def news(self) -> News:
        return News(0, self.gather())

    def rest(self, number: int, seconds: float | None) -> None:
        raise AssertionError("an open run in one process does not wait")

    def has_evaluator(self) -> bool:
        return EVALUATOR in self.workers.clients

    def versions(self) -> Mapping[int, Sequence[int]]:
        return {c: self.workers.versions(c) for c in self._numbered()}

    def require(self, *_: object) -> None:
        """Nobody loses a state here while the engine runs."""

    def starting_over(self) -> Sequence[int]:
        return ()

    def send_and_receive(self, trip: Trip) -> Answers:
        first = self._arrivals(trip.orders)[: trip.until.enough]
        return self._answers(*self._ordered(trip, first, trip.until.needed))

    def send(self, *trips: Trip) -> None:
        for trip in trips:
            self._lasting |= dict.fromkeys(self._arrivals(trip.orders), trip)

    def take(self, until: AnyOf) -> Answers:
        """Let the clients work that are wanted, or else those with the oldest orders."""
        wanted = tuple(until.wanted or self._lasting)[: until.size]
        trips = {client: self._lasting.pop(client) for client in wanted}
        found: dict[ClientId, Answer] = {}
        declined: dict[ClientId, str] = {}
        for _, clients in groupby(wanted, lambda client: id(trips[client])):
            some = [*clients]
            done, left = self._ordered(trips[some[0]], some, 0)
            found, declined = found | done, declined | left
        if declined and len(found) < until.needed:
            client, why = next(iter(declined.items()))
            raise ClientFailed(client, until.round, "order", why)
        answers = self._answers(found, declined)
        answers.arrivals = {int(c): trip.interaction for c, trip in trips.items()}
        answers.under_way = {int(c): trip.interaction for c, trip in self._lasting.items()}
        return answers

    def recall(self, clients: Collection[int] | None = None) -> None:
        for client in [*self._lasting] if clients is None else clients:
            self._lasting.pop(client, None)

    def _answers(
        self, found: Mapping[ClientId, Answer], declined: Mapping[ClientId, str]
    ) -> Answers:
        by_client = dict(sorted(found.items(), key=lambda item: str(item[0]).zfill(9)))
        return Answers(by_client, dict(declined))

    def _ordered(
        self, trip: Trip, clients: Sequence[ClientId], needed: int | None
    ) -> tuple[dict[ClientId, Answer], dict[ClientId, str]]:
        """Let clients do an order, one after the other; return who declined it.

        Where clients may come later, one that fails counts as one that declined.

        Raises:
            ClientFailed: a client failed, or too few are left of those that did not decline.
        """
        found: dict[ClientId, Answer] = {}
        declined: dict[ClientId, str] = {}
        for client in clients:
            if self._admission is not None and not self.workers.has_data(client):
                declined[client] = "its data are not there"  # away, as over the network
                continue
            given = self._given(trip, client)
            (result,) = executed(given)
            if result.reason == rpc.FAILURE_REASON_DECLINED:
                declined[client] = failed_by(result.reason, result.failure)
                continue
            try:
                found[client] = self._answer(trip, client, result, given.payload.num_bytes())
            except ClientFailed as failed:
                if self._admission is None:
                    raise
                declined[client] = failed.reason
        if declined and (needed is None or len(found) < needed):
            client, why = next(iter(declined.items()))
            raise ClientFailed(client, trip.round, "order", why)
        return found, declined

    def _given(self, trip: Trip, client: ClientId) -> GivenOrder:
        """Return what a client has to do, and what it needs for that."""
        order = stamped(trip.orders[client], self.committed, self.watermark)
        self.before(order)
        self.workers.follow(order.settings)
        worker, specs = self.workers.of(client), self.workers.set_ups.of(order).payload_spec
        if order.kind in WITHOUT_PAYLOAD:
            return GivenOrder(worker, order, Bundle())
        parts = {"common": transported(trip.sent, specs["common"])}
        if client in trip.personal:
            parts["personal"] = transported(trip.personal[client], specs["personal"])
        return GivenOrder(worker, order, merged(parts))

    def _answer(self, trip: Trip, client: ClientId, done: Result, down: int) -> Answer:
        """Take a client's result; raise ClientFailed if there is none."""
        if failed := failed_by(done.reason, done.failure):
            raise ClientFailed(client, done.order.round, "order", failed)
        self.after(done)
        sent = transported(done.upload, trip.form.spec)
        try:
            trip.form.check_report(client, done.order, done.report)
            upload = sent if trip.form.restore is None else trip.form.restore(sent, lease)
            trip.form.check_upload(client, upload)
        except PayloadError as error:
            raise ClientFailed(client, done.order.round, "upload", str(error)) from None
        measured = trip.measured(client, upload)
        return Answer(upload, done.report, sent.num_bytes(), down, measured=measured)

    def _arrivals(self, orders: Iterable[ClientId]) -> list[ClientId]:
        clients = list(orders)
        if self.arrival is not None:
            self.arrival.shuffle(clients)
        return clients

    def commit(self, interaction: Interaction, watermark: Interaction) -> None:
        self.committed, self.watermark = interaction, watermark

    def durable(self) -> Interaction | None:
        return None


def launch_in_process(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    without: Sequence[int] = (),
    data: Path | None = None,
    hear: Hear | None = None,
) -> None:
    """Do what ``fedsrv launch`` does, in this process: deal the data out, run, write the result.

    ``data`` are clients' data that lie elsewhere. ``hear`` is called with each event of the run.

    Raises:
        FedtideError: the run failed, or could not start; one line says why.
    """
    experiment = deal_out(experiment, out, resume=resume, data=data)
    go_on(experiment, out, "close", data, without=without, hear=hear)


def deal_out(
    experiment: Experiment, out: Path, *, resume: bool = False, data: Path | None = None
) -> Experiment:
    """Make a run directory with the clients' data; return the experiment with all its digests.

    Data that are somewhere else stay there, once they are checked.

    Raises:
        FedtideError: the run could not start; one line says why.
    """
    if not resume:
        refuse_existing(out)
    experiment = in_one_process(experiment)
    check(experiment)
    if experiment.net.begin_from is not None:
        from fedsrv.trained.begin_from import begun

        experiment = begun(experiment, out)
    experiment = with_digests(experiment)
    check_given_data(experiment, data, "data")
    if data is not None:
        check_net(experiment, data)
    with beginning(out) as began:
        make_directory(out / "clients", out)  # what a resumed run is known by
        if data is None:
            run_partition(
                *data_and_scenario(experiment),
                experiment.schedule.clients,
                experiment.seed,
                out / "data",
                Console(quiet=True),
                gather=experiment.method.pools_data,
            )
        began.set()
    return experiment


def go_on(
    experiment: Experiment,
    out: Path,
    at_rest: Literal["pause", "close"],
    data: Path | None = None,
    **options: Any,
) -> None:
    """Go on with the run of a directory that :func:`deal_out` made, and write its result.

    The data are those that were dealt out there, unless others are given. Options are those of
    :func:`run_in_process`.

    Raises:
        RunPaused: an open run has nothing to learn, and ``at_rest`` says "pause".
        FedtideError: the run failed; one line says why.
    """
    data, threads = data or out / "data", torch.get_num_threads()
    try:
        evaluator = (data / "global-test").is_dir()
        how = {"evaluator": evaluator, "resume": True, "facts": True, "at_rest": at_rest}
        run_in_process(experiment, data, out, **how, **options)
    finally:
        torch.set_num_threads(threads)


def run_in_process(
    tables: Mapping[str, Any] | Experiment, data: Path, out: Path, **options: Any
) -> dict[str, Any]:
    """Run an experiment to its end without a network; return its summary.

    Args:
        tables: what is run.
        data: the partition.
        out: the run directory.
        options: those of :class:`InProcessCohort`, and further ones. ``resume``: go on with the run
            that is there. ``facts``: write config and versions, by which other commands can resume
            the run, and the summary. ``without``: clients that take no part from now on;
            ``forgotten``: those without whom the run is computed again.
            ``retired``: clients that leave an open run, ``forgets`` whether they are forgotten.
            ``at_rest``: what an open run does when it has nothing to learn. ``hear``: called with
            each event.
    """
    experiment = tables if isinstance(tables, Experiment) else experiment_of(tables)
    experiment = in_one_process(experiment)
    resume, facts = bool(options.pop("resume", False)), bool(options.pop("facts", False))
    without, at_rest = options.pop("without", ()), options.pop("at_rest", "close")
    forgotten, hear = options.pop("forgotten", ()), options.pop("hear", None)
    retired, forgets = options.pop("retired", ()), bool(options.pop("forgets", False))
    torch.set_num_threads(experiment.training.threads)  # the count changes floats
    place = data / "server"
    held = server_data_for(experiment, place if place.is_dir() else None)
    with ExitStack() as stack:
        store = Store(out, experiment, resume)
        stack.callback(store.close)
        store.decide(RETIRE, *({"client": client, "forgets": forgets} for client in retired))
        for line in store.evidence.differences:
            log.warning("%s", line)
        for line in set_aside(store, without, forgotten):
            log.warning("%s", line)
        if facts:
            store.expect("config.toml", config_text(experiment))
            write_facts(out, experiment, computes=store.ended() is None)
        events = EventLog(hear)
        parts = parts_of(store, events, server_data=held, at_rest=at_rest)
        how = {"admission": admission_by(parts, store), "began": store.began, **options}
        cohort = InProcessCohort(experiment, data, out / "clients", **how)
        for ending in filter(None, (one.follows() for one in parts)):
            stack.callback(ending)
        engine = Engine(experiment, cohort, store, events, parts)
        with name_faults(engine.method), refuse_exits():
            summary = engine.run()
        if facts:
            publish_lineage(store)
            store.publish("summary.json", json.dumps(summary, indent=2) + "\n")
        return summary
