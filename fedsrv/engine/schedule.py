"""The interactions of a run, in order, with their cohorts, from its config and seed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedmodels.config.combinations import part_at
from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.position import Interaction, Round, Stage, Task
from fedmodels.numerics.randomness import derive_seed
from fedmodels.tensors.bundle import ClientId
from fedmodels.training.contexts import Position


@dataclass(frozen=True)
class Step(Position):
    """One interaction of the schedule."""

    task: Stage
    cohort: tuple[int, ...]
    """Clients that train, ascending; with ``asynchronous``, all that may. Empty where independent
    chances drew nobody: then nothing changes, but for the noise that hides whole clients."""
    ends_round: bool
    """Whether it is the last interaction of its round."""
    ends_run: bool
    ends_stage: bool = False
    """Whether a wait for news follows, as far as was known when this step was planned."""
    tasks: Mapping[int, Task] = field(default_factory=dict)
    """Where clients are on tasks of their own: each one's; ``task`` then counts the stages."""

    def task_of(self, client: ClientId) -> Task:
        """Return the task that a client trains on."""
        common = Task(self.task)  # of everybody, unless clients are on tasks of their own
        return self.tasks.get(client, common) if isinstance(client, int) else common


def draw_cohort(
    seed: int,
    round: Round,
    candidates: Sequence[int],
    size: int,
    weights: Mapping[int, int] | None = None,
) -> tuple[int, ...]:
    """Draw ``size`` of the candidates without replacement, from a fresh generator per round.

    Args:
        seed: of the run.
        round: which round.
        candidates: clients to draw from.
        size: how many; all candidates where there are no more.
        weights: of each client; by default all alike. Clients are drawn one after the other, with
            chances in proportion to their weights. A client of weight 0 is never drawn.
    """
    known = sorted(c for c in candidates if weights is None or weights[c] > 0)
    if size >= len(known):
        return tuple(known)
    rng = np.random.default_rng(derive_seed(seed, "server", round, "cohort"))
    chances = None
    if weights is not None:
        each = np.array([weights[c] for c in known], dtype=np.float64)
        chances = each / each.sum()
    return tuple(sorted(int(c) for c in rng.choice(known, size, replace=False, p=chances)))


Chance = Callable[[Interaction, int], float]
"""Gives the number in [0, 1) that decides whether a client takes part in an interaction."""


def independent_cohort(
    chance: Chance, interaction: Interaction, candidates: Sequence[int], rate: float
) -> tuple[int, ...]:
    """Draw each candidate independently, with the same probability (Poisson sampling).

    Nobody may be drawn. The draws of two interactions are independent, also of the same round.

    Args:
        chance: gives the number in [0, 1) of an interaction and a client.
        interaction: which one.
        candidates: clients to draw from.
        rate: the probability.
    """
    return tuple(sorted(c for c in candidates if chance(interaction, c) < rate))


def steps(
    experiment: Experiment,
    trainers: Sequence[int],
    tasks: Mapping[int, int],
    weights: Mapping[int, int] | None = None,
    aside: Mapping[int, Interaction] | None = None,
    chance: Chance | None = None,
    forgotten: Collection[tuple[int, int]] = (),
) -> list[Step]:
    """Return every interaction of a run.

    Args:
        experiment: gives rounds, cohort size, order and seed.
        trainers: clients that cohorts are drawn from.
        tasks: number of tasks of each client; clients may have different ones. A client takes
            part in the interactions of the tasks it has.
        weights: of each client, as for :func:`draw_cohort`.
        aside: the first interaction without each client that was set aside.
        chance: decides who takes part with independent chances; from the run's seed unless given.
        forgotten: clients and tasks that are as if the clients did not have them.

    Raises:
        ConfigError: the availability trace cannot be used, or nobody is there in any round.
    """
    aside = aside or {}
    if trainers and {*trainers} <= aside.keys():
        raise ConfigError("every client that trains was excluded (--without): none is left")
    if experiment.schedule.sampling == "poisson":
        chance = chance or _seeded(experiment.seed)
        found = list(_independent_visits(experiment, trainers, tasks, aside, chance, forgotten))
    else:
        found = list(_visits(experiment, trainers, tasks, weights, aside, forgotten))
    if not found and trainers and experiment.schedule.availability is not None:
        raise ConfigError("[schedule] availability: no client is there in any round")
    return [
        Step(
            Interaction(number),
            round,
            Stage(task),
            cohort,
            ends_round=number + 1 == len(found) or found[number + 1][0] != round,
            ends_run=number + 1 == len(found),
        )
        for number, (round, task, cohort) in enumerate(found)
    ]


def _visits(
    experiment: Experiment,
    trainers: Sequence[int],
    tasks: Mapping[int, int],
    weights: Mapping[int, int] | None,
    aside: Mapping[int, Interaction],
    forgotten: Collection[tuple[int, int]],
) -> Iterator[tuple[Round, int, tuple[int, ...]]]:
    """Yield (round, task, cohort) in order; a round without anybody is left out."""
    schedule, size = experiment.schedule, experiment.cohort_size + experiment.schedule.over_select
    attends: Callable[[int, Round], bool] | None = None
    if schedule.availability is not None:
        attends = part_at("fedsrv.engine.availability:attendance")(experiment)

    def drawn(round: Round, candidates: Sequence[int], size: int) -> tuple[int, ...]:
        there = candidates
        if attends is not None:
            there = [c for c in candidates if attends(c, round)]
        return draw_cohort(experiment.seed, round, there, size, weights)

    most, number = max((tasks[c] for c in trainers), default=0), 0

    def present(candidates: Sequence[int]) -> Sequence[int]:
        """Return the clients that are not set aside from the next interaction on."""
        following = Interaction(number)
        return [c for c in candidates if takes_part(c, following, aside)] if aside else candidates

    if schedule.order == "rounds_outer":
        for round in map(Round, range(schedule.rounds)):
            cohort = drawn(round, present(trainers), size)
            for task in range(most):
                if aside:  # maybe from the middle of a round on
                    cohort = drawn(round, present(trainers), size)
                members = tuple(_having(cohort, task, tasks, forgotten))
                if members:
                    yield round, task, members
                    number += 1
    else:
        for task in range(most):
            candidates = _having(trainers, task, tasks, forgotten)
            for visit in range(schedule.rounds):
                round = Round(task * schedule.rounds + visit)
                everybody = schedule.is_asynchronous  # who trains depends on who is done
                most_drawn = len(candidates) if everybody else size
                cohort = drawn(round, present(candidates), most_drawn)
                if cohort:
                    yield round, task, cohort
                    number += 1


def _independent_visits(
    experiment: Experiment,
    trainers: Sequence[int],
    tasks: Mapping[int, int],
    aside: Mapping[int, Interaction],
    chance: Chance,
    forgotten: Collection[tuple[int, int]],
) -> Iterator[tuple[Round, int, tuple[int, ...]]]:
    """Yield (round, task, cohort) in order, where independent chances draw each cohort.

    A client's chance is the config's, however many others are left. An interaction is left out if
    nobody could be drawn, and not if nobody was.
    """
    schedule = experiment.schedule
    rate, rounds = min(1.0, experiment.cohort_size / len(trainers)), range(schedule.rounds)
    every = range(max((tasks[c] for c in trainers), default=0))
    places = ((round, task) for round in rounds for task in every)
    if schedule.order == "tasks_outer":
        places = ((task * schedule.rounds + visit, task) for task in every for visit in rounds)
    number = 0
    for round, task in places:
        having = _having(trainers, task, tasks, forgotten)
        at = Interaction(number)
        found = [c for c in having if takes_part(c, at, aside)]
        if found:
            yield Round(round), task, independent_cohort(chance, at, found, rate)
            number += 1


def _having(
    clients: Sequence[int],
    task: int,
    tasks: Mapping[int, int],
    forgotten: Collection[tuple[int, int]],
) -> list[int]:
    """Return the clients that have a task."""
    return [c for c in clients if tasks[c] > task and (c, task) not in forgotten]


def _seeded(seed: int) -> Chance:
    """Return chances that everybody who knows the seed knows as well."""
    return lambda interaction, client: derive_seed(seed, client, interaction, "cohort") / 2.0**63


def takes_part(
    client: ClientId, interaction: Interaction, aside: Mapping[int, Interaction]
) -> bool:
    """Tell whether a client may take part in an interaction: it was not set aside before."""
    return not isinstance(client, int) or interaction < aside.get(client, interaction + 1)


def scorers(experiment: Experiment, known: Collection[int], cohort: Iterable[int]) -> list[int]:
    """Return the known clients that score the models after a round, ascending.

    Where ``[evaluate] clients`` bounds them, they are the round's cohort, and so many clients that
    are the same in all rounds, so that rounds can be compared.
    """
    most, everybody = experiment.evaluate.clients, range(experiment.schedule.clients)
    if most is None or most >= len(everybody):
        return sorted(known)
    rng = np.random.default_rng(derive_seed(experiment.seed, "scorers", 0, "cohort"))
    drawn = rng.choice(everybody, most, replace=False)
    return sorted({*drawn.tolist(), *cohort}.intersection(known))


def is_scored(steps: Sequence[Step], step: Step, every: int) -> bool:
    """Tell whether the round of a step is scored: each ``every``-th, and the last one.

    Of an open run that is the last one of each stage.
    """
    is_last = step.ends_stage if step.tasks else step.round == steps[-1].round
    return is_last or (every > 0 and (step.round + 1) % every == 0)


def end_before(steps: Sequence[Step], step: Step) -> str:
    """Return after what a run ends that does not do a step, for people to read."""
    number, round = step.interaction, step.round
    if number and steps[number - 1].round == round:
        return f"the run ends after interaction {number}, within round {round + 1}"
    return f"the run ends after round {round}"


def new_classes(known: Sequence[str], announced: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the names that clients announce and the run lacks, in the order of the clients."""
    found = dict.fromkeys(name for names in announced for name in names)
    return tuple(name for name in found if name not in set(known))
