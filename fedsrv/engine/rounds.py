"""The round engine: the loop of a run, over any :class:`Cohort`.

Every interaction is: broadcast, train, aggregate, finish, commit, score. After a crash the engine
computes an interaction without a commit again, to the same bits. So clients need not wait for the
commit. A thread writes the commit while clients train for the next interaction, and the next commit
waits for this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed, PayloadError, TooFewClients
from fedmodels.methods import make
from fedmodels.nets.cost import multiply_adds
from fedmodels.numerics.prototypes import drift
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, state_digest
from fedmodels.tensors.heap import give_back_free_pages
from fedmodels.training.compression import Compression
from fedmodels.training.contexts import Metrics, ServerContext, ServerData, ServerState
from fedmodels.training.fault import faults_told
from fedmodels.training.hooks import broadcast, evaluation, init_server, received
from fedmodels.training.run import RunFacts
from fedmodels.training.stack_trial import check_together
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.client_profile import untrained
from fedsrv.engine.cohort import Answers, Cohort, StateLost, Trip, fewest, fewest_alive
from fedsrv.engine.common_commit import back_before_the_odd, go_to_common_commit, odd_commit
from fedsrv.engine.odd_uploads import check_left, far_out
from fedsrv.engine.reduction import reduced
from fedsrv.engine.roster import Roster
from fedsrv.engine.rows import add_wire, commit_facts, left_out_of, put_scores, record_of
from fedsrv.engine.schedule import (
    Step,
    ends_task,
    is_scored,
    scorers,
    steps,
    takes_part,
    tasks_seen,
    tryers,
)
from fedsrv.engine.scores import Scores
from fedsrv.engine.server_data import check_fits, check_given
from fedsrv.engine.summary import check_reference, left_out, summarise
from fedsrv.engine.terms import Terms
from fedsrv.events import EventLog
from fedsrv.state.history import History
from fedsrv.state.record import Record, trained_in
from fedsrv.state.store import Store
from fedsrv.state.syncer import Syncer

MOST_CONFUSED = 100
"""Classes of a problem up to which the last scores tell what each class was taken for."""


class Engine:
    """Runs an experiment from its last commit to its end."""

    def __init__(
        self,
        experiment: Experiment,
        cohort: Cohort,
        store: Store,
        events: EventLog,
        server_data: ServerData | None = None,
    ) -> None:
        self.experiment, self.cohort, self.store, self.events = experiment, cohort, store, events
        check_given(experiment, server_data is not None)
        self.server_data = server_data
        self.method = make(experiment.method.name, **experiment.method.hyper_parameters())
        self.roster = Roster(store)
        self.profiles, self.groups = self.roster.profiles, self.roster.groups
        self.last_trained: dict[int, int] = {}
        """Interaction of each client's last upload that counts; names the private state to hold."""
        self.history = History()
        self._lost: StateLost | None = None
        """The loss for which the engine goes back to an earlier commit."""
        self._committing: Future[None] | None = None
        self._told = set[str]()
        """Kinds of notes on skipped examples that were told."""

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            RunFailed: too many clients failed.
        """
        self._meet_clients()
        syncer = Syncer(self.store.sync)
        try:
            with ThreadPoolExecutor(1, "committer") as committer:
                while True:
                    try:
                        self._begin_at_common_commit()
                        syncer.want(self.store.committed)  # later commits are not safe yet
                        self.run_facts.forget_initial_weights()  # few methods need them again
                        give_back_free_pages()
                        return self._run_interactions(committer, syncer)
                    except StateLost as lost:
                        self._settle()
                        self._lost = lost
                    except (TooFewClients, ClientFailed) as failed:
                        self._settle()
                        raise back_before_the_odd(self.store, self.events, failed) from failed
        finally:
            syncer.close()

    # --- beginnings -------------------------------------------------------------------------------

    def _meet_clients(self) -> None:
        """Wait for the clients; derive problem, tasks and schedule from their descriptions."""
        self.roster.add(self.cohort.gather())
        if not self.experiment.method.pools_data and (line := untrained(self.profiles)):
            self.events.tell("note", line=line)
        self.run_facts = RunFacts(self.experiment, next(iter(self.profiles.values())).problem)
        if self.experiment.training.together > 1:
            check_together(self.method, self.run_facts)
        self.tasks = self.roster.tasks(self.experiment.schedule.clients)
        pooled = self.experiment.method.pools_data
        trainers = [0] if pooled else range(self.experiment.schedule.clients)
        weights, self.aside = self.roster.weights(), self.store.aside()
        self.steps = steps(self.experiment, trainers, self.tasks, weights, self.aside)
        check_reference(self.experiment, self.steps)
        how = Compression.of(self.method, self.run_facts)
        self.stateful = self.method.keeps_state(self.run_facts) or how.feedback
        self.upload_spec = how.upload_spec(self.method.upload_spec(self.run_facts))
        self.terms = Terms(self.method, self.run_facts, self.profiles, self.steps)
        self.trip = partial(Trip, check_report=self.terms.check_report, compression=how)
        check_fits(self.server_data, self.run_facts.problem)
        if self.stateful:  # a client that lost too much must join again, and learns what to do
            self._remember(self.store.committed)
            self.cohort.require(self._holds_state, self.last_trained, self.store.watermark)
            self.cohort.gather()

    def _present(self, step: Step) -> tuple[int, ...]:
        """Return the clients of a step's cohort that can get orders.

        A run may begin without some clients. Those that have joined since take part from now on.
        """
        if len(self.profiles) < self.experiment.schedule.clients:
            needed = min(self.experiment.min_clients, len(step.cohort))
            found = self.cohort.meet(step.cohort, needed)
            if not found.keys() <= self.profiles.keys():
                self.roster.add(found)
        return self.roster.ordered(step)

    def _context(self, step: Step, cohort: tuple[int, ...]) -> ServerContext:
        """Return the context of the server half at a step."""
        accumulates = self.experiment.accumulates
        return ServerContext(
            self.run_facts,
            step,
            cohort,
            server_data=self.server_data,
            labels={c: self.profiles[c].labels(step.task, accumulates) for c in cohort},
            limits=self.roster.limits,
            ends_task=ends_task(self.steps, step),
            tell=partial(self._tell_work, step),
        )

    def _tell_work(self, step: Step, what: str, done: int, of: int, loss: float) -> None:
        """Report the progress of long work of the server half."""
        place = {"interaction": step.interaction, "round": step.round}
        self.events.tell("server", **place, work=what, step=done, of=of, loss=loss)

    def _begin_at_common_commit(self) -> None:
        """Go to the last commit whose server and client states all still exist.

        Raises:
            RunFailed: that commit lies further back than the run may go.
        """
        target = go_to_common_commit(
            self.store, self.cohort, self.events, self._lost, stateful=self.stateful
        )
        self._lost = None
        self.cohort.commit(target, -1)
        self._begin_after(target)
        if self.stateful:
            self.cohort.require(self._holds_state, self.last_trained, self.store.watermark)

    def _begin_after(self, interaction: int) -> None:
        """Load what the run needs to go on after an interaction; -1: to begin."""
        self.state = self._state_after(interaction)
        self._remember(interaction)

    def _state_after(self, interaction: int) -> ServerState:
        """Return the committed state after an interaction; the initial one for -1."""
        if interaction < 0:
            return init_server(self.method, self.run_facts)
        return self.store.state(interaction)

    def _remember(self, interaction: int) -> None:
        """Read who trained when, up to an interaction."""
        self.history = self.store.history()
        trained = self.history.last_trained(interaction)
        self.last_trained = {c: n for c, n in trained.items() if self._takes_part(c, interaction)}

    def _takes_part(self, client: ClientId, interaction: int) -> bool:
        """Tell whether a client takes part in what follows a commit, and was not set aside."""
        return takes_part(client, interaction + 1, self.aside)

    def _holds_state(self, client: int, versions: Sequence[int]) -> bool:
        """Tell whether a client holds its required private state; called from any thread."""
        if self.last_trained.get(client, -1) in (-1, *versions):
            return True
        self.history.check(client, versions)
        return False

    # --- the loop ---------------------------------------------------------------------------------

    def _run_interactions(self, committer: ThreadPoolExecutor, syncer: Syncer) -> dict[str, Any]:
        pending = self.store.pending()
        if pending is not None:
            record, counts = pending
            self._score(self.steps[record["interaction"]], record, Scores.from_json(counts))
        for step in self.steps[self.store.committed + 1 :]:
            self._interact(step, committer, syncer)
        self._settle()
        return self._finish()

    def _interact(self, step: Step, committer: ThreadPoolExecutor, syncer: Syncer) -> None:
        """Do one interaction: train, aggregate, commit, score."""
        ctx = self._context(step, self._present(step))
        begun = time.monotonic()
        due = is_scored(self.steps, step, self.experiment.evaluate.every)
        tried = self._try_training(step, ctx) if due else Answers({}, {})
        results = self._train(ctx, due)
        self._check_failures(ctx, results)
        trained = time.monotonic()
        self.state, metrics, series = self._reduce(ctx, results)
        record = record_of(step, results, metrics, series, self.method.count)
        record["seconds"]["server"] = time.monotonic() - trained
        self._settle()
        record["seconds"]["wall"] = time.monotonic() - begun
        add_wire(record, tried)
        scores = Scores()
        scores.add({**tried.by_client, **results.by_client})
        needs_trip = due and bool(self._views(step))
        if due and not needs_trip:
            self._fill_in(step, record, scores)
        counts = scores.to_json() if needs_trip else None
        self._committing = committer.submit(self._commit, step, record, self.state, counts, syncer)
        self.last_trained |= trained_in(record)
        if needs_trip:
            self._settle()
            self._score(step, record, scores)

    def _check_failures(self, ctx: ServerContext, results: Answers) -> None:
        """Check that a few clients do not go on from what an odd upload made most others fail with.

        Raises:
            TooFewClients: most clients failed, and the commit before was odd.
        """
        failed = {c: why for c, why in results.failed.items() if c not in results.aside}
        if len(failed) > len(results.by_client):
            self._settle()
            if odd_commit(self.store) is not None:
                client, why = next(iter(failed.items()))
                raise TooFewClients(str(ClientFailed(client, ctx.round, "upload", why)))

    def _reduce(
        self, ctx: ServerContext, results: Answers
    ) -> tuple[ServerState, Metrics, Mapping[str, Any]]:
        """Reduce the uploads to the next state; mark clients that spoil it as failed."""
        sent = {c: r.upload for c, r in results.by_client.items() if isinstance(c, int)}
        uploads = received(self.method, sent, results.mean)
        needed = self._needed(ctx.cohort, self.experiment.cohort_size)
        found = reduced(self.method, ctx, self.state, uploads, needed)
        self._set_aside(ctx, results, found.left_out)
        moved = drift(*(s.common.prototypes.get("class") for s in (self.state, found.state)))
        more = {} if moved is None else {"prototype_drift": moved}
        return found.state, {**found.metrics, **more}, found.series

    def _set_aside(self, ctx: ServerContext, results: Answers, why: Mapping[int, str]) -> None:
        """Let uploads not count, and say whose and why."""
        for client, reason in why.items():
            results.set_aside(client, reason)
            facts = {"interaction": ctx.interaction, "round": ctx.round, "reason": reason}
            self.events.tell("failed", client, **facts)

    def _needed(self, clients: Sequence[ClientId], wanted: int | None = None) -> int:
        """Return how many of these clients a trip needs: all or as many as are wanted, or fewer."""
        most = min(wanted or len(clients), len(clients))
        return min(self.experiment.server.min_clients or most, most)

    def _commit(
        self, step: Step, record: Record, state: ServerState, counts: str | None, syncer: Syncer
    ) -> None:
        """Commit an interaction, and report it."""
        self.store.commit(record, state, counts)
        self._advance_watermark(record, syncer)
        self.events.tell("commit", **commit_facts(record), of=len(self.steps))
        for kind, line in left_out_of(record).items():
            if kind not in self._told:  # it is the same in most rounds
                self._told.add(kind)
                self.events.tell("note", line=line)

    def _settle(self) -> None:
        """Wait until the last interaction is committed; raise the error of its commit."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None

    def _train(self, ctx: ServerContext, due: bool) -> Answers:
        """Let the cohort train; leave out uploads that lie far out of it."""
        trip = self._trip(ctx, self.state, due)
        results = self.cohort.exchange(trip)
        odd = far_out(results.measured())
        left = tuple(client for client in results.by_client if client not in odd)
        check_left(odd, left, self.experiment.server.min_clients, ctx.round)
        self._set_aside(ctx, results, odd)
        if not odd or results.mean is None:
            return results
        orders = {client: trip.orders[client] for client in left}
        without = replace(trip, orders=orders, needed=self._needed(left), enough=None)
        return self.cohort.exchange(without).after(results)  # clients bring what they sent again

    def _trip(self, ctx: ServerContext, state: ServerState, due: bool) -> Trip:
        """Return the orders of a cohort to train from a state."""
        common, personal = broadcast(self.method, ctx, state)
        views = ["after_local"] if due and self._scores_trained else []
        orders = self._orders(ctx, rpc.ORDER_KIND_TRAIN, ctx.cohort, views, ctx.task + 1)
        count = self.method.count if self.method.reduction == "mean" else None
        wanted = self.experiment.cohort_size
        return self.trip(
            orders, common, personal, self.upload_spec, self._needed(ctx.cohort, wanted), count,
            check_upload=partial(self._check_upload, ctx, state), enough=wanted,
        )  # fmt: skip

    def _check_upload(
        self, ctx: ServerContext, state: ServerState, client: ClientId, upload: Bundle
    ) -> None:
        """Check the values of an upload that was trained from a state; called from any thread."""
        assert isinstance(client, int), "the evaluator trains nothing"
        announced = self.terms.announced(client, self.steps[ctx.interaction])
        with faults_told(self.method, PayloadError):
            self.method.check_upload(ctx, state, upload, announced)

    def _orders(
        self,
        ctx: ServerContext,
        kind: rpc.OrderKind,
        clients: Iterable[ClientId],
        views: Sequence[str],
        tasks_seen: int,
    ) -> dict[ClientId, rpc.Order]:
        is_last = ctx.interaction == len(self.steps) - 1
        confusion = is_last and self.run_facts.problem.num_classes <= MOST_CONFUSED
        return {client: rpc.Order(
            kind=kind, client_id=str(client), interaction=ctx.interaction, round=ctx.round,
            task=ctx.task, views=views, tasks_seen=tasks_seen,
            global_test=self.experiment.evaluate.generalization,
            confusion=confusion and bool(views) and client != EVALUATOR,
            base=self.last_trained.get(client, -1) if isinstance(client, int) else -1,
        ) for client in clients}  # fmt: skip

    def _advance_watermark(self, record: Record, syncer: Syncer) -> None:
        committed = record["interaction"]
        syncer.want(committed)
        clients = self.cohort.durable()
        watermark = min(syncer.durable, committed if clients is None else clients)
        floor = self.store.advance(watermark)
        self.history = self.history.after(committed, trained_in(record), floor)
        self.cohort.commit(committed, self.store.oldest_begun(floor))

    # --- scoring ----------------------------------------------------------------------------------

    def _try_training(self, step: Step, ctx: ServerContext) -> Answers:
        """Let clients beside the cohort train for the score, before it: a commit has all scores."""
        others = tryers(self.experiment, self.profiles, self.tasks, step, ctx.cohort)
        others = tuple(c for c in others if takes_part(c, step.interaction, self.aside))
        if not others or not self._scores_trained:
            return Answers({}, {})
        theirs, views = self._context(step, others), ["after_local"]
        common, personal = broadcast(self.method, theirs, self.state)
        orders = self._orders(theirs, rpc.ORDER_KIND_EVALUATE, others, views, step.task + 1)
        return self.cohort.exchange(self._evaluation(orders, common, personal))

    def _evaluation(
        self,
        orders: Mapping[ClientId, rpc.Order],
        common: Bundle,
        personal: Mapping[ClientId, Bundle],
    ) -> Trip:
        """Return a trip for scores, which ends although some of those asked are gone."""
        least = fewest_alive(self.experiment, orders)
        needed = fewest(self.experiment, orders)
        return self.trip(orders, common, personal, needed=needed, least=least)

    @property
    def _scores_trained(self) -> bool:
        """Whether models are scored right after local training."""
        return "after_local" in {*self.method.views} & {*self.experiment.evaluate.views}

    def _views(self, step: Step) -> list[str]:
        """Return the views that need an evaluation trip after a step of a scored round."""
        wanted: list[str] = [v for v in self.experiment.evaluate.views if v in self.method.views]
        trip = [v for v in wanted if v != "after_local"]
        of_task = ("after_downlink", self.method.local_view)
        return trip if step.ends_round else [v for v in trip if v in of_task]

    def _score(self, step: Step, record: Record, scores: Scores) -> None:
        """Score the committed models and complete the record."""
        ctx = self._context(step, self.roster.cohort_of(step))
        common, personal = evaluation(self.method, ctx, self.state)
        clients: list[ClientId] = [*self._scorers(step, record)]
        if step.ends_round and self.cohort.has_evaluator():
            clients.append(EVALUATOR)
        views, seen = self._views(step), tasks_seen(self.experiment, self.tasks, step)
        orders = self._orders(ctx, rpc.ORDER_KIND_EVALUATE, clients, views, seen)
        results = Answers({}, {})
        if orders:  # nobody scores where no upload counts
            results = self.cohort.exchange(self._evaluation(orders, common, personal))
        scores.add(results.by_client)
        add_wire(record, results)
        self._fill_in(step, record, scores)
        self.store.add_scores(record)

    def _scorers(self, step: Step, record: Record) -> Iterable[int]:
        """Return the clients that score the models after a step."""
        cohort = record["cohort"]
        found = scorers(self.experiment, self.profiles, cohort) if step.ends_round else cohort
        return [client for client in found if self._takes_part(client, step.interaction)]

    def _fill_in(self, step: Step, record: Record, scores: Scores) -> None:
        """Put scores into a record."""
        for other in scores.settle_global_test():
            reason = "its global test set is not what most others scored on: its scores are dropped"
            self.events.tell("failed", other, interaction=step.interaction, reason=reason)
        seen, view = tasks_seen(self.experiment, self.tasks, step), self.method.local_view
        put_scores(record, scores, view, self.groups, self.profiles, seen, ends=step.ends_round)
        self.events.tell(
            "scores", interaction=step.interaction, round=step.round, metrics=record["metrics"]
        )

    # --- the end ----------------------------------------------------------------------------------

    def _macs(self) -> int:
        return multiply_adds(self.run_facts.make_net(), self.run_facts.problem.input_shape)

    def _finish(self) -> dict[str, Any]:
        """Let every client store its final model and report its digest; return the summary."""
        everyone: list[ClientId] = [c for c in self.profiles if c not in self.aside]
        ctx = self._context(self.steps[-1], tuple(self.profiles))
        common, personal = evaluation(self.method, ctx, self.state)  # what is scored is stored
        if self.cohort.has_evaluator():
            everyone.append(EVALUATOR)
        orders = self._orders(ctx, rpc.ORDER_KIND_FINISH, everyone, (), 0)
        ends = self.trip(orders, common, personal, needed=fewest(self.experiment, everyone))
        results = self.cohort.exchange(ends)
        digests = [r.report.state_sha256 for c, r in results.by_client.items() if c != EVALUATOR]
        digest = state_digest(self.state.named(), digests)
        records = [record for record, _ in self.store.records()]
        names = [profile.dataset for profile in self.profiles.values()]
        summary = summarise(
            records, self.experiment, self.method.local_view, digest, self._macs, names
        )
        for figure, why in summary.get("figures_missing", {}).items():
            self.events.tell("note", line=f"the summary goes without {figure}: {why}")
        asked = {*everyone, *range(self.experiment.schedule.clients)} - self.aside.keys()
        missing = asked - results.by_client.keys()
        summary |= left_out(missing, self.history.started_over, self.aside)
        self.events.tell("finished", metrics=summary["metrics"], state_sha256=digest)
        return summary
