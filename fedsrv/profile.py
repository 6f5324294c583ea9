"""What the server knows of its clients' data: the descriptions they give when they join."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedmodels.errors import PayloadError
from fedmodels.types import ClientId, Problem

FORMAT = 1


@dataclass(frozen=True)
class Profile:
    """One client's description: the problem it has, and how many examples per task and class."""

    problem: Problem
    train: npt.NDArray[np.int64]  # (T, K)
    test: npt.NDArray[np.int64]  # (T, K)

    @property
    def num_tasks(self) -> int:
        """Return how many tasks the client has."""
        return len(self.train)

    @classmethod
    def parse(cls, client: ClientId, text: str) -> Profile:
        """Read a ``client.json``.

        Raises:
            PayloadError: it is not one, or of another format version.
        """
        try:
            facts = json.loads(text)
            if facts["format"] != FORMAT:
                raise PayloadError(
                    f"client {client}: client.json has format {facts['format']}, expected {FORMAT}"
                )
            problem = Problem(tuple(map(int, facts["input_shape"])), int(facts["num_classes"]))
            tasks = facts.get("tasks", [])
            shape = (len(tasks), problem.num_classes)
            train = np.array([t["train"] for t in tasks], dtype=np.int64).reshape(shape)
            test = np.array([t["test"] for t in tasks], dtype=np.int64).reshape(shape)
        except (ValueError, KeyError, TypeError) as error:
            raise PayloadError(f"client {client}: client.json is malformed: {error!r}") from None
        if min(problem.input_shape, default=0) < 1 or not 1 <= problem.num_classes <= 100_000:
            raise PayloadError(f"client {client}: client.json states an impossible problem")
        return cls(problem, train, test)


class Admission:
    """Checks that everyone who joins has the run's problem; the first to join states it."""

    def __init__(self, known: Mapping[int, str]) -> None:
        """Start from the descriptions of an earlier part of the run, if there are any."""
        self._lock = threading.Lock()
        self._known = dict(known)
        self._problem: Problem | None = None
        for client, text in known.items():
            self._problem = Profile.parse(client, text).problem

    def check(self, client: ClientId, text: str) -> None:
        """Check a description.

        Raises:
            PayloadError: it states another problem than the run's, or than the client's own before.
        """
        profile = Profile.parse(client, text)
        with self._lock:
            known = self._known.get(client) if isinstance(client, int) else None
            if known is not None and json.loads(known) != json.loads(text):
                raise PayloadError(f"client {client} had other data when it first joined this run")
            if self._problem is None:
                self._problem = profile.problem
            if profile.problem != self._problem:
                raise PayloadError(
                    f"client {client} has inputs {list(profile.problem.input_shape)} and "
                    f"{profile.problem.num_classes} classes; the run has "
                    f"{list(self._problem.input_shape)} and {self._problem.num_classes}"
                )

    @property
    def num_classes(self) -> int:
        """Return the classes of the run's problem; 0 before anybody joined."""
        return self._problem.num_classes if self._problem else 0
