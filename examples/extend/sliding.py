"""A scenario: a window slides over the classes, with a different start for each client.

``width`` is the number of classes of a task; each task drops one class and adds one.

    fedcli partition run.toml --out data --set scenario.kind=examples/extend/sliding.py:deal --set scenario.tasks=3
"""  # noqa: E501

import numpy as np

from fedtide import CutInput


def deal(given: CutInput, width: int = 2) -> list[list[np.ndarray]]:
    """Return the training examples of each client and task; its tests follow its classes."""
    holders = [[] for _ in range(given.num_classes)]
    for client, tasks in enumerate(given.tasks):
        for task in range(tasks):
            first = client * given.num_classes // len(given.tasks) + task
            for label in range(first, first + width):
                holders[label % given.num_classes].append((client, task))
    dealt = [[[] for _ in range(tasks)] for tasks in given.tasks]
    for label, pairs in enumerate(holders):
        if not pairs:
            continue
        members = given.rng("clients", label).permutation(np.flatnonzero(given.train == label))
        for (client, task), piece in zip(pairs, np.array_split(members, len(pairs)), strict=True):
            dealt[client][task].append(piece)
    return [[np.concatenate(pieces) for pieces in tasks] for tasks in dealt]
