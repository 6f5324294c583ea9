"""A partition in a few files, however many clients it has: examples once, and who holds which.

    DIR/store/problem.json    what all clients share of their descriptions: a :class:`ProblemFile`
    DIR/store/{x,y}.npy       every example: those for training, then those for testing
    DIR/store/indices.npy     (N,) which examples each (client, task) holds, one after the other
    DIR/store/starts.npy      (U, 3) where a pair's training and test indices begin, and their end
    DIR/store/pairs.npy       (C + 1,) the first pair of each client, and U
    DIR/store/group.npy       (n,) what stays whole, of each example for training, if there is any
    DIR/store/people.npy      (g,) key of each such group, where it has a name, and people.key
    DIR/store/whose.npy       (N,) group of each example, for training or for testing, likewise
    DIR/store/moments.npy     (C, 2, c) mean and deviation, where clients have their own
    DIR/store/names.json      the clients' names, where they have some

A client of a store holds what its directory would hold, in the same order, and announces the same
description. So a run has the same digest with either layout. The files are memory-mapped: whoever
opens a client reads the examples of that client alone.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedcli.data.arrays import (
    IntArray,
    Labelled,
    check_examples,
    read_array,
    strata,
)
from fedcli.data.store.client_data import (
    ABOUT,
    PARTS,
    PEOPLE,
    SALT,
    STORE,
    ClientData,
    Part,
)
from fedcli.data.store.people import people_table
from fedmodels.errors import DataError, reason_of
from fedmodels.facts.data_description import (
    ClientFile,
    ProblemFile,
    TaskCounts,
    first_fault,
    read_file,
)
from fedmodels.host.files import check_inside, stamp_of


class PartitionStore:
    """The store of one partition, opened."""

    def __init__(self, root: Path) -> None:
        """Open ``root/store`` and check that its files fit together.

        Raises:
            DataError: a file is missing or damaged.
        """
        self.root, self.place = root, root / STORE
        check_inside(self.place / "problem.json", root)
        self.problem = read_file(self.place / "problem.json", ProblemFile)
        self._x, self._y = self._array("x", mmap=True), self._array("y", mmap=True)
        files = self.place / "x.npy", self.place / "y.npy"
        check_examples(*files, self._x, self._y, self.problem)
        self._indices = self._array("indices", mmap=True)
        self._starts, self._pairs = self._array("starts"), self._array("pairs")
        self._check_indices()

    @classmethod
    def find(cls, root: Path) -> Self | None:
        """Open the store of a partition; None where there is none."""
        return cls(root) if (root / STORE).is_dir() else None

    def __len__(self) -> int:
        """Return how many clients there are."""
        return len(self._pairs) - 1

    @property
    def kind(self) -> np.dtype[Any]:
        """The type of the inputs."""
        return self._x.dtype

    def client(self, client: int) -> StoredClient:
        """Open one client; raise DataError if the partition has no such client."""
        if not 0 <= client < len(self):
            raise DataError(f"{self.place} holds no client {client}: it has 0 to {len(self) - 1}")
        return StoredClient(self, client)

    def description(self, client: int) -> ClientFile:
        """Return what a client announces: the shared fields, its own moments, its counts.

        Raises:
            DataError: ``moments.npy`` holds a mean or deviation that no inputs can have.
        """
        shared = {name: getattr(self.problem, name) for name in self.problem.model_fields_set}
        if self._moments is not None:
            mean, std = self._moments[client].tolist()
            shared |= {"mean": tuple(mean), "std": tuple(std)}
        first, end = self._pairs[client], self._pairs[client + 1]
        tasks = tuple(
            TaskCounts(train=self._counts(pair, "train"), test=self._counts(pair, "test"))
            for pair in range(first, end)
        )
        name = self._names[client] if self._names else ""
        try:
            return ClientFile(**shared, name=name, tasks=tasks)
        except ValidationError as error:  # all else was checked with problem.json
            where = f"{self.place / 'moments.npy'}: client {client}"
            raise DataError(f"{where}: {first_fault(error)}") from None

    def examples(self, client: int, task: int, part: Part) -> Labelled:
        """Return a copy of the raw inputs (n, *input_shape) and labels (n,) of a task."""
        indices = self._held(int(self._pairs[client]) + task, part)
        return self._x[indices], np.asarray(self._y[indices])

    def wholes(self, client: int, task: int) -> IntArray | None:
        """Return the group (n,) of each training example of a task; None without groups.

        Raises:
            DataError: an example has none.
        """
        if not (self.place / "group.npy").exists():
            return None
        found, held = self._array("group"), self._held(int(self._pairs[client]) + task, "train")
        if found.dtype != np.int64 or found.ndim != 1 or held.max(initial=-1) >= len(found):
            raise DataError(f"{self.place / 'group.npy'} does not fit indices.npy")
        return np.array(found[held])

    def people(self, client: int, task: int) -> IntArray | None:
        """Return of each person of a task key, part and number, (k, 3); None where nothing says it.

        Raises:
            DataError: an example has no person.
        """
        if not (self.place / f"{PEOPLE}.npy").exists():
            return None
        keys, whose = self._array(PEOPLE), self._array("whose")
        pair = int(self._pairs[client]) + task
        fits = keys.ndim == whose.ndim == 1 and keys.dtype == whose.dtype == np.int64
        if not fits or len(whose) != len(self._y) or whose.max(initial=-1) >= len(keys):
            raise DataError(f"{self.place / 'people.npy'} does not fit whose.npy")
        return people_table(keys, *(whose[self._held(pair, part)] for part in PARTS))

    @cached_property
    def _moments(self) -> NDArray[np.float64] | None:
        """Mean and deviation of each client, (C, 2, c), where they have their own."""
        if not (self.place / "moments.npy").exists():
            return None
        found = self._array("moments")
        if found.dtype != np.float64 or found.ndim != 3 or found.shape[:2] != (len(self), 2):
            raise DataError(f"{self.place / 'moments.npy'} does not fit pairs.npy")
        return found

    @cached_property
    def _names(self) -> list[str]:
        """The clients' names; empty where they have none."""
        path = self.place / "names.json"
        if not path.exists():
            return []
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} is damaged: {reason_of(error)}") from None
        if not isinstance(found, list) or len(found) != len(self):
            raise DataError(f"{path} does not hold a name for each client")
        return [str(name) for name in found]

    def _held(self, pair: int, part: Part) -> IntArray:
        """Return the indices (n,) of a pair's examples in ``x`` and ``y``."""
        begin = PARTS.index(part)
        return self._indices[self._starts[pair, begin] : self._starts[pair, begin + 1]]

    def _counts(self, pair: int, part: Part) -> tuple[int, ...]:
        """Return how many examples of each class a pair has, (K,)."""
        labels = self._y[self._held(pair, part)]
        return tuple(np.bincount(strata(labels), minlength=self.problem.num_classes).tolist())

    def _array(self, name: str, *, mmap: bool = False) -> NDArray[Any]:
        check_inside(self.place / f"{name}.npy", self.root)
        return read_array(self.place / f"{name}.npy", mmap=mmap)

    def _check_indices(self) -> None:
        """Raise DataError unless all indices are within the files that they point into."""
        starts, pairs, indices = self._starts, self._pairs, self._indices
        shapes_fit = starts.shape[1:] == (3,) and pairs.ndim == 1 and indices.ndim == 1
        if not shapes_fit or {a.dtype for a in (starts, pairs, indices)} != {np.dtype(np.int64)}:
            raise DataError(f"{self.place}: indices, starts and pairs are no store's")
        if len(pairs) < 2 or not _rises(pairs, len(starts)):
            raise DataError(f"{self.place / 'pairs.npy'} does not fit starts.npy")
        if not _rises(starts.ravel(), len(indices)):
            raise DataError(f"{self.place / 'starts.npy'} does not fit indices.npy")
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(self._y):
            raise DataError(f"{self.place / 'indices.npy'} names examples that are not in y.npy")


class StoredClient(ClientData):
    """One client of a store, read as its directory would be.

    Tasks that it got since lie in a directory of its own, behind those of the store.
    """

    def __init__(self, store: PartitionStore, client: int) -> None:
        """Read the client's description, and none of its inputs.

        Raises:
            DataError: the client's own directory does not go on from the store.
        """
        self.store, self.client = store, client
        self.directory = store.root / str(client)
        self.stamp = stamp_of(self.directory / ABOUT)
        self.file = store.description(client)
        self.num_stored = len(self.file.tasks)
        if (about := self.directory / ABOUT).exists():
            check_inside(about, store.root)
            grown = read_file(about, ClientFile)
            if not _goes_on(self.file, grown):
                raise DataError(f"{about} does not continue {store.place}: remove it")
            self.file = grown
        self._begin()

    def _opened_again(self) -> ClientData:
        return StoredClient(self.store, self.client)

    def is_gone(self, task: int, part: Part) -> bool:
        """Tell whether the training data of an earlier task were deleted, which is no fault."""
        return task >= self.num_stored and super().is_gone(task, part)

    def _place(self, task: int, part: Part) -> Path:
        if task >= self.num_stored:
            return super()._place(task, part)
        return self.store.place / "indices.npy"

    def raw(self, task: int, part: Part) -> Labelled:
        """Read and check one part of a task, of the store or added later."""
        if task >= self.num_stored:
            return super().raw(task, part)
        return self.store.examples(self.client, task, part)

    def wholes(self, task: int) -> IntArray | None:
        """Return the group (n,) of each training example; None without groups."""
        if task >= self.num_stored:
            return super().wholes(task)
        return self.store.wholes(self.client, task)

    def people(self, task: int) -> IntArray | None:
        """Return of each person of a task key, part and number, (k, 3); None where nothing says it.

        Raises:
            DataError: the table is damaged.
        """
        if task >= self.num_stored:
            return super().people(task)
        return self.store.people(self.client, task)

    @property
    def salt_place(self) -> Path:
        """The file with which names of people are hashed: that of the store, if it has one."""
        stored = self.store.place / SALT
        return stored if stored.exists() else super().salt_place

    def kind(self) -> np.dtype[Any]:
        """Return the type of the store's inputs."""
        return self.store.kind


def _goes_on(before: ClientFile, grown: ClientFile) -> bool:
    """Tell whether a description has all tasks and classes of an earlier one, and maybe more."""
    tasks = grown.tasks[: len(before.tasks)]
    counts = [(task.train[: before.num_classes], task.test[: before.num_classes]) for task in tasks]
    return (
        before.input_shape == grown.input_shape
        and before.classes == grown.classes[: before.num_classes]
        and counts == [(task.train, task.test) for task in before.tasks]
    )


def _rises(numbers: IntArray, end: int) -> bool:
    """Tell whether numbers go from 0 to ``end`` without a step down."""
    return (
        len(numbers) > 0
        and bool((np.diff(numbers) >= 0).all())
        and (int(numbers[0]), int(numbers[-1])) == (0, end)
    )
