"""What the server knows of its clients' data: the descriptions they give when they join."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.types import ClientId, Problem

FORMAT = 1
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Profile:
    """One client's description: the problem it has, and how many examples per task and class."""

    problem: Problem
    train: Counts  # (T, K)
    test: Counts  # (T, K)
    limits: tuple[Tensor, Tensor]
    """What black and white of each channel are as inputs: (C,) each, or (1,) for all channels."""

    @property
    def num_tasks(self) -> int:
        """Return how many tasks the client has."""
        return len(self.train)

    def labels(self, task: int) -> tuple[int, ...]:
        """Return the classes the client trains on in a task; none in one it does not have."""
        here = self.train[task] if task < self.num_tasks else np.zeros(0)
        return tuple(int(c) for c in np.flatnonzero(here))

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
            if min(problem.input_shape, default=0) < 1 or not 1 <= problem.num_classes <= 100_000:
                raise ValueError("an impossible problem")
            tasks = facts.get("tasks", [])
            train, test = (_counts(tasks, part, problem) for part in ("train", "test"))
            limits = _limits(facts, problem)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise PayloadError(f"client {client}: client.json is malformed: {error!r}") from None
        return cls(problem, train, test, limits)


def _counts(tasks: list[dict[str, list[int]]], part: str, problem: Problem) -> Counts:
    """Return the examples of each task and class (T, K)."""
    rows = [task[part] for task in tasks]
    for row in rows:
        if len(row) != problem.num_classes:
            raise ValueError(f"{part} counts of {len(row)} classes")
        if not all(type(n) is int and 0 <= n < 2**40 for n in row):
            raise ValueError(f"{part} counts that are none")
    return np.array(rows, dtype=np.int64).reshape(len(rows), problem.num_classes)


def _limits(facts: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor]:
    """Return what raw values 0 and ``scale`` are after normalisation, of each channel or of all."""
    channels = problem.input_shape[0 if len(problem.input_shape) == 3 else -1]
    mean = np.array(facts.get("mean", [0.0]), dtype=np.float32)
    std = np.array(facts.get("std", [1.0]), dtype=np.float32)
    if not (mean.shape in ((1,), (channels,)) and std.shape in ((1,), (channels,))):
        raise ValueError("a normalisation of other channels")
    with np.errstate(all="ignore"):
        low, high = -mean / std, (1 - mean) / std
    if not (np.isfinite([low, high]).all() and (std > 0).all()):
        raise ValueError("a normalisation that is none")
    return torch.from_numpy(low), torch.from_numpy(high)


def common_limits(profiles: Iterable[Profile]) -> tuple[Tensor, Tensor]:
    """Return the median of each limit: one client of many does not say what black is."""
    low, high = (
        np.median(np.stack(np.broadcast_arrays(*edges)), axis=0).astype(np.float32)
        for edges in zip(*(profile.limits for profile in profiles), strict=True)
    )
    return torch.from_numpy(low), torch.from_numpy(high)


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
