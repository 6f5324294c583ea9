"""The task stream of one client: the current task's data, and nothing of the past.

Training data of a task exist only while that task is open. Whoever asks for those of another task
gets an error, so a method cannot see old data even by mistake. A reading of the scenario counts
those of earlier tasks among a task's own. Test data of every task met so far stay, since they only
measure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcli.data.arrays import IntArray, content_hashes
from fedcli.data.store.client_data import ClientData, GlobalTest
from fedmodels.config.combinations import part_at
from fedmodels.errors import DataError
from fedmodels.facts.data_description import Normaliser, ProblemFile

if TYPE_CHECKING:
    from fedcli.data.store.validation import Validation
    from fedmodels.problems.targets import Targets

Examples = tuple[Tensor, Tensor]
"""Inputs (n, *input_shape) float32, normalised; labels (n,) int64, or targets (n, T) float32."""


class TaskStream:
    """What a client may see of its own data at this moment."""

    def __init__(
        self,
        data: ClientData,
        device: torch.device | str = "cpu",
        *,
        keep_history: bool = False,
        accumulates: bool = False,
        validation: Validation | None = None,
    ) -> None:
        """Start before the first task.

        ``keep_history`` allows :meth:`train_up_to` (Centralized on a client's own history). With
        ``accumulates``, a reading of the scenario, a task's training data are those of all tasks up
        to it.
        """
        self.data = data
        self.device = torch.device(device)
        self.keep_history, self.accumulates = keep_history, accumulates
        self.kept = validation
        self.set_aside: Collection[int] = frozenset()
        """Tasks that the run passes over."""
        self.task: int | None = None
        """The open task."""
        self.num_seen = 0
        """Tasks met so far: all up to the last one ever opened."""
        self.read: dict[int, int] = {}
        """Training examples by task that were read since the task was opened."""
        self._parts: dict[int, int] = {}
        """Of how many examples of which tasks the training data of the open task are."""
        self._train: dict[int, Examples] = {}
        self._test: dict[int, Examples] = {}
        self._validation: dict[int, Examples] = {}
        self._contents: dict[int, NDArray[np.uint64]] = {}
        self._global_test: Examples | None = None

    def open(self, task: int) -> None:
        """Open a task, and free the training data of every other; DataError if there is no such."""
        if not 0 <= task < self.data.num_tasks:
            raise DataError(
                f"{self.data.directory} has no task {task}: it has {self.data.num_tasks}"
            )
        if task != self.task:
            self._train.clear()
            self._contents.clear()
        self.task, self.read = task, {}
        self.num_seen = max(self.num_seen, task + 1)

    def meet(self, tasks: int, first: int = 0) -> None:
        """Allow scoring on the test data of the first ``tasks`` tasks, trained on or not.

        Those before ``first`` are scored no more, and leave the memory.
        """
        self.num_seen = max(self.num_seen, min(tasks, self.data.num_tasks))
        for held in (self._test, self._validation):
            for task in [task for task in held if task < first]:
                del held[task]

    def scored(self, tasks: int, first: int) -> Iterator[tuple[int, Examples, Examples | None]]:
        """Yield each task from ``first`` to before ``tasks``: its test data and what is kept of it.

        :meth:`meet` says what becomes of others.
        """
        self.meet(tasks, first)
        for task in self.counted(first, min(tasks, self.data.num_tasks)):
            yield task, self.test(task), self.validation(task)

    def pass_over(self, tasks: Iterable[int]) -> None:
        """Take which tasks are set aside; nothing of them stays in memory."""
        if (out := frozenset(tasks)) != self.set_aside:
            self.set_aside = out
            self.close()

    def counted(self, first: int, end: int) -> Iterator[int]:
        """Yield the tasks from a first one to before an end that count: none that is set aside."""
        return (task for task in range(first, end) if task not in self.set_aside)

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that are in memory."""
        found = [*self._train.values(), *self._test.values(), *self._validation.values()]
        found += [self._global_test] if self._global_test else []
        return sum(tensor.nbytes for examples in found for tensor in examples)

    def close(self) -> None:
        """Free everything; no task is open afterwards."""
        self.task = None
        self._train.clear()
        self._contents.clear()
        self._test.clear()
        self._validation.clear()
        self._global_test = None

    def train(self, task: int) -> Examples:
        """Return the training data of the open task; raise DataError if ``task`` is another."""
        if task != self.task:
            raise DataError(self._gone(task))
        if task not in self._train:
            tasks = self._each_up_to(task) if self.accumulates else {task: self._of(task)}
            self._train[task] = _joined(tasks)
            self._parts = {each: len(y) for each, (_, y) in tasks.items()}
        self.read |= self._parts
        return self._train[task]

    def sessions(self, task: int) -> Tensor | None:
        """Return the session (n,) of each of the training examples of ``train``; None if unnamed.

        Examples of several tasks together have none.
        """
        found = None if self.accumulates else self.data.wholes(task)
        if found is not None and self.kept is not None:
            _, y = self.data.arrays(task, "train")
            found = found[self.kept.trains(self.data, task, y)]
        return None if found is None else torch.from_numpy(found)

    def train_up_to(self, task: int) -> Examples:
        """Return the training data of all tasks up to the open one, in order.

        Raises:
            DataError: the stream keeps no history, or ``task`` is not the open one.
        """
        return _joined(self.train_each(task))

    def train_each(self, task: int) -> dict[int, Examples]:
        """Return what :meth:`train_up_to` does by task, without tasks that the run passes over."""
        if not self.keep_history or task != self.task:
            raise DataError(self._gone(task))
        found = self._each_up_to(task)
        self.read |= {each: len(y) for each, (_, y) in found.items()}
        return found

    def contents(self, task: int, *, up_to: bool = False) -> NDArray[np.uint64]:
        """Return a hash of the content of each input of ``train`` or of ``train_up_to``, (n,)."""
        found, last = [], task
        for task in self.counted(0, last + 1) if self.accumulates or up_to else [last]:
            if task not in self._contents:
                x, y = self.data.arrays(task, "train")
                if self.kept is not None:
                    x = x[self.kept.trains(self.data, task, y)]
                self._contents[task] = content_hashes(x)
            found.append(self._contents[task])
        return np.concatenate(found) if len(found) > 1 else found[0]

    def _each_up_to(self, task: int) -> dict[int, Examples]:
        return {earlier: self._of(earlier) for earlier in self.counted(0, task + 1)}

    def _of(self, task: int) -> Examples:
        x, y = self.data.arrays(task, "train")
        if self.kept is None:
            return self._tensors(x, y)
        trains = self.kept.trains(self.data, task, y)
        return self._tensors(x[trains], y[trains])

    def validation(self, task: int) -> Examples | None:
        """Return what is kept of the training data of a task met so far; None if nothing is.

        Raises:
            DataError: the task was not met yet.
        """
        if self.kept is None:
            return None
        if not 0 <= task < self.num_seen:
            raise DataError(f"validation data of task {task} were asked for before it was met")
        if task not in self._validation:
            if (found := self.kept.examples(self.data, task)) is None:
                return None
            self._validation[task] = self._tensors(*found)
        return self._validation[task]

    def test(self, task: int) -> Examples:
        """Return the test data of a task; raise DataError if it was not met yet."""
        if not 0 <= task < self.num_seen:
            raise DataError(f"test data of task {task} were asked for before it was met")
        if task not in self._test:
            self._test[task] = self._tensors(*self.data.arrays(task, "test"))
        return self._test[task]

    def global_test(self) -> Examples | None:
        """Return the global test set; None where there is none: real participants have none."""
        if self._global_test is None:
            found = self.data.global_test()
            if found is not None:
                self._global_test = global_test_tensors(found, self.device)
        return self._global_test

    def limits(self) -> tuple[Tensor, Tensor]:
        """Return the inputs that stand for black and for white, (C,) or (1,) each."""
        low, high = self.data.file.limits()
        return torch.from_numpy(low), torch.from_numpy(high)

    def _gone(self, task: int) -> str:
        """Return why training data cannot be read."""
        opened = "no task is open" if self.task is None else f"task {self.task} is open"
        return f"training data of task {task} are out of reach: {opened}, and old data are gone"

    def _tensors(self, x: NDArray[Any], y: IntArray) -> Examples:
        return _tensors(x, self.data.merged(y), self.data.file, self.device)


def _joined(parts: Mapping[int, Examples]) -> Examples:
    """Return the examples of several tasks, in order."""
    if len(parts) == 1:
        return next(iter(parts.values()))
    return torch.cat([x for x, _ in parts.values()]), torch.cat([y for _, y in parts.values()])


def global_test_tensors(found: GlobalTest, device: torch.device | str = "cpu") -> Examples:
    """Return the global test set as tensors, normalised by its own description."""
    return _tensors(found.x, found.y, found.problem, torch.device(device))


def _tensors(x: NDArray[Any], y: NDArray[Any], file: ProblemFile, device: torch.device) -> Examples:
    """Return a normalised copy, which keeps no part of the memory-mapped file open.

    Raises:
        DataError: there are targets, and the description of the data names none.
    """
    inputs = torch.from_numpy(np.ascontiguousarray(Normaliser.of(file)(x)))
    labels = torch.from_numpy(np.array(y) if y.ndim == 1 else learned(y, file.transform))
    return inputs.to(device), labels.to(device)


def learned(y: NDArray[Any], transform: Mapping[str, Any] | None) -> NDArray[np.float32]:
    """Return targets (n, T) of files as they are learned.

    Raises:
        DataError: the transform of the files does not name these targets.
    """
    targets: Targets | None = part_at("fedmodels.problems.targets:targets_in")(transform, "data")
    if targets is None or len(targets.names) != y.shape[1]:
        raise DataError(
            f"the data hold {y.shape[1]} targets, and the columns of their description name others"
        )
    return targets.learned(y)
