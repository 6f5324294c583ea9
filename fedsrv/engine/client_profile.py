"""The server's knowledge of clients' data: the descriptions they give when they join."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationError
from torch import Tensor

from fedmodels.console.printable import printable
from fedmodels.errors import PayloadError
from fedmodels.facts.data_description import ClientFile, ProblemFile, first_fault
from fedmodels.facts.run_classes import RunClasses
from fedmodels.tensors.bundle import ClientId, Problem

MAX_LETTERS = 60
"""Limit of the name of a data set."""
MAX_NAMED = 5
"""Clients named in a line."""
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
    counted: Literal["", "rounded", "none"] = ""
    """How it counts its examples; empty for exactly."""
    name: str = ""
    """What pages call the client; empty where its number is enough."""
    again: Mapping[int, int] = field(default_factory=dict)
    """How many examples of the sources of tasks earlier tasks have, of tasks with some."""
    set_aside: Mapping[int, str] = field(default_factory=dict)
    """The tasks that an open run passes over, and why; an empty text where nobody said it."""

    unusual: Mapping[int, str] = field(default_factory=dict)
    """In which ways tasks are not like earlier ones, of tasks of which the client says it."""

    drifted: Mapping[int, str] = field(default_factory=dict)
    """What had moved in the inputs that the client's live model was asked, before a task came."""

    digests: Mapping[int, str] = field(default_factory=dict)
    """What tells the content of tasks apart, of tasks that were added at the site."""

    @property
    def num_tasks(self) -> int:
        """Return how many tasks the client has."""
        return len(self.train)

    def given(self, task: int, accumulates: bool = False) -> npt.NDArray[np.int64]:
        """Return what the client trains on in a task, (K,); nothing if it does not have the task.

        Args:
            task: from 0.
            accumulates: whether that is the data of all tasks up to this one.
        """
        if task >= self.num_tasks:
            return np.zeros(self.problem.num_classes, dtype=np.int64)
        first = 0 if accumulates else task
        return np.asarray(self.train[first : task + 1].sum(0), dtype=np.int64)

    def labels(self, task: int, accumulates: bool = False) -> tuple[int, ...]:
        """Return the classes the client trains on in a task; none if it does not have the task."""
        return tuple(int(c) for c in np.flatnonzero(self.given(task, accumulates)))

    def met(self, tasks: int) -> tuple[int, ...]:
        """Return the classes the client has training examples of in its first tasks."""
        return tuple(int(c) for c in np.flatnonzero(self.train[:tasks].sum(0)))

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the names of the classes in label order; numbers where the client states none."""
        return self.class_names or tuple(map(str, range(self.problem.num_classes)))

    @property
    def num_again(self) -> int:
        """Return how many examples of its tasks' sources earlier tasks have."""
        return sum(count for task, count in self.again.items() if task < self.num_tasks)

    @property
    def brought(self) -> tuple[str, ...]:
        """Return the names of the classes that the client brings to an open run, in label order.

        Those that tasks have alone that are set aside are not among them.
        """
        if not self.set_aside:
            return self.classes
        out = [*self.set_aside]
        counts = self.train + self.test
        gone, left = counts[out].sum(0), np.delete(counts, out, 0).sum(0)
        return tuple(name for k, name in enumerate(self.classes) if left[k] or not gone[k])

    def within(self, tasks: int, classes: RunClasses) -> Profile:
        """Return the description of the first tasks alone, in the order of the run's classes.

        Args:
            tasks: how many the run has begun.
            classes: those of the run; they hold every class of these tasks.
        """
        problem = Problem(self.problem.input_shape, len(classes.names))
        labels = classes.labels
        own = [n for n, name in enumerate(self.classes) if name in labels]
        places = [labels[self.classes[n]] for n in own]
        tables = []
        for counts in (self.train[:tasks], self.test[:tasks]):
            table = np.zeros((len(counts), len(classes.names)), dtype=np.int64)
            np.add.at(table.T, places, counts[:, own].T)
            tables.append(table)
        names = classes.names if self.class_names or classes.changes else ()
        train, test = tables
        return replace(self, problem=problem, train=train, test=test, class_names=names)

    def without(self, tasks: Collection[int], why: str) -> Profile:
        """Return the description in which tasks have no examples, and are not scored."""
        out = [task for task in sorted(tasks) if task < self.num_tasks]
        if not out:
            return self
        train, test = self.train.copy(), self.test.copy()
        train[out], test[out] = 0, 0
        aside = {**self.set_aside, **dict.fromkeys(out, why)}
        return replace(self, train=train, test=test, set_aside=aside)

    @staticmethod
    def parse(client: ClientId, text: str) -> Profile:
        """Read a ``client.json``; PayloadError if it is malformed, or of another format."""
        try:
            said = ClientFile.model_validate_json(text)
        except ValidationError as error:
            fault = first_fault(error)
        else:
            fault = "" if "format" in said.model_fields_set else "format: Field required"
        if fault:
            raise PayloadError(f"client {client}: client.json is malformed: {fault}")
        return replace(
            _shared(said.model_dump_json(exclude={"tasks", "name", "recipe", "counted"})),
            name=printable(said.name),
            counted=said.counted,
            train=_table([task.train for task in said.tasks], said.problem),
            test=_table([task.test for task in said.tasks], said.problem),
            again={n: t.again for n, t in enumerate(said.tasks) if t.again},
            unusual={n: printable(t.unusual) for n, t in enumerate(said.tasks) if t.unusual},
            drifted={n: printable(t.drifted) for n, t in enumerate(said.tasks) if t.drifted},
            digests={n: t.digest for n, t in enumerate(said.tasks) if t.digest},
            set_aside={n: printable(t.why) for n, t in enumerate(said.tasks) if t.set_aside},
        )


@lru_cache(maxsize=2)  # clients of a partition follow each other; a liar has no more than two kept
def _shared(text: str) -> Profile:
    """Return the profile of a checked description without its tasks; clients share its values."""
    said = ProblemFile.model_validate_json(text)
    low, high = map(torch.from_numpy, said.limits())
    dataset = printable(said.dataset[:MAX_LETTERS])
    nothing = _table([], said.problem)
    return Profile(
        said.problem, nothing, nothing, (low, high), dataset, said.class_names, said.partition
    )


def _table(rows: Sequence[Sequence[int]], problem: Problem) -> CountTable:
    """Return the examples of each task and class (T, K)."""
    table = np.empty((len(rows), problem.num_classes), dtype=np.int64)
    for counts, row in zip(table, rows, strict=True):
        counts[:] = row
    return table


def untrained(profiles: Mapping[int, Profile]) -> str:
    """Return a line on the clients that have no training example; empty where all have some."""
    found = [client for client, profile in profiles.items() if not profile.train.any()]
    if not found:
        return ""
    return (
        f"no training example at {clients_text(found)}: if that is not meant, look with fedcli "
        "check DIR"
    )


def clients_text(clients: Sequence[object], most: int = MAX_NAMED) -> str:
    """Return clients for a line: the first of them, and how many more there are."""
    more = f" and {len(clients) - most} more" if len(clients) > most else ""
    named = ", ".join(map(str, clients[:most]))
    return f"client{'s' if len(clients) > 1 else ''} {named}{more}"


def common_limits(profiles: Iterable[Profile]) -> tuple[Tensor, Tensor]:
    """Return the median over clients of the lowest and the highest input values."""
    low, high = (
        np.median(np.stack(np.broadcast_arrays(*edges)), axis=0).astype(np.float32)
        for edges in zip(*(profile.limits for profile in profiles), strict=True)
    )
    return torch.from_numpy(low), torch.from_numpy(high)


def accuracy_of_guesses(profiles: Iterable[Profile]) -> dict[str, float]:
    """Return the accuracy of answers that look at no example; none where nobody has test data.

    Returns:
        ``chance``: every class equally often. ``own``: each client answers what is most frequent
        among its training examples; mean over clients on their own test data, as ``a_loc``.
        ``all``: all answer what is most frequent among everyone's, as ``a_glo``. Of classes that
        are equally frequent, the first one.
    """
    tested = [p for p in profiles if p.test.any()]
    if not tested:
        return {}
    trained = np.array([p.train.sum(0) for p in tested])  # (clients, K)
    test = np.array([p.test.sum(0) for p in tested])
    shares = test / test.sum(1, keepdims=True)
    own = shares[np.arange(len(tested)), trained.argmax(1)]
    of_all = shares[:, trained.sum(0).argmax()]
    return {"chance": 1 / test.shape[1], "own": float(own.mean()), "all": float(of_all.mean())}
