"""The round engine: a run from its last commit to its end, over any :class:`Cohort`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed, TooFewClients
from fedmodels.methods import make
from fedmodels.tensors.allocator import give_back_free_pages
from fedmodels.tensors.memory_blocks import forget_free_blocks
from fedmodels.training.class_growth import StateGrowth
from fedmodels.training.contexts import ServerContext, ServerData
from fedsrv.engine.buffered_rounds import BufferedRounds
from fedsrv.engine.choice import Stopping
from fedsrv.engine.client_profile import untrained
from fedsrv.engine.cohort import AllOf, Answers, Cohort, StateLost
from fedsrv.engine.commits import Commits, back_before_the_odd
from fedsrv.engine.example_privacy import why_declined
from fedsrv.engine.exclusions import ClientsExcluded, Exclusions
from fedsrv.engine.odd_uploads import check_left
from fedsrv.engine.plan import Plan, describe
from fedsrv.engine.private_rounds import PrivacySpent
from fedsrv.engine.relayed_sums import far_out_beside_relays
from fedsrv.engine.round_parts import RoundParts
from fedsrv.engine.schedule import Step
from fedsrv.engine.scores import Scores
from fedsrv.engine.secure_rounds import SecureRounds
from fedsrv.engine.server_data import check_fits, check_given
from fedsrv.engine.stages import AtRest, Stages
from fedsrv.events import EventLog
from fedsrv.state.store import Store


class Engine:
    """Runs an experiment from its last commit to its end."""

    stages: Stages | None = None
    """What an open run learns; None where all is known from the beginning."""

    def __init__(
        self,
        experiment: Experiment,
        cohort: Cohort,
        store: Store,
        events: EventLog,
        server_data: ServerData | None = None,
        at_rest: AtRest = "wait",
    ) -> None:
        """Run nothing yet; ``at_rest`` says what an open run does that has nothing to learn."""
        self.experiment, self.cohort, self.store, self.events = experiment, cohort, store, events
        self.at_rest, self.exclusions = at_rest, Exclusions(store, events)
        check_given(experiment, server_data is not None)
        self.server_data = server_data
        self.method = make(experiment.method.name, **experiment.method.hyper_parameters())

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            RunFailed: too many clients failed.
            RunPaused: an open run has nothing to learn, and does not wait.
        """
        plan, lost = self._meet_clients(), None
        interaction: int | None = None
        with Commits(self.store, self.cohort, self.events) as commits:
            if plan.is_stateful:  # one that lost too much must join again, and learns what to do
                commits.remember(plan, self.store.committed)
                self.cohort.gather()
            parts = RoundParts(plan, commits, self.server_data)
            while True:
                try:
                    if interaction is None:
                        interaction = commits.go_to_common(parts.plan, lost)
                    return self._go_on(parts, interaction)
                except ClientsExcluded as excluded:
                    commits.settle()
                    self.exclusions.store_them(excluded)
                    parts.plan = parts.plan.with_aside(self.store)
                    interaction = self.store.committed
                    commits.remember(parts.plan, interaction)
                except StateLost as loss:
                    commits.settle()
                    lost, interaction = loss, None
                except (TooFewClients, ClientFailed) as failed:
                    commits.settle()
                    raise back_before_the_odd(self.store, self.events, failed) from failed

    def _meet_clients(self) -> Plan:
        """Wait for the clients; derive the plan from their descriptions."""
        descriptions = self.cohort.gather()
        if self.experiment.schedule.open:
            self.stages = Stages(
                self.method, self.store, self.cohort, self.events, descriptions, self.at_rest
            )
            plan = self.stages.plan_at(self.store.committed)
            describe(self.store, plan.profiles)
        else:
            plan = Plan.of(self.method, self.store, descriptions)
        if not self.experiment.method.pools_data and (line := untrained(plan.profiles)):
            self.events.tell("note", line=line)
        if self.experiment.server.is_robust and (singly := self.method.reads_singly):
            line = (
                f"{self.experiment.server.named} does not reach all of {self.method.name}: {singly}"
            )
            self.events.tell("note", line=line)
        check_fits(self.server_data, plan.run.problem)
        return plan

    def _go_on(self, parts: RoundParts, interaction: int) -> dict[str, Any]:
        """Do everything that is left after a commit, and return the summary."""
        # --- begin: load what the run needs
        if self.stages is not None:
            parts.plan = self.stages.plan_at(interaction)
        kind = BufferedRounds if self.experiment.schedule.is_asynchronous else Rounds
        give_back_free_pages()  # of the net that the plan looked at: initial weights come next
        rounds = kind(parts, interaction)
        parts.plan.run.forget_initial_weights()  # few methods need them again
        give_back_free_pages()

        # --- complete the last commit, if the run broke off before its scores
        if (pending := self.store.ledger.pending()) is not None:
            record, counts = pending
            step = parts.plan.steps[record["interaction"]]
            parts.score(step, record, Scores.from_json(counts), rounds.state)

        # --- every interaction that is left
        stopping = Stopping.of(self.experiment)
        for step in self._steps_after(rounds, interaction):
            if stopping.may and self._has_enough(stopping, parts.commits, step.interaction):
                self.events.tell("note", line=f"{step.round} rounds are enough: {stopping.why()}")
                break
            if why := parts.spent_up(step) or self._done(parts, rounds, step):
                self.events.tell("note", line=f"the run ends after round {step.round}: {why}")
                parts.commits.settle()
                parts.score_unscored(rounds.state)
                break
        parts.commits.settle()
        if isinstance(rounds, Rounds) and rounds.secure is not None:
            rounds.secure.forget()

        # --- the end
        rounds.state = parts.mapped(rounds.state)
        forget_free_blocks()  # a net is built whose multiply-adds are counted
        give_back_free_pages()
        return parts.finish(rounds.state)

    def _steps_after(self, rounds: Rounds | BufferedRounds, interaction: int) -> Iterator[Step]:
        """Yield the steps after an interaction; an open run grows in between."""
        if self.stages is None:
            yield from rounds.parts.plan.steps[interaction + 1 :]
            return
        assert isinstance(rounds, Rounds), "open runs have no asynchronous rounds"
        while True:
            interaction += 1
            plan = rounds.parts.plan
            if interaction >= len(plan.steps):
                rounds.parts.commits.settle()  # what comes may come much later
            following = self.stages.following(plan, interaction, rounds.score_ahead)
            if following is None:
                return
            if following is not plan:
                rounds.grow(following)
            yield following.steps[interaction]

    def _done(self, parts: RoundParts, rounds: Rounds | BufferedRounds, step: Step) -> str:
        """Do an interaction; return why privacy ended the run before it, if it did.

        Raises:
            TooFewClients, ClientFailed: too few clients are left, and not for having declined.
            PrivacySpent: nothing was committed that the run could end with.
            ClientsExcluded: somebody is to be set aside first.
        """
        self._check_exclusions(parts, step.interaction)
        try:
            rounds.interact(step)
        except (TooFewClients, ClientFailed) as failed:
            if step.interaction and (why := why_declined(failed)):
                return why
            raise
        except PrivacySpent as spent:
            if step.interaction:
                return str(spent)
            raise
        return ""

    def _check_exclusions(self, parts: RoundParts, interaction: int) -> None:
        """Check that nobody is to be set aside first; let those know that are.

        Raises:
            ClientsExcluded: somebody is.
        """
        if parts.plan.aside:
            self.cohort.set_out(self.store.gone(interaction))
        if self.experiment.server.exclude_after is not None:
            parts.commits.settle()
        self.exclusions.check(interaction, parts.plan.aside)

    def _has_enough(self, stopping: Stopping, commits: Commits, interaction: int) -> bool:
        """Tell whether the run ends before an interaction; all committed ones before it count."""
        commits.settle()
        for number in range(stopping.seen, interaction):
            record = self.store.ledger.record(number)
            assert record is not None, "it was committed"
            stopping.see(record["metrics"])
        return bool(stopping.why())


class Rounds:
    """Rounds that wait for their cohorts."""

    def __init__(self, parts: RoundParts, interaction: int) -> None:
        """Go on after the last commit, -1 before the first."""
        self.parts, self.state = parts, parts.state_after(interaction)
        self.secure = SecureRounds(parts) if parts.experiment.secure_sum else None

    def grow(self, plan: Plan) -> None:
        """Go on with another plan of an open run: new classes get rows, and who left may go."""
        before, self.parts.plan = self.parts.plan, plan
        self.state = StateGrowth(self.parts.method, before.run, plan.run).server(self.state)
        new = plan.growths[len(before.growths) :]
        if gone := {c for growth in new if growth.forgets for c in growth.retired}:
            self.state = self.parts.method.forgotten(self.state, gone)
        if any(growth.retired for growth in new):  # nobody waits for their states any more
            self.parts.commits.settle()
            self.parts.commits.remember(plan, self.parts.store.committed)

    def score_ahead(self, plan: Plan, clients: Sequence[int]) -> float | None:
        """Return the accuracy of present models on the tasks that a plan would begin with."""
        kept = self.parts.plan
        state = StateGrowth(self.parts.method, kept.run, plan.run).server(self.state)
        self.parts.plan = plan
        try:
            return self.parts.accuracy_on(plan.steps[-1], clients, state)
        finally:
            self.parts.plan = kept

    def interact(self, step: Step) -> None:
        """Do one interaction."""
        parts = self.parts
        # --- who takes part
        ctx = parts.context(step, parts.present(step))
        began = time.monotonic()

        # --- train: first those whom only the score needs, then the cohort
        tried = parts.try_training(step, ctx.cohort, self.state)
        results = self.train(ctx)
        parts.check_failures(ctx, results)
        done = time.monotonic()

        # --- aggregate and finish
        self.state = parts.mapped(self.state)
        found = parts.reduce(ctx, self.state, results)
        self.state = found.state  # the one before leaves memory

        # --- commit while clients go on, or score first
        parts.commit(step, results, tried, found, began, done)

    def train(self, ctx: ServerContext) -> Answers:
        """Let the cohort train; leave out uploads that lie far out of it."""
        parts = self.parts
        if not ctx.cohort:  # sampling = "poisson" drew nobody
            parts.payload(ctx, self.state)
            return Answers({}, {})
        is_scored = parts.plan.is_scored(parts.plan.steps[ctx.interaction])
        if self.secure is not None:  # masks hide how far an upload lies from others
            return self.secure.train(ctx, self.state, is_scored)
        trip = parts.training(ctx, self.state, is_scored)
        results = parts.cohort.send_and_receive(trip)
        if parts.privacy is not None:  # who counts, and records, would tell of single uploads
            results.forget_measured()
            return results
        odd = far_out_beside_relays(results)
        left = tuple(client for client in results.by_client if client not in odd)
        check_left(odd, left, parts.experiment.server.min_clients, ctx.round)
        parts.leave_out(ctx, results, odd)
        if not odd or results.mean is None:
            return results
        orders = {client: trip.orders[client] for client in left}
        without = replace(trip, orders=orders, until=AllOf(parts.plan.needed(left)))
        return parts.cohort.send_and_receive(without).after(
            results
        )  # clients bring what they sent again
