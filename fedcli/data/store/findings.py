"""What is wrong with clients' data, or may not be meant: found before a run fails or misleads.

``fedcli check`` prints it, with what clients hold.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from fedcli.data.arrays import strata
from fedcli.data.sets.dataset import Dataset
from fedcli.data.store.client_data import (
    PARTS,
    STORE,
    TABLE,
    ClientData,
    GlobalTest,
    Part,
    has_grown,
)
from fedcli.data.store.column_findings import Column, columns_of, found_in_all
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.partition_store import PartitionStore
from fedcli.data.store.repeats import ALIKE
from fedmodels.console.printable import printable
from fedmodels.console.rows import Checked, CheckedClient
from fedmodels.errors import DataError
from fedmodels.facts.data_description import channel_axis
from fedmodels.own.code_names import is_own
from fedmodels.training.divergence import HUGE

LEAKED = 0.01
"""Share of the test examples that may be among the training examples beside those that are equal by
chance; data sets repeat some."""
SURE = 0.5
"""Share of a part that is equal to others beyond which that is an error: it cannot be chance. What
is less is a note, as equal rows may be different ones."""
FEW = 2
"""So many examples that are equal say nothing."""
ONE_PART = "if they are the same ones, keep each in one part"
HANDFUL = 10
"""Training examples below which a client hardly learns."""
AT_ONCE = 4096
"""Examples looked at together."""
SHOWN = 5
"""Names that a line lists."""
SEPARATORS = re.compile(r"(?<=\w)[\s_./-]+(?=\w)|_")
"""What stands between the words of a name."""
MAX_LETTERS = 40
"""Letters of a name that a line lists, at most."""
SHARING = ("drawn", "replay_circulating", "replay_gradual", "replay_heterogeneous")
"""Kinds of scenarios whose clients draw from the same examples, and so hold some in common.

A function of a user's file may deal an example to several as well.
"""
Hashes = set[bytes]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with data, or that may not be meant."""

    line: str
    is_wrong: bool = False
    client: str = ""
    """Whose data; empty where it is of all."""
    kind: str = ""
    """Lines of one kind say the same of several clients."""

    def __str__(self) -> str:
        """Return the line with its client."""
        return f"client {self.client}: {self.line}" if self.client else self.line


@dataclass
class Inspected:
    """One client's data, and what is in them."""

    name: str
    data: ClientData
    train: Hashes = field(default_factory=set)
    test: Hashes = field(default_factory=set)
    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    """Examples of each class, (K,), by part."""
    lows: NDArray[np.float32] | None = None
    highs: NDArray[np.float32] | None = None
    """Least and greatest value of each channel as the net sees it, (C,); None without examples."""
    first: NDArray[np.float32] | None = None
    """The first input, as the net sees it."""
    varies: bool = False
    """Whether two inputs differ."""
    columns: list[Column] = field(default_factory=list)
    """What the columns hold, as the files have it; none for images."""
    again: int = 0
    """How many examples of its tasks earlier ones have."""
    rows: int = 0
    twice: int = 0
    """Training examples of its tasks, and how many of these are a second one of their task."""
    sets: int = 0
    """Tasks that have training examples."""
    has_targets: bool = False
    """Whether targets stand in place of labels: nothing is of a class then."""
    gone: list[int] = field(default_factory=list)
    """Tasks whose training data were deleted."""

    def read(self) -> None:
        """Read every task; raise DataError if a file does not hold what it must.

        Rows of a task that is set aside may come again.
        """
        for part in PARTS:
            self.counts[part] = np.zeros(self.data.file.num_classes, dtype=np.int64)
        for task in range(self.data.num_tasks):
            found = dict[Part, Hashes]()
            for part in PARTS:
                self.counts[part] += self.data.counts(task, part)
                if self.data.is_gone(task, part):
                    self.gone += [task] if task not in self.gone else []
                    continue
                x, y = self.data.arrays(task, part)
                found[part] = set() if self.data.tasks[task].set_aside else hashes_of(x)
                if part == "train" and found[part]:
                    self.take(len(x), found[part])
                self.look(x, y)
            for hashes in found.values():
                self.again += sum(each in self.train or each in self.test for each in hashes)
            self.train |= found.get("train", set())
            self.test |= found.get("test", set())

    def take(self, rows: int, distinct: Hashes) -> None:
        """Count the training examples of a task."""
        self.rows, self.sets = self.rows + rows, self.sets + 1
        self.twice += rows - len(distinct)

    def look(self, x: NDArray[Any], y: NDArray[np.int64]) -> None:
        """Look at the inputs (n, …) and labels (n,), or targets (n, T), of a part of a task."""
        self.has_targets, labels = y.ndim == 2, strata(y)
        shape = self.data.file.input_shape
        axis = 1 + channel_axis(shape)
        others = tuple(a for a in range(1 + len(shape)) if a != axis)
        for begin in range(0, len(x), AT_ONCE):
            seen = self.data.normaliser(x[begin : begin + AT_ONCE])
            self.first = seen[0].copy() if self.first is None else self.first
            self.varies = self.varies or bool((seen != self.first).any())
            low, high = seen.min(axis=others), seen.max(axis=others)
            self.lows = low if self.lows is None else np.minimum(self.lows, low)
            self.highs = high if self.highs is None else np.maximum(self.highs, high)
            if len(shape) < 3:
                self.columns = self.columns or columns_of(self.data.file)
                rows = slice(begin, begin + AT_ONCE)
                for column in self.columns:
                    column.add(x[rows], labels[rows])

    @property
    def low(self) -> float:
        """Least value of the inputs as the net sees them; NaN stays."""
        return np.inf if self.lows is None else float(self.lows.min())

    @property
    def high(self) -> float:
        """Greatest value of the inputs as the net sees them."""
        return -np.inf if self.highs is None else float(self.highs.max())

    @property
    def is_pooled(self) -> bool:
        """Whether client 0 has its training examples, as Centralized on pooled data wants it."""
        return self.name != "0" and (self.data.file.partition or {}).get("gathered") is True

    @property
    def has_grown(self) -> bool:
        """Whether tasks were added, and with them maybe classes that other clients lack."""
        return has_grown(self.data.directory)

    @property
    def may_share(self) -> bool:
        """Whether its scenario gives other clients some of its examples."""
        scenario = (self.data.file.partition or {}).get("scenario")
        kind = scenario.get("kind") if isinstance(scenario, dict) else None
        return isinstance(kind, str) and (kind in SHARING or is_own(kind))

    def classes(self, chosen: NDArray[np.bool_]) -> str:
        """Return the names of some classes (K,)."""
        names = self.data.file.class_names or range(len(chosen))
        return some(printable(str(names[k]), MAX_LETTERS) for k in np.flatnonzero(chosen))

    def found(self) -> Iterator[Finding]:
        """Yield what is wrong with this client's own data, or may not be meant."""
        train, test = self.counts["train"], self.counts["test"]
        if not train.sum() and not test.sum():
            if not self.is_pooled:
                line = "there is no example: fill task-0, or leave this client out"
                yield self._wrong("empty", line)
            return
        if not self.is_pooled:
            yield from self._found_in_training(train, test)
        if not test.sum():
            line = "there is no test example, so its model has no score of its own"
            yield self._odd("no test", line)
        yield from self._found_in_inputs()

    def _wrong(self, kind: str, line: str) -> Finding:
        return Finding(line, True, self.name, kind)

    def _odd(self, kind: str, line: str) -> Finding:
        return Finding(line, False, self.name, kind)

    def _found_in_training(
        self, train: NDArray[np.int64], test: NDArray[np.int64]
    ) -> Iterator[Finding]:
        """Yield what may be wrong with the classes to train on."""
        if not train.sum():
            yield self._wrong("no training", "there is no example to train on: fill task-0/train")
            return
        if train.sum() < HANDFUL:
            count = "1 example" if train.sum() == 1 else f"{train.sum()} examples"
            line = f"{count} to train on: little can be learnt from a handful"
            yield self._odd("handful", line)
        if np.count_nonzero(train) == 1 and len(train) > 1 and not self.has_targets:
            line = (
                f"all its training examples are of class {self.classes(train > 0)}: alone, it "
                "cannot learn to tell classes apart"
            )
            yield self._odd("one class", line)
        if ((test > 0) & (train == 0)).any():
            line = (
                f"class {self.classes((test > 0) & (train == 0))} has test examples and none to "
                "train on; if that is not meant, check the labels"
            )
            yield self._odd("only tested", line)
        if test.any() and ((train > 0) & (test == 0)).any():
            line = f"class {self.classes((train > 0) & (test == 0))} has no test example"
            yield self._odd("untested", line)

    def _found_in_inputs(self) -> Iterator[Finding]:
        """Yield what is wrong with the inputs."""
        if not (np.isfinite(self.low) and np.isfinite(self.high)):
            line = "inputs hold NaN or infinity: remove or replace those examples"
            yield self._wrong("nan", line)
        elif max(-self.low, self.high) > HUGE:
            line = (
                f"inputs go from {self.low:.4g} to {self.high:.4g} once normalised, which "
                "diverges: give scale, mean and std in client.json so that they are near 0"
            )
            yield self._wrong("huge", line)
        if not self.varies and sum(part.sum() for part in self.counts.values()) > 1:
            line = "all inputs are the same: the files hold no data, or scale is wrong"
            yield self._wrong("same", line)
        alike = self.twice > ALIKE * self.rows  # as for fedcli add-task
        if self.again and not self.may_share and not alike:
            line = (
                f"{self.again} examples of its tasks are in earlier tasks already, as where a file "
                "has grown: fedcli add-task leaves them out"
            )
            yield self._odd("again", line)
        leaked = len(self.train & self.test)
        if leaked > most_equal([self], self.rows, len(self.test)):
            line = (
                f"{leaked} test examples are among its training examples, more than by chance, so "
                f"scores would be too good: {ONE_PART}"
            )
            yield Finding(line, leaked > SURE * len(self.test), self.name, "leaked")


def most_equal(read: Sequence[Inspected], pool: int, count: int) -> float:
    """Return how many of ``count`` examples may be among ``pool`` others without a word.

    Equal rows may be different people. How often two of them are equal by chance is known from the
    rows of one client's task, which are different ones: if a part t of n rows is there twice, one
    more row is among them with a chance of t to 2 t. Twice as many are no sign of anything, nor are
    a few.
    """
    read = [one for one in read if one.varies and np.isfinite(one.low) and np.isfinite(one.high)]
    rows, twice, sets = (
        sum(getattr(one, key) for one in read) for key in ("rows", "twice", "sets")
    )
    by_chance = 0.0
    if twice:
        alone = 1 - min(1.0, 2 * (twice + 2 * twice**0.5) / rows)
        by_chance = 1 - alone ** (pool * sets / rows)
    return FEW + (LEAKED + 2 * by_chance) * count


def hashes_of(x: NDArray[Any]) -> Hashes:
    """Return the hashes of examples (n, …), 16 bytes each."""
    return {hashlib.blake2b(np.ascontiguousarray(e).tobytes(), digest_size=16).digest() for e in x}


def inspected(root: Path) -> tuple[list[Inspected], list[Finding]]:
    """Read what clients hold; return it, and what is wrong with it or may not be meant.

    Args:
        root: a partition's root, or one client's directory.

    Raises:
        DataError: there is no client's directory.
    """
    read, found = list[Inspected](), list[Finding]()
    for name, open_one in _clients(root):
        try:
            one = Inspected(name, open_one())
            one.read()
        except DataError as error:
            found.append(Finding(str(error), True, name, "unreadable"))
            continue
        read.append(one)
        found += one.found()
    whole = len(read) > 1 or PartitionStore.find(root) is not None
    found += [*_files_as_clients(root), *_between(read), *_in_global_test(root, read)]
    found += [*_of_classes(read, whole=whole), *_in_columns(read)]
    return read, found


def tell(root: Path, *, strict: bool = False) -> None:
    """Say in a line for each kind what is wrong with clients' data, or may not be meant.

    Raises:
        DataError: ``strict``, and there is something.
    """
    found = [finding for finding in inspected(root)[1] if finding.kind != "unreadable"]
    lines = summaries(found, _names_of(root))
    for line in lines:
        log.warning("note: %s", line)
    if strict and lines:
        more = f", and {len(lines) - 1} more notes above" if len(lines) > 1 else ""
        raise DataError(f"--strict: {lines[0]}{more}")


def tell_own(root: Path, clients: Iterable[int], *, strict: bool = False) -> None:
    """Say what may not be meant in the data of some clients, each by itself.

    Data that cannot be read are passed over: whoever opens them says so.

    Raises:
        DataError: ``strict``, and there is something.
    """
    lines = list[str]()
    for client in clients:
        try:
            one = Inspected(str(client), open_data(root, client))
            one.read()
        except DataError:
            continue
        lines += [str(finding) for finding in [*one.found(), *_in_columns([one])]]
    for line in lines:
        log.warning("note: %s", line)
    if strict and lines:
        raise DataError(f"--strict: {lines[0]}")


def arrived(data: ClientData, dataset: Dataset) -> list[Finding]:
    """Return what may not be meant in a task that is to come, by the rules of ``fedcli check``.

    ``data`` counts its examples already. Which classes there are is looked at over all tasks, and
    inputs are looked at in the new task alone.
    """
    one = Inspected("", data)
    for part, x, y in (
        ("train", dataset.train.x, dataset.train.y), ("test", dataset.test.x, dataset.test.y)
    ):  # fmt: skip
        setattr(one, part, hashes_of(x))
        if part == "train" and len(x):
            one.take(len(x), one.train)
        one.look(x, y)
        one.counts[part] = np.sum([getattr(task, part) for task in data.tasks], axis=0)
    return [*one.found(), *_in_columns([one])]


def summaries(found: Sequence[Finding], names: Sequence[str] = ()) -> list[str]:
    """Return a line for each kind of finding: whose data, by number and name; what of the first."""
    kinds = dict[str, list[Finding]]()
    for finding in found:
        kinds.setdefault(finding.kind or finding.line, []).append(finding)
    lines = list[str]()
    for same in kinds.values():
        first, others = same[0], [called(one.client, names) for one in same[1:]]
        if not first.client:
            lines += map(str, same)
            continue
        also = f" (likewise {some(others)})" if others else ""
        lines.append(f"client {called(first.client, names)}{also}: {first.line}")
    return lines


def called(client: str, names: Sequence[str]) -> str:
    """Return a client's number, with its name where it has one."""
    known = names[int(client)] if client.isdecimal() and int(client) < len(names) else ""
    return f"{client} ({printable(known, MAX_LETTERS)})" if known else client


def _names_of(root: Path) -> list[str]:
    """Return the names of natural clients, where a partition has them."""
    try:
        names = json.loads((root / TABLE).read_bytes()).get("client_names") or []
    except (OSError, ValueError, AttributeError, RecursionError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []


def _clients(root: Path) -> list[tuple[str, Callable[[], ClientData]]]:
    """Return the name of each client below ``root``, and the function that opens its data."""
    store = PartitionStore.find(root)
    if store is not None:
        late = [path for path in _directories(root) if int(path.name) >= len(store)]
        return [
            *((str(client), partial(store.client, client)) for client in range(len(store))),
            *((place.name, partial(ClientData, place)) for place in late),
        ]
    return [(place.name, partial(ClientData, place)) for place in _places(root)]


def _places(root: Path) -> list[Path]:
    """Return clients' directories by number, or ``root`` if it is one; DataError without any."""
    if not root.is_dir():
        raise DataError(f"{root} is no directory")
    if (root / "client.json").exists():
        return [root]
    found = _directories(root)
    if not found:
        raise DataError(
            f"{root} holds no client directory such as {root / '0'} with a client.json; see 'A "
            "directory of each participant' in docs/data.md"
        )
    return found


def _directories(root: Path) -> list[Path]:
    """Return the clients' directories below a root, by number."""
    found = [path for path in root.glob("*") if path.is_dir() and path.name.isdecimal()]
    return sorted(found, key=lambda path: int(path.name))


def _files_as_clients(root: Path) -> Iterator[Finding]:
    """Yield each file that has a client's name."""
    for path in sorted(root.glob("*")):
        if path.name.isdecimal() and not path.is_dir():
            line = f"{path} is a file; client {path.name} needs a directory of this name"
            yield Finding(line, True)


def _between(read: Sequence[Inspected]) -> Iterator[Finding]:
    """Yield contradictions between clients, and examples that they share."""
    owner: dict[bytes, str] = {}
    everybody = sum(one.rows for one in read)
    for one in read:
        first = read[0]
        grown = one.has_grown or first.has_grown
        for key in ("input_shape", *(() if grown else ("num_classes", "class_names"))):
            here, there = getattr(one.data.file, key), getattr(first.data.file, key)
            if here != there:
                line = (
                    f"{key} is {here}, and {there} at client {first.name}: all clients need the "
                    "same"
                )
                yield Finding(line, True, one.name, key)
        shared: dict[str, int] = {}
        for each in one.train:
            whose = owner.setdefault(each, one.name)
            if whose != one.name:
                shared[whose] = shared.get(whose, 0) + 1
        if not one.may_share and sum(shared.values()) > most_equal(read, everybody, len(one.train)):
            line = (
                f"{sum(shared.values())} of its training examples are also at client "
                f"{some(shared)}, more than by chance: if they are the same ones, give each to one "
                "client"
            )
            is_wrong = sum(shared.values()) > SURE * len(one.train)
            yield Finding(line, is_wrong, one.name, "shared")
    for one in read:
        whose_all = [owner.get(each, one.name) for each in one.test]
        met = [name for name in whose_all if name != one.name]
        if len(met) > most_equal(read, everybody, len(one.test)):
            line = (
                f"{len(met)} of its test examples are training examples of client "
                f"{some(sorted(set(met)))}, more than by chance: {ONE_PART}"
            )
            yield Finding(line, len(met) > SURE * len(one.test), one.name, "leaked between")


def _in_global_test(root: Path, read: Sequence[Inspected]) -> Iterator[Finding]:
    """Yield a finding if clients train on the global test set, or it does not fit them."""
    try:
        held = read[0].data.global_test() if read else GlobalTest.find(root)
    except DataError as error:
        yield Finding(str(error), True)
        return
    if held is not None:
        tested = hashes_of(held.x)
        leaked = len({each for one in read for each in tested & one.train})
        if leaked > most_equal(read, sum(one.rows for one in read), len(tested)):
            line = (
                f"global-test: {leaked} of its examples are trained on, more than by chance: "
                f"{ONE_PART}"
            )
            yield Finding(line, leaked > SURE * len(tested))


def _of_classes(read: Sequence[Inspected], *, whole: bool) -> Iterator[Finding]:
    """Yield classes that nobody of a whole run has, and classes whose names look alike."""
    if not read or any(one.has_targets for one in read):
        return
    names = read[0].data.file.class_names
    alike = dict[str, list[str]]()
    for name in names:
        alike.setdefault(_spelling(name), []).append(name)
    for same in alike.values():
        if len(same) > 1:
            shown = " and ".join(repr(printable(name, MAX_LETTERS)) for name in same[:SHOWN])
            yield Finding(f"classes {shown} differ only in case or punctuation: one class?")
    known = [one for one in read if len(one.counts["train"]) == len(read[0].counts["train"])]
    held = np.sum([one.counts[part] for one in known for part in PARTS], axis=0)
    if whole and (held == 0).any():
        missing = read[0].classes(held == 0)
        line = (
            f"{np.count_nonzero(held == 0)} of {len(held)} classes have no example: {missing}; "
            "labels are numbered from 0 on, without a gap"
        )
        yield Finding(line)


def _spelling(name: str) -> str:
    """Return a class's name without capitals, separators of words and punctuation around it.

    Numbers are told apart by their values, and signs that mean something stay: -1 is another class
    than 1, and A+ than A-.
    """
    try:
        return str(Decimal(name.strip()).normalize())
    except InvalidOperation:
        return SEPARATORS.sub("", name.casefold().strip(" .,;:_'\"()")) or name


def _in_columns(read: Sequence[Inspected]) -> Iterator[Finding]:
    """Yield what may not be meant in the columns of tables."""
    seen = [one for one in read if one.columns]
    seen = [one for one in seen if one.data.file.input_shape == seen[0].data.file.input_shape]
    if not any(one.varies for one in seen):
        return
    yield from _constant(seen)
    for one in seen:
        for column in one.columns:
            for line in column.lines():
                yield Finding(line, False, one.name, line)
    is_table = bool(seen[0].data.file.transform)
    yield from map(Finding, found_in_all([one.columns for one in seen], is_table=is_table))


def _constant(seen: Sequence[Inspected]) -> Iterator[Finding]:
    """Yield the columns that have one value in the examples of all clients."""
    same = np.all([one.lows == one.highs for one in seen], axis=0)
    names = [
        printable(column.name, MAX_LETTERS)
        for column in seen[0].columns
        if not column.is_levels and same[column.channels[0]]
    ]
    if names:
        yield Finding(
            f"column {some(names)} has one value in all examples: leave it out of features"
        )


def some(names: Iterable[object]) -> str:
    """Return the first five names, and whether there are others."""
    listed = [str(name) for name in names]
    return ", ".join(listed[:SHOWN]) + (" and others" if len(listed) > SHOWN else "")


# --- fedcli check ---------------------------------------------------------------------------------


def inspect(root: Path, console: Console, *, as_json: bool = False) -> bool:
    """Print what clients hold and what is wrong with it; tell whether all is well.

    With ``as_json``, one object, a :class:`~fedmodels.console.rows.Checked`.

    Raises:
        DataError: there is no client's directory below ``root``, and it is none.
    """
    read, found = inspected(root)
    notes = [str(finding) for finding in found if not finding.is_wrong]
    if any(one.is_pooled for one in read):
        notes.append("all training examples are at client 0: this partition is a pooled one")
    notes += [_gone(one) for one in read if one.gone]
    notes += [line for one in read for line in _set_aside(one)]
    wrong = [str(finding) for finding in found if finding.is_wrong]
    notes += _gaps(root)
    if as_json:
        checked = Checked(clients=[_told(one) for one in read], notes=notes, wrong=wrong)
        print(checked.model_dump_json(indent=1))
        return not wrong
    console.print(_table_of(map(_told, read)))
    for line in notes:
        console.print(f"note: {line}", markup=False, highlight=False, soft_wrap=True)
    for line in wrong:
        console.print(f"wrong: {line}", markup=False, highlight=False, soft_wrap=True)
    if not wrong:
        console.print(f"nothing wrong with {len(read)} client directories")
    return not wrong


def _gaps(root: Path) -> Iterable[str]:
    """Yield a line if numbers are left out, as on a machine that holds some of a run's clients."""
    numbers = {int(p.name) for p in root.glob("*") if p.name.isdecimal() and p.is_dir()}
    has_store = (root / STORE).is_dir()
    if not has_store and (left_out := sorted({*range(max(numbers, default=0))} - numbers)):
        yield (
            f"no directory of client {some(left_out)}; that is well where other machines hold "
            "them, but fedsrv launch needs every number from 0 on"
        )


def _set_aside(one: Inspected) -> Iterator[str]:
    """Yield which tasks of a client are set aside."""
    for number, task in enumerate(one.data.tasks):
        if task.set_aside:
            why = f": {printable(task.why)}" if task.why else ""
            yield f"client {one.name}: task {number} is set aside{why}; an open run passes it over"


def _gone(one: Inspected) -> str:
    """Say which training data of a client were deleted."""
    tasks = f"task {one.gone[0]}" if len(one.gone) == 1 else f"tasks {some(one.gone)}"
    return (
        f"client {one.name}: the training data of {tasks} were deleted; that is well where its run "
        "has gone on to a later task"
    )


def _told(one: Inspected) -> CheckedClient:
    """Return what a client holds."""
    train, test, file = one.counts["train"], one.counts["test"], one.data.file
    has_values = one.low <= one.high
    return CheckedClient(
        client=one.name, tasks=one.data.num_tasks, train=int(train.sum()), test=int(test.sum()),
        classes=file.num_classes, classes_trained=int((train > 0).sum()),
        classes_tested=int(((train > 0) & (test > 0)).sum()), input_shape=[*file.input_shape],
        lowest=float(one.low) if has_values else None,
        highest=float(one.high) if has_values else None,
    )  # fmt: skip


def _table_of(clients: Iterable[CheckedClient]) -> Table:
    """Return the table of what each client holds."""
    table = Table(
        "client", "tasks", "train", "test", "classes", "tested", "inputs", "as the net sees them"
    )
    for one in clients:
        table.add_row(
            one.client, str(one.tasks), str(one.train), str(one.test),
            f"{one.classes_trained} of {one.classes}",
            f"{one.classes_tested} of {one.classes_trained}", "×".join(map(str, one.input_shape)),
            "" if one.lowest is None else f"{one.lowest:.3g} to {one.highest:.3g}",
        )  # fmt: skip
    return table
