"""What ``fedcli check`` finds in directories of client data before a run does."""

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
"""A normalised input beyond this makes a usual learning rate diverge."""
LEAKED = 0.01
"""Share of the test examples that may be among the training examples: data sets repeat some."""
AT_ONCE = 4096
"""Examples looked at together."""
Hashes = set[bytes]


@dataclass
class Holding:
    """One client's directory, as far as it could be read."""

    name: str
    data: ClientData
    train: Hashes = field(default_factory=set)
    test: Hashes = field(default_factory=set)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    low: float = np.inf
    high: float = -np.inf
    """Of inputs as the net sees them."""
    varies: bool = False
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

    def find(self) -> None:
        """Return the problems of this client's own data."""
        train, test = self.counts["train"], self.counts["test"]
        if not train.sum() and not test.sum():
            self.wrong.append("there is no example: fill task-0, or leave this client out")
            return
        if not (np.isfinite(self.low) and np.isfinite(self.high)):
            self.wrong.append("inputs hold NaN or infinity: remove or replace those examples")
        elif max(-self.low, self.high) > HUGE:
            self.wrong.append(
                f"inputs go from {self.low:.4g} to {self.high:.4g} once normalised, which diverges:"
                " give scale, mean and std in client.json so that they are near 0"
            )
        if not self.varies:
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
    """Return a hash of each example."""
    return {hashlib.blake2b(np.ascontiguousarray(e).tobytes(), digest_size=16).digest() for e in x}


def inspect(root: Path, console: Console) -> bool:
    """Print what client directories hold and what is wrong with them; tell whether all is well.

    Args:
        root: a directory with one for each client, or one client's.
        console: where to print.

    Raises:
        DataError: there is no client's directory.
    """
    wrong: list[str] = []
    holdings: list[Holding] = []
    for name, open_one in _clients(root):
        try:
            holding = Holding(name, open_one())
            holding.read()
        except DataError as error:
            wrong.append(f"client {name}: {error}")
            continue
        holding.find()
        holdings.append(holding)
        wrong += [f"client {holding.name}: {line}" for line in holding.wrong]
    wrong += _between(holdings)
    wrong += _in_global_test(root, holdings)
    console.print(_table(holdings))
    for holding in holdings:
        for line in holding.notes:
            text = f"note: client {holding.name}: {line}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(f"wrong: {line}", markup=False, highlight=False, soft_wrap=True)
    if not wrong:
        console.print(f"nothing wrong with {len(holdings)} client directories")
    return not wrong


def _clients(root: Path) -> list[tuple[str, Callable[[], ClientData]]]:
    """Return every client of a partition, or of one directory, by name, and what opens it."""
    store = PartitionStore.find(root)
    if store is not None:
        return [(str(client), partial(store.client, client)) for client in range(len(store))]
    return [(place.name, partial(ClientData, place)) for place in _places(root)]


def _places(root: Path) -> list[Path]:
    if not root.is_dir():
        raise DataError(f"{root} is no directory")
    if (root / "client.json").exists():
        return [root]
    found = [path for path in root.glob("*") if path.is_dir() and path.name.isdecimal()]
    if not found:
        raise DataError(
            f"{root} holds no client directory such as {root / '0'} with a client.json; see 'A "
            "client's directory' in docs/protocol.md"
        )
    return sorted(found, key=lambda path: int(path.name))


def _between(holdings: list[Holding]) -> Iterable[str]:
    """Return how clients contradict each other, and which examples they share."""
    owner: dict[bytes, str] = {}
    for holding in holdings:
        first, one, other = holdings[0], holdings[0].data.file, holding.data.file
        for key in ("input_shape", "num_classes", "class_names"):
            if getattr(one, key) != getattr(other, key):
                yield (
                    f"client {holding.name}: {key} is {getattr(other, key)}, and "
                    f"{getattr(one, key)} at client {first.name}: all clients need the same"
                )
        shared: dict[str, int] = {}
        for each in holding.train:
            whose = owner.setdefault(each, holding.name)
            if whose != holding.name:
                shared[whose] = shared.get(whose, 0) + 1
        if sum(shared.values()) > LEAKED * len(holding.train):
            yield (
                f"client {holding.name}: {sum(shared.values())} of its training examples are also "
                f"at client {_some(list(shared))}: give each example to one client"
            )
    for holding in holdings:
        found = [owner.get(each, holding.name) for each in holding.test]
        met = [name for name in found if name != holding.name]
        if len(met) > LEAKED * len(holding.test):
            yield (
                f"client {holding.name}: {len(met)} of its test examples are training examples of "
                f"client {_some(sorted(set(met)))}: remove them from one of the two"
            )


def _in_global_test(root: Path, holdings: list[Holding]) -> Iterable[str]:
    """Return how many examples of the global test set clients train on."""
    try:
        found = GlobalTest.find(root)
    except DataError as error:
        yield str(error)
        return
    if found is not None:
        tested = hashes_of(found.x)
        leaked = sum(len(tested & holding.train) for holding in holdings)
        if leaked > LEAKED * len(tested):
            yield f"global-test: {leaked} of its examples are trained on: remove them from there"


def _table(holdings: list[Holding]) -> Table:
    table = Table("client", "tasks", "train", "test", "classes", "inputs", "as the net sees them")
    for one in holdings:
        train, file = one.counts["train"], one.data.file
        shape = "×".join(map(str, file.input_shape))
        table.add_row(
            one.name, str(one.data.num_tasks), str(train.sum()), str(one.counts["test"].sum()),
            f"{np.count_nonzero(train)} of {file.num_classes}", shape,
            f"{one.low:.3g} to {one.high:.3g}",
        )  # fmt: skip
    return table


def _some(names: Iterable[object]) -> str:
    """Return the first names of many."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:5]) + (" and others" if len(listed) > 5 else "")
