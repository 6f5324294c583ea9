"""The plan of an open run: what it grew by, and the steps that follow.

A run of ``[schedule] open`` has no last round. It learns in stages. A stage begins with a
:class:`Growth`: some clients go on to their next task, some join, some leave, and classes may be
new. A growth says how often each client has still to train on its task. Its stage lasts until all
have, or until the next growth. A growth is stored before it takes effect, keyed by its first
interaction. All else follows from the stored growths, so a replay comes to the same bits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any, Self

from fedmodels.config.experiment import Experiment
from fedmodels.config.open_changes import changed
from fedmodels.errors import ConfigError
from fedmodels.facts.position import Interaction, Round, Stage, Task
from fedmodels.facts.run_classes import ClassChange, RunClasses
from fedmodels.tensors.bundle import ClientId, Problem
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import check_parts
from fedmodels.training.wire import check_fits
from fedpb.tables import table_of
from fedpb.v1 import coordinator_pb2 as rpc
from fedpb.v1.table_pb2 import Table
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.cohort import Cohort
from fedsrv.engine.plan import Plan
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.schedule import Step, draw_cohort, takes_part
from fedsrv.state.store import Store


@dataclass(frozen=True)
class Growth:
    """What a run knows from an interaction on, beyond what it knew before."""

    interaction: Interaction
    tasks: Mapping[int, int] = field(default_factory=dict)
    """The number of tasks of each client that goes on to another one, or is new."""
    classes: tuple[str, ...] = ()
    """Names of the new classes, in label order; of the first growth, those the run begins with."""
    retired: tuple[int, ...] = ()
    """Clients that left for good."""
    forgets: tuple[int, ...] = ()
    """Those of them of whom the server's state drops what it holds of them alone."""
    owed: Mapping[int, int] = field(default_factory=dict)
    """How often each client has still to train on its present task; none that has learned it."""
    failed: Mapping[int, int] = field(default_factory=dict)
    """How many uploads of their present tasks came to nothing, of clients that have to train."""
    away: tuple[int, ...] = ()
    """Clients that have to train and are not connected: the stage does not last for them."""
    set_aside: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Clients and tasks that nobody trains or scores from here on, and why."""
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    """The keys of the config that have other values from here on: before, and now."""
    class_changes: tuple[ClassChange, ...] = ()
    """What becomes of the classes that the run has, before the new ones come."""

    def to_json(self) -> dict[str, Any]:
        """Return it for the database and the records."""
        numbers = {name: [*getattr(self, name).items()] for name in ("tasks", "owed", "failed")}
        aside = [(client, task, why) for (client, task), why in self.set_aside.items()]
        found = {**asdict(replace(self, set_aside={})), **numbers, "set_aside": aside}
        for name in ("changes", "class_changes"):
            if not found[name]:
                del found[name]
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_json` wrote."""
        tasks, owed, failed = (
            {int(client): int(number) for client, number in found[name]}
            for name in ("tasks", "owed", "failed")
        )
        return cls(
            Interaction(int(found["interaction"])),
            tasks,
            tuple(map(str, found["classes"])),
            tuple(map(int, found["retired"])),
            _forgotten(found["forgets"], found["retired"]),
            owed,
            failed,
            tuple(map(int, found["away"])),
            {(int(client), int(task)): str(why) for client, task, why in found["set_aside"]},
            {str(key): (before, now) for key, (before, now) in found.get("changes", {}).items()},
            tuple(ClassChange(*map(str, one)) for one in found.get("class_changes", ())),
        )


def _forgotten(said: object, retired: Sequence[int]) -> tuple[int, ...]:
    """Return who is forgotten; the version before said it of all that retired at once."""
    return tuple(map(int, said if isinstance(said, list) else retired if said else ()))


@dataclass(frozen=True)
class OpenPlan(Plan):
    """What an open run does until it grows again."""

    growths: Sequence[Growth] = ()
    """How it grew so far."""
    began: Mapping[int, tuple[Interaction, ...]] = field(default_factory=dict)
    """The interactions in which each client went on to a task, ascending."""
    described: Mapping[int, Profile] = field(default_factory=dict)
    """What ``profiles`` were made from, whole; those of clients that stay as they are, are kept."""
    keeps_since: int = 0
    """The first interaction after which clients have to hold their states: a change may ask for
    states in a run whose clients kept none."""

    @classmethod
    def opened(cls, method: Method, store: Store, first: Growth, known: Profile) -> OpenPlan:
        """Return the plan of an open run before its first growth.

        The first growth names the classes; the inputs of all clients are of one shape.

        Raises:
            ConfigError: the method, or the config, does not fit an open run.
        """
        experiment = store.began
        problem = Problem(known.problem.input_shape, len(first.classes))
        run = RunFacts(experiment, problem)
        if experiment.method.pools_data:
            raise ConfigError("centralized has all data in one place, and an open run gets more")
        check_fits(method, run)
        check_parts(method, run)
        terms = ReportValidator(method, run, {}, ())
        return cls(method, run, {}, {}, (), store.aside(), terms)

    def grown(self, growth: Growth, known: Mapping[int, Profile]) -> OpenPlan:
        """Return the plan of an open run from a growth on."""
        run, growths = self._changed(growth), [*self.growths, growth]
        experiment = run.experiment
        classes = classes_of(growths)
        tasks = {**self.tasks, **growth.tasks}
        aside = {**self.aside, **dict.fromkeys(growth.retired, growth.interaction)}
        kept = {} if growth.classes or growth.class_changes else {
            c: self.profiles[c] for c, one in self.described.items()
            if c not in growth.tasks and known[c] is one
        }  # fmt: skip
        profiles = {c: kept.get(c) or known[c].within(tasks[c], classes) for c in sorted(tasks)}
        present = {
            c: Task(tasks[c] - 1) for c in profiles if takes_part(c, growth.interaction, aside)
        }
        weights = None
        if experiment.schedule.sampling == "weighted":
            weights = {c: int(profiles[c].train[task].sum()) for c, task in present.items()}
        before, stage = self.steps[: growth.interaction], Stage(len(self.growths))
        owed = {c: n for c, n in growth.owed.items() if c not in growth.away}
        gone = {place for each in growths for place in each.set_aside}
        first = Interaction(len(before))
        untrained = {c: first for c, task in present.items() if (c, task) in gone}
        until = {**aside, **untrained}
        if buffer := experiment.schedule.buffer:
            due = rounds_ahead(
                buffer, {c: n for c, n in owed.items() if c in {*present} - {*untrained}}
            )
            added = buffer_steps(stage, first, due, present, gone)
        else:
            added = stage_steps(experiment, stage, first, present, owed, weights, until)
        steps = [*before, *added]
        if len(classes.names) > run.problem.num_classes:
            run = run.for_classes(len(classes.names))
        if (merged := tuple(classes.merged.items())) != run.merged:
            run = replace(run, merged=merged)
        terms = self.terms.grown(run, profiles, steps)
        on = {c: (*self.began.get(c, ()), growth.interaction) for c in growth.tasks}
        began = {**self.began, **on}
        described = {c: known[c] for c in profiles}
        plan = OpenPlan(
            self.method, run, profiles, tasks, steps, aside, terms, growths, began, described
        )
        if plan.is_stateful and not self.is_stateful and self.growths:
            return replace(plan, keeps_since=growth.interaction)
        return replace(plan, keeps_since=self.keeps_since)

    def _changed(self, growth: Growth) -> RunFacts:
        """Return the facts of the run with what a growth changes of the config."""
        now = changed(self.run.experiment, {key: now for key, (_, now) in growth.changes.items()})
        return self.run if now is self.run.experiment else replace(self.run, experiment=now)

    @property
    def settings(self) -> Table | None:
        """Return what the growths have changed of the config that clients joined with."""
        found = {key: now for each in self.growths for key, (_, now) in each.changes.items()}
        return table_of(found) if found else None

    def with_rounds(self, interaction: Interaction, rounds: int) -> OpenPlan:
        """Return the plan with so many asynchronous rounds of its stage from an interaction on."""
        there = (c for c in self.profiles if takes_part(c, interaction, self.aside))
        present = {c: Task(self.tasks[c] - 1) for c in there}
        stage = Stage(len(self.growths) - 1)
        added = buffer_steps(stage, interaction, rounds, present, self.set_aside)
        steps = [*self.steps[:interaction], *added]
        return replace(self, steps=steps, terms=self.terms.grown(self.run, self.profiles, steps))

    def ended(self) -> OpenPlan:
        """Return the plan in which the last step ends its stage, as a record showed."""
        return replace(self, steps=[*self.steps[:-1], replace(self.steps[-1], ends_stage=True)])

    def with_aside(self, store: Store) -> Plan:
        """Return the plan with the clients that were set aside; ``Stages`` makes steps anew."""
        return replace(self, aside=store.aside())

    def met(self, store: Store, cohort: Cohort, step: Step) -> Plan:
        """Return the plan as it is: who joins takes part from a growth on."""
        return self

    @cached_property
    def classes(self) -> RunClasses:
        """Of an open run: its classes."""
        return classes_of(self.growths)

    @property
    def members(self) -> Collection[int]:
        """Return the clients that the run has met."""
        return self.profiles

    @property
    def new_classes(self) -> Sequence[str]:
        """Return the names of the classes that the run did not begin with."""
        return self.classes.came

    @property
    def class_changes(self) -> Sequence[rpc.ClassChange]:
        """Return what became of the classes since the run began."""
        return [rpc.ClassChange(after=n, **one._asdict()) for n, one in self.classes.changes]

    @cached_property
    def set_aside(self) -> Mapping[tuple[int, int], str]:
        """Of an open run: the clients and tasks that nobody trains or scores, and why."""
        return {place: why for growth in self.growths for place, why in growth.set_aside.items()}

    def unscored(self, client: ClientId) -> list[int]:
        """Return the tasks of a client that were set aside, ascending."""
        return sorted(task for other, task in self.set_aside if other == client)

    def needed_uploads(self, clients: Sequence[ClientId], wanted: int | None = None) -> int:
        """Return how many uploads a round needs: fewer than all, unless the config wants all.

        A round may have one client alone, which then ends no run.
        """
        needed, most = self.needed(clients, wanted), min(wanted or len(clients), len(clients))
        return min(needed, most - 1) if self.spares_clients else needed

    @property
    def spares_clients(self) -> bool:
        """Tell that it does, unless the config wants all clients."""
        experiment = self.run.experiment
        least = experiment.server.min_clients
        return least is not None and least < experiment.schedule.clients

    def task_began(self, client: ClientId, step: Step) -> Round:
        """Return the round in which a client's task of a step began; 0 for the evaluator.

        Rounds without the client do not count, where a course of the rate follows its rounds.
        """
        began = self.began.get(client, ()) if isinstance(client, int) else ()
        begun = bisect_right(began, step.interaction)
        first = began[begun - 1] if begun else 0
        experiment = self.run.experiment
        course, schedule = experiment.training.lr_schedule, experiment.schedule
        takes_all = schedule.participants == "all" and not schedule.selects
        if takes_all or course is None or course.over != "rounds":
            return Round(first)  # every round is one interaction
        trained = sum(client in s.cohort for s in self.steps[first : step.interaction])
        return Round(step.round - trained)

    def tasks_seen(self, step: Step) -> int:
        """Return the most tasks that a client is scored on."""
        return 1 + max(step.tasks.values())

    def ends_task(self, step: Step) -> bool:
        """Tell whether a wait for the next task follows a step, as after the last of a stage."""
        return step.ends_stage


def opened(plan: Plan) -> OpenPlan:
    """Return a plan of an open run as one."""
    assert isinstance(plan, OpenPlan), "an open run has open plans"
    return plan


def classes_of(growths: Sequence[Growth]) -> RunClasses:
    """Return the classes that a run has after some growths, of which the first names its own."""
    found = RunClasses(growths[0].classes if growths else ())
    for growth in growths[1:]:
        found = found.grown(growth.classes, growth.class_changes)
    return found


def rounds_of(
    experiment: Experiment, tasks: Mapping[int, int], known: Mapping[int, Profile]
) -> dict[int, int]:
    """Return how often clients have to train on the tasks that they go on to.

    That is in as many rounds as the schedule says; never where there is nothing to train on.
    """
    rounds = experiment.schedule.rounds
    return {c: rounds for c, number in tasks.items() if known[c].train[number - 1].any()}


def stage_steps(
    experiment: Experiment,
    stage: Stage,
    first: Interaction,
    tasks: Mapping[int, Task],
    owed: Mapping[int, int],
    weights: Mapping[int, int] | None = None,
    aside: Mapping[int, Interaction] | None = None,
) -> list[Step]:
    """Return the interactions of a stage of an open run, until everybody has trained as is owed.

    Args:
        experiment: gives cohort size, who takes part, and the seed.
        stage: from 0.
        first: its first interaction.
        tasks: the present task of each client that may train.
        owed: how often clients have still to train on it.
        weights: of each client, as for :func:`draw_cohort`.
        aside: the first interaction without each client that was set aside, or whose task was.
    """
    left = {c: n for c, n in owed.items() if n and c in tasks}
    cohorts = list[tuple[int, ...]]()
    while True:  # every round is one interaction
        n = Interaction(first + len(cohorts))
        there = [client for client in sorted(tasks) if takes_part(client, n, aside or {})]
        owing = {client: left[client] for client in there if left.get(client)}
        if not owing:
            break
        cohorts.append(stage_cohort(experiment, Round(n), there, owing, weights))
        left |= {client: left[client] - 1 for client in cohorts[-1] if client in owing}
    last = first + len(cohorts) - 1
    return [
        Step(Interaction(n), Round(n), stage, cohort, True, False, n == last, tasks)
        for n, cohort in enumerate(cohorts, first)
    ]


def rounds_ahead(buffer: int, owed: Mapping[int, int]) -> int:
    """Return how many rounds are needed at least until nobody owes any more.

    A round counts as many uploads as ``buffer`` at most, and one of each client.

    Args:
        buffer: uploads that end a round.
        owed: how often each client has still to train.
    """
    return max([ceil(sum(owed.values()) / buffer), *owed.values()], default=0)


def buffer_steps(
    stage: Stage,
    first: Interaction,
    rounds: int,
    tasks: Mapping[int, Task],
    set_aside: Collection[tuple[int, int]],
) -> list[Step]:
    """Return asynchronous rounds of a stage; whoever may train at all is their cohort.

    Args:
        stage: from 0.
        first: the interaction of the first one.
        rounds: how many.
        tasks: the present task of each client that takes part.
        set_aside: clients and tasks that nobody trains.
    """
    cohort = tuple(c for c in sorted(tasks) if (c, tasks[c]) not in set_aside)
    numbers = range(first, first + rounds)
    return [
        Step(Interaction(n), Round(n), stage, cohort, True, False, False, tasks) for n in numbers
    ]


def stage_cohort(
    experiment: Experiment,
    round: Round,
    there: Sequence[int],
    owing: Mapping[int, int],
    weights: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """Return who trains in a round of an open run, ascending: first those with the most to learn.

    Args:
        experiment: gives cohort size, who takes part beside them, and the seed.
        round: which one.
        there: clients that may train.
        owing: how often those of them have still to train that have new data.
        weights: of each client, as for :func:`draw_cohort`.
    """
    schedule, size = experiment.schedule, experiment.cohort_size
    if len(owing) > size:  # else nobody stands in for who has new data
        size += schedule.over_select

    def drawn(some: Sequence[int], most: int) -> tuple[int, ...]:
        return draw_cohort(experiment.seed, round, some, most, weights) if most > 0 else ()

    cohort = list[int]()
    for rounds in sorted({*owing.values()}, reverse=True):
        cohort += drawn([c for c in there if owing.get(c) == rounds], size - len(cohort))
    beside = [c for c in there if c not in owing]
    most = schedule.beside_new
    room = size - len(cohort)
    cohort += drawn(beside, room if most is None else min(most, room))
    return tuple(sorted(cohort))


def movers(
    experiment: Experiment,
    known: Mapping[int, int],
    present: Mapping[int, int],
    resting: Collection[int],
    is_idle: bool,
    set_aside: Collection[tuple[int, int]] = (),
) -> dict[int, int]:
    """Return the clients that can go on to another task or join, with their new number of tasks.

    Args:
        experiment: bounds the newcomers of one growth.
        known: how many tasks each client has announced.
        present: how many tasks of each client the run has begun.
        resting: the clients that have learned their present task.
        is_idle: whether no round is due; with ``newcomers``, clients join at no other time.
        set_aside: clients and tasks that are left out.
    """

    def following(client: int) -> int:
        """Return the client's number of tasks with its next one; 0 where there is none."""
        tasks = range(present.get(client, 0), known[client])
        return 1 + next((task for task in tasks if (client, task) not in set_aside), -1)

    most = experiment.schedule.newcomers
    new = sorted(known.keys() - present.keys())[:most] if most is None or is_idle else []
    on = sorted(c for c in known.keys() & present.keys() if c in resting)
    return {c: tasks for c in (*on, *new) if (tasks := following(c))}
