"""Reading a client's directory: what the client announces, and the arrays of its tasks.

    DIR/<id>/client.json                                      :mod:`fedmodels.data_description`
    DIR/<id>/task-K/{train_x,train_y,test_x,test_y}.npy       memory-mapped
    DIR/<id>/task-K/{train,test}/<class>/*.png                or a participant's own images
    DIR/global-test/{problem.json,x.npy,y.npy}                simulations only

Nothing here unpickles anything, and every value is checked before use.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray, check_examples, read_array
from fedcli.data.sets.directory import Labelled, class_folders, class_of, read_class_folders
from fedmodels.data_description import (
    ClientFile,
    Normaliser,
    ProblemFile,
    TaskCounts,
    read_file,
)
from fedmodels.errors import DataError, suggestion
from fedmodels.tensors.bundle import Problem

Described = TypeVar("Described", bound=ProblemFile)
Part = Literal["train", "test"]
PARTS: tuple[Part, Part] = ("train", "test")


@dataclass(frozen=True)
class GlobalTest:
    """The global test set of a simulation."""

    problem: ProblemFile
    x: NDArray[Any]  # (n, *input_shape), memory-mapped
    y: IntArray  # (n,)

    @classmethod
    def find(cls, root: Path) -> GlobalTest | None:
        """Open ``root/global-test``; None where there is none: real participants have none.

        Raises:
            DataError: it is there but damaged.
        """
        place = root / "global-test"
        if not place.is_dir():
            return None
        problem = read_file(place / "problem.json", ProblemFile)
        x, y = read_array(place / "x.npy", mmap=True), read_array(place / "y.npy")
        if "scale" not in problem.model_fields_set:
            problem = scaled(problem, x.dtype == np.uint8, place / "problem.json")
        check_examples(place / "x.npy", place / "y.npy", x, y, problem)
        return cls(problem, x, y)


class ClientData:
    """The directory of one client."""

    def __init__(self, directory: Path) -> None:
        """Open ``directory`` and read its ``client.json``.

        Raises:
            DataError: the directory or its description is missing or wrong.
        """
        if not directory.is_dir():
            raise DataError(f"{directory} is not there: it should be this client's data")
        self.directory = directory
        self.file = read_file(directory / "client.json", ClientFile)
        if "scale" not in self.file.model_fields_set:
            self.file = scaled(self.file, self._is_bytes(), directory / "client.json")
        if "tasks" not in self.file.model_fields_set:
            self.file = self.file.model_copy(update={"tasks": self._counted()})
        self.normaliser = Normaliser.of(self.file)

    @property
    def problem(self) -> Problem:
        """What is learned: input shape and number of classes."""
        return self.file.problem

    @property
    def tasks(self) -> tuple[TaskCounts, ...]:
        """Counts per class of each task."""
        return self.file.tasks

    @property
    def num_tasks(self) -> int:
        """How many tasks this client has."""
        return len(self.tasks)

    def announcement(self) -> str:
        """Return ``client.json`` as it is sent with ``Join``, counts included."""
        return self.file.model_dump_json()

    def arrays(self, task: int, part: Part) -> Labelled:
        """Return raw inputs (n, *input_shape) and labels (n,) of a task.

        Raises:
            DataError: there is no such task, or its files do not hold what they must.
        """
        if not 0 <= task < self.num_tasks:
            raise DataError(f"{self.directory} has no task {task}: it has {self.num_tasks}")
        x, y = self._read(task, part)
        counts = np.bincount(y, minlength=self.file.num_classes).tolist()
        if counts != list(getattr(self.tasks[task], part)):
            raise DataError(
                f"{self._place(task, part)} does not hold the {part} counts that "
                f"client.json gives for task {task}"
            )
        return x, y

    def check(self) -> None:
        """Read and check every task.

        Raises:
            DataError: names the first file that does not hold what it must.
        """
        for task in range(self.num_tasks):
            self.arrays(task, "train")
            self.arrays(task, "test")

    def global_test(self) -> GlobalTest | None:
        """Return the global test set beside this directory, if there is one.

        Raises:
            DataError: it is damaged, or made for another problem.
        """
        found = GlobalTest.find(self.directory.parent)
        if found is not None and (
            found.problem.input_shape != self.file.input_shape
            or found.problem.num_classes != self.file.num_classes
        ):
            raise DataError(f"{self.directory.parent / 'global-test'} is of another problem")
        return found

    def _place(self, task: int, part: Part) -> Path:
        """Return the image folder of a part if there is one, else its label file."""
        folder = self.directory / f"task-{task}" / part
        return folder if folder.is_dir() else folder.with_name(f"{part}_y.npy")

    def _is_bytes(self) -> bool:
        """Tell whether the training inputs of task 0 are uint8; images always are."""
        place = self._place(0, "train")
        inputs = place.with_name("train_x.npy")
        return place.is_dir() or (inputs.exists() and read_array(inputs, True).dtype == np.uint8)

    def _read(self, task: int, part: Part) -> Labelled:
        """Read and check one part of a task, from a folder of images or from arrays."""
        place = self._place(task, part)
        if place.is_dir():
            x, y = self._read_images(place)
            x = x if len(x) else np.empty((0, *self.file.input_shape), dtype=np.uint8)
        else:
            images = [p.name for p in (place.with_name(other) for other in PARTS) if p.is_dir()]
            if images and not place.exists():
                raise DataError(
                    f"{place.with_name(part)} is missing: {images[0]} beside it has a folder of "
                    "images for each class"
                )
            x = read_array(place.with_name(f"{part}_x.npy"), mmap=True)
            y = read_array(place)
        inputs = place.with_name(place.name.replace("_y.npy", "_x.npy"))
        check_examples(inputs, place, x, y, self.file)
        return x, y

    def _read_images(self, place: Path) -> Labelled:
        """Read one folder of images per class.

        Raises:
            DataError: a folder's name is none of ``class_names``; the line says what to write.
        """
        names = list(self.file.class_names)
        folders = class_folders(place)
        found = [path.name for path in folders]
        unnamed = [path.name for path in folders if class_of(path, names) is None]
        strange = [name for name in unnamed if not name.isdecimal()]
        if strange:
            file, known = self.directory / "client.json", ", ".join(names[:20]) or "numbers"
            line = f"{place / strange[0]} names no class; known are {known}"
            if near := suggestion(strange[0], names):
                raise DataError(f"{line}.{near} Rename the directory, or mend {file}")
            wanted = [*names, *strange] if names else found
            raise DataError(
                f'{line}: name every class in {file}, such as "num_classes": {len(wanted)}, '
                f'"class_names": {json.dumps(wanted)}, in the same order at every client'
            )
        return read_class_folders(place, names)

    def _counted(self) -> tuple[TaskCounts, ...]:
        """Count the examples of ``task-0``, ``task-1`` and so on.

        Raises:
            DataError: one is missing, or a task's files do not hold what they must.
        """
        tasks: list[TaskCounts] = []
        while (self.directory / f"task-{len(tasks)}").is_dir():
            labels = [self._read(len(tasks), part)[1] for part in PARTS]
            train, test = (np.bincount(y, minlength=self.file.num_classes) for y in labels)
            tasks.append(TaskCounts(train=tuple(train.tolist()), test=tuple(test.tolist())))
        further = sorted(path.name for path in self.directory.glob("task-*") if path.is_dir())
        if len(further) > len(tasks) or not tasks:
            beside = f", but {further[-1]}" if further else ""
            raise DataError(
                f"{self.directory} holds no task-{len(tasks)}{beside}: tasks are task-0, task-1 …"
            )
        return tuple(tasks)


def scaled(file: Described, is_bytes: bool, path: Path) -> Described:
    """Return a description with the ``scale`` that it leaves out: 255 for uint8 inputs, else 1.

    Raises:
        DataError: inputs are uint8, and the mean exceeds 1: it is not one of ``x / 255``.
    """
    if not is_bytes:
        return file
    if max(file.mean) > 1:
        raise DataError(
            f"{path}: mean is of x / scale, and scale is 255 for uint8 inputs unless given; "
            f'mean = {max(file.mean):g} wants "scale": 1 as well, or has to be divided by 255'
        )
    return file.model_copy(update={"scale": 255.0})
