"""A data set in memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedcli.data.arrays import Inputs, IntArray, check_examples, strata
from fedcli.data.cuts.held_out import Put, held_out, tasks_in_order
from fedmodels.errors import ConfigError, DataError
from fedmodels.facts.data_description import MAX_CLASSES, ProblemFile, first_fault

_TOLD = ("group_names", "devices", "coarse", "variant", "has_own_parts", "overlapping", "columns")


@dataclass(frozen=True)
class Examples:
    """Labelled inputs of one part, training or test."""

    x: Inputs  # (n, *input_shape)
    y: IntArray  # (n,)
    groups: IntArray | None = None  # (n,) natural client
    transform: Mapping[str, Any] | None = None
    """How files became the inputs, where that is known."""
    wholes: IntArray | None = None  # (n,) what stays whole when a part is held out
    tasks: IntArray | None = None  # (n,) task of its natural client, where it was cut along time
    domains: IntArray | None = None  # (n,) domain, where there are several

    @property
    def first_inputs(self) -> Inputs:
        """Return the inputs of everybody's first task: what is there as a run begins."""
        return self.x if self.tasks is None else self.x[self.tasks == 0]

    def at(self, chosen: NDArray[np.bool_] | IntArray) -> Examples:
        """Return some of the examples: told of each (n,), or by their places."""
        of_each = {
            name: None if (values := getattr(self, name)) is None else values[chosen]
            for name in ("groups", "wholes", "tasks", "domains")
        }
        return replace(self, x=self.x[chosen], y=self.y[chosen], **of_each)

    def split(
        self,
        share: float,
        seed: int | None = None,
        tasks: Sequence[int] = (),
        put: Put | None = None,
    ) -> tuple[Examples, Examples]:
        """Return the examples for training, and a share of them for testing.

        Args:
            share: part of each class, natural client and task that is for testing.
            seed: draws them; the last ones unless given.
            tasks: of natural clients, by number; one unless given, or those that examples have.
            put: in which part groups are already.
        """
        owners = np.zeros(len(self.y), dtype=np.int64)
        if self.groups is not None:
            owners = np.unique(self.groups, return_inverse=True)[1].reshape(-1)
        task = self.tasks
        if task is None:
            task = tasks_in_order(owners, tasks, self.wholes)
        test = held_out(owners, task, strata(self.y), share, self.wholes, seed, put)
        cut = self if self.groups is None else replace(self, tasks=task)
        return cut.at(~test), cut.at(test)


@dataclass(frozen=True)
class Dataset:
    """A data set in memory.

    Inputs are raw: a net sees ``(x / scale - mean) / std``, per channel.
    """

    name: str
    train: Examples
    """Inputs are images (n, C, H, W) uint8, or sensor windows (n, 128, 6) float32."""
    test: Examples
    class_names: tuple[str, ...]
    scale: float
    mean: tuple[float, ...]
    """One number per channel, or a single one."""
    std: tuple[float, ...]
    domain_names: tuple[str, ...] = ()
    group_names: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """Device model of each natural client, where the data set has several."""
    persons: tuple[int, ...] = ()
    """Person of each natural client, where a person has several devices, which are domains."""
    coarse: IntArray | None = None  # (K,) coarse class of each class
    variant: str = "full"
    """What this copy is, where it is not the whole published set."""
    has_own_parts: bool = False
    """Whether its owner chose the test part, so that natural clients keep it as it is."""
    overlapping: bool = False
    """Whether examples may share rows of a recording: windows with a hop below their length."""
    moments_given: bool = False
    """Whether mean and std are the config's, and so the same for all clients."""
    columns: tuple[str, ...] = ()
    """Names of the columns of a table that an example consists of, in their order."""
    whole_names: tuple[str, ...] = ()
    """Names of the groups that stay whole, such as persons, by their numbers; empty where they have
    none."""
    levels: tuple[bool, ...] = ()
    """Which of them are 0 or 1 for a level of a column of categories, and stay so: a rare level is
    no large number."""

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    @property
    def transform(self) -> Mapping[str, Any] | None:
        """How files became these examples (``fedmodels.config.transforms``), where they did."""
        return self.train.transform

    def at(self, train: IntArray | None = None, test: IntArray | None = None) -> Dataset:
        """Return the data set with these of its training and test examples; all unless given."""
        return replace(
            self,
            train=self.train if train is None else self.train.at(train),
            test=self.test if test is None else self.test.at(test),
        )

    def showing(self, train_x: Inputs, test_x: Inputs, **facts: Any) -> Dataset:
        """Return the data set with other inputs, and with other fields."""
        train, test = replace(self.train, x=train_x), replace(self.test, x=test_x)
        return replace(self, train=train, test=test, **facts)

    def relabelled(self, places: IntArray, class_names: Sequence[str]) -> Dataset:
        """Return the data set with label ``places[k]`` (K,) in place of k, and other classes."""
        train, test = (replace(one, y=places[one.y]) for one in (self.train, self.test))
        return replace(self, train=train, test=test, class_names=tuple(class_names))

    def __post_init__(self) -> None:
        """Raise DataError unless all parts fit together, whoever made them."""
        check_names(self.class_names, self.name)
        parts = (("training", self.train), ("test", self.test))
        for part, one in parts:
            check_finite(f"{self.name} ({part})", one.x)
        try:
            problem = ProblemFile(
                input_shape=self.input_shape,
                num_classes=self.num_classes,
                scale=self.scale,
                mean=self.mean,
                std=self.std,
                class_names=self.class_names,
            )
        except ValidationError as error:
            raise DataError(f"{self.name}: {first_fault(error)}") from None
        for part, one in parts:
            where, groups, n = f"{self.name} ({part})", one.groups, len(one.y)
            check_examples(where, where, one.x, one.y, problem)
            if groups is not None and (groups.dtype != np.int64 or groups.shape != (n,)):
                raise DataError(f"{where}: groups must hold {n} numbers of type int64")
        if self.train.x.dtype != self.test.x.dtype:
            raise DataError(
                f"{self.name}: training inputs are {self.train.x.dtype}, test inputs "
                f"{self.test.x.dtype}: give both one type"
            )

    @property
    def identity(self) -> str:
        """What tells custom data from others under the same name: all that is in them."""
        if not self.has_own_parts:
            return self.variant
        train, test, sha = self.train, self.test, hashlib.sha256()
        told = {
            "name": self.name, "train_x": train.x, "train_y": train.y, "test_x": test.x,
            "test_y": test.y, "num_classes": self.num_classes, "scale": self.scale,
            "mean": self.mean, "std": self.std, "class_names": self.class_names,
            "groups_train": train.groups, "groups_test": test.groups,
            **{name: getattr(self, name) for name in _TOLD},
        }  # fmt: skip
        for name, value in told.items():
            if isinstance(value, np.ndarray):
                sha.update(f"{name} {value.dtype} {value.shape}".encode())
                sha.update(np.ascontiguousarray(value).data)
            else:
                sha.update(repr((name, value)).encode())
        return f"{self.variant}, sha256 {sha.hexdigest()[:12]}"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.train.x.shape[1:])

    def by_person(self) -> Dataset:
        """Return the data set whose natural clients are persons, with all their devices.

        Raises:
            ConfigError: it does not tell persons from devices.
        """
        if not self.persons or self.train.groups is None or self.test.groups is None:
            raise ConfigError(
                f"[scenario.domains] {self.name} has no natural clients with several domains each"
            )
        person = np.array(self.persons, dtype=np.int64)
        return replace(
            self, train=replace(self.train, groups=person[self.train.groups]),
            test=replace(self.test, groups=person[self.test.groups]),
            group_names=tuple(f"subject {n}" for n in range(max(self.persons) + 1)), devices=(),
            persons=(),
        )  # fmt: skip

    @property
    def client_names(self) -> list[str]:
        """Return the names of the natural clients, by the number that each has as a client.

        A natural client without a name is called by its number in the data set.
        """
        known = dict(enumerate(self.group_names))
        found = [] if self.groups is None else np.unique(self.groups).tolist()
        return [known.get(group, str(group)) for group in found]

    @property
    def groups(self) -> IntArray | None:
        """(n + m,) natural client of each training, then of each test example."""
        return both(self.train.groups, self.test.groups)

    @property
    def whose(self) -> IntArray | None:
        """(n + m,) group of each training, then of each test example, where groups have names."""
        return both(self.train.wholes, self.test.wholes) if self.whole_names else None

    @property
    def tasks(self) -> IntArray | None:
        """(n + m,) task of each training, then of each test example, where both are cut in time."""
        return both(self.train.tasks, self.test.tasks)


def both(train: IntArray | None, test: IntArray | None) -> IntArray | None:
    """Return what is known of each training, then of each test example, where both are known."""
    return None if train is None or test is None else np.concatenate([train, test])


def check_finite(where: object, x: NDArray[np.generic]) -> None:
    """Raise DataError if inputs hold NaN or infinity: with the first example that does."""
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        first = int(np.flatnonzero(~np.isfinite(x.reshape(len(x), -1)).all(axis=1))[0])
        raise DataError(f"{where}: example {first} holds NaN or infinity: mend it, or leave it out")


def named_classes(names: Sequence[str], highest: int, where: object) -> tuple[str, ...]:
    """Return the names of classes in label order: those given, or else the labels' numbers.

    Raises:
        DataError: the highest label has no name, or there would be too many classes.
    """
    if names and highest >= len(names):
        raise DataError(f"{where}: label {highest} has no name among {len(names)} classes")
    if highest >= MAX_CLASSES:
        raise DataError(f"{where}: label {highest} is beyond {MAX_CLASSES} classes, the most")
    return tuple(names) or tuple(str(k) for k in range(highest + 1))


def check_names(names: Sequence[str], where: object) -> None:
    """Raise DataError unless every class has a name of its own."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"{where}: two classes have the name {twice[0]!r}")
