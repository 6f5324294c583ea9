"""What a change of domains or concepts costs, and how soon it is seen, against the truth of it.

What a task shows is any value that is equal for tasks that show the same, task by task.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from fedmodels.facts.position import Round

NEAR = 0.05
"""Distance from the accuracy before a change within which a model has recovered."""
Scored = tuple[Round, int, Mapping[int, float]]
"""A round, a client's present task, and its accuracy on each of its tasks that it was scored on."""


def changes(shown: Sequence[object]) -> list[int]:
    """Return the tasks that show another thing than the task before."""
    return [task for task in range(1, len(shown)) if shown[task] != shown[task - 1]]


def recoveries(
    scored: Sequence[Scored], shown: Sequence[object], began: Mapping[int, Round]
) -> list[tuple[int, bool]]:
    """Return for each change of a client in how many rounds it recovered, and whether it did.

    It has once its accuracy on its present task is at most :data:`NEAR` below the last one before
    the change. A client that does not recover has the rounds until its last score before its next
    change, or the end. Changes with no score before them, or none after them, are left out.

    Args:
        scored: in the order of rounds.
        shown: by the client's task.
        began: the first round of each task, from which rounds count.
    """
    found = list[tuple[int, bool]]()
    level: float | None = None
    begun, rounds, wanted, present = 0, 0, 0.0, -1
    waits, moments = False, set(changes(shown))
    for number, task, accuracies in scored:
        new = [step for step in range(present + 1, task + 1) if step in moments]
        if new and level is not None:
            if waits and rounds:
                found.append((rounds, False))
            waits, wanted, begun, rounds = True, level - NEAR, began.get(new[-1], number), 0
        present = max(present, task)
        if task not in accuracies:
            continue
        level, rounds = accuracies[task], number - begun + 1
        if waits and level >= wanted:
            found.append((rounds, True))
            waits = False
    return [*found, (rounds, False)] if waits and rounds else found


def detections(alarms: Collection[int], shown: Sequence[object]) -> tuple[list[int], int, int, int]:
    """Return what the alarms of a client, by task, say against the truth.

    The first alarm at or after a change, and before the next one, detects it. An alarm at a task
    that shows what the one before did is false, unless it detects a change late.

    Returns:
        Delay of each detection in tasks, changes that no alarm detects, false alarms, and tasks
        with one before them at which nothing changed.
    """
    delays, missed, false = list[int](), 0, 0
    moments, since = set(changes(shown)), None
    for task in range(1, len(shown)):
        if task in moments:
            missed += since is not None
            since = task
        if task in alarms and since is not None:
            delays.append(task - since)
            since = None
        elif task in alarms and task not in moments:
            false += 1
    missed += since is not None
    return delays, missed, false, len(shown) - 1 - len(moments)


def transfer_by_domain(
    scored: Sequence[Scored], domains: Sequence[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return what a client forgot, and its backward transfer, by domain; none of its present one.

    The accuracy on a domain is the mean over its tasks. It counts after the last score of each
    present task. Forgetting is the best earlier one minus the last, backward transfer the last one
    minus that of the end of the last task that showed the domain.
    """
    ends: dict[int, dict[int, float]] = {}
    for _, task, accuracies in scored:
        by_domain: dict[int, list[float]] = {}
        for other, accuracy in accuracies.items():
            if other <= task:
                by_domain.setdefault(domains[other], []).append(accuracy)
        ends[task] = {domain: fmean(found) for domain, found in by_domain.items()}
    if not ends:
        return {}, {}
    last = max(ends)
    forgotten, transfer = dict[int, float](), dict[int, float]()
    for domain, now in ends[last].items():
        shown = [task for task in ends if domains[task] == domain and domain in ends[task]]
        best = [ends[task][domain] for task in ends if task < last and domain in ends[task]]
        if domain == domains[last] or not shown or not best:
            continue
        forgotten[domain] = max(best) - now
        transfer[domain] = now - ends[max(shown)][domain]
    return forgotten, transfer
