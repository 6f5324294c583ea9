"""The round engine: the loop of a run, over any :class:`Cohort`.

Every interaction is: broadcast, train, aggregate, finish, commit, score. Whatever is not committed
is computed again after a crash, to the same bits. So clients need not wait for the commit: it is
written while they train for the next interaction, whose own commit waits for it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from fedmodels.config import Experiment
from fedmodels.method import Metrics, Run, ServerContext, ServerData, ServerState
from fedmodels.methods import make
from fedmodels.metrics import frequency_groups, minority_classes
from fedmodels.nets.cost import multiply_adds
from fedmodels.prototypes import drift
from fedmodels.stack import check_stacks
from fedmodels.types import EVALUATOR, BundleSpec, ClientId, state_digest
from fedpb import coordinator_pb2 as rpc
from fedpb.heap import give_back_free_pages
from fedsrv.cohort import Cohort, Results, StateLost, Trip
from fedsrv.events import EventLog
from fedsrv.profile import Profile, common_limits
from fedsrv.schedule import Step, steps
from fedsrv.scores import Scores, accuracy_over, client_rows, own_test, round_metrics
from fedsrv.server_data import check_fits, check_given
from fedsrv.store import Record, Store, Syncer
from fedsrv.summary import summarise

STAGE, ROUND = 1, 2
"""Numbers of the evaluation trips of one interaction."""


class Engine:
    """Takes a run from where it is committed to its end."""

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
        self.last_trained: dict[int, int] = {}
        """Interaction of each client's last upload that counts: the private state it must hold."""
        self._committing: Future[None] | None = None

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
                        self._take_up()
                        self.run_facts.forget_initial_weights()  # few methods need them again
                        give_back_free_pages()
                        return self._go_on(committer, syncer)
                    except StateLost as lost:
                        self.events.tell("rollback", lost.client, reason=str(lost))
                        self._settle()
        finally:
            syncer.close()

    # --- beginnings -------------------------------------------------------------------------------

    def _meet_clients(self) -> None:
        """Wait for the clients, then derive from their descriptions what the run consists of."""
        known = {**self.store.profiles(), **self.cohort.gather()}
        for client, text in known.items():
            self.store.add_profile(client, text)
        self.profiles = {c: Profile.parse(c, text) for c, text in sorted(known.items())}
        self.run_facts = Run(self.experiment, next(iter(self.profiles.values())).problem)
        if self.experiment.training.together > 1:
            check_stacks(self.run_facts)
        self.tasks = {c: p.num_tasks for c, p in self.profiles.items()}
        self.steps = steps(self.experiment, self.method.trainers(self.run_facts), self.tasks)
        examples = sum(p.train.sum(axis=0) for p in self.profiles.values())
        self.groups = {"minority": minority_classes(examples), **frequency_groups(examples)}
        self.stateful = self.method.keeps_state(self.run_facts)
        self.upload_spec = self.method.upload_spec(self.run_facts)
        if self.server_data is not None:
            check_fits(self.server_data, self.run_facts.problem)

    def _context(self, step: Step, cohort: tuple[int, ...]) -> ServerContext:
        """Return where the server half is at a step."""
        return ServerContext(
            self.run_facts,
            step.interaction,
            step.round,
            step.task,
            cohort,
            server_data=self.server_data,
            minority=tuple(self.groups["minority"]),
            labels={c: self.profiles[c].labels(step.task) for c in cohort},
            limits=common_limits(self.profiles.values()),
            ends_task=self._ends_task(step),
            tell=partial(self._tell_work, step),
        )

    def _ends_task(self, step: Step) -> bool:
        """Tell whether the interaction after a step is on another task."""
        following = self.steps[step.interaction + 1 : step.interaction + 2]
        return any(other.task != step.task for other in following)

    def _tell_work(self, step: Step, what: str, done: int, of: int, loss: float) -> None:
        """Tell how far the server half is with long work of its own."""
        place = {"interaction": step.interaction, "round": step.round}
        self.events.tell("server", **place, work=what, step=done, of=of, loss=loss)

    def _take_up(self) -> None:
        """Go back to the last commit whose server and client states all still exist."""
        target = self.store.committed
        versions = self.cohort.versions()
        while not self._can_take_up(target, versions):
            target -= 1  # at -1 everything is derived from the seed: the run begins anew
        if target < self.store.committed:
            self.store.roll_back(target)
        self.state = self.store.state(target) if target >= 0 else self._initial_state()
        self.last_trained = self._trained_up_to(target)
        self.cohort.commit(target, -1)
        if self.stateful:
            self.cohort.require(self._holds_state, self.last_trained)

    def _initial_state(self) -> ServerState:
        return self.method.init_server(self.run_facts)

    def _can_take_up(self, target: int, versions: Mapping[int, Sequence[int]]) -> bool:
        if not self.store.has_state(target):
            return False
        trained = self._trained_up_to(target).items() if self.stateful else ()
        return all(k in versions[c] for c, k in trained if c in versions)

    def _trained_up_to(self, interaction: int) -> dict[int, int]:
        """Return each client's last committed upload up to an interaction."""
        found: dict[int, int] = {}
        for record, _ in self.store.records():
            if record["interaction"] <= interaction:
                found |= dict.fromkeys(record["cohort"], record["interaction"])
        return found

    def _holds_state(self, client: int, versions: Sequence[int]) -> bool:
        return client not in self.last_trained or self.last_trained[client] in versions

    # --- the loop ---------------------------------------------------------------------------------

    def _go_on(self, committer: ThreadPoolExecutor, syncer: Syncer) -> dict[str, Any]:
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
        begun = time.monotonic()
        ctx = self._context(step, step.cohort)
        due = self._is_due(step)
        results = self._train(ctx, due)
        ctx = replace(ctx, mean=results.mean)
        trained = time.monotonic()
        uploads = {c: r.upload for c, r in results.by_client.items() if isinstance(c, int)}
        state = self.method.aggregate(ctx, self.state, uploads)
        before = self.state.common.prototypes.get("class")
        self.state, metrics = self.method.finish(ctx, state, uploads)
        moved = drift(before, self.state.common.prototypes.get("class"))
        if moved is not None:
            metrics = {**metrics, "prototype_drift": moved}
        record = self._record(step, results, metrics)
        if ctx.series:
            record["series"] = ctx.series
        record["seconds"]["server"] = time.monotonic() - trained
        self._settle()
        record["seconds"]["wall"] = time.monotonic() - begun
        scores = Scores()
        scores.add(results.by_client)
        needs_trip = due and bool(self._views(step))
        if due and not needs_trip:
            self._fill_in(step, record, scores)
        counts = scores.to_json() if needs_trip else None
        self._committing = committer.submit(self._commit, step, record, self.state, counts, syncer)
        self.last_trained |= dict.fromkeys(record["cohort"], step.interaction)
        if needs_trip:
            self._settle()
            self._score(step, record, scores)

    def _commit(
        self, step: Step, record: Record, state: ServerState, counts: str | None, syncer: Syncer
    ) -> None:
        """Make an interaction count, and tell so."""
        self.store.commit(record, state, counts)
        self._advance_watermark(step.interaction, syncer)
        self.events.tell(
            "commit", interaction=step.interaction, round=step.round, task=step.task,
            loss=record["metrics"].get("loss"), of=len(self.steps),
            failed=record.get("failed", {}),
        )  # fmt: skip

    def _settle(self) -> None:
        """Wait until the last interaction is committed; raise what went wrong with that."""
        if self._committing is not None:
            self._committing.result()
            self._committing = None

    def _train(self, ctx: ServerContext, due: bool) -> Results:
        common, personal = self.method.broadcast(ctx, self.state)
        views = [
            v
            for v in self.method.views
            if due and v == "after_local" and v in self.experiment.evaluate.views
        ]
        orders = self._orders(ctx, rpc.ORDER_TRAIN, ctx.cohort, views, ctx.task + 1)
        needed = min(self.experiment.min_clients, len(ctx.cohort))
        trip = Trip(orders, common, personal, self.upload_spec, needed, self.method.share_of)
        return self.cohort.exchange(trip)

    def _orders(
        self,
        ctx: ServerContext,
        kind: rpc.OrderKind,
        clients: Iterable[ClientId],
        views: Sequence[str],
        tasks_seen: int,
        trip: int = 0,
    ) -> dict[ClientId, rpc.Order]:
        return {
            client: rpc.Order(
                kind=kind,
                client_id=str(client),
                interaction=ctx.interaction,
                round=ctx.round,
                task=ctx.task,
                views=views,
                tasks_seen=tasks_seen,
                trip=trip,
                global_test=self.experiment.evaluate.generalization,
                base=self.last_trained.get(client, -1) if isinstance(client, int) else -1,
            )
            for client in clients
        }

    def _record(self, step: Step, results: Results, metrics: Metrics) -> Record:
        """Return the record of an interaction, without its scores."""
        clients = {c: r for c, r in results.by_client.items() if isinstance(c, int)}
        reports = {c: r.report for c, r in clients.items()}
        trained = [r for r in reports.values() if r.num_examples and math.isfinite(r.loss)]
        examples = sum(r.num_examples for r in trained)
        loss = sum(r.loss * r.num_examples for r in trained)
        per_client = {
            str(c): {
                "down": r.logical_down,
                "up": r.logical_up,
                **({"eval_up": extra} if (extra := r.upload.num_evaluation_bytes()) else {}),
            }
            for c, r in clients.items()
        }
        return {
            "round": step.round,
            "interaction": step.interaction,
            "task": step.task,
            "cohort": sorted(clients),
            "metrics": _finite({"loss": loss / examples if examples else math.nan, **metrics}),
            "bytes": {
                "down": sum(b["down"] for b in per_client.values()),
                "up": sum(b["up"] for b in per_client.values()),
                "wire_down": results.wire_down,
                "wire_up": results.wire_up,
                "per_client": per_client,
            },
            "seconds": {"train": max((r.seconds for r in reports.values()), default=0.0)},
            "clients": {
                str(c): _finite(
                    {
                        "loss": r.loss,
                        "seconds": r.seconds,
                        "num_examples": r.num_examples,
                        "peak_rss_bytes": r.peak_rss_bytes,
                        **dict(r.extra),
                    }
                )
                for c, r in reports.items()
            },
            **(
                {"failed": {str(c): why for c, why in results.failed.items()}}
                if results.failed
                else {}
            ),
        }

    def _advance_watermark(self, committed: int, syncer: Syncer) -> None:
        syncer.want(committed)
        clients = self.cohort.durable()
        watermark = min(syncer.durable, committed if clients is None else clients)
        self.cohort.commit(committed, watermark)
        self.store.prune(watermark)

    # --- scoring ----------------------------------------------------------------------------------

    def _is_due(self, step: Step) -> bool:
        """Tell whether the round of a step is scored."""
        every = self.experiment.evaluate.every
        last_round = step.round == self.steps[-1].round
        return last_round or (every > 0 and (step.round + 1) % every == 0)

    def _views(self, step: Step) -> list[str]:
        """Return the views that need an evaluation trip after a step of a scored round."""
        wanted: list[str] = [v for v in self.experiment.evaluate.views if v in self.method.views]
        trip = [v for v in wanted if v != "after_local"]
        return trip if step.ends_round else [v for v in trip if v == "after_downlink"]

    def _score(self, step: Step, record: Record, scores: Scores) -> None:
        """Score the committed models and complete the record."""
        ctx = self._context(step, step.cohort)
        common, personal = self.method.evaluation(ctx, self.state)
        clients: list[ClientId] = list(self.profiles) if step.ends_round else list(record["cohort"])
        if step.ends_round and self.cohort.has_evaluator():
            clients.append(EVALUATOR)
        trip = ROUND if step.ends_round else STAGE
        seen = self._tasks_seen(step)
        orders = self._orders(ctx, rpc.ORDER_EVALUATE, clients, self._views(step), seen, trip)
        needed = min(self.experiment.min_clients, len(clients))
        results = self.cohort.exchange(Trip(orders, common, personal, BundleSpec(), needed))
        scores.add(results.by_client)
        record["bytes"]["wire_down"] += results.wire_down
        record["bytes"]["wire_up"] += results.wire_up
        self._fill_in(step, record, scores)
        self.store.add_scores(record)

    def _fill_in(self, step: Step, record: Record, scores: Scores) -> None:
        """Put scores into a record."""
        view = self.method.local_view
        own = scores.of(view)
        a_sel = accuracy_over(own_test(own[c]) for c in record["cohort"] if c in own)
        if a_sel is not None:
            record["metrics"]["a_sel"] = a_sel
        if step.ends_round:
            seen = self._tasks_seen(step)
            found = round_metrics(scores, view, self.groups, self.profiles, seen)
            record["metrics"] |= found
        for client, row in client_rows(scores).items():
            record["clients"].setdefault(client, {}).update(row)
        self.events.tell(
            "scores", interaction=step.interaction, round=step.round, metrics=record["metrics"]
        )

    def _tasks_seen(self, step: Step) -> int:
        """Return how many tasks clients are scored on: with ``rounds_outer``, all after a round."""
        all_seen = self.experiment.schedule.order == "rounds_outer" and step.ends_round
        return max(self.tasks.values()) if all_seen else step.task + 1

    # --- the end ----------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any]:
        """Let every client store its final model and report its digest; return the summary."""
        last = self.steps[-1]
        everyone: list[ClientId] = list(self.profiles)
        ctx = self._context(last, tuple(self.profiles))
        common, personal = self.method.broadcast(ctx, self.state)
        if self.cohort.has_evaluator():
            everyone.append(EVALUATOR)
        orders = self._orders(ctx, rpc.ORDER_FINISH, everyone, (), 0)
        needed = min(self.experiment.min_clients, len(everyone))
        results = self.cohort.exchange(Trip(orders, common, personal, BundleSpec(), needed))
        digests = [r.report.state_sha256 for c, r in results.by_client.items() if c != EVALUATOR]
        digest = state_digest(self.state.named(), digests)
        records = [record for record, _ in self.store.records()]
        macs = multiply_adds(self.run_facts.make_net(), self.run_facts.problem.input_shape)
        summary = summarise(records, self.experiment, self.method.local_view, digest, macs)
        missing = sorted(str(c) for c in everyone if c not in results.by_client)
        if missing:
            summary["clients_missing"] = missing
        self.events.tell("finished", metrics=summary["metrics"], state_sha256=digest)
        return summary


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers JSON can hold; a client that made no step has no loss."""
    return {key: value for key, value in numbers.items() if math.isfinite(value)}
