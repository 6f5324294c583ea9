"""The plan of an open run: what it grew by, and the steps that follow.

A run of ``[schedule] open`` has no last round. It learns in stages. A stage begins with a
:class:`Growth`: some clients go on to their next task, some join, some leave, and classes may be
new. It lasts ``[schedule] rounds`` rounds, or until the next growth. A growth is stored before it
takes effect, keyed by its first interaction. All else follows from the stored growths, so a replay
comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.tensors.bundle import ClientId, Problem
from fedmodels.training.announcement import check_announcement
from fedmodels.training.method import Method
from fedmodels.training.position import Stage, Task
from fedmodels.training.run import RunFacts
from fedmodels.training.settings import check_parts
from fedsrv.engine.client_profile import Profile
from fedsrv.engine.cohort import Cohort
from fedsrv.engine.plan import Plan
from fedsrv.engine.report_validator import ReportValidator
from fedsrv.engine.schedule import Step, draw_cohort, takes_part
from fedsrv.state.store import Store


@dataclass(frozen=True)
class Growth:
    """What a run knows from an interaction on, beyond what it knew before."""

    interaction: int
    tasks: Mapping[int, int] = field(default_factory=dict)
    """The number of tasks of each client that goes on to another one, or is new."""
    classes: tuple[str, ...] = ()
    """Names of the new classes, in label order; of the first growth, those the run begins with."""
    retired: tuple[int, ...] = ()
    """Clients that left for good."""
    forgets: bool = False
    """Whether the server's state drops what it holds of the retired clients alone."""

    def to_json(self) -> dict[str, Any]:
        """Return it for the database and the records."""
        return {**asdict(self), "tasks": [*self.tasks.items()]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_json` wrote."""
        return cls(
            int(found["interaction"]),
            {int(client): int(tasks) for client, tasks in found["tasks"]},
            tuple(map(str, found["classes"])),
            tuple(map(int, found["retired"])),
            bool(found["forgets"]),
        )


@dataclass(frozen=True)
class OpenPlan(Plan):
    """What an open run does until it grows again."""

    growths: Sequence[Growth] = ()
    """How it grew so far."""

    @classmethod
    def opened(cls, method: Method, store: Store, first: Growth, known: Profile) -> OpenPlan:
        """Return the plan of an open run before its first growth.

        The first growth names the classes; the inputs of all clients are of one shape.

        Raises:
            ConfigError: the method, or the config, does not fit an open run.
        """
        experiment = store.experiment
        problem = Problem(known.problem.input_shape, len(first.classes))
        run = RunFacts(experiment, problem)
        if experiment.method.pools_data:
            raise ConfigError("centralized has all data in one place, and an open run gets more")
        check_announcement(method, run)
        check_parts(method, run)
        terms = ReportValidator(method, run, {}, ())
        return cls(method, run, {}, {}, (), store.aside(), terms)

    def grown(self, growth: Growth, known: Mapping[int, Profile]) -> OpenPlan:
        """Return the plan of an open run from a growth on."""
        experiment, growths = self.run.experiment, [*self.growths, growth]
        names = [name for each in growths for name in each.classes]
        tasks = {**self.tasks, **growth.tasks}
        aside = {**self.aside, **dict.fromkeys(growth.retired, growth.interaction)}
        profiles = {c: known[c].within(tasks[c], names) for c in sorted(tasks)}
        present = {
            c: Task(tasks[c] - 1) for c in profiles if takes_part(c, growth.interaction, aside)
        }
        weights = None
        if experiment.schedule.sampling == "weighted":
            weights = {c: int(profiles[c].train[task].sum()) for c, task in present.items()}
        before = self.steps[: growth.interaction]
        steps = [
            *before,
            *stage_steps(
                experiment,
                Stage(len(self.growths)),
                before,
                present,
                experiment.schedule.rounds if growth.tasks else len(self.steps) - len(before),
                weights,
                aside,
            ),
        ]
        run = self.run
        if len(names) > run.problem.num_classes:
            run = run.for_classes(len(names))
        terms = self.terms.grown(run, profiles, steps)
        return OpenPlan(self.method, run, profiles, tasks, steps, aside, terms, growths)

    def with_aside(self, store: Store) -> Plan:
        """Return the plan with the clients that were set aside; ``Stages`` makes steps anew."""
        return replace(self, aside=store.aside())

    def met(self, store: Store, cohort: Cohort, step: Step) -> Plan:
        """Return the plan as it is: who joins takes part from a growth on."""
        return self

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Of an open run: the names of its classes, in label order."""
        return tuple(name for growth in self.growths for name in growth.classes)

    @property
    def members(self) -> Collection[int]:
        """Return the clients that the run has met."""
        return self.profiles

    @property
    def new_classes(self) -> Sequence[str]:
        """Return the names of the classes that the run did not begin with."""
        return self.classes[len(self.growths[0].classes) :] if self.growths else ()

    def task_began(self, client: ClientId, step: Step) -> int:
        """Return the round in which a client's task of a step began; 0 for the evaluator."""
        began = [g.interaction for g in self.growths if client in g.tasks]
        return max((first for first in began if first <= step.interaction), default=0)

    def tasks_seen(self, step: Step) -> int:
        """Return the most tasks that a client is scored on."""
        return 1 + max(step.tasks.values())

    def ends_task(self, step: Step) -> bool:
        """Tell whether a wait for the next task follows a step, as after the last of a stage."""
        return step.ends_stage

    def resting(self, interaction: int) -> set[int]:
        """Return the clients that have had all rounds of their present task by an interaction."""
        began = {c: growth.interaction for growth in self.growths for c in growth.tasks}
        rounds = self.run.experiment.schedule.rounds
        if interaction >= len(self.steps):
            return set(began)
        return {c for c, first in began.items() if interaction - first >= rounds}


def stage_steps(
    experiment: Experiment,
    stage: Stage,
    before: Sequence[Step],
    tasks: Mapping[int, Task],
    rounds: int,
    weights: Mapping[int, int] | None = None,
    aside: Mapping[int, int] | None = None,
) -> list[Step]:
    """Return the interactions of a stage of an open run; there are none where nobody may train.

    Args:
        experiment: gives cohort size and seed.
        stage: from 0.
        before: the interactions before it.
        tasks: the present task of each client that may train.
        rounds: how many.
        weights: of each client, as for :func:`draw_cohort`.
        aside: the first interaction without each client that was set aside.
    """
    size = experiment.cohort_size + experiment.schedule.over_select
    cohorts = dict[int, tuple[int, ...]]()
    for n in range(len(before), len(before) + rounds):  # every round is one interaction
        present = [client for client in sorted(tasks) if takes_part(client, n, aside or {})]
        if cohort := draw_cohort(experiment.seed, n, present, size, weights):
            cohorts[n] = cohort
    return [
        Step(n, n, stage, cohort, True, False, n == max(cohorts), tasks)
        for n, cohort in cohorts.items()
    ]


def movers(
    experiment: Experiment,
    known: Mapping[int, int],
    present: Mapping[int, int],
    resting: Collection[int],
    is_idle: bool,
) -> dict[int, int]:
    """Return the clients that can go on to another task or join, with their new number of tasks.

    Args:
        experiment: bounds the newcomers of one growth.
        known: how many tasks each client has announced.
        present: how many tasks of each client the run has begun.
        resting: the clients that have had all rounds of their present task.
        is_idle: whether no round is due; with ``newcomers``, clients join at no other time.
    """
    most = experiment.schedule.newcomers
    new = sorted(known.keys() - present.keys())[:most] if most is None or is_idle else []
    on = sorted(c for c in known.keys() & present.keys() if known[c] > present[c] and c in resting)
    return {**{c: present[c] + 1 for c in on}, **dict.fromkeys(new, 1)}
