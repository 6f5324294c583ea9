"""Reading a client's directory: what the client announces, and the arrays of its tasks.

    DIR/<id>/client.json                                     :mod:`fedmodels.facts.data_description`
    DIR/<id>/task-K/{train_x,train_y,test_x,test_y}.npy       memory-mapped
    DIR/<id>/task-K/{train,test}/<class>/*.png                or a participant's own images
    DIR/global-test/{problem.json,x.npy,y.npy}                simulations only

Nothing here unpickles anything, and every value is checked before use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import (
    IntArray,
    Labelled,
    check_examples,
    ranges_of,
    read_array,
    strata,
)
from fedmodels.config.bounds import CountDetail, digest_of
from fedmodels.config.origin import placeless
from fedmodels.console.printable import printable
from fedmodels.errors import DataError
from fedmodels.facts.data_description import (
    SCALES,
    ClientFile,
    Normaliser,
    ProblemFile,
    TaskCounts,
    read_file,
)
from fedmodels.facts.run_classes import RunClasses
from fedmodels.host.files import Stamp, check_inside, stamp_of, sync_path
from fedmodels.tensors.bundle import Problem

if TYPE_CHECKING:
    from fedcli.data.store.image_folder import ImageFolder

Described = TypeVar("Described", bound=ProblemFile)
Part = Literal["train", "test"]
PARTS: tuple[Part, Part] = ("train", "test")
GROUP = "train_group"
"""The file of the groups that stay whole where training examples are kept for validation."""
PEOPLE, SALT = "people", "people.key"
"""The file of a task that says in which part each person is, and that with which names are hashed
(:mod:`fedcli.data.store.people`)."""
ABOUT, SOURCE = "client.json", "source.json"
"""A client's description, and the file that says what an added task was made of."""
STORE, TABLE = "store", "partition.json"
"""Of a partition: the directory of a store, and the table of who holds what."""

MAX_LETTERS = 60


@dataclass(frozen=True)
class ClassOrder:
    """Which label of a run each label of a client is; a run may have got further classes.

    Labels of a client count through its own list of classes, as ``client.json`` has it. Labels of a
    run count through the run's list. Both lists begin alike in most runs; what comes later may come
    in another order at each client. So classes go by name. A class without a name is called by its
    label.
    """

    names: tuple[str, ...]
    """Names of the client's classes, in its own order."""
    places: IntArray  # (K,) the run's label of each class as it came; -1 where the run lacks it
    classes: RunClasses

    @classmethod
    def own(cls, names: tuple[str, ...]) -> Self:
        """Return the order of a client that has the classes of its run."""
        return cls(names, np.arange(len(names)), RunClasses(names))

    @classmethod
    def of(cls, names: tuple[str, ...], run: RunClasses) -> Self:
        """Return the order of a client in a run, by the names that classes have or had.

        Of the first classes of the run, those that it began with, a number stands for the label.
        """
        known = dict(run.rows)
        for label, (name, first) in enumerate(zip(names, run.first, strict=False)):
            if str(label) in (name, first):
                known.setdefault(name, known[first])
        found = [known.get(name, -1) for name in names]
        return cls(names, np.array(found, dtype=np.int64), run)

    @property
    def run(self) -> tuple[str, ...]:
        """Names of the run's classes, in the run's order."""
        return self.classes.names

    def labels(self, labels: IntArray, where: object) -> IntArray:
        """Return labels (n,) of the client as those of the run; DataError if it lacks a class."""
        if (self.places == np.arange(len(self.places))).all():  # both orders are the same
            return labels
        if labels.ndim == 2:
            raise DataError(f"{where} has targets in another order than the run")
        found: IntArray = self.places[labels]
        if (found < 0).any():
            self._refuse(int(labels[found < 0][0]), where)
        return found

    def merged(self, labels: IntArray) -> IntArray:
        """Return labels (n,) of :meth:`labels` as those of the classes that these are part of."""
        for row, into in self.classes.merged.items():
            labels = np.where(labels == row, into, labels)
        return labels

    def counts(self, counts: Sequence[int], where: object) -> list[int]:
        """Return counts (K,) of the client's classes as the run's; DataError if it lacks one."""
        found, merged = [0] * len(self.run), self.classes.merged
        for label, count in enumerate(counts):
            if count and self.places[label] < 0:
                self._refuse(label, where)
            if count:
                place = int(self.places[label])
                found[merged.get(place, place)] += count
        return found

    def _refuse(self, label: int, where: object) -> None:
        name = printable(self.names[label], MAX_LETTERS)
        raise DataError(
            f"{where} has examples of the class {name!r}, which the run does not know yet"
        )


@dataclass(frozen=True)
class GlobalTest:
    """The global test set of a simulation."""

    problem: ProblemFile
    x: NDArray[Any]  # (n, *input_shape), memory-mapped
    y: IntArray  # (n,)

    @classmethod
    def find(cls, root: Path) -> GlobalTest | None:
        """Open ``root/global-test``, or None where there is none; DataError if it is damaged."""
        place = root / "global-test"
        if not place.is_dir():
            return None
        for name in ("problem.json", "x.npy", "y.npy"):
            check_inside(place / name, root)
        problem = read_file(place / "problem.json", ProblemFile)
        x, y = read_array(place / "x.npy", mmap=True), read_array(place / "y.npy")
        if "scale" not in problem.model_fields_set:
            problem = scaled(problem, x.dtype, place / "problem.json")
        check_examples(place / "x.npy", place / "y.npy", x, y, problem)
        return cls(problem, x, y)


RANGED = 20_000
"""Examples of a task that its ranges come from, evenly spread, at most twice as many."""


class ClientData:
    """The directory of one client."""

    stamp: Stamp | None = None
    """What tells whether ``client.json`` was written since it was read."""

    def __init__(self, directory: Path) -> None:
        """Open ``directory`` and its ``client.json``; DataError if one is missing or wrong."""
        if not directory.is_dir():
            raise DataError(f"{directory} is not there: it should be this client's data")
        self.directory, self.stamp = directory, stamp_of(directory / ABOUT)
        about = directory / ABOUT
        check_inside(about, directory)
        file = read_file(about, ClientFile)
        self.file = file
        if "scale" not in file.model_fields_set:
            self.file = scaled(file, self.kind() or np.dtype(np.uint8), about)
        if "tasks" not in file.model_fields_set:
            self.file = self.file.model_copy(update={"tasks": self._counted()})
        self._begin(states_counts="tasks" in file.model_fields_set)

    def _begin(self, *, states_counts: bool = True) -> None:
        """Finish opening, once the description is known."""
        self.normaliser = Normaliser.of(self.file)
        self.states_counts = states_counts
        """Whether ``client.json`` itself gives the counts of all tasks."""
        self._order = ClassOrder.own(self.file.classes)
        self._ranges: list[list[float]] | None = None
        self.kept_people: dict[str, list[dict[int | None, bool]]] = {}
        """By validation part and task: who of earlier tasks is kept for validation."""

    @property
    def problem(self) -> Problem:
        """What is learned: input shape and number of classes."""
        return self.file.problem

    def order_by(self, classes: RunClasses) -> None:
        """From now on, give labels and counts in the order of a run's classes."""
        self._order = ClassOrder.of(self.file.classes, classes)

    def refresh(self) -> None:
        """Read the description again; if it is wrong, raise DataError and change nothing."""
        again = self._opened_again()
        again.order_by(self._order.classes)
        self.__dict__.update(again.__dict__)

    def _opened_again(self) -> ClientData:
        return ClientData(self.directory)

    @property
    def is_stale(self) -> bool:
        """Whether ``client.json`` was written since it was read."""
        return stamp_of(self.directory / ABOUT) != self.stamp

    @property
    def num_classes(self) -> int:
        """How many classes the run has."""
        return len(self._order.run)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the run's classes; empty where nobody states names."""
        numbers = tuple(map(str, range(self.num_classes)))
        return self._order.run if self.file.class_names or self._order.run != numbers else ()

    @property
    def classes(self) -> RunClasses:
        """The run's classes."""
        return self._order.classes

    def merged(self, labels: IntArray) -> IntArray:
        """Return labels (n,) of :meth:`arrays` as those of the classes that these are part of.

        What is chosen by class stays chosen, whatever becomes one class later.
        """
        return self._order.merged(labels)

    def counts(self, task: int, part: Part) -> list[int]:
        """Return the examples of each class of the run; DataError if it lacks one."""
        return self._order.counts(getattr(self.tasks[task], part), self._where(task, part))

    @property
    def tasks(self) -> tuple[TaskCounts, ...]:
        """Counts per class of each task."""
        return self.file.tasks

    @property
    def num_tasks(self) -> int:
        """How many tasks this client has."""
        return len(self.tasks)

    def announcement(self, known: tuple[int, int] | None = None, how: CountDetail = "exact") -> str:
        """Return ``client.json`` as Join and Announce send it: with counts, no transform, no path.

        ``known`` says how many tasks and classes to tell of; by default all.
        """
        dealt, recipe = self.file.partition, (self.file.transform or {}).get("recipe")
        file = self.file.model_copy(
            update={"partition": dealt and placeless(dealt), "recipe": digest_of(recipe)}
        )
        if known is None:
            return file.told(how).text("transform")
        tasks, classes = known
        told = {
            "num_classes": classes,
            "class_names": self.file.class_names[:classes],
            "tasks": tuple(
                task.model_copy(update={part: getattr(task, part)[:classes] for part in PARTS})
                for task in self.tasks[:tasks]
            ),
        }
        return file.model_copy(update=told).told(how).text("transform")

    def arrays(self, task: int, part: Part) -> Labelled:
        """Return raw inputs (n, *input_shape) and labels (n,) of a task.

        Raises:
            DataError: there is no such task, its files do not hold what they must, or the run does
                not know one of its classes.
        """
        if not 0 <= task < self.num_tasks:
            raise DataError(f"{self.directory} has no task {task}: it has {self.num_tasks}")
        x, y = self.raw(task, part)
        counts = np.bincount(strata(y), minlength=self.file.num_classes).tolist()
        if counts != list(getattr(self.tasks[task], part)):
            raise DataError(
                f"{self._place(task, part)} does not hold the {part} counts that "
                f"client.json gives for task {task}"
            )
        return x, self.labels(y, self._where(task, part))

    def labels(self, labels: IntArray, where: object) -> IntArray:
        """Return labels (n,) of the files as those of the run; DataError if it lacks a class."""
        return self._order.labels(labels, where)

    def ranges(self) -> list[list[float]]:
        """Return the plausible range of each column of a table, by the training data there are.

        They are looked at once.
        """
        if self._ranges is None:
            there = [task for task in range(self.num_tasks) if not self.is_gone(task, "train")]
            parts = [x for task in there if len(x := self.raw(task, "train")[0])]
            columns = self.file.input_shape[-1]
            rows = [part.reshape(-1, columns)[:: len(part) // RANGED + 1] for part in parts]
            self._ranges = ranges_of(np.concatenate(rows)) if rows else []
        return self._ranges

    def wholes(self, task: int) -> IntArray | None:
        """Return the group (n,) of each training example, which stays whole; None without groups.

        Raises:
            DataError: there is not one for each example.
        """
        path = self.directory / f"task-{task}" / f"{GROUP}.npy"
        if not path.exists():
            return None
        found = self.array(path)
        if found.dtype != np.int64 or found.shape != (sum(self.tasks[task].train),):
            raise DataError(f"{path} does not hold a number of type int64 for each example")
        return np.array(found)

    def people(self, task: int) -> IntArray | None:
        """Return of each person of a task key, part and number, (k, 3); None where nothing says it.

        Raises:
            DataError: it is no such table.
        """
        path = self.directory / f"task-{task}" / f"{PEOPLE}.npy"
        if not path.exists():
            return None
        found = self.array(path)
        if found.dtype != np.int64 or found.ndim != 2 or found.shape[1] != 3:
            raise DataError(f"{path} does not hold three numbers of type int64 for each person")
        return np.array(found)

    @property
    def salt_place(self) -> Path:
        """The file with which names of people are hashed, if there is one."""
        return self.directory / SALT

    def check(self) -> None:
        """Read every task whose data are there; raise DataError for the first wrong file."""
        for task in range(self.num_tasks):
            for part in PARTS:
                if not self.is_gone(task, part):
                    self.arrays(task, part)

    def is_gone(self, task: int, part: Part) -> bool:
        """Tell whether data that nobody asks for any more were deleted, which is no fault.

        Those are the training data of an earlier task, since a run that has gone on to the next
        task asks for them no more, and all data of a task that is set aside.
        """
        is_earlier = part == "train" and self.states_counts and task < self.num_tasks - 1
        is_earlier = is_earlier or self.tasks[task].set_aside
        place, files = self.directory / f"task-{task}", (part, f"{part}_x.npy", f"{part}_y.npy")
        return is_earlier and not any((place / file).exists() for file in files)

    def global_test(self) -> GlobalTest | None:
        """Return the global test set beside this directory, if there is one.

        Raises:
            DataError: it is damaged, or made for another problem.
        """
        found = GlobalTest.find(self.directory.parent)
        if found is None:
            return None
        where = self.directory.parent / "global-test"
        same = found.problem.problem == self.file.problem
        known = self.file.classes[: found.problem.num_classes]  # the client may know more by now
        if not same and (
            found.problem.input_shape != self.file.input_shape or found.problem.classes != known
        ):
            raise DataError(f"{where} is of another problem")
        return replace(found, y=self.merged(self.labels(found.y, where)))

    def _place(self, task: int, part: Part) -> Path:
        """Return the image folder of a part if there is one, else its label file."""
        folder = self.directory / f"task-{task}" / part
        return folder if folder.is_dir() else folder.with_name(f"{part}_y.npy")

    def kind(self) -> np.dtype[Any] | None:
        """Return the type of the inputs of the first task that has some; None where none has."""
        numbers = range(len(self.file.tasks) or 1)
        for place, part in ((self._place(task, part), part) for task in numbers for part in PARTS):
            if place.name == part and (found := self._images(place)).listed:
                return found.read(first=1)[0].dtype
            if (inputs := place.with_name(f"{part}_x.npy")).exists():
                return self.array(inputs).dtype
        return None

    def _where(self, task: int, part: Part) -> str:
        """Return what error lines call a part of a task."""
        return f"{self.directory}: task {task} ({part})"

    def _images(self, place: Path) -> ImageFolder:
        """Open a folder of images."""
        from fedcli.data.store.image_folder import ImageFolder  # loads readers of images

        return ImageFolder(self.directory, self.file, place)

    def array(self, path: Path) -> NDArray[Any]:
        """Open an array of this directory, memory-mapped."""
        check_inside(path, self.directory)
        return read_array(path, mmap=True)

    def raw(self, task: int, part: Part) -> Labelled:
        """Read and check one part of a task, from a folder of images or from arrays.

        Labels are the client's own; :meth:`arrays` gives the run's.
        """
        place = self._place(task, part)
        if place.name == part:
            x, y = self._images(place).read()
        else:
            images = [p.name for p in (place.with_name(other) for other in PARTS) if p.is_dir()]
            if images and not place.exists():
                raise DataError(
                    f"{place.with_name(part)} is missing: {images[0]} beside it has a folder of "
                    "images for each class"
                )
            x, y = self.array(place.with_name(f"{part}_x.npy")), self.array(place)
        inputs = place.with_name(place.name.replace("_y.npy", "_x.npy"))
        check_examples(inputs, place, x, y, self.file)
        return x, y

    def _counted(self) -> tuple[TaskCounts, ...]:
        """Count the examples of ``task-0``, ``task-1`` and so on.

        Raises:
            DataError: one is missing, or a task's files do not hold what they must.
        """
        every = (path for path in self.directory.glob("task-*") if path.is_dir())
        further = sorted(path.name for path in every if path.suffix != ".part")  # being written
        tasks: list[TaskCounts] = []
        while (self.directory / f"task-{len(tasks)}").is_dir():
            labels = [self.raw(len(tasks), part)[1] for part in PARTS]
            train, test = (np.bincount(strata(y), minlength=self.file.num_classes) for y in labels)
            tasks.append(TaskCounts(train=tuple(train.tolist()), test=tuple(test.tolist())))
        if len(further) > len(tasks) or not tasks:
            beside = f", but {further[-1]}" if further else ""
            raise DataError(
                f"{self.directory} holds no task-{len(tasks)}{beside}: tasks are task-0, task-1 …"
                + (", and client.json must give their counts where one is gone" if beside else "")
            )
        return tuple(tasks)


def save_arrays(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays into a folder by name, safely on the disk; raise OSError if that fails."""
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array, allow_pickle=False)
        sync_path(folder / f"{name}.npy")


def has_grown(directory: Path) -> bool:
    """Tell whether a task was added to a client's data after the first ones."""
    return any(directory.glob(f"task-*/{SOURCE}"))


def scaled(file: Described, kind: np.dtype[Any], path: Path) -> Described:
    """Return a description with the ``scale`` that it leaves out: what inputs of a type have.

    Raises:
        DataError: inputs are whole numbers, and the mean exceeds 1: it is not one of ``x / scale``.
    """
    scale = SCALES.get(kind.name, 1.0)
    if scale > 1 and max(file.mean) > 1:
        raise DataError(
            f"{path}: mean is of x / scale, and scale is {scale:g} for {kind} inputs unless given; "
            f'mean = {max(file.mean):g} wants "scale": 1 as well, or has to be divided by {scale:g}'
        )
    return file.model_copy(update={"scale": scale})
