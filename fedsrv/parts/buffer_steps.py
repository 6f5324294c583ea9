"""The asynchronous rounds of a stage of an open run: how many at least, and who may train."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import ceil

from fedmodels.training.contexts import Stage, Task
from fedsrv.engine.schedule import Step


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
    first: int,
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
    return [Step(n, n, stage, cohort, True, False, False, tasks) for n in numbers]
