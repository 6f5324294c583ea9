"""The clients that a run knows, their descriptions, and the groups of classes that follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedmodels.errors import RunFailed
from fedmodels.numerics.metrics import frequency_groups
from fedsrv.engine.client_profile import Profile, common_limits
from fedsrv.engine.schedule import Step
from fedsrv.state.store import Store

log = logging.getLogger(__name__)


class Roster:
    """The known clients; all who hold the roster see a client that is added late."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.profiles: dict[int, Profile] = {}
        """Descriptions by id, ascending."""
        self.groups: dict[str, list[int]] = {}
        """Classes by name, such as ``minority``."""
        self.limits: tuple[Tensor, Tensor]
        """Black and white after normalisation, as most clients have them: (C,) each."""

    def add(self, descriptions: Mapping[int, str]) -> None:
        """Add and store clients' descriptions; known clients stay."""
        known = {**self._store.profiles(), **descriptions}
        for client, text in known.items():
            self._store.add_profile(client, text)
        parsed = {c: Profile.parse(c, text) for c, text in sorted(known.items())}
        self.profiles.clear()
        self.profiles.update(parsed)
        examples = np.sum([p.train.sum(axis=0) for p in parsed.values()], axis=0)
        self.limits = common_limits(parsed.values())
        self.groups.update(frequency_groups(examples))
        self._store.describe(
            {
                "classes": next((p.class_names for p in parsed.values() if p.class_names), ()),
                "examples": examples.tolist(),
                "rare": self.groups["minority"],
                "clients": {c: p.name for c, p in parsed.items() if p.name},
            }
        )

    def tasks(self, clients: int) -> dict[int, int]:
        """Return the number of tasks of each client, as fixed when the run began.

        An unknown client counts as one with the most tasks. Where clients bring data of their own
        and ``min_clients`` is given, tasks that fewer clients have are left out: nobody is a cohort
        alone by saying that its stream is longer.
        """
        met = {c: p.num_tasks for c, p in self.profiles.items()}
        if least := self._least_for_a_task():
            most = sorted(met.values(), reverse=True)[min(least, len(met)) - 1]
            longer = [str(c) for c, tasks in met.items() if tasks > most]
            if longer:
                log.warning(
                    "clients %s announce more than %d tasks; fewer than min_clients = %d clients "
                    "have the tasks after those, so the run leaves these tasks out",
                    ", ".join(longer), most, least,
                )  # fmt: skip
            met = {c: min(tasks, most) for c, tasks in met.items()}
        absent = dict.fromkeys(range(clients), max(met.values()))
        return self._store.fixed("tasks", {**absent, **met})

    def _least_for_a_task(self) -> int | None:
        """Return how many clients must have a task; None if the config itself deals tasks out."""
        experiment = self._store.experiment
        return experiment.server.min_clients if experiment.scenario is None else None

    def weights(self) -> dict[int, int] | None:
        """Return each client's number of training examples, or None where all count alike.

        The numbers are fixed when the run begins.

        An unknown client counts as one with the mean number.
        """
        schedule = self._store.experiment.schedule
        if schedule.sampling != "weighted":
            return None
        met = {c: int(p.train.sum()) for c, p in self.profiles.items()}
        absent = dict.fromkeys(range(schedule.clients), sum(met.values()) // len(met))
        return self._store.fixed("examples", {**absent, **met})

    def ordered(self, step: Step) -> tuple[int, ...]:
        """Return the clients that get orders at a step.

        With ``over_select``, a replay asks the clients whose uploads counted the first time.
        """
        chosen = self._store.experiment.schedule.over_select > 0
        undone = self._store.record(step.interaction) if chosen else None
        return self.cohort_of(step) if undone is None else tuple(undone["cohort"])

    def cohort_of(self, step: Step) -> tuple[int, ...]:
        """Return the known clients of a step that have its task.

        Raises:
            RunFailed: no known client of the step has it.
        """
        known = self.profiles
        found = tuple(c for c in step.cohort if c in known and known[c].num_tasks > step.task)
        if not found:
            where = f"interaction {step.interaction + 1}"
            raise RunFailed(f"{where}: no known client has task {step.task}")
        return found
