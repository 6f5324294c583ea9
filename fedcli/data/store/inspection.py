"""``fedcli check``: what is wrong with clients' data, told before a run fails on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from fedcli.data.store.client_data import PARTS, ClientData, GlobalTest
from fedcli.data.store.partition_store import PartitionStore
from fedmodels.errors import DataError

HUGE = 100.0
"""A normalised input beyond this, or below its negative, makes a usual learning rate diverge."""
LEAKED = 0.01
"""Share of the test examples that may be among the training examples; data sets repeat some."""
AT_ONCE = 4096
"""Examples looked at together."""
SHARING = ("drawn", "replay_circulating", "replay_gradual", "replay_heterogeneous")
"""Kinds of scenarios whose clients draw from the same examples, and so hold some in common."""
Hashes = set[bytes]


@dataclass
class Inspected:
    """One client's data, and what was found in them."""

    name: str
    data: ClientData
    train: Hashes = field(default_factory=set)
    test: Hashes = field(default_factory=set)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Examples of each class, (K,), by part."""
    low: float = np.inf
    high: float = -np.inf
    """Least and greatest value of the inputs as the net sees them."""
    varies: bool = False
    """Whether two inputs differ."""
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read(self) -> None:
        """Read every task.

        Raises:
            DataError: a file does not hold what it must.
        """
        classes = self.data.file.num_classes
        first: NDArray[Any] | None = None
        for part in PARTS:
            self.counts[part] = np.zeros(classes, dtype=np.int64)
            hashes: Hashes = getattr(self, part)
            for task in range(self.data.num_tasks):
                x, y = self.data.arrays(task, part)
                self.counts[part] += np.bincount(y, minlength=classes)
                hashes |= hashes_of(x)
                for begin in range(0, len(x), AT_ONCE):
                    seen = self.data.normaliser(x[begin : begin + AT_ONCE])
                    first = seen[0].copy() if first is None else first
                    self.low = float(np.minimum(self.low, seen.min()))  # NaN stays
                    self.high = float(np.maximum(self.high, seen.max()))
                    self.varies = self.varies or bool((seen != first).any())

    @property
    def is_pooled(self) -> bool:
        """Whether client 0 has its training examples, as Centralized on pooled data wants it."""
        return self.name != "0" and (self.data.file.partition or {}).get("gathered") is True

    @property
    def may_share(self) -> bool:
        """Whether its scenario gives other clients some of its examples."""
        scenario = (self.data.file.partition or {}).get("scenario")
        return isinstance(scenario, dict) and scenario.get("kind") in SHARING

    def judge(self) -> None:
        """Add what is wrong with this client's own data to ``wrong``, and doubts to ``notes``."""
        train, test = self.counts["train"], self.counts["test"]
        if not train.sum() and not test.sum():
            if not self.is_pooled:
                self.wrong.append("there is no example: fill task-0, or leave this client out")
            return
        if not train.sum() and not self.is_pooled:
            self.wrong.append("there is no example to train on: fill task-0/train")
        if not test.sum():
            self.notes.append("there is no test example, so its model has no score of its own")
        if not (np.isfinite(self.low) and np.isfinite(self.high)):
            self.wrong.append("inputs hold NaN or infinity: remove or replace those examples")
        elif max(-self.low, self.high) > HUGE:
            self.wrong.append(
                f"inputs go from {self.low:.4g} to {self.high:.4g} once normalised, which diverges:"
                " give scale, mean and std in client.json so that they are near 0"
            )
        if not self.varies and train.sum() + test.sum() > 1:
            self.wrong.append("all inputs are the same: the files hold no data, or scale is wrong")
        only_test = [k for k in range(len(train)) if test[k] and not train[k]]
        if train.sum() and only_test:
            self.notes.append(
                f"class {_some(only_test)} has test examples and none to train on; if that is not "
                "meant, check the labels"
            )
        leaked = len(self.train & self.test)
        if leaked > LEAKED * len(self.test):
            self.wrong.append(
                f"{leaked} test examples are among its training examples, so scores would be too "
                "good: remove them from one of the two"
            )


def hashes_of(x: NDArray[Any]) -> Hashes:
    """Return the hashes of examples (n, …), 16 bytes each."""
    return {hashlib.blake2b(np.ascontiguousarray(e).tobytes(), digest_size=16).digest() for e in x}


def inspect(root: Path, console: Console) -> bool:
    """Print what clients hold and what is wrong with it; tell whether all is well.

    Args:
        root: a partition's root, or one client's directory.
        console: where to print.

    Raises:
        DataError: there is no client's directory.
    """
    wrong: list[str] = []
    inspected: list[Inspected] = []
    for name, open_one in _clients(root):
        try:
            one = Inspected(name, open_one())
            one.read()
        except DataError as error:
            wrong.append(f"client {name}: {error}")
            continue
        one.judge()
        inspected.append(one)
        wrong += [f"client {one.name}: {line}" for line in one.wrong]
    wrong += _files_as_clients(root)
    wrong += _between(inspected)
    wrong += _in_global_test(root, inspected)
    console.print(_table(inspected))
    notes = [f"client {one.name}: {line}" for one in inspected for line in one.notes]
    if any(one.is_pooled for one in inspected):
        notes.append("all training examples are at client 0: this partition is a pooled one")
    for line in [*notes, *_gaps(root)]:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(f"wrong: {line}", markup=False, highlight=False, soft_wrap=True)
    if not wrong:
        console.print(f"nothing wrong with {len(inspected)} client directories")
    return not wrong


def _clients(root: Path) -> list[tuple[str, Callable[[], ClientData]]]:
    """Return the name of each client below ``root``, and the function that opens its data."""
    store = PartitionStore.find(root)
    if store is not None:
        return [(str(client), partial(store.client, client)) for client in range(len(store))]
    return [(place.name, partial(ClientData, place)) for place in _places(root)]


def _places(root: Path) -> list[Path]:
    """Return the clients' directories in ``root``, by number; ``root`` itself if it is one.

    Raises:
        DataError: there is none.
    """
    if not root.is_dir():
        raise DataError(f"{root} is no directory")
    if (root / "client.json").exists():
        return [root]
    found = [path for path in root.glob("*") if path.is_dir() and path.name.isdecimal()]
    if not found:
        raise DataError(
            f"{root} holds no client directory such as {root / '0'} with a client.json; see 'A "
            "directory of each participant' in docs/data.md"
        )
    return sorted(found, key=lambda path: int(path.name))


def _files_as_clients(root: Path) -> Iterable[str]:
    """Yield a line for each file that has a client's name."""
    for path in sorted(root.glob("*")):
        if path.name.isdecimal() and not path.is_dir():
            yield f"{path} is a file; client {path.name} needs a directory of this name"


def _gaps(root: Path) -> Iterable[str]:
    """Yield a line if numbers are left out, as on a machine that holds some of a run's clients."""
    numbers = {int(p.name) for p in root.glob("*") if p.name.isdecimal() and p.is_dir()}
    if left_out := sorted(set(range(max(numbers, default=0))) - numbers):
        yield (
            f"no directory of client {_some(left_out)}; that is well where other machines hold "
            "them, but fedsrv launch needs every number from 0 on"
        )


def _between(inspected: list[Inspected]) -> Iterable[str]:
    """Yield a line for each contradiction between clients, and for examples that they share."""
    owner: dict[bytes, str] = {}
    for one in inspected:
        first = inspected[0]
        for key in ("input_shape", "num_classes", "class_names"):
            here, there = getattr(one.data.file, key), getattr(first.data.file, key)
            if here != there:
                yield (
                    f"client {one.name}: {key} is {here}, and {there} at client {first.name}: "
                    "all clients need the same"
                )
        shared: dict[str, int] = {}
        for each in one.train:
            whose = owner.setdefault(each, one.name)
            if whose != one.name:
                shared[whose] = shared.get(whose, 0) + 1
        if not one.may_share and sum(shared.values()) > LEAKED * len(one.train):
            yield (
                f"client {one.name}: {sum(shared.values())} of its training examples are also "
                f"at client {_some(list(shared))}: give each example to one client"
            )
    for one in inspected:
        found = [owner.get(each, one.name) for each in one.test]
        met = [name for name in found if name != one.name]
        if len(met) > LEAKED * len(one.test):
            yield (
                f"client {one.name}: {len(met)} of its test examples are training examples of "
                f"client {_some(sorted(set(met)))}: remove them from one of the two"
            )


def _in_global_test(root: Path, inspected: list[Inspected]) -> Iterable[str]:
    """Yield a line if clients train on examples of the global test set, or it does not fit them."""
    try:
        found = inspected[0].data.global_test() if inspected else GlobalTest.find(root)
    except DataError as error:
        yield str(error)
        return
    if found is not None:
        tested = hashes_of(found.x)
        leaked = sum(len(tested & one.train) for one in inspected)
        if leaked > LEAKED * len(tested):
            yield f"global-test: {leaked} of its examples are trained on: remove them from there"


def _table(inspected: list[Inspected]) -> Table:
    """Return the table of what each client holds."""
    table = Table("client", "tasks", "train", "test", "classes", "inputs", "as the net sees them")
    for one in inspected:
        train, file = one.counts["train"], one.data.file
        shape = "×".join(map(str, file.input_shape))
        table.add_row(
            one.name, str(one.data.num_tasks), str(train.sum()), str(one.counts["test"].sum()),
            f"{np.count_nonzero(train)} of {file.num_classes}", shape,
            "" if one.low > one.high else f"{one.low:.3g} to {one.high:.3g}",
        )  # fmt: skip
    return table


def _some(names: Iterable[object]) -> str:
    """Return the first five names, and whether there are others."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:5]) + (" and others" if len(listed) > 5 else "")
