"""The commits of a run: the record of each interaction, and when it is written and undone.

After a crash the engine computes an interaction without a commit again, to the same bits. So
clients need not wait for the commit. The store's thread writes it while clients train for the next
interaction, and the next commit waits for this one.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Self

from fedmodels.facts.position import NONE_YET, Interaction
from fedmodels.host.guarded import Guarded
from fedmodels.numerics.metric_names import DEFINITIONS
from fedmodels.training.asked import local_view
from fedmodels.training.contexts import ServerState
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer, Answers, Cohort, StateLost
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step, takes_part
from fedsrv.engine.scores import (
    Scores,
    accuracy_over,
    client_rows,
    figure_metrics,
    own_test,
    round_metrics,
)
from fedsrv.engine.server_part import ServerPart
from fedsrv.progress.events import EventLog
from fedsrv.state.history import History
from fedsrv.state.record import Record, Traffic, scored_in, trained_in
from fedsrv.state.store import Store

SHARE = "aggregation_weight"


def record_of(step: Step, results: Answers, found: Reduced) -> Record:
    """Return the record of an interaction, without its scores and what parts add."""
    clients = {c: r for c, r in results.by_client.items() if isinstance(c, int)}
    reports = {c: r.report for c, r in clients.items()}
    record: Record = {
        "round": step.round,
        "interaction": step.interaction,
        "task": step.task,
        "definitions": DEFINITIONS,
        "cohort": sorted(clients),
        "metrics": _finite({"loss": _mean_loss(reports), **found.metrics}),
        "bytes": _traffic_of(results, clients),
        "seconds": {
            "train": max(
                (r.seconds for r in reports.values() if "seconds" not in r.withheld), default=0.0
            )
        },
        "clients": {str(c): _told_in(r) for c, r in reports.items()},
    }
    for number, share in found.shares.items():
        if (known := record["clients"].get(str(number))) is not None and math.isfinite(share):
            known[SHARE] = share
    if kept := {str(c): sorted(r.withheld) for c, r in reports.items() if r.withheld}:
        record["withheld"] = kept
    if results.failed:
        record["failed"] = {str(c): why for c, why in results.failed.items()}
    if found.series:
        record["series"] = found.series
    return record


def _mean_loss(reports: Mapping[int, rpc.Report]) -> float:
    """Return the mean loss over the examples that were trained on; NaN where there were none."""
    trained = [
        (r.num_examples - r.skipped_examples, r.loss)
        for r in reports.values()
        if r.num_examples > r.skipped_examples
        and math.isfinite(r.loss)
        and "loss" not in r.withheld
    ]
    examples = sum(n for n, _ in trained)
    return sum(n * mean for n, mean in trained) / examples if examples else math.nan


def _told_in(report: rpc.Report) -> dict[str, float]:
    """Return what a client's row holds of its report."""
    skipped = report.skipped_examples
    told = {
        "loss": report.loss,
        "seconds": report.seconds,
        "num_examples": report.num_examples,
        **({"skipped_examples": skipped} if skipped else {}),
        "peak_rss_bytes": report.peak_rss_bytes,
        **dict(sorted(report.extra.items())),
    }
    return _finite({key: value for key, value in told.items() if key not in report.withheld})


def put_scores(record: Record, scores: Scores, plan: Plan, step: Step) -> None:
    """Put the scores of a step into its record."""
    own, seen = scores.of(local_view(plan.method)), plan.tasks_seen(step)
    a_sel = accuracy_over(own_test(own[c]) for c in record["cohort"] if c in own)
    of_targets = plan.run.targets is not None
    if a_sel is not None and not of_targets:
        record["metrics"]["a_sel"] = a_sel
    if step.ends_round:
        view = local_view(plan.method)
        record["metrics"] |= (
            figure_metrics(scores, view)
            if of_targets
            else round_metrics(scores, view, plan.groups, plan.profiles, seen, plan.scores_classes)
        )
    for client, row in client_rows(
        scores,
        seen,
        plan.groups.get("minority", ()),
        plan.scores_classes,
        of_targets=of_targets,
    ).items():
        record["clients"].setdefault(client, {}).update(row)
    if step.tasks:
        for number, task in step.tasks.items():
            record["clients"].get(str(number), {})["task"] = task
    views = {*plan.views(step)}
    named = {c for c in scored_in(record) if views <= record["clients"][c]["views"].keys()}
    hides = plan.run.experiment.announced == "none"  # who has test data
    wanted = (c for c in plan.scorers(step, record["cohort"]) if str(c) not in named)
    if gone := [c for c in wanted if named and (hides or plan.profiles[c].test.any())]:
        record["unscored"] = gone
    if scores.confusions:
        record["confusions"] = scores.confusions


def add_wire(record: Record, answers: Answers) -> None:
    """Add the bytes of a trip of scores to a record."""
    record["bytes"]["wire_down"] += answers.wire_down
    record["bytes"]["wire_up"] += answers.wire_up


def _traffic_of(results: Answers, clients: Mapping[int, Answer]) -> Traffic:
    """Return what tensors held, in all and by client, and what crossed the wire."""
    per_client = {
        str(c): {
            "down": r.logical_down,
            "up": r.logical_up,
            **({"eval_up": extra} if (extra := r.upload.num_evaluation_bytes()) else {}),
        }
        for c, r in clients.items()
    }
    return {
        "down": sum(b["down"] for b in per_client.values()),
        "up": sum(b["up"] for b in per_client.values()),
        "wire_down": results.wire_down,
        "wire_up": results.wire_up,
        "per_client": per_client,
    }


def commit_facts(record: Record) -> dict[str, Any]:
    """Return what listeners are told of a committed record."""
    return {
        "interaction": record["interaction"],
        "round": record["round"],
        "task": record["task"],
        "loss": record["metrics"].get("loss"),
        "bytes": {way: record["bytes"][way] for way in ("down", "up")},
        "seconds": record["seconds"]["wall"],
        "failed": record.get("failed", {}),
    }


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the finite numbers, which JSON can hold; the loss of no step at all is NaN."""
    return {key: value for key, value in numbers.items() if math.isfinite(value)}


log = logging.getLogger(__name__)


class Syncer:
    """Syncs committed states in the background and knows the newest one that is safe.

    All of its values are under the lock of one condition. States that a roll-back undid are written
    anew, in the next *generation*: a sync that began before counts no more, whatever it says.
    """

    _wanted: Guarded[Interaction] = Guarded("_changed")
    _durable: Guarded[Interaction] = Guarded("_changed")
    _generation: Guarded[int] = Guarded("_changed")
    _closed: Guarded[bool] = Guarded("_changed")
    _failed: Guarded[int] = Guarded("_changed")
    """The last interaction whose sync failed; only a later one is tried again."""

    def __init__(self, sync: Callable[[Interaction], None]) -> None:
        self._sync = sync
        self._wanted = self._durable = NONE_YET
        self._changed = threading.Condition()
        self._generation, self._closed, self._failed = 0, False, -1
        self._thread = threading.Thread(target=self._work, name="syncer", daemon=True)
        self._thread.start()

    @property
    def durable(self) -> Interaction:
        """Return the newest interaction that is safe."""
        with self._changed:
            return self._durable

    def want(self, interaction: Interaction) -> None:
        """Ask for a sync of everything up to an interaction; it follows a roll-back to an earlier.

        States after it are to be written anew, and so is the one of the interaction itself unless
        it was safe before.
        """
        with self._changed:
            if interaction <= self._wanted:
                self._generation += 1
                self._failed = -1
            self._wanted = interaction
            self._durable = min(self._durable, interaction)
            self._changed.notify()

    def _is_behind(self) -> bool:
        return self._wanted > self._durable and self._wanted != self._failed

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._is_behind())
                if self._closed:
                    return
                target, generation = self._wanted, self._generation
            failed = ""
            try:
                self._sync(target)
            except OSError as error:
                failed = str(error.strerror)
                log.error("interaction %d is not safe on the disk: %s", target + 1, failed)
            with self._changed:
                if generation != self._generation:
                    continue
                if failed:
                    self._failed = target
                else:
                    self._durable = target

    def close(self) -> None:
        """Stop after the sync under way."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()


class Commits:
    """Writes commits one after the other, and knows who trained when."""

    def __init__(
        self, store: Store, cohort: Cohort, events: EventLog, options: Sequence[ServerPart] = ()
    ) -> None:
        self.store, self.cohort, self.events, self.options = store, cohort, events, options
        self.history = History()
        self.last_trained: dict[int, Interaction] = {}
        """Interaction of each client's last upload that counts; names the private state to hold."""
        self._requires = False
        """Whether clients have to hold states."""
        self._syncer = Syncer(store.sync)
        self._under_way: Future[None] | None = None
        """The commit that the store's owner writes."""

    def __enter__(self) -> Self:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for what is being written."""
        if self._under_way is not None:
            wait([self._under_way])
        self._syncer.close()

    # --- to go on from a commit -------------------------------------------------------------------

    def remember(self, plan: Plan, interaction: Interaction) -> None:
        """Read who trained when, up to an interaction, and ask clients for the states behind it."""
        self.history = self.store.history()
        trained = self.history.last_trained(interaction)
        following = Interaction(interaction + 1)
        self.last_trained = {
            c: n for c, n in trained.items() if takes_part(c, following, plan.aside)
        }
        if plan.is_stateful:
            self.cohort.require(self._holds_state, self.last_trained, self.store.watermark)
            self._requires = True
        elif self._requires:  # a change took away what clients kept
            self.cohort.require(lambda client, versions: True, {}, self.store.watermark)
            self._requires = False

    def go_to_common(self, plan: Plan, lost: StateLost | None) -> Interaction:
        """Go to the last commit whose server and client states all still exist, and return it.

        Args:
            plan: says whether clients keep private states, and who was set aside.
            lost: the state whose loss makes the run go back; None at its start.

        Raises:
            RunFailed: that commit lies further back than the run may go.
        """
        store = self.store
        for client in self.cohort.starting_over():
            store.start_over(client)
            self.events.tell("started-over", client)
        committed, versions = store.committed, self.cohort.versions()
        held = {c: v for c, v in versions.items() if plan.is_stateful and c not in plan.aside}
        target = store.history().target(store.newest, store.has_state, held)
        if target < committed:
            why = str(lost or "states of the server or of clients are gone")
            reason = f"{why}; interactions after {target + 1} are computed again"
            whose = lost.client if lost else ""
            self.events.tell("rollback", whose, interaction=target, reason=reason)
        store.go_to(target)
        self.cohort.commit(target, NONE_YET)
        self.remember(plan, target)
        self._syncer.want(target)  # later commits are not safe yet
        return target

    def _holds_state(self, client: int, versions: Sequence[int]) -> bool:
        """Tell whether a client holds its required private state; called from any thread."""
        if self.last_trained.get(client, -1) in (-1, *versions):
            return True
        self.history.check(client, versions)
        return False

    # --- to add one -------------------------------------------------------------------------------

    def add(self, record: Record, state: ServerState, counts: str | None, of: int) -> None:
        """Begin to write a commit; no other one is under way.

        With ``counts`` of clients its scores are still to come. The run has ``of`` interactions.
        """
        write = self.store.owner.queue
        self._under_way = write(self._write, record, state, counts, of)
        self.last_trained = self.last_trained | trained_in(record)  # others read it meanwhile

    def settle(self) -> None:
        """Wait until the last interaction is committed; raise the error of its commit."""
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _write(self, record: Record, state: ServerState, counts: str | None, of: int) -> None:
        """Commit an interaction, advance the watermark, and report it, on the owner's thread."""
        self.store.commit(record, state, counts)
        committed = record["interaction"]
        self._syncer.want(committed)
        clients = self.cohort.durable()
        watermark = min(self._syncer.durable, committed if clients is None else clients)
        floor = self.store.advance(watermark)
        self.history = self.history.after(committed, trained_in(record), floor)
        self.cohort.commit(committed, self.store.oldest_begun(floor))
        facts = commit_facts(record)
        for one in self.options:
            facts |= one.tells(record)
        self.events.tell("commit", **facts, of=of)
        for one in self.options:
            one.committed(record)
