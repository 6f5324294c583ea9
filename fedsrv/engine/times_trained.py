"""How often each client was asked to train each of its tasks, up to an interaction."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedsrv.engine.schedule import Step

Times = npt.NDArray[np.int64]
"""Orders to train by task, (T,): as many tasks as were ordered, or more."""


class TimesTrained:
    """Counts orders as the steps have them; each step is looked at once, whoever asks."""

    def __init__(self, steps: Sequence[Step]) -> None:
        """Begin with the steps of a run, all of them."""
        self.steps = steps
        self._counted = 0
        """The steps that are counted so far."""
        self._times: dict[int, Times] = {}
        self._lock = threading.Lock()
        """Uploads are checked on several threads."""

    def of(self, client: int, interaction: int) -> Times:
        """Return the orders of a client by task, up to and with those of an interaction."""
        with self._lock:
            self._count_up_to(interaction + 1)
            found = self._times.get(client, _NEVER).copy()
            later = self.steps[interaction + 1 : self._counted]  # an upload that comes late
        for step in later:
            if _takes_part(client, step):
                found[step.task_of(client)] -= 1
        return found

    def grown(self, steps: Sequence[Step]) -> TimesTrained:
        """Return the counts of a run whose steps go on otherwise from some step on."""
        found = TimesTrained(steps)
        with self._lock:
            last = self._counted - 1
            if last < len(steps) and (last < 0 or steps[last] is self.steps[last]):
                found._counted = self._counted
                found._times = {client: times.copy() for client, times in self._times.items()}
        return found

    def _count_up_to(self, end: int) -> None:
        for step in self.steps[self._counted : end]:
            for client in step.cohort:
                task = step.task_of(client)
                times = self._times.get(client, _NEVER)
                if task >= len(times):
                    more = np.zeros(task + 1, dtype=np.int64)  # twice as many: few are moved
                    times = np.concatenate([times, more])
                    self._times[client] = times
                times[task] += 1
        self._counted = max(self._counted, end)


_NEVER = np.zeros(0, dtype=np.int64)


def _takes_part(client: int, step: Step) -> bool:
    place = bisect_left(step.cohort, client)
    return step.cohort[place : place + 1] == (client,)
