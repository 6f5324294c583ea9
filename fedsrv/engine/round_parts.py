"""What a round is made of, whoever waits for whom: orders, reduction, commit and scores.

The parts of a run are asked at their seams here and in :mod:`fedsrv.engine.rounds`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fedmodels.config.combinations import part_at
from fedmodels.config.experiment import Experiment
from fedmodels.errors import PayloadError
from fedmodels.facts.position import Interaction
from fedmodels.numerics.randomness import derive_seed
from fedmodels.tensors.aggregation_rule import MEAN, Facts
from fedmodels.tensors.bundle import EVALUATOR, Bundle, ClientId, state_digest
from fedmodels.tensors.uploads import Uploads
from fedmodels.training.asked import local_view
from fedmodels.training.contexts import ServerContext, ServerState
from fedmodels.training.fault import name_faults
from fedmodels.training.hooks import broadcast, evaluation, init_client, init_server
from fedmodels.training.method import Payload
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import AllOf, Answers, Trip, fewest_alive
from fedsrv.engine.commits import Commits, add_wire, put_scores, record_of
from fedsrv.engine.forecast import forecast
from fedsrv.engine.plan import Plan
from fedsrv.engine.provenance import put_provenance
from fedsrv.engine.reduction import Reduced, reduced
from fedsrv.engine.schedule import Step
from fedsrv.engine.scores import Scores, accuracy_over
from fedsrv.engine.server_part import CheckUpload, CurrentInteraction, Exchange, ServerPart
from fedsrv.engine.summary import summarise
from fedsrv.state.record import (
    MeansOver,
    Record,
    change_text,
    means_of,
    named_aside,
    scored_in,
)

LARGE_STATE = 64 << 20
"""Size from which a committed state leaves memory for the pages of its file."""
MAX_CONFUSED = 100
"""Most classes of a problem for which the last scores include confusion matrices."""


class RoundParts:
    """The parts of the rounds of one run, and its plan."""

    def __init__(self, plan: Plan, commits: Commits, options: Sequence[ServerPart] = ()) -> None:
        self.plan, self.commits = plan, commits
        self.cohort, self.store, self.events = commits.cohort, commits.store, commits.events
        self.method = plan.method
        self.options = options
        """The parts that the config asks for, in their order."""
        self.rule = next((one.rule for one in options if one.rule is not None), MEAN)
        """How uploads become one result."""
        alike = self.rule.reads_each or any(one.counts_alike for one in options)
        self.count: Callable[[Bundle], float] = _alike if alike else self.method.count
        """What an upload counts in the mean."""
        each = self.rule.reads_each or any(one.needs_each for one in options)
        self._folds = self.method.reduction == "mean" and not each
        """Whether uploads may be added up as they come."""
        self._foretold = False
        self._over: MeansOver | None = None
        """Who is in the means of scored rounds; None until a round is scored."""

    @property
    def experiment(self) -> Experiment:
        """Return the config that holds now."""
        return self.store.experiment

    # --- who and where ----------------------------------------------------------------------------

    def present(self, step: Step) -> tuple[int, ...]:
        """Return the clients of a step's cohort that can get orders.

        A run may begin without some clients. Those that have joined since take part from now on.
        With ``over_select``, a replay asks the clients whose uploads counted the first time.
        """
        self.plan = self.plan.met(self.store, self.cohort, step)
        chosen = self.experiment.schedule.over_select > 0
        undone = self.store.ledger.record(step.interaction) if chosen else None
        found = self.plan.cohort_of(step) if undone is None else tuple(undone["cohort"])
        settle = self.commits.settle
        out = {c for one in self.options for c in one.abstains(step, self.plan, settle)}
        return tuple(c for c in found if c not in out) if out else found

    def context(self, step: Step, cohort: tuple[int, ...]) -> ServerContext:
        """Return the context of the server half at a step."""
        plan, accumulates = self.plan, self.experiment.accumulates
        ctx = ServerContext(
            plan.run,
            step,
            cohort,
            labels={}
            if self.experiment.announced == "none"
            else {c: plan.profiles[c].labels(step.task_of(c), accumulates) for c in cohort},
            tasks={c: step.tasks[c] for c in cohort if c in step.tasks},
            limits=plan.limits,
            ends_task=plan.ends_task(step),
            tell=partial(self.tell_work, step),
        )
        for one in self.options:
            ctx = one.context(ctx)
        return ctx

    def tell_work(self, step: Step, what: str, done: int, of: int, loss: float) -> None:
        """Report the progress of long work of the server half."""
        place = {"interaction": step.interaction, "round": step.round}
        self.events.tell("server", **place, work=what, step=done, of=of, loss=loss)

    def state_after(self, interaction: Interaction) -> ServerState:
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
        common, personal = self.payload(ctx, state)
        views = ["after_local"] if is_scored and plan.scores_trained else []
        orders = self.orders(ctx, rpc.ORDER_KIND_TRAIN, ctx.cohort, views)
        check: CheckUpload = partial(self._check_upload, plan, ctx, state)
        for one in self.options:
            check = one.checks(ctx, check)
        trip = plan.trip(
            orders, common, personal, AllOf(plan.needed_uploads(ctx.cohort, wanted), wanted),
            spec=plan.upload_spec, count=self.count if self._folds else None, check_upload=check,
            measures=True,
        )  # fmt: skip
        if orders and not ctx.interaction and not self._foretold:
            self._foretold = True
            self.events.tell("forecast", **forecast(plan, trip, state, wanted))
        return trip

    def payload(self, ctx: ServerContext, state: ServerState) -> Payload:
        """Return what a cohort gets to train from: the common part, and each client's own."""
        common, personal = broadcast(self.method, ctx, state)
        for one in self.options:
            one.gives(ctx, common)
        return common, personal

    def _wanted(self, ctx: ServerContext) -> int:
        """Return how many uploads end an interaction."""
        schedule = self.experiment.schedule
        return len(ctx.cohort) if schedule.sampling == "poisson" else self.experiment.cohort_size

    def _check_upload(
        self, plan: Plan, ctx: ServerContext, state: ServerState, client: ClientId, upload: Bundle
    ) -> None:
        """Check the values of an upload that was trained from a state; called from any thread."""
        assert isinstance(client, int), "the evaluator trains nothing"
        announced = plan.terms.announced(client, plan.steps[ctx.interaction])
        with name_faults(self.method, PayloadError):
            self.method.check_upload(ctx, state, upload, announced)

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
        confusion = confusion and ctx.run.targets is None
        last_trained = self.commits.last_trained
        return {client: rpc.Order(
            kind=kind, client_id=str(client), interaction=ctx.interaction, round=ctx.round,
            task=step.task_of(client), views=views, tasks_seen=tasks,
            first_task=max(0, tasks - (most or tasks)), new_classes=self.plan.new_classes,
            task_began=self.plan.task_began(client, step), set_aside=self.plan.unscored(client),
            global_test=self.experiment.evaluate.generalization,
            confusion=confusion and bool(views) and client != EVALUATOR,
            base=last_trained.get(client, -1) if isinstance(client, int) else -1,
            settings=self.plan.settings, class_changes=self.plan.class_changes,
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
        results = self.cohort.send_and_receive(trip)
        for one in self.options:
            one.answered(results)
        return results

    # --- uploads ----------------------------------------------------------------------------------

    def leave_out(self, ctx: ServerContext, results: Answers, why: Mapping[int, str]) -> None:
        """Let uploads not count, and say whose and why."""
        for client, reason in why.items():
            results.set_aside(client, reason)
            facts = {"interaction": ctx.interaction, "round": ctx.round, "reason": reason}
            self.events.tell("failed", client, **facts)

    def judged(self, at: CurrentInteraction, results: Answers) -> dict[int, str]:
        """Return whose uploads are to be left out, and why."""
        found: dict[int, str] = {}
        for one in self.options:
            found |= one.leaves_out(at, results)
        return found

    def reduce(self, at: CurrentInteraction, state: ServerState) -> Reduced:
        """Reduce the uploads to the next state; mark clients that spoil it as failed.

        Where there is no upload, and nothing stands in its place, the state stays as it is.
        """
        ctx, results = at.ctx, at.results
        sent = {c: r.upload for c, r in results.by_client.items() if isinstance(c, int)}
        seed = derive_seed(self.experiment.seed, "rule", ctx.interaction, "method")
        facts = Facts(seed, ctx.interaction, _given(state) if self.rule.reads_each else Bundle())
        uploads = Uploads(
            sent, self.method.count, self.method.reduction, results.mean, self.rule, facts,
            results.sums,
        )  # fmt: skip
        for one in self.options:
            uploads = one.uploads(at, uploads)
        if not uploads:
            return Reduced(state, {}, {})
        needed = self.plan.needed_uploads(ctx.cohort, self._wanted(ctx))
        found = reduced(self.method, ctx, state, uploads, needed)
        self.leave_out(ctx, results, found.left_out)
        if "class" in state.common.prototypes:
            drift = part_at("fedmodels.numerics.prototypes:drift")
            moved = drift(*(s.common.prototypes.get("class") for s in (state, found.state)))
            more = {} if moved is None else {"prototype_drift": moved}
            found = replace(found, metrics={**found.metrics, **more})
        return found

    # --- commit and scores ------------------------------------------------------------------------

    def commit(self, at: CurrentInteraction, found: Reduced, exchange: Exchange) -> None:
        """Commit an interaction while clients go on, or score it first where that is due."""
        record = record_of(at.step, at.results, found)
        exchange.records(at, found, record)
        put_provenance(record, at.results, found, self.plan)
        step = at.step  # an exchange may know by now that it is the last one of its stage
        for one in self.options:
            one.answered(at.results)
            one.records(at, found, record)
        record["seconds"]["server"] = time.monotonic() - at.answered
        self.commits.settle()
        record["seconds"]["wall"] = time.monotonic() - at.began
        add_wire(record, at.tried)
        scores, is_scored = Scores(), self.plan.is_scored(step)
        scores.add({**at.tried.by_client, **at.results.by_client})
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
        self._over = self._over or MeansOver(found for found, _ in self.store.ledger.records())
        self._over.take(record)
        facts = means_told(record, self._over)
        self.events.tell("scores", **place, round=step.round, **facts)

    # --- the end ----------------------------------------------------------------------------------

    def finish(self, state: ServerState) -> dict[str, Any]:
        """Let clients store their final models and report their digests; return the summary.

        Of a population, those that never trained have nothing to store.
        """
        plan = self.plan
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
        view = local_view(self.method)
        figures = {name: f for one in self.options for name, f in one.figures().items()}
        summary = summarise(records, self.experiment, view, digest, plan.count_macs, names, figures)
        for figure, why in summary.get("figures_missing", {}).items():
            self.events.tell("note", line=f"the summary goes without {figure}: {why}")
        missing = {*everyone, *plan.members} - plan.aside.keys() - results.by_client.keys()
        missing -= digests.keys()
        named: dict[str, list[Any]] = {
            "clients_missing": sorted(map(str, missing)),
            "clients_started_over": sorted(self.commits.history.started_over),
            **named_aside(plan.aside, self.store.forgotten()),
        }
        summary |= {key: clients for key, clients in named.items() if clients}
        summary["chooses_among"] = self.method.chooses_among
        for one in self.options:
            summary |= one.ended(records)
        self.events.tell("finished", metrics=summary["metrics"], state_sha256=digest)
        return summary

    def _untouched(self, client: int) -> str:
        """Return the digest of the private state of a client that never trained."""
        first = init_client(self.method, self.plan.run.of_client(client), client)
        return state_digest([("client", first)])


def means_told(record: Record, over: MeansOver) -> dict[str, Any]:
    """Return what events say of the means of a record: what they are, and over whom."""
    return {
        "metrics": record["metrics"],
        "scored": len(scored_in(record)),
        "unscored": [*map(str, record.get("unscored", ()))],
        "means": means_of(record),
        "changed": change_text(*over.changes[-1]) if over.changes else "",
    }


def _alike(upload: Bundle) -> float:
    """Return what an upload counts where a rule gives no weight to numbers that clients claim."""
    return 1.0


def _given(state: ServerState) -> Bundle:
    """Return what uploads are compared with: the state that they were trained from."""
    common = state.common
    if not state.own.weights:
        return Bundle(common.weights, common.prototypes)
    return Bundle({**state.own.weights, **common.weights}, common.prototypes)
