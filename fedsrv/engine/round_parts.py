"""What a round is made of, whoever waits for whom: orders, reduction, commit and scores."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedmodels.errors import ClientFailed, PayloadError, TooFewClients
from fedmodels.numerics.prototypes import drift
from fedmodels.numerics.randomness import derive_seed
from fedmodels.reductions.rule import rule_of
from fedmodels.tensors.aggregation_rule import Facts
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, Weights, state_digest
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.training.contexts import ServerContext, ServerData, ServerState
from fedmodels.training.fault import name_faults
from fedmodels.training.hooks import as_uploads, broadcast, evaluation, init_client, init_server
from fedmodels.training.method import Payload
from fedmodels.training.private_uploads import count_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import AllOf, Answers, Trip, fewest_alive
from fedsrv.engine.commits import Commits, add_wire, odd_commit, put_scores, record_of
from fedsrv.engine.example_privacy import ExamplePrivacy
from fedsrv.engine.plan import Plan
from fedsrv.engine.private_rounds import PrivateRounds
from fedsrv.engine.reduction import Reduced, reduced
from fedsrv.engine.schedule import Step
from fedsrv.engine.scores import Scores, accuracy_over
from fedsrv.engine.summary import summarise
from fedsrv.state.record import Record

log = logging.getLogger(__name__)
REFUSED = "the method refuses its upload; the coordinator's log says why"
"""What is told of an upload that noise hides: the reason may tell of its values."""
LARGE_STATE = 64 << 20
"""Size from which a committed state leaves memory for the pages of its file."""
MAX_CONFUSED = 100
"""Most classes of a problem for which the last scores include confusion matrices."""


class RoundParts:
    """The parts of the rounds of one run, and its plan."""

    def __init__(self, plan: Plan, commits: Commits, server_data: ServerData | None) -> None:
        self.plan, self.commits, self.server_data = plan, commits, server_data
        self.cohort, self.store, self.events = commits.cohort, commits.store, commits.events
        self.experiment, self.method = commits.store.experiment, plan.method
        self.privacy = PrivateRounds(plan, self.store) if self.store.releases is not None else None
        """Gives the method sums of uploads with noise, where the config hides clients."""
        table = self.experiment.privacy
        hides = table is not None and table.hides_examples
        self.hidden = ExamplePrivacy(plan, self.store) if hides else None
        """Ends a run whose clients hide their examples, before they spend too much."""
        self._given: Weights = {}
        """The weights that the present cohort was given, where noise is added to their mean."""
        self.rule = rule_of(self.experiment.server)
        """How uploads become one result."""

    # --- who and where ----------------------------------------------------------------------------

    def present(self, step: Step) -> tuple[int, ...]:
        """Return the clients of a step's cohort that can get orders.

        A run may begin without some clients. Those that have joined since take part from now on.
        With ``over_select``, a replay asks the clients whose uploads counted the first time.
        """
        is_open, clients = self.experiment.schedule.open, self.experiment.schedule.clients
        if step.cohort and not is_open and len(self.plan.profiles) < clients:
            needed = min(self.experiment.min_clients, len(step.cohort))
            self.plan = self.plan.with_clients(self.store, self.cohort.meet(step.cohort, needed))
        chosen = self.experiment.schedule.over_select > 0
        undone = self.store.ledger.record(step.interaction) if chosen else None
        return self.plan.cohort_of(step) if undone is None else tuple(undone["cohort"])

    def context(self, step: Step, cohort: tuple[int, ...]) -> ServerContext:
        """Return the context of the server half at a step."""
        plan, accumulates = self.plan, self.experiment.accumulates
        return ServerContext(
            plan.run,
            step,
            cohort,
            server_data=self.server_data,
            labels={}
            if self.experiment.announced == "none"
            else {c: plan.profiles[c].labels(step.task_of(c), accumulates) for c in cohort},
            tasks={c: step.tasks[c] for c in cohort if c in step.tasks},
            limits=plan.limits,
            ends_task=plan.ends_task(step),
            tell=partial(self.tell_work, step),
        )

    def tell_work(self, step: Step, what: str, done: int, of: int, loss: float) -> None:
        """Report the progress of long work of the server half."""
        place = {"interaction": step.interaction, "round": step.round}
        self.events.tell("server", **place, work=what, step=done, of=of, loss=loss)

    def state_after(self, interaction: int) -> ServerState:
        """Return the committed state after an interaction; the initial one for -1."""
        if interaction < 0:
            return init_server(self.method, self.plan.run)
        return self.store.state(interaction)

    def mapped(self, state: ServerState) -> ServerState:
        """Return the last committed state, or the initial one; a large one on its file's pages.

        The memory is for the state that follows.
        """
        if sum(b.num_bytes() for b in (state.common, state.own, state.optimizer)) < LARGE_STATE:
            return state
        self.commits.settle()
        return self.store.mapped(state)

    # --- orders -----------------------------------------------------------------------------------

    def training(self, ctx: ServerContext, state: ServerState, is_scored: bool) -> Trip:
        """Return the orders of a cohort to train from a state."""
        plan, wanted = self.plan, self._wanted(ctx)
        if self.privacy is not None:
            self.privacy.check_cohort(ctx)
        common, personal = self.payload(ctx, state)
        views = ["after_local"] if is_scored and plan.scores_trained else []
        orders = self.orders(ctx, rpc.ORDER_KIND_TRAIN, ctx.cohort, views)
        is_sum = self.method.reduction == "mean" and not self.rule.reads_each
        bounds_each = self.privacy is not None and self.privacy.privacy.noise_at_server
        count = self.count if is_sum and not bounds_each else None
        until = AllOf(plan.needed(ctx.cohort, wanted), wanted)
        return plan.trip(
            orders, common, personal, until, spec=plan.upload_spec, count=count,
            check_upload=partial(self._check_upload, plan, ctx, state), measures=True,
        )  # fmt: skip

    def payload(self, ctx: ServerContext, state: ServerState) -> Payload:
        """Return what a cohort gets to train from: the common part, and each client's own."""
        common, personal = broadcast(self.method, ctx, state)
        if self.privacy is not None:
            self._given = common.weights
        return common, personal

    def _wanted(self, ctx: ServerContext) -> int:
        """Return how many uploads end an interaction."""
        schedule = self.experiment.schedule
        return len(ctx.cohort) if schedule.sampling == "poisson" else self.experiment.cohort_size

    @property
    def count(self) -> Callable[[Bundle], float]:
        """What an upload counts in the mean: with noise on sums, all count alike."""
        return count_of(self.method, self.plan.run)

    def _check_upload(
        self, plan: Plan, ctx: ServerContext, state: ServerState, client: ClientId, upload: Bundle
    ) -> None:
        """Check the values of an upload that was trained from a state; called from any thread."""
        assert isinstance(client, int), "the evaluator trains nothing"
        if self.privacy is not None and self.privacy.privacy.noise_at_clients:
            return check_numbers(upload)  # noise takes values beyond all other bounds
        announced = plan.terms.announced(client, plan.steps[ctx.interaction])
        try:
            with name_faults(self.method, PayloadError):
                self.method.check_upload(ctx, state, upload, announced)
        except PayloadError as error:
            if self.privacy is None:
                raise
            log.warning("client %d, interaction %d: %s", client, ctx.interaction + 1, error)
            raise PayloadError(REFUSED) from None

    def orders(
        self,
        ctx: ServerContext,
        kind: rpc.OrderKind,
        clients: Iterable[ClientId],
        views: Sequence[str],
        tasks_seen: int | None = None,
    ) -> dict[ClientId, rpc.Order]:
        """Return orders; clients are scored on their tasks up to the one they train on."""
        step, most = self.plan.steps[ctx.interaction], self.experiment.evaluate.last_tasks
        is_last = ctx.interaction == len(self.plan.steps) - 1
        seen = {c: step.task_of(c) + 1 if tasks_seen is None else tasks_seen for c in clients}
        by_class = self.experiment.announced == "exact"
        confusion = by_class and is_last and ctx.run.problem.num_classes <= MAX_CONFUSED
        last_trained = self.commits.last_trained
        return {client: rpc.Order(
            kind=kind, client_id=str(client), interaction=ctx.interaction, round=ctx.round,
            task=step.task_of(client), views=views, tasks_seen=tasks,
            first_task=max(0, tasks - (most or tasks)), new_classes=self.plan.new_classes,
            global_test=self.experiment.evaluate.generalization,
            confusion=confusion and bool(views) and client != EVALUATOR,
            base=last_trained.get(client, -1) if isinstance(client, int) else -1,
        ) for client, tasks in seen.items()}  # fmt: skip

    def _asked(
        self,
        orders: Mapping[ClientId, rpc.Order],
        common: Bundle,
        personal: Mapping[ClientId, Bundle],
        *,
        ends_run: bool = False,
    ) -> Answers:
        """Ask clients for scores, or to finish; with ``min_clients`` given, some may be missing."""
        if not orders:  # nobody scores where no upload counts
            return Answers({}, {})
        least = None if ends_run else fewest_alive(self.experiment, orders)
        numbered = [client for client in orders if client != EVALUATOR]
        may_lack = self.experiment.server.min_clients is not None  # else all, and the evaluator
        needed = self.plan.needed(numbered) if may_lack else None
        trip = self.plan.trip(orders, common, personal, AllOf(needed, least=least))
        return self.cohort.send_and_receive(trip)

    # --- uploads ----------------------------------------------------------------------------------

    def leave_out(self, ctx: ServerContext, results: Answers, why: Mapping[int, str]) -> None:
        """Let uploads not count, and say whose and why."""
        for client, reason in why.items():
            results.set_aside(client, reason)
            facts = {"interaction": ctx.interaction, "round": ctx.round, "reason": reason}
            self.events.tell("failed", client, **facts)

    def check_failures(self, ctx: ServerContext, results: Answers) -> None:
        """Refuse to go on if most clients failed right after a commit with an odd upload.

        Raises:
            TooFewClients: most clients failed, and the commit before was odd.
        """
        failed = {c: why for c, why in results.failed.items() if c not in results.aside}
        if len(failed) > len(results.by_client):
            self.commits.settle()
            if odd_commit(self.store) is not None:
                client, why = next(iter(failed.items()))
                raise TooFewClients(str(ClientFailed(client, ctx.round, "upload", why)))

    def reduce(self, ctx: ServerContext, state: ServerState, results: Answers) -> Reduced:
        """Reduce the uploads to the next state; mark clients that spoil it as failed.

        Where there is no upload, and no noise stands in its place, the state stays as it is.
        """
        sent = {c: r.upload for c, r in results.by_client.items() if isinstance(c, int)}
        seed = derive_seed(self.experiment.seed, "rule", ctx.interaction, "method")
        facts = Facts(seed, ctx.interaction, _given(state) if self.rule.reads_each else Bundle())
        uploads = as_uploads(self.method, sent, results.mean, self.rule, facts, results.sums)
        if self.privacy is not None:
            expected = self.privacy.expected(self.plan.steps[ctx.interaction], self.plan)
            sums = results.sums
            folded = sums[0].mean.weights if sums else results.mean
            came = {} if sums == [] else sent
            uploads = self.privacy.uploads(ctx, expected, self._given, came, folded) or uploads
        if not uploads:
            return Reduced(state, {}, {})
        needed = self.plan.needed(ctx.cohort, self._wanted(ctx))
        found = reduced(self.method, ctx, state, uploads, needed)
        self.leave_out(ctx, results, found.left_out)
        moved = drift(*(s.common.prototypes.get("class") for s in (state, found.state)))
        more = {} if moved is None else {"prototype_drift": moved}
        return replace(found, metrics={**found.metrics, **more})

    # --- commit and scores ------------------------------------------------------------------------

    def commit(
        self, step: Step, results: Answers, also: Answers, found: Reduced, began: float, done: float
    ) -> None:
        """Commit an interaction while clients go on, or score it first where that is due.

        Clients were asked at ``began`` and had answered at ``done``, on the monotonic clock.
        ``also`` are answers of clients that trained for the score alone.
        """
        count = _alike if self.rule.reads_each else self.count
        record = record_of(step, results, found, count, self.experiment.server.attackers)
        if self.privacy is not None:
            record["privacy"] = {**self.privacy.facts}
            record["metrics"]["epsilon"] = self.privacy.facts["epsilon"]
        if self.hidden is not None:
            self.hidden.see(record, step)
        if new := [g.to_json() for g in self.plan.growths if g.interaction == step.interaction]:
            record["growths"] = new
        record["seconds"]["server"] = time.monotonic() - done
        self.commits.settle()
        record["seconds"]["wall"] = time.monotonic() - began
        add_wire(record, also)
        scores, is_scored = Scores(), self.plan.is_scored(step)
        scores.add({**also.by_client, **results.by_client})
        needs_trip = is_scored and bool(self.plan.views(step))
        if is_scored and not needs_trip:
            self._fill_in(step, record, scores)
        counts = scores.to_json() if needs_trip else None
        self.commits.add(record, found.state, counts, of=len(self.plan.steps))
        if needs_trip:
            self.commits.settle()
            self.score(step, record, scores, found.state)

    def try_training(self, step: Step, cohort: Sequence[int], state: ServerState) -> Answers:
        """Let clients beside a cohort train for the score, before it: a commit has all scores."""
        others = self.plan.tryers(step, cohort)
        if not others:
            return Answers({}, {})
        ctx = self.context(step, others)
        common, personal = broadcast(self.method, ctx, state)
        kind = rpc.ORDER_KIND_EVALUATE
        orders = self.orders(ctx, kind, others, ["after_local"])
        return self._asked(orders, common, personal)

    def score(self, step: Step, record: Record, scores: Scores, state: ServerState) -> None:
        """Score a committed state and complete its record."""
        plan = self.plan
        ctx = self.context(step, plan.cohort_of(step))
        common, personal = evaluation(self.method, ctx, state)
        clients: list[ClientId] = [*plan.scorers(step, record["cohort"])]
        if step.ends_round and self.cohort.has_evaluator():
            clients.append(EVALUATOR)
        views, kind = plan.views(step), rpc.ORDER_KIND_EVALUATE
        tasks_seen = None if step.tasks else plan.tasks_seen(step)
        orders = self.orders(ctx, kind, clients, views, tasks_seen)
        results = self._asked(orders, common, personal)
        scores.add(results.by_client)
        add_wire(record, results)
        self._fill_in(step, record, scores)
        self.store.add_scores(record)

    def spent_up(self, step: Step) -> str:
        """Return why the privacy of the run ends it before a step; empty if it may go on."""
        if self.hidden is not None:
            return self.hidden.spent_up(step, self.plan)
        return self.privacy.spent_up(step) if self.privacy is not None else ""

    def score_unscored(self, state: ServerState) -> None:
        """Score the last committed state of a run that ends early, unless it has its scores."""
        record = self.store.ledger.record(self.store.committed)
        if record is None or any("views" in row for row in record["clients"].values()):
            return
        step = self.plan.steps[self.store.committed]
        if self.plan.views(step):
            self.score(step, record, Scores(), state)

    def accuracy_on(self, step: Step, clients: Sequence[int], state: ServerState) -> float | None:
        """Return the mean accuracy of clients' received models on their tasks of a step.

        None where nobody has test data of that task.
        """
        ctx = self.context(step, tuple(clients))
        common, personal = evaluation(self.method, ctx, state)
        view = "after_downlink" if "after_downlink" in self.method.views else "global"
        orders = self.orders(ctx, rpc.ORDER_KIND_EVALUATE, clients, [view])
        scores = Scores()
        scores.add(self._asked(orders, common, personal).by_client)
        found = scores.of(view)
        return accuracy_over(found[c].get(f"task/{step.task_of(c)}") for c in found)

    def _fill_in(self, step: Step, record: Record, scores: Scores) -> None:
        """Put scores into a record."""
        place = {"interaction": step.interaction}
        for other in scores.settle_global_test():
            reason = "its global test set is not what most others scored on: its scores are dropped"
            self.events.tell("failed", other, **place, reason=reason)
        put_scores(record, scores, self.plan, step)
        self.events.tell("scores", **place, round=step.round, metrics=record["metrics"])

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, state: ServerState) -> dict[str, Any]:
        """Let clients store their final models and report their digests; return the summary.

        Of a population, those that never trained have nothing to store.
        """
        plan, clients = self.plan, self.experiment.schedule.clients
        members = [c for c in plan.profiles if c not in plan.aside]
        trained = set(self.commits.last_trained if self.experiment.schedule.selects else members)
        everyone: list[ClientId] = [c for c in members if c in trained]
        ctx = self.context(plan.steps[self.store.committed], tuple(plan.profiles))
        common, personal = evaluation(self.method, ctx, state)  # what is scored is stored
        if self.cohort.has_evaluator():
            everyone.append(EVALUATOR)
        orders = self.orders(ctx, rpc.ORDER_KIND_FINISH, everyone, (), 0)
        results = self._asked(orders, common, personal, ends_run=True)
        digests = {c: self._untouched(c) for c in set(members) - set(everyone)}
        for client, result in results.by_client.items():
            if client != EVALUATOR:
                digests[int(client)] = result.report.state_sha256
        digest = state_digest(state.named(), [digests[c] for c in sorted(digests)])
        records = [record for record, _ in self.store.ledger.records()]
        names = [profile.dataset for profile in plan.profiles.values()]
        view = self.method.local_view
        summary = summarise(records, self.experiment, view, digest, plan.count_macs, names)
        for figure, why in summary.get("figures_missing", {}).items():
            self.events.tell("note", line=f"the summary goes without {figure}: {why}")
        expected = plan.profiles if plan.growths else range(clients)
        missing = {*everyone, *expected} - plan.aside.keys() - results.by_client.keys()
        missing -= digests.keys()
        named: dict[str, list[Any]] = {
            "clients_missing": sorted(map(str, missing)),
            "clients_started_over": sorted(self.commits.history.started_over),
            "clients_set_aside": sorted(plan.aside),
        }
        summary |= {key: clients for key, clients in named.items() if clients}
        self.events.tell("finished", metrics=summary["metrics"], state_sha256=digest)
        return summary

    def _untouched(self, client: int) -> str:
        """Return the digest of the private state of a client that never trained."""
        return state_digest([("client", init_client(self.method, self.plan.run, client))])


def _alike(upload: Bundle) -> float:
    """Return what an upload counts where a rule gives no weight to numbers that clients claim."""
    return 1.0


def _given(state: ServerState) -> Bundle:
    """Return what uploads are compared with: the state that they were trained from."""
    common = state.common
    if not state.own.weights:
        return Bundle(common.weights, common.prototypes)
    return Bundle({**state.own.weights, **common.weights}, common.prototypes)
