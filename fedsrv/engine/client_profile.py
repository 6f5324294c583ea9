"""The server's knowledge of clients' data: the descriptions they give when they join."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.printable import printable
from fedmodels.tensors.bundle import ClientId, Problem

FORMAT = 1
MOST_AXES, MOST_VALUES, MOST_CLASSES = 4, 2**24, 100_000
"""Limits of an example's axes and values, and of classes: these numbers size nets and arrays."""
MOST_LETTERS = 60
"""Limit of the name of a data set."""
MOST_EXAMPLES = 2**31
"""Limit of one class in one task."""
CountTable = npt.NDArray[np.int64]
"""Examples by task and class, (T, K)."""


@dataclass(frozen=True)
class Profile:
    """One client's description: the problem it has, and how many examples per task and class."""

    problem: Problem
    train: CountTable  # (T, K)
    test: CountTable  # (T, K)
    limits: tuple[Tensor, Tensor]
    """Black and white of each channel after normalisation: (C,) each, or (1,) for all channels."""
    dataset: str = "own"
    """Name of the client's data set."""
    class_names: tuple[str, ...] = ()
    """Names in label order; empty where the client states none."""
    origin: Mapping[str, Any] | None = None
    """Config that the data were dealt out by; None for a client's own data."""

    @property
    def num_tasks(self) -> int:
        """Return how many tasks the client has."""
        return len(self.train)

    def labels(self, task: int) -> tuple[int, ...]:
        """Return the classes the client trains on in a task; empty if it does not have the task."""
        here = self.train[task] if task < self.num_tasks else np.zeros(0)
        return tuple(int(c) for c in np.flatnonzero(here))

    @classmethod
    def parse(cls, client: ClientId, text: str) -> Profile:
        """Read a ``client.json``.

        Raises:
            PayloadError: it is malformed, or has another format version.
        """
        try:
            facts = json.loads(text)
            if facts["format"] != FORMAT:
                raise PayloadError(
                    f"client {client}: client.json has format {facts['format']}, expected {FORMAT}"
                )
            problem = Problem(tuple(facts["input_shape"]), facts["num_classes"])
            if not _is_possible(problem):
                raise ValueError("input_shape or num_classes is beyond its limits")
            tasks = facts.get("tasks", [])
            train, test = (_counts(tasks, part, problem) for part in ("train", "test"))
            limits = _limits(facts, problem)
            dataset, origin = _source(facts)
            names = _names(facts, problem)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise PayloadError(f"client {client}: client.json is malformed: {error!r}") from None
        return cls(problem, train, test, limits, dataset, names, origin)


def _source(facts: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """Return what the data are called, and what they were dealt out by."""
    dataset, origin = facts.get("dataset", "own"), facts.get("partition")
    if not isinstance(dataset, str) or not (origin is None or isinstance(origin, dict)):
        raise ValueError("dataset must be a text, and partition a table")
    return printable(dataset[:MOST_LETTERS]), origin


def _names(facts: Mapping[str, Any], problem: Problem) -> tuple[str, ...]:
    """Return the names of the classes; nothing if the client states none."""
    names = tuple(facts.get("class_names", ()))
    if len(names) not in (0, problem.num_classes) or not all(isinstance(n, str) for n in names):
        raise ValueError("class_names must be one text for each class")
    return names


def _is_possible(problem: Problem) -> bool:
    """Tell whether a problem consists of whole numbers within the limits."""
    numbers = (*problem.input_shape, problem.num_classes)
    return (
        all(type(n) is int and n >= 1 for n in numbers)
        and 1 <= len(problem.input_shape) <= MOST_AXES
        and math.prod(problem.input_shape) <= MOST_VALUES
        and problem.num_classes <= MOST_CLASSES
    )


def _counts(tasks: list[dict[str, list[int]]], part: str, problem: Problem) -> CountTable:
    """Return the examples of each task and class (T, K)."""
    rows = [task[part] for task in tasks]
    for row in rows:
        if len(row) != problem.num_classes:
            raise ValueError(f"{part} counts {len(row)} classes")
        if not all(type(n) is int and 0 <= n < MOST_EXAMPLES for n in row):
            raise ValueError(f"{part} counts must be whole numbers from 0 to {MOST_EXAMPLES - 1}")
    return np.array(rows, dtype=np.int64).reshape(len(rows), problem.num_classes)


def _limits(facts: Mapping[str, Any], problem: Problem) -> tuple[Tensor, Tensor]:
    """Return raw values 0 and ``scale`` after normalisation, for each channel or for all."""
    channels = problem.input_shape[0 if len(problem.input_shape) == 3 else -1]
    with np.errstate(over="ignore"):  # a number beyond float32 becomes infinite, and is refused
        mean = np.array(facts.get("mean", [0.0]), dtype=np.float32)
        std = np.array(facts.get("std", [1.0]), dtype=np.float32)
    if not (mean.shape in ((1,), (channels,)) and std.shape in ((1,), (channels,))):
        raise ValueError(f"mean and std must have 1 or {channels} values")
    with np.errstate(all="ignore"):
        low, high = -mean / std, (1 - mean) / std
    if not (np.isfinite([low, high]).all() and (std > 0).all()):
        raise ValueError("std must be above 0, and mean / std finite")
    return torch.from_numpy(low), torch.from_numpy(high)


def common_limits(profiles: Iterable[Profile]) -> tuple[Tensor, Tensor]:
    """Return the median of each limit, so that no single client decides what black is."""
    low, high = (
        np.median(np.stack(np.broadcast_arrays(*edges)), axis=0).astype(np.float32)
        for edges in zip(*(profile.limits for profile in profiles), strict=True)
    )
    return torch.from_numpy(low), torch.from_numpy(high)
