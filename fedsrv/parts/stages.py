"""The stages of an open run: what they begin with, and the wait until there is something to learn.

:mod:`fedsrv.parts.open_plan` says what a stage is. Between two rounds the run looks at what clients
and its operator have said. Where enough clients have new data (``[trigger]``), it stores a growth
and goes on with the plan that follows from it. Where no round is due, it waits without work.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fedmodels.config.experiment import Experiment
from fedmodels.config.open_changes import changed, changes_between, settings_of, with_settings
from fedmodels.errors import (
    ConfigError,
    OrderDeclined,
    PayloadError,
    RunFailed,
    TooFewClients,
)
from fedmodels.facts.data_description import UNUSUAL
from fedmodels.facts.position import Interaction
from fedmodels.facts.run_classes import ClassChange
from fedmodels.parts.class_growth import StateGrowth
from fedmodels.parts.growth_by_method import forgotten
from fedmodels.times import LOOK_EVERY_S
from fedmodels.training.hooks import learns_at_task_end
from fedmodels.training.method import Method
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.admission import Admission
from fedsrv.engine.client_profile import Profile, clients_text
from fedsrv.engine.cohort import Cohort, News
from fedsrv.engine.plan import Plan, describe
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step, new_classes, takes_part
from fedsrv.engine.server_part import (
    NOTHING,
    CurrentInteraction,
    Exchange,
    Kernel,
    Running,
    ServerPart,
    Timetable,
)
from fedsrv.parts.open_admission import OpenAdmission, first_classes
from fedsrv.parts.open_buffer import OpenBuffer
from fedsrv.parts.open_plan import (
    Growth,
    OpenPlan,
    classes_of,
    movers,
    opened,
    rounds_ahead,
    rounds_of,
)
from fedsrv.parts.open_wishes import checked, told_of
from fedsrv.progress.events import EventLog
from fedsrv.state.decisions import CLASSES, CLOSE, EXCLUDE, FAILED, RETIRE, SET_ASIDE
from fedsrv.state.record import Record, of_parts
from fedsrv.state.store import Store

Ahead = Callable[[Plan, Sequence[int]], float | None]
"""Returns the accuracy of clients' present models on the tasks that a plan begins for them."""
AtRest = Literal["wait", "close", "pause"]
"""What a run does that has nothing to learn: wait for news, end, or stop where it is."""

FEWEST_TRIES = 3
"""Uploads of a task that may come to nothing, if a task has no more rounds than this."""
BY_HAND = "an operator set it aside"
BY_SITE = "its site set it aside"
MARKS = {
    "unusual": f"is {UNUSUAL}",
    "drifted": "was announced after the inputs of its deployed model had drifted",
}
"""What a client may say of a task, as its description calls it, and how a line says it."""


class RunPaused(Exception):
    """An open run has nothing to learn, and its caller goes on with it later."""


class OpenRuns(ServerPart):
    """Lets a run learn what comes while it goes on (``[schedule] open``)."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Take what the run does that has nothing to learn: by default it waits."""
        super().__init__(store, events, given)
        self._at_rest: AtRest = given.get("at_rest", "wait")
        self._deciding = threading.RLock()
        """Held from the check of a decision until it is stored."""
        self._stages: Stages | None = None
        """None until clients have joined."""
        self._before: tuple[Sequence[Growth], Mapping[int, Profile]] = (), {}
        """How a run that goes on had grown, and what its clients had announced."""

    @classmethod
    def takes_up(cls, store: Store, before: Experiment) -> Mapping[str, str]:
        """Read how the run began, or let it begin as it is started now.

        Raises:
            ConfigError: a change cannot be.
        """
        now, ledger = store.experiment, store.ledger
        if ledger.growths():
            settings = ledger.fact("began", dict) or settings_of(before)
        else:
            settings = settings_of(now)
        store.began = with_settings(now, settings)
        most = max(ledger.profiles(), default=-1)
        if now.schedule.clients <= most:
            raise ConfigError(
                f"[schedule] clients = {now.schedule.clients}, and client {most} is in the run: "
                f"{most + 1} at least"
            )
        if ledger.fact("end", dict) and (new := changes_between(before, now)):
            raise ConfigError(
                f"{store.path} has ended: {', '.join(new)} cannot change any more; begin a new run "
                f"from its models ([net] begin_from = {str(store.path)!r})"
            )
        for key, (old, wished) in changes_between(before, now).items():
            store.tell("wished", key=key, before=old, now=wished)
        return {"began": json.dumps(settings, sort_keys=True)}

    def offers(self) -> Mapping[str, Callable[..., Any]]:
        """Let an operator steer the run: each decision is on the disk before it is answered."""
        return {
            "set_aside": self._ask, "classes": self._ask_classes, "retire": self._ask_to_retire,
            "close": lambda now: self.store.decide(CLOSE, {"now": now}),
        }  # fmt: skip

    def _ask_to_retire(self, clients: Sequence[int], forgets: bool = False) -> None:
        """Let clients leave before the next round.

        Raises:
            PayloadError: nobody would be left, or none has joined.
        """
        with self._deciding:
            growths, _ = self._known()
            gone = {*clients, *retiring(self.store), *self.store.aside()}
            if {client for growth in growths for client in growth.tasks} <= gone:
                raise PayloadError("no client would be left: fedsrv close ends the run")
            told = [{"client": client, "forgets": forgets} for client in clients]
            self.store.decide(RETIRE, *told)

    def _ask(self, tasks: Sequence[tuple[int, int]]) -> None:
        """Set tasks aside before the next round, also after a crash from now on.

        Raises:
            PayloadError: a client has not told of a task, or none has joined.
        """
        _, profiles = self._known()
        for client, task in tasks:
            known = profiles[client].num_tasks if client in profiles else 0
            if not 0 <= task < known:
                raise PayloadError(f"client {client} has no task {task}: the run knows of {known}")
        self.store.decide(SET_ASIDE, *({"client": c, "task": t} for c, t in sorted(tasks)))

    def _ask_classes(
        self, changes: Sequence[ClassChange], merges: bool = False
    ) -> list[rpc.ClassOf]:
        """Change classes before the next round, also after a crash from now on.

        With ``merges`` they become part of others; else they get other names.

        Returns:
            The classes as they will be then.

        Raises:
            PayloadError: a change cannot be, or nobody has joined.
        """
        if changes and (names := self.store.experiment.targets):
            raise PayloadError(f"the run learns {', '.join(names)}, and has no classes to change")
        with self._deciding:
            growths, profiles = self._known()
            done = sum(len(one.class_changes) for one in growths)
            classes = classes_of(growths).grown((), names_after(self.store, done))
            wanted = list[ClassChange]()
            coming = new_classes(
                classes.names, [classes.called(p.brought) for p in profiles.values()]
            )
            for change in changes:
                wanted.append(checked(classes, change, merges=merges, coming=coming))
                classes = classes.grown((), wanted[-1:])
            last = max((one["number"] + 1 for one in self.store.decided(CLASSES)), default=0)
            new = enumerate(wanted, max(done, last))
            self.store.decide(CLASSES, *({"number": n, **one._asdict()} for n, one in new))
        return told_of(classes, [*profiles.values()])

    def _known(self) -> tuple[Sequence[Growth], Mapping[int, Profile]]:
        """Return how the run grew, and what clients announced, also before they join again.

        Raises:
            PayloadError: it has not begun.
        """
        stages = self._stages
        growths, profiles = self._before if stages is None else (stages.growths, stages.known)
        if not growths:
            raise PayloadError("the run has not begun: it has no classes and no tasks yet")
        return [*growths], {**profiles}

    def admission(self, known: Mapping[int, str]) -> Admission:
        """Return the checks of clients that bring classes of their own."""
        growths = [Growth.from_json(found) for found in self.store.ledger.growths()]
        self._before = growths, {c: Profile.parse(c, text) for c, text in known.items()}
        classes = classes_of(growths) if growths else None
        return OpenAdmission.of(self.experiment, known, classes=classes)

    def timetable(
        self, method: Method, cohort: Cohort, descriptions: Mapping[int, str]
    ) -> Timetable:
        """Return the stages of the run."""
        stages = Stages(
            method, self.store, cohort, self.events, descriptions, self._at_rest, self._deciding
        )
        describe(self.store, stages.first.profiles)
        self._stages = stages
        return stages

    def exchange(self, rounds: Kernel, interaction: Interaction) -> Exchange | None:
        """Return the buffer of asynchronous rounds, which lasts over growths."""
        if not self.experiment.schedule.buffer:
            return None
        assert self._stages is not None, "the run has begun"
        return OpenBuffer(rounds, interaction, self._stages.still_owed)

    def tells(self, record: Record) -> Mapping[str, Any]:
        """Tell that no interaction is the last one."""
        return {"open": True}

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down what the run grew by before an interaction, and note who has trained in it.

        ``unusual`` has the tasks that begin here and are not like their client's earlier ones, and
        in which ways, as the client says it; ``drifted`` those before which the inputs moved that a
        live model was asked, and what moved.
        """
        assert self._stages is not None, "the run has begun"
        self._stages.trained(record)
        growths = at.plan.growths if isinstance(at.plan, OpenPlan) else ()
        if new := [one.to_json() for one in growths if one.interaction == at.step.interaction]:
            record["growths"] = new
        begun = [
            (g.tasks, at.plan.profiles) for g in growths if g.interaction == at.step.interaction
        ]
        for mark in MARKS:
            if told := [one for some in begun for one in marked_in(mark, *some)]:
                of_parts(record)[mark] = told

    def explains(self, failed: Exception) -> Exception | None:
        """Store that a round came to nothing; return an error that says how a task goes."""
        if not isinstance(failed, TooFewClients) or not failed.reasons or self._stages is None:
            return None
        growths, (client, *_) = self._stages.growths, failed.reasons
        at = {"interaction": self.store.committed + 1, "growths": len(growths)}
        tried = sum(one | at == one for one in self.store.decided(FAILED))
        told = {str(client): why for client, why in failed.reasons.items()}
        self.store.decide(FAILED, {**at, "try": tried, "reasons": told})
        task = max((growth.tasks.get(client, 0) for growth in growths), default=0) - 1
        advice = (
            f"; --resume tries again, and sets the task aside of a client that failed "
            f"{self._stages.most_tries} times; at the site, fedcli drop-task --client-id {client} "
            f"{task} does that now; --resume --without {client} continues without client {client}"
        )
        return TooFewClients(failed.line, failed.reasons, advice) if task >= 0 else None

    def ended(self, records: Sequence[Record]) -> Mapping[str, Any]:
        """Return what the run grew by after its last interaction, which stands in no record."""
        assert self._stages is not None, "the run has begun"
        last = [one.to_json() for one in self._stages.growths if one.interaction >= len(records)]
        return {"growths": last} if last else {}


class Stages(Timetable):
    """What an open run learns, stage by stage."""

    def __init__(
        self,
        method: Method,
        store: Store,
        cohort: Cohort,
        events: EventLog,
        descriptions: Mapping[int, str],
        at_rest: AtRest = "wait",
        deciding: threading.RLock | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what clients announced so far; the run's first ones have joined."""
        self.method, self.store, self.cohort, self.events = method, store, cohort, events
        self.at_rest, self._clock = at_rest, clock
        self._deciding = deciding or threading.RLock()
        """Held by who stores a decision."""
        self._texts: dict[int, str] = {}
        self._looked_at: Mapping[int, int] = {}
        """The tasks that present models were last scored on before anybody trained on them."""
        self.known: dict[int, Profile] = {}
        """What each client announced, its classes in its own order."""
        self._owed: dict[int, int] = {}
        """How often each client has still to train on its present task, as records have it."""
        self._failed = Counter[int]()
        """How many uploads of clients that have to train came to nothing."""
        self._why: dict[int, str] = {}
        """Why the last upload of a client came to nothing."""
        self._since: dict[int, Interaction] = {}
        """The interaction in which each client went on to its present task."""
        self._orders: dict[int, Interaction] = {}
        """Of asynchronous rounds: the interaction of each client's order that is under way."""
        self._buffer = store.experiment.schedule.buffer
        """How many uploads end a round, where rounds are asynchronous."""
        self._again: Collection[int] = ()
        """The interactions that a roll-back undid."""
        self._score: Callable[[], None] = lambda: None
        """Scores the last round of a stage that ended without those who still owe."""
        self._learn(store.ledger.profiles())
        self._learn(descriptions)
        self.growths = [Growth.from_json(found) for found in store.ledger.growths()]
        if not self.growths:
            self._store(self._first())
        cohort.begin(classes_of(self.growths))
        super().__init__(self._plan_at(store.committed))

    # --- plans ------------------------------------------------------------------------------------

    def plan_at(self, plan: Plan, interaction: Interaction) -> Plan:
        """Return the plan that an interaction was done by, or the first one."""
        return self._plan_at(interaction)

    def steps_after(self, rounds: Running, interaction: Interaction) -> Iterator[Step]:
        """Yield the steps after an interaction; the run grows in between."""
        ahead = partial(score_ahead, rounds)
        if self._buffer:
            self._again = self.store.ledger.undone().keys()
            self._score = lambda: rounds.parts.score_unscored(rounds.state)
        while True:
            interaction = Interaction(interaction + 1)
            plan = opened(rounds.parts.plan)
            if interaction >= len(plan.steps):
                rounds.parts.commits.settle()  # what comes may come much later
            following = self.following(plan, interaction, ahead)
            if following is None:
                rounds.parts.plan = closing(plan, self.growths[len(plan.growths) :])
                forget(rounds, rounds.parts.plan.growths[len(plan.growths) :])
                return
            if following is not plan:
                grow(rounds, plan, following)
            yield following.steps[interaction]

    def _plan_at(self, interaction: Interaction) -> OpenPlan:
        some = next(iter(self.known.values()))
        plan = OpenPlan.opened(self.method, self.store, self.growths[0], some)
        for growth in self.growths:
            if growth.interaction <= max(interaction, 0):
                plan = self._reaching(plan, growth.interaction).grown(growth, self.known)
        self._begin(plan)
        first = plan.growths[-1].interaction
        before = self.store.ledger.record(Interaction(first - 1)) if self._buffer else None
        self._orders = dict(before.get("under_way", ())) if before else {}
        for n in map(Interaction, range(first, interaction + 1)):
            if (record := self.store.ledger.record(n)) is not None:
                self.trained(record)
        plan = self._reaching(plan, Interaction(interaction + 1))
        hold(self.store, plan)
        is_over = bool(self._buffer) and interaction >= first and not self.still_owed(plan)
        return plan.ended() if is_over else plan

    def _reaching(self, plan: OpenPlan, interaction: Interaction) -> OpenPlan:
        """Return a plan with all interactions before one; asynchronous rounds have no number."""
        if not self._buffer or len(plan.steps) >= interaction:
            return plan
        return plan.with_rounds(Interaction(len(plan.steps)), interaction - len(plan.steps))

    def _first(self) -> Growth:
        """Return what the run begins with."""
        beginners = sorted(self.known.keys() & {*self.store.began.schedule.beginners})
        if not beginners:
            raise RunFailed("no client that an open run could begin with has joined")
        tasks = dict.fromkeys(beginners, 1)
        announced = {client: profile.brought for client, profile in self.known.items()}
        classes = first_classes(self.store.experiment, announced)
        return Growth(
            Interaction(0), tasks, classes, owed=rounds_of(self.store.experiment, tasks, self.known)
        )

    def _store(self, growth: Growth) -> None:
        self.store.grow(growth.to_json())
        self.growths.append(growth)

    def _begin(self, plan: OpenPlan) -> None:
        """Begin to count what clients train from the last growth of a plan on."""
        growth = plan.growths[-1]
        self._owed, self._failed = dict(growth.owed), Counter(growth.failed)
        for one in self.store.decided(FAILED):  # rounds that came to no commit
            if one["growths"] == len(plan.growths) and one["interaction"] > self.store.committed:
                for client in (int(c) for c in one["reasons"] if c.isdecimal()):
                    self._note_failure(client, one["reasons"][str(client)])
        self._since = {client: began[-1] for client, began in plan.began.items()}

    def still_owed(self, plan: OpenPlan) -> dict[int, int]:
        """Return how often clients have still to train; none that left, and no task set aside."""
        gone = plan.aside.keys() | {c for c, task in plan.set_aside if plan.tasks[c] == task + 1}
        return {client: left for client, left in self._owed.items() if left and client not in gone}

    def trained(self, record: Record) -> None:
        """Note whose uploads of an interaction counted, and whose came to nothing.

        An upload counts for the task that its order was of.
        """
        ordered = {**self._orders, **dict(record.get("arrivals", ()))}
        self._orders = dict(record.get("under_way", ()))

        def owes(client: int) -> bool:
            begun = ordered.get(client, record["interaction"])
            return bool(self._owed.get(client)) and begun >= self._since.get(client, 0)

        for client in filter(owes, record["cohort"]):
            self._owed[client] -= 1
        for name, why in record.get("failed", {}).items():
            if name.isdecimal() and owes(int(name)):
                self._note_failure(int(name), why)

    def _note_failure(self, client: int, why: str) -> None:
        """Count an upload that came to nothing; who declines will do so the next time."""
        declined = why.startswith(OrderDeclined.SAID)
        self._failed[client] += self.most_tries if declined else 1
        self._why[client] = why

    def _stored(self, plan: OpenPlan, growth: Growth) -> OpenPlan:
        """Store a growth, tell it, and return the plan from it on."""
        with self._deciding:  # until it is stored, another name may still be asked for
            growth = self._named_now(plan, growth)
            self._store(growth)
        if growth.retired:  # they know at once, also where the run rests from now on
            self.cohort.set_out(self.store.gone(growth.interaction))
        for (client, task), why in growth.set_aside.items():
            line = f"task {task} of client {client} is set aside: {why}"
            self.events.tell("note", client, line=line)
            facts = {"client": client, "task": task, "interaction": growth.interaction}
            self.store.tell("set aside", **facts, reason=why)
        for mark, what in MARKS.items():
            for odd in marked_in(mark, growth.tasks, self.known):
                line = f"task {odd['task']} of client {odd['client']} {what}: {odd['line']}"
                self.events.tell("note", odd["client"], line=line)
                self.store.tell(mark, **odd, interaction=growth.interaction)
        for key, (before, now) in growth.changes.items():
            said = {"key": key, "interaction": growth.interaction, "before": before, "now": now}
            self.store.tell("changed", **said)
            line = f"{key} is {shown_value(now)} from here on, and was {shown_value(before)}"
            self.events.tell("note", line=line)
        if line := _line_of(growth, plan.tasks):
            self.events.tell("growth", line=line)
        grown = plan.grown(growth, self.known)
        if growth.class_changes:
            self.cohort.begin(grown.classes)
        for one in growth.class_changes:
            merges = grown.classes.merges(one)
            what, how = ("merged", "part of") if merges else ("renamed", "called")
            self.store.tell(what, **one._asdict(), interaction=growth.interaction)
            line = f"the class {one.old!r} is {how} {one.now!r} from here on"
            self.events.tell("note", line=line)
        self._begin(grown)
        describe(self.store, grown.profiles)
        return grown

    # --- what comes next --------------------------------------------------------------------------

    def following(self, plan: OpenPlan, interaction: Interaction, ahead: Ahead) -> OpenPlan | None:
        """Return the plan of an interaction that comes next; None if the run is to end.

        ``plan`` is that of the interaction before.

        Raises:
            RunPaused: nothing is to be learned, and the run does not wait.
        """
        replayed = [g for g in self.growths[len(plan.growths) :] if g.interaction == interaction]
        for stored in replayed:
            plan = plan.grown(stored, self.known)
            self._begin(plan)
        if replayed and interaction < len(plan.steps):  # a crash came before that round's commit
            is_new = interaction > self.store.newest
            growth = is_new and self._growth_of(plan, interaction, self._news(), 0.0, None)
            plan = self._stored(plan, growth) if growth else plan
            if interaction < len(plan.steps) and not self._closes(now=True):
                return plan
        since, told, late = self._clock(), False, list[int]()
        while True:
            news, before = self._news(), late
            if self._closes(now=True):
                if growth := self._growth_of(plan, interaction, news, 0.0, None):
                    self._stored(plan, growth)
                return None
            if late := self._late(plan, interaction, news.away):
                if late != before:
                    self._tell_late(late)
                self.cohort.rest(news.number, LOOK_EVERY_S)
                continue
            plan, waited = self._paced(plan, interaction, news.away), self._clock() - since
            if growth := self._growth_of(plan, interaction, news, waited, ahead):
                plan = self._stored(plan, growth)
            if interaction < len(plan.steps):
                return plan
            if growth:
                told = False  # watchers heard that the run goes on
                continue
            self._score()
            if self._closes() or self._ends(waited):
                return None
            if not told:
                self._tell_rest(news.away)
                told = True
            self.cohort.rest(news.number, self._seconds_left(waited))

    def _news(self) -> News:
        """Return what was said by now, once it is taken in."""
        news = self.cohort.news()
        self._learn(news.descriptions)
        absent = self.known.keys() - news.descriptions.keys()  # they have not joined again
        return replace(news, away={*news.away, *absent})

    def _late(self, plan: OpenPlan, interaction: Interaction, away: Collection[int]) -> list[int]:
        """Return who is away of those without whom nothing begins, with ``wait = "all"``."""
        if self.store.experiment.schedule.wait != "all":
            return []
        excluded = (one["client"] for one in self.store.decided(EXCLUDE))
        aside = {**plan.aside, **dict.fromkeys((*retiring(self.store), *excluded), interaction)}
        out = {*plan.set_aside, *self._set_aside(plan)}
        return [
            client for client in sorted(plan.tasks.keys() & {*away})
            if takes_part(client, interaction, aside)
            and (client, plan.tasks[client] - 1) not in out
        ]  # fmt: skip

    def _paced(self, plan: OpenPlan, interaction: Interaction, away: Collection[int]) -> OpenPlan:
        """Return a plan with asynchronous rounds ahead while somebody owes who is there.

        A round that was undone comes again, whoever is there by now.
        """
        if not self._buffer:
            return plan
        owed = {c: left for c, left in self.still_owed(plan).items() if c not in away}
        due = rounds_ahead(self._buffer, owed) or int(interaction in self._again)
        is_right = (interaction < len(plan.steps)) == (due > 0)
        return plan if is_right else plan.with_rounds(interaction, due)

    def _learn(self, descriptions: Mapping[int, str]) -> None:
        """Store the descriptions that are new."""
        new = {c: text for c, text in descriptions.items() if self._texts.get(c) != text}
        if new:
            self._texts |= new
            self.known |= {c: Profile.parse(c, text) for c, text in new.items()}
            self.store.add_profiles(new)

    def _growth_of(
        self,
        plan: OpenPlan,
        interaction: Interaction,
        news: News,
        waited: float,
        ahead: Ahead | None,
    ) -> Growth | None:
        """Return what the run grows by at an interaction; None if that is not due.

        Without ``ahead`` no round follows: it is what was decided meanwhile, and nobody goes on.
        """
        changes, names = self._changes(plan, interaction), self._class_changes(interaction)
        classes = plan.classes.grown((), names)
        wanted = retiring(self.store)
        retired = tuple(c for c in wanted if c in plan.tasks and c not in plan.aside)
        aside = {**plan.aside, **dict.fromkeys(retired, interaction)}
        if plan.tasks.keys() <= aside.keys():
            raise RunFailed("every client of the run has retired: none is left")
        moving, is_idle = {}, interaction >= len(plan.steps)
        gone = self._set_aside(plan)
        out = {*plan.set_aside, *gone}
        owed = {
            client: left
            for client, left in sorted(self._owed.items())
            if left and takes_part(client, interaction, aside)
            and (client, plan.tasks[client] - 1) not in out
        }  # fmt: skip
        if is_idle or not learns_at_task_end(self.method):  # else after a stage's last round alone
            known = {
                c: p.num_tasks for c, p in self.known.items() if takes_part(c, interaction, aside)
            }
            resting = plan.tasks.keys() - owed.keys()
            moving = movers(self.store.experiment, known, plan.tasks, resting, is_idle, out)
        brought = [classes.called(self.known[c].brought) for c in moving]
        added = new_classes(classes.names, brought)
        forgets = tuple(c for c in retired if wanted[c])
        found = Growth(
            interaction, moving, added, retired, forgets, set_aside=gone, changes=changes,
            class_changes=names,
        )  # fmt: skip
        if ahead is None or not self._is_due(plan, found, waited, is_idle, ahead):
            again = ahead is not None and is_idle and bool(owed.keys() - {*news.away})
            if not (retired or again or gone or changes or names):
                return None
            found = replace(found, tasks={}, classes=())
        failed = {c: n for c, n in sorted(self._failed.items()) if c in owed}
        owed |= rounds_of(self.store.experiment, found.tasks, self.known)
        away = tuple(c for c in owed if c in news.away)
        return replace(found, owed=owed, failed=failed, away=away)

    def _changes(self, plan: OpenPlan, interaction: Interaction) -> dict[str, tuple[Any, Any]]:
        """Return what the run was started with and does not hold yet; from now on it does.

        A replay comes first: what is computed again is what it was.
        """
        if interaction <= self.store.newest:
            return {}
        found = changes_between(plan.run.experiment, self.store.wished)
        if found:
            now = {key: value for key, (_, value) in found.items()}
            self.store.experiment = changed(plan.run.experiment, now)
        return found

    def _class_changes(self, interaction: Interaction) -> tuple[ClassChange, ...]:
        """Return the changes of classes that are wanted and not done; a replay comes first."""
        if interaction <= self.store.newest:
            return ()
        done = sum(len(one.class_changes) for one in self.growths)
        return tuple(names_after(self.store, done))

    def _named_now(self, plan: OpenPlan, growth: Growth) -> Growth:
        """Return a growth with what was asked for since it was made.

        A class that it brings is no new one if another class has got its name.
        """
        names = self._class_changes(growth.interaction)
        classes = plan.classes.grown((), names)
        new = new_classes(classes.names, [classes.called(growth.classes)])
        return replace(growth, classes=new, class_changes=names)

    @property
    def most_tries(self) -> int:
        """How many uploads of a task may come to nothing before it is set aside."""
        return max(FEWEST_TRIES, self.store.experiment.schedule.rounds)

    def _set_aside(self, plan: OpenPlan) -> dict[tuple[int, int], str]:
        """Return the clients and tasks to be set aside: as said, or where uploads fail.

        It is said by an operator, by a site of its own tasks, or by the admission of new ones.

        A client whose uploads come to nothing again and again goes on without its task.
        """
        wished = ((one["client"], one["task"]) for one in self.store.decided(SET_ASIDE))
        found = dict.fromkeys(sorted(wished), BY_HAND)
        for client, profile in sorted(self.known.items()):
            found |= {(client, t): why or BY_SITE for t, why in profile.set_aside.items()}
        found = {place: why for place, why in found.items() if place not in plan.set_aside}
        for client, failed in sorted(self._failed.items()):
            if failed >= self.most_tries and self._owed.get(client):
                place = client, plan.tasks[client] - 1
                last = f"; the last one: {self._why[client]}" if client in self._why else ""
                why = f"{failed} of its uploads failed{last}"
                if self._why.get(client, "").startswith(OrderDeclined.SAID):
                    why = f"its client {self._why[client]}"
                found |= {place: why} if place not in plan.set_aside else {}
        return found

    def _is_due(
        self, plan: OpenPlan, growth: Growth, waited: float, is_idle: bool, ahead: Ahead
    ) -> bool:
        """Tell whether ``[trigger]`` lets clients go on."""
        begins, moving = self.store.experiment.begins, growth.tasks
        if not moving or len(moving) >= begins.new_data:
            return bool(moving)
        if begins.every_s is not None and waited >= begins.every_s:
            return True
        if begins.drift and any(self._waits_after_drift(*one) for one in moving.items()):
            return True
        if begins.score_drop is None or not is_idle or moving == self._looked_at:
            return False
        self._looked_at = moving
        accuracy = ahead(plan.grown(growth, self.known), sorted(moving))
        record = self.store.ledger.record(self.store.committed)
        before = record["metrics"] if record else {}
        known = before.get("a_loc_received", before.get("a_glo"))
        return accuracy is not None and known is not None and known - accuracy >= begins.score_drop

    def _waits_after_drift(self, client: int, tasks: int) -> bool:
        """Tell whether a client that may go on to so many tasks has one to come after a drift."""
        known = self.known[client]
        return any(tasks <= task + 1 and task not in known.set_aside for task in known.drifted)

    # --- rest -------------------------------------------------------------------------------------

    def _closes(self, *, now: bool = False) -> bool:
        """Tell whether it was decided that the run ends, at once or when all is learned."""
        return any(one["now"] or not now for one in self.store.decided(CLOSE))

    def _ends(self, waited: float) -> bool:
        """Tell whether a run that has nothing to learn ends now.

        Raises:
            RunPaused: it stops where it is.
        """
        if self.at_rest == "pause":
            raise RunPaused
        until = self.store.experiment.begins.close_after_s
        return self.at_rest == "close" or (until is not None and waited >= until)

    def _seconds_left(self, waited: float) -> float | None:
        """Return after how many seconds something may be due without news."""
        begins = self.store.experiment.begins
        left = [s - waited for s in (begins.every_s, begins.close_after_s) if s is not None]
        return min((s for s in left if s > 0), default=None)

    def _tell_late(self, late: Sequence[int]) -> None:
        """Say for whom everybody waits."""
        line = (
            f"what comes next: waiting for {clients_text(late)} (not connected), as [schedule] wait"
            ' = "all"; fedsrv retire goes on without'
        )
        self.events.tell("waiting", line=line, clients=[*map(str, late)], seconds=0)

    def _tell_rest(self, away: Collection[int]) -> None:
        """Say that the run waits, and for what."""
        needed = self.store.experiment.begins.new_data
        late = sorted(client for client, left in self._owed.items() if left and client in away)
        line = f"the run has learned all it has: it waits for new data at {_number_of(needed)}"
        if late:
            line = (
                f"the run waits for {clients_text(late)}, which did not learn all and left, and "
                f"for new data at {_number_of(needed)}"
            )
        others = sorted({*away} - {*late} - self.store.aside().keys())
        line += f"; away: {clients_text(others)}" if others else ""
        for client, one in sorted(self.store.ledger.standings().items()):
            if one.get("refused"):
                line += f"; what client {client} brought last is refused: {one['refused']}"
        self.events.tell("resting", line=line, clients=[*map(str, late)])


def retiring(store: Store) -> dict[int, bool]:
    """Return the clients that were to leave for good, and whether each is forgotten."""
    found = dict[int, bool]()
    for one in store.decided(RETIRE):
        found[one["client"]] = one["forgets"] or found.get(one["client"], False)
    return found


def names_after(store: Store, done: int) -> list[ClassChange]:
    """Return the changes of classes that were decided beyond so many that were done."""
    told = (one for one in store.decided(CLASSES) if one["number"] >= done)
    return [ClassChange(one["old"], one["now"]) for one in told]


def marked_in(
    mark: str, tasks: Mapping[int, int], profiles: Mapping[int, Profile]
) -> list[dict[str, Any]]:
    """Return what clients say of tasks that begin, of those that have one of ``MARKS``."""
    found = ((client, number - 1) for client, number in sorted(tasks.items()))
    return [
        {"client": client, "task": task, "line": marked[task]}
        for client, task in found
        if task in (marked := getattr(profiles[client], mark))
    ]


def shown_value(value: Any) -> str:
    """Return a value of a config as a line has it."""
    return "left out" if value is None else json.dumps(value)


def _number_of(clients: int) -> str:
    return "a client" if clients == 1 else f"{clients} clients"


def _line_of(growth: Growth, tasks: Mapping[int, int]) -> str:
    """Return what is new in words."""
    new = [c for c in growth.tasks if c not in tasks]
    on = [c for c in growth.tasks if c in tasks]
    again = [c for c in growth.owed if c not in growth.tasks and c not in growth.away]
    parts = [
        f"{clients_text(on)} with another task" if on else "",
        f"{clients_text(again)} on what is not learned yet" if again and not growth.tasks else "",
        f"{clients_text(new)} joined" if new else "",
        f"{clients_text(growth.retired)} retired" if growth.retired else "",
        f"new classes {', '.join(growth.classes)}" if growth.classes else "",
    ]
    return "; ".join(filter(None, parts))


def grow(rounds: Running, before: OpenPlan, plan: OpenPlan) -> None:
    """Go on with another plan: new classes get rows, and what the state holds of others may go."""
    parts = rounds.parts
    parts.plan = plan
    hold(parts.store, plan)
    rounds.state = StateGrowth(parts.method, before.run, plan.run).server(rounds.state)
    new = plan.growths[len(before.growths) :]
    forget(rounds, new)
    if any(growth.retired or growth.changes for growth in new):  # who holds which states may change
        parts.commits.settle()
        parts.commits.remember(plan, parts.store.committed)


def forget(rounds: Running, growths: Sequence[Growth]) -> None:
    """Drop what the state holds of the clients alone that growths let go to be forgotten."""
    if gone := {c for growth in growths for c in growth.forgets}:
        rounds.state = forgotten(rounds.parts.method, rounds.state, gone)


def closing(plan: OpenPlan, growths: Sequence[Growth]) -> OpenPlan:
    """Return the plan by which clients end, with the growths that no round followed.

    Clients that retired are out of it, and classes have the names of by now. What nobody trained,
    tasks and new classes, stays out.
    """
    classes, kept = plan.classes, list[Growth]()
    for growth in growths:
        names = tuple(one for one in growth.class_changes if one.old in classes.names)
        classes = classes.grown((), names)
        if names or growth.retired:
            one = Growth(growth.interaction, retired=growth.retired, forgets=growth.forgets)
            kept.append(replace(one, class_changes=names))
    gone = {c: growth.interaction for growth in kept for c in growth.retired}
    if not kept:
        return plan
    return replace(plan, growths=[*plan.growths, *kept], aside={**plan.aside, **gone})


def hold(store: Store, plan: OpenPlan) -> None:
    """Let what a plan says of the config, and of states that clients hold, be what holds."""
    store.experiment, store.keeps_since = plan.run.experiment, plan.keeps_since


def score_ahead(rounds: Running, plan: Plan, clients: Sequence[int]) -> float | None:
    """Return the accuracy of present models on the tasks that a plan would begin with."""
    parts, kept = rounds.parts, rounds.parts.plan
    state = StateGrowth(parts.method, kept.run, plan.run).server(rounds.state)
    parts.plan = plan
    try:
        return parts.accuracy_on(plan.steps[-1], clients, state)
    finally:
        parts.plan = kept
