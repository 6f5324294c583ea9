"""Clients of one process that train at the same time (``[training] together``)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fedcli.runtime.client_part import ClientPart, Training
from fedcli.runtime.worker import Result, Task
from fedmodels.training.stack import fit_together


class Together(ClientPart):
    """Does the orders of several clients in one step, where a host has some."""

    @staticmethod
    def at_once(tasks: Sequence[Task]) -> list[Result]:
        """Train the clients of several orders at the same time."""
        return execute_together(tasks)


def execute_together(tasks: Sequence[Task]) -> list[Result]:
    """Train the clients of several orders of one interaction at the same time.

    A client that cannot begin or end fails alone; an error in the common steps fails all. Orders
    that were abandoned have no result.
    """
    found: list[Result | None] = []
    begun: list[tuple[Task, Training]] = []
    for place, task in enumerate(tasks):
        try:
            half = task.worker.begin(task.order, task.payload, place)
            if isinstance(half, Result):
                found.append(half)
                continue
            half.begin_apart()
            begun.append((task, half))
        except Exception as error:
            found.append(task.worker.failed(task.order, error))
    if begun:
        found += _trained(begun)
    return [result for result in found if result is not None]


def _trained(begun: Sequence[tuple[Task, Training]]) -> list[Result | None]:
    start = time.monotonic()
    try:
        losses = fit_together([half for _, half in begun])
    except Exception as error:
        return [task.worker.failed(task.order, error) for task, _ in begun]
    each = (time.monotonic() - start) / len(begun)
    return [_ended(*one, loss, each) for one, loss in zip(begun, losses, strict=True)]


def _ended(task: Task, half: Training, loss: float, seconds: float) -> Result | None:
    try:
        return task.worker.end(half, half.end_apart(loss), seconds)
    except Exception as error:
        return task.worker.failed(task.order, error)
