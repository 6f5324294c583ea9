"""The round engine: a run from its last commit to its end, over any :class:`Cohort`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed, RunFailed, TooFewClients
from fedmodels.facts.position import Interaction
from fedmodels.host.machine import give_back_free_pages
from fedmodels.methods import make
from fedmodels.tensors.packed_weights import forget_free_blocks
from fedsrv.engine.cohort import Cohort, StateLost
from fedsrv.engine.commits import Commits
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.round_parts import RoundParts
from fedsrv.engine.schedule import Step, end_before
from fedsrv.engine.scores import Scores
from fedsrv.engine.server_part import CurrentInteraction, ServerPart, Timetable, WholeCohort
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store


class Engine:
    """Runs an experiment from its last commit to its end."""

    def __init__(
        self,
        experiment: Experiment,
        cohort: Cohort,
        store: Store,
        events: EventLog,
        options: Sequence[ServerPart] = (),
    ) -> None:
        """Run nothing yet; ``options`` are the parts that the config asks for, in their order."""
        self.experiment, self.cohort, self.store, self.events = experiment, cohort, store, events
        self.options = options
        self.method = make(experiment.method.name, **experiment.method.hyper_parameters())

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary; RunFailed if too many clients failed."""
        times, lost = self._meet_clients(), None
        plan, interaction = times.first, None
        with Commits(self.store, self.cohort, self.events, self.options) as commits:
            if plan.is_stateful:  # one that lost too much must join again, and learns what to do
                commits.remember(plan, self.store.committed)
                self.cohort.gather()
            parts = RoundParts(plan, commits, self.options)
            while True:
                try:
                    if interaction is None:
                        interaction = commits.go_to_common(parts.plan, lost)
                    return self._go_on(times, parts, interaction)
                except ClientsLeave as leaving:
                    commits.settle()
                    self._set_aside(leaving.why)
                    parts.plan = parts.plan.with_aside(self.store)
                    interaction = self.store.committed
                    commits.remember(parts.plan, interaction)
                except StateLost as loss:
                    commits.settle()
                    lost, interaction = loss, None
                except (TooFewClients, ClientFailed) as failed:
                    commits.settle()
                    others = (one.explains(failed) for one in reversed(self.options))
                    raise next((e for e in others if e is not None), failed) from failed

    def _meet_clients(self) -> Timetable:
        """Wait for the clients; derive the plan from their descriptions."""
        descriptions = self.cohort.gather()
        made = (one.timetable(self.method, self.cohort, descriptions) for one in self.options)
        times = next((one for one in made if one is not None), None)
        if times is None:
            times = Timetable(Plan.of(self.method, self.store, descriptions))
        for one in self.options:
            one.gathered(times.first)
        return times

    def _go_on(
        self, times: Timetable, parts: RoundParts, interaction: Interaction
    ) -> dict[str, Any]:
        """Do everything that is left after a commit, and return the summary."""
        # --- begin: load what the run needs
        parts.plan = times.plan_at(parts.plan, interaction)
        give_back_free_pages()  # of the net that the plan looked at: initial weights come next
        rounds = Rounds(parts, interaction)
        parts.plan.run.forget_initial_weights()  # few methods need them again
        give_back_free_pages()

        # --- complete the last commit, if the run broke off before its scores
        if (pending := self.store.ledger.pending()) is not None:
            record, counts = pending
            step = parts.plan.steps[record["interaction"]]
            parts.score(step, record, Scores.from_json(counts), rounds.state)

        # --- every interaction that is left
        for step in times.steps_after(rounds, interaction):
            if why := self._why_not(parts, step) or self._done(parts, rounds, step):
                self.events.tell("note", line=why)
                parts.commits.settle()
                parts.score_unscored(rounds.state)
                break
        parts.commits.settle()
        rounds.exchange.ended()

        # --- the end
        rounds.state = parts.mapped(rounds.state)
        forget_free_blocks()  # a net is built whose multiply-adds are counted
        give_back_free_pages()
        return parts.finish(rounds.state)

    def _why_not(self, parts: RoundParts, step: Step) -> str:
        """Return the line that the run ends with before a step; empty if it goes on."""
        settle = parts.commits.settle
        return next(filter(None, (p.may_go_on(step, parts.plan, settle) for p in self.options)), "")

    def _done(self, parts: RoundParts, rounds: Rounds, step: Step) -> str:
        """Do an interaction; return the line that the run ends with before it, if it does.

        Raises:
            TooFewClients, ClientFailed: too few clients are left.
            ClientsLeave: somebody is to be set aside first.
        """
        if parts.plan.aside:
            self.cohort.set_out(self.store.gone(step.interaction))
        why: dict[int, str] = {}
        for one in self.options:
            why |= one.sets_aside(step, parts.plan.aside, parts.commits.settle)
        if why:
            raise ClientsLeave(why)
        try:
            rounds.interact(step)
        except (RunFailed, ClientFailed) as failed:
            lines = (one.ends_with(failed) for one in self.options)
            if step.interaction and (line := next(filter(None, lines), "")):
                return f"{end_before(parts.plan.steps, step)}: {line}"
            raise
        return ""

    def _set_aside(self, why: Mapping[int, str]) -> None:
        """Write clients into the ledger, and say so; no commit is under way."""
        self.store.set_aside(why)
        for client, reason in why.items():
            place = f"interaction {self.store.committed + 2}"
            line = f"client {client} takes no part from {place} on: {reason}"
            self.events.tell("note", line=line)


class ClientsLeave(Exception):
    """Some clients take no part from the next interaction on; the line of each says why."""

    def __init__(self, why: Mapping[int, str]) -> None:
        super().__init__(f"clients {sorted(why)} leave")
        self.why = why


class Rounds:
    """The interactions of a run from a commit on, and the state that they lead to."""

    def __init__(self, parts: RoundParts, interaction: Interaction) -> None:
        """Go on after the last commit, -1 before the first."""
        self.parts, self.state = parts, parts.state_after(interaction)
        made = (one.exchange(parts, interaction) for one in parts.options)
        self.exchange = next((one for one in made if one is not None), WholeCohort(parts))

    def interact(self, step: Step) -> None:
        """Do one interaction."""
        parts, exchange = self.parts, self.exchange
        # --- who takes part
        ctx = parts.context(step, parts.present(step))
        at = CurrentInteraction(step, parts.plan, ctx, time.monotonic(), parts.count)

        # --- train: first those whom only the score needs, then the cohort
        if exchange.tries_first:
            at.tried = parts.try_training(step, ctx.cohort, self.state)
        at.results = exchange.train(at, self.state)
        for one in parts.options:
            one.came(at, parts.commits.settle)
        at.answered = time.monotonic()

        # --- aggregate and finish
        if exchange.maps_state:
            self.state = parts.mapped(self.state)
        found, aligned = Reduced(self.state, {}, {}), exchange.aligned(at, self.state)
        if aligned is not None:  # else no upload counts, and the state stays
            at.ctx = aligned
            found = parts.reduce(at, self.state)
        self.state = found.state  # the one before leaves memory

        # --- commit while clients go on, or score first
        parts.commit(at, found, exchange)
