"""Asynchronous rounds: a round ends with the first K uploads, and nobody waits for the slowest.

This is FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS
2022) for methods whose server half takes the mean of everybody's weights. At the start of an
interaction idle clients get orders until ``per_round`` clients train. The first ``buffer`` uploads
are reduced and committed: a flush says how many, and ``OpenTrips.ready`` in
``fedsrv/transport/open_trips.py`` tells when they have come. How much each counts depends on its
staleness: :mod:`fedmodels.tensors.staleness`.

The record of an interaction holds which clients arrived, in which order, and which orders were
still under way. All else follows from the seed. So whoever follows recorded arrivals comes to the
same bits: a replay after a roll-back, or a run with ``schedule.arrivals``.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError, RunFailed, reason_of
from fedmodels.facts.position import Interaction
from fedmodels.methods import make
from fedmodels.tensors.bundle import Weights
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.differences import Norms
from fedmodels.tensors.staleness import discount, rebase
from fedmodels.training.contexts import ServerContext, ServerState
from fedmodels.training.hooks import init_server
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedsrv.engine.cohort import Answers, AnyOf, TooFewOrders, Trip
from fedsrv.engine.comparison import measured_in
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step, draw_cohort, takes_part
from fedsrv.engine.server_part import CurrentInteraction, Exchange, Kernel, ServerPart
from fedsrv.state.record import Record


class AsynchronousRounds(ServerPart):
    """Lets rounds end with the first uploads (``[schedule] order = "asynchronous"``)."""

    @classmethod
    def check(cls, experiment: Experiment, *, certified: bool) -> None:
        """Refuse arrivals that cannot be followed, and methods that read single uploads."""
        recorded_arrivals(experiment)
        _check_reads_the_mean(make(experiment.method.name, **experiment.method.hyper_parameters()))

    @classmethod
    def fits(cls, method: Method, run: RunFacts) -> None:
        """Refuse a method whose late uploads cannot be moved to other weights."""
        check_asynchronous(method, run)

    def exchange(self, rounds: Kernel, interaction: Interaction) -> Exchange:
        """Return a buffer of uploads."""
        return BufferedRounds(rounds, interaction)


class BufferedRounds(Exchange):
    """Rounds that end with the first uploads."""

    tries_first = maps_state = False

    def __init__(self, parts: Kernel, interaction: Interaction) -> None:
        """Give the orders again that were under way at a commit."""
        super().__init__(parts)
        self.experiment, self.cohort = parts.experiment, parts.cohort
        self.followed = recorded_arrivals(self.experiment, len(parts.plan.steps))
        """Records of the run whose arrivals ``schedule.arrivals`` follows, by interaction."""
        check_asynchronous(parts.method, parts.plan.run)
        last = parts.store.ledger.record(interaction)
        ordered = dict(last.get("under_way", ())) if last else {}
        self.under_way = self._orders_at(Interaction(interaction + 1), ordered)
        """The clients with an order under way, and the interaction of that order."""
        self.undone = parts.store.ledger.undone()
        """Records that a roll-back undid, by interaction; the replay follows their arrivals."""
        self.begun: dict[Interaction, Weights] = {}
        """Everybody's weights at the start of each interaction that has an order under way."""
        self.company = self._company_at(interaction)
        """The norms of the last uploads that count, as many as train at once."""
        self.cohort.recall()
        if self.under_way and self._goes_on(interaction):
            versions = sorted({*self.under_way.values()})
            self.cohort.send(*(self._trip_again(begun) for begun in versions))

    def _goes_on(self, interaction: Interaction) -> bool:
        """Tell whether orders of earlier rounds are wanted after a commit."""
        return interaction + 1 < len(self.parts.plan.steps)

    def _orders_at(
        self, interaction: Interaction, under_way: Mapping[int, Interaction]
    ) -> dict[int, Interaction]:
        """Return the orders under way that are still wanted in an interaction."""
        aside = self.parts.plan.aside
        return {c: n for c, n in under_way.items() if takes_part(c, interaction, aside)}

    def _state_of(self, begun: Interaction) -> ServerState:
        """Return what the orders of an interaction train from."""
        return self.parts.state_after(Interaction(begun - 1))

    def _company_at(self, interaction: Interaction) -> deque[Norms]:
        """Return the norms of the last uploads up to a commit; a round alone may have one."""
        newest, size = list[Norms](), self.experiment.cohort_size
        for number in map(Interaction, range(interaction, -1, -1)):
            record = self.parts.store.ledger.record(number)
            if record is None or len(newest) >= size:
                break
            newest += [measured_in(record["clients"][str(c)]).norms for c in record["cohort"][::-1]]
        return deque(newest[:size][::-1], maxlen=size)

    # --- one interaction --------------------------------------------------------------------------

    def train(self, at: CurrentInteraction, state: ServerState) -> Answers:
        """Let idle clients begin, and take the first uploads that come."""
        step, present, at.company = at.step, at.ctx.cohort, self.company
        followed = self.undone.get(step.interaction) or self.followed.get(step.interaction)
        free = self.experiment.cohort_size - len(self.under_way)
        begin = _begun_in(followed) if followed else self._draw(step, present, free)
        self._begin(step, state, begin)
        found = self._take(at, state, self._flush(step, followed, present))
        while not followed and (more := self._more(at, found)):
            others = self._take(at, state, more)
            found = others.beside(found)
            if not others.by_client:
                break
        if followed and len(found.arrivals) < len(followed.get("arrivals", ())):
            self.undone = {}  # this went another way than before, so later records do not fit
        if step.ends_run:
            self.cohort.recall()
        self.parts.leave_out(at.ctx, found, self.parts.judged(at, found))
        return found

    def aligned(self, at: CurrentInteraction, state: ServerState) -> ServerContext | None:
        """Change late uploads as if all had begun with the present weights; return who came."""
        self._rebase(at.step, at.results, state)
        if not at.results.by_client:  # they were all left out, and the model stays
            return None
        return self.parts.context(at.step, tuple(sorted(at.results.arrivals)))

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down which uploads came when, and what is under way; uploads that count are company.

        Their mean staleness is a metric.
        """
        results = at.results
        self.company += [one.norms for one in results.measured().values()]
        if results.by_client:
            begun = [
                results.arrivals[c] for c in sorted(results.arrivals) if c in results.by_client
            ]
            staleness = [at.step.interaction - number for number in begun]
            record["metrics"]["staleness"] = sum(staleness) / len(staleness)
        record["arrivals"] = [*results.arrivals.items()]
        record["under_way"] = [*results.under_way.items()]

    # --- orders -----------------------------------------------------------------------------------

    def _begin(self, step: Step, state: ServerState, clients: Iterable[int]) -> None:
        """Give orders to train from the present model."""
        begin = tuple(clients)
        if begin:
            self.cohort.send(self._trip_of(step, state, begin))
        self.under_way |= dict.fromkeys(begin, step.interaction)

    def _trip_again(self, begun: Interaction) -> Trip:
        """Return the orders of an earlier interaction that are under way."""
        clients = [c for c, number in self.under_way.items() if number == begun]
        return self._trip_of(self.parts.plan.steps[begun], self._state_of(begun), clients)

    def _trip_of(self, step: Step, state: ServerState, clients: Iterable[int]) -> Trip:
        """Return the orders of a step for these clients.

        Nobody knows yet which interaction will count an order, and whether that one is scored. So
        every client scores what it trained, unless only the last round is scored.
        """
        ctx = self.parts.context(step, tuple(sorted(clients)))
        self.begun[step.interaction] = state.common.weights
        return self.parts.training(ctx, state, self.experiment.evaluate.every > 0)

    def _draw(self, step: Step, present: Iterable[int], free: int) -> tuple[int, ...]:
        """Draw some clients that have no order."""
        idle = self._idle(present)
        return draw_cohort(self.experiment.seed, step.round, idle, max(0, free))

    def _idle(self, present: Iterable[int]) -> list[int]:
        return [client for client in present if client not in self.under_way]

    # --- uploads ----------------------------------------------------------------------------------

    def _take(self, at: CurrentInteraction, state: ServerState, flush: AnyOf) -> Answers:
        """Take the first uploads; let others train where those with orders failed or died."""
        while True:
            try:
                found = self.cohort.take(flush)
            except TooFewOrders as starved:
                self._begin(at.step, state, self._draw(at.step, starved.idle, starved.short))
                flush = replace(flush, idle=self._idle(at.ctx.cohort))
            else:
                self.under_way = found.under_way
                return found

    def _more(self, at: CurrentInteraction, found: Answers) -> AnyOf | None:
        """Return which further uploads a step needs in place of those that will be left out.

        Without them a client that lies and is quick would end round after round by itself.
        """
        out = self.parts.judged(at, found)
        lacking = min(len(out), len(self.under_way))
        if not lacking or len(found.by_client) - len(out) >= self._size():
            return None
        return AnyOf(at.step.interaction, at.step.round, size=lacking, needed=0)

    def _size(self) -> int:
        """Return how many uploads end a step."""
        assert self.experiment.schedule.buffer is not None, "the config says so"
        return self.experiment.schedule.buffer

    def _flush(self, step: Step, followed: Record | None, present: Iterable[int]) -> AnyOf:
        """Return which uploads end a step.

        Raises:
            RunFailed: followed arrivals are of clients that got no such order.
        """
        wanted = dict(followed.get("arrivals", ())) if followed else {}
        for client, begun in wanted.items():
            if self.under_way.get(client) != begun:
                raise RunFailed(
                    f"interaction {step.interaction + 1} cannot follow the recorded arrivals: "
                    f"client {client} has no order of interaction {begun + 1}"
                )
        size = len(wanted) if followed else min(self._size(), len(self.under_way))
        needed = size if self.followed else min(self.experiment.min_clients, size)
        may_lack = self.experiment.server.min_clients is not None and not wanted
        idle = self._idle(present) if may_lack else ()
        return AnyOf(step.interaction, step.round, size, needed, wanted, idle)

    def _rebase(self, step: Step, results: Answers, state: ServerState) -> None:
        """Change late uploads as if their clients had begun with the present weights."""
        now, exponent = step.interaction, self.experiment.schedule.staleness_exponent
        present, parameters = state.common.weights, frozenset(self.parts.plan.run.parameters)
        for client, begun in results.arrivals.items():
            answer = results.by_client.get(client)
            if answer is not None and begun < now:  # a fresh upload counts as it came
                factor, sent = discount(now - begun, exponent), answer.upload.weights
                moved = rebase(sent, self.begun[begun], present, factor, parameters)
                answer.upload = replace(answer.upload, weights=moved)
        self.begun = {n: w for n, w in self.begun.items() if n in self.under_way.values()}


def _begun_in(record: Record) -> tuple[int, ...]:
    """Return the clients that got an order in an interaction, as far as its record names them."""
    orders = [*record.get("arrivals", ()), *record.get("under_way", ())]
    return tuple(sorted(client for client, begun in orders if begun == record["interaction"]))


def check_asynchronous(method: Method, run: RunFacts) -> None:
    """Check that a method's rounds may be asynchronous.

    Raises:
        ConfigError: the method's rounds may not be; the line says why.
    """
    _check_reads_the_mean(method)
    upload, of_net = method.upload_spec(run), {f"weights/{name}" for name in run.forms}
    everybodys = set(init_server(method, run).common.by_key())
    sent = {k for k in (*upload.required, *upload.optional) if not k.startswith("scalars/")}
    if method.payload_spec(run)[1] != BundleSpec():
        reason = "its server sends parts to single clients"
    elif not sent | everybodys <= of_net:
        reason = "other tensors than weights of the net are shared"
    elif not sent or sent != everybodys:
        reason = "clients do not send all the weights that they receive"
    else:
        return
    raise not_asynchronous(method.name, reason)


def _check_reads_the_mean(method: Method) -> None:
    if method.reduction != "mean":
        raise not_asynchronous(method.name, "its server half reads single uploads")


def not_asynchronous(name: str, reason: str) -> ConfigError:
    """Return the error of a method whose rounds may not be asynchronous, for a reason."""
    return ConfigError(
        '[schedule] order = "asynchronous" is for methods whose server averages weights and does '
        f"nothing else; {name} is none: {reason}"
    )


def recorded_arrivals(experiment: Experiment, steps: int = 0) -> dict[int, Record]:
    """Return the records of the run that ``schedule.arrivals`` names, by interaction.

    Args:
        experiment: of the run that is to follow them.
        steps: its interactions, as far as they are known.

    Raises:
        ConfigError: the named directory holds no asynchronous run, a record is damaged, or this
            run's schedule does not allow what it says.
    """
    if experiment.schedule.arrivals is None:
        return {}
    run = Path(experiment.schedule.arrivals)
    try:
        lines = (run / "rounds.jsonl").read_text("utf-8").splitlines()
        records: list[Any] = [json.loads(line) for line in lines]
    except OSError as error:
        raise ConfigError(
            f"[schedule] arrivals: {run} is no run directory ({reason_of(error)})"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"[schedule] arrivals: {run}/rounds.jsonl is damaged: {error}") from None
    tables = [record for record in records if isinstance(record, dict)]
    if not records or any("arrivals" not in record for record in tables):
        raise ConfigError(f"[schedule] arrivals: the run {run} records no arrivals")
    under_way = dict[int, int]()
    for number, record in enumerate(records):
        if fault := _fault_of(record, number, under_way, experiment):
            raise ConfigError(f"[schedule] arrivals: interaction {number + 1} of {run} {fault}")
        under_way = dict(record.get("under_way", ()))
    if len(records) < steps:
        raise ConfigError(
            f"schedule.arrivals: {run} records {len(records)} interactions, this run has {steps}"
        )
    return dict(enumerate(records))


def _fault_of(
    record: Any, number: int, under_way: Mapping[int, int], experiment: Experiment
) -> str:
    """Return why a run cannot follow a record, as far as its config tells; empty if it can.

    Without this check a run would wait for ever for uploads that its own schedule turns away.

    Args:
        record: what a line of ``rounds.jsonl`` holds.
        number: the interaction that it should be of.
        under_way: the orders under way before it, by client.
        experiment: of the run that is to follow it.
    """
    table: Mapping[str, Any] = record if isinstance(record, dict) else {}
    arrived, left = table.get("arrivals"), table.get("under_way", [])
    if table.get("interaction") != number:
        return "is damaged: its line is none of that interaction"
    if not isinstance(arrived, list) or not isinstance(left, list):
        return "is damaged: it has no list of orders"
    orders = [*arrived, *left]
    if not all(map(_is_order, orders)):
        return "is damaged: an order is no pair of a client and an interaction"
    clients, schedule = sorted(client for client, _ in orders), experiment.schedule
    if len({*clients}) < len(clients):
        return "is damaged: a client has two orders"
    if any(begun != under_way.get(client, number) for client, begun in orders):
        return "is damaged: an order comes from nowhere"
    if clients and clients[-1] >= schedule.clients:
        return f"has client {clients[-1]}; this run's are 0 to {schedule.clients - 1}"
    if len(clients) > experiment.cohort_size and experiment.server.min_clients is None:
        return f"has {len(clients)} clients that train at once; here {experiment.cohort_size} may"
    failed = table.get("failed")
    counted = [c for c, _ in arrived if not isinstance(failed, dict) or str(c) not in failed]
    if len(counted) > (schedule.buffer or 0):
        return f"ends with {len(counted)} uploads; here buffer = {schedule.buffer}"
    return ""


def _is_order(pair: Any) -> bool:
    """Tell whether this is a pair of a client and an interaction."""
    return isinstance(pair, list) and [type(found) for found in pair] == [int, int] and pair[0] >= 0
