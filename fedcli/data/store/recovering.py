"""Putting a client's data in order with its run, after they came back from an earlier backup.

The run knows tasks that the client lost, and what the client added since may have their numbers. So
a new directory is written: the run's tasks as it knows them, and behind them what is new. Tasks
whose data are lost are set aside: the model keeps what it learned of them.

    DIR/<id>.part      what is being written, of links to the files of DIR/<id>
    DIR/<id>.before    the client's directory as it was, for its owner to delete
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcli.data.arrays import IntArray, Labelled, strata
from fedcli.data.store.client_data import ABOUT, PARTS, ClientData
from fedcli.data.store.growing import LOCK, alone, free_path, write_about
from fedcli.data.store.known_rows import FILE, named
from fedcli.data.store.opened_data import open_data
from fedcli.data.store.people import salt_of
from fedcli.data.store.task_digests import content_of, digest_of
from fedmodels.errors import ArchiveNotWritten, DataError, reason_of
from fedmodels.facts.data_description import ClientFile, TaskCounts
from fedmodels.host.files import sync_path

LOST = "its data are lost at the site"


@dataclass(frozen=True)
class Recovered:
    """What the client has now."""

    lost: Sequence[int] = ()
    """Tasks of the run whose data are gone."""
    moved: Mapping[int, int] | None = None
    """The new number of each task that has another one, by the old one."""
    before: Path | None = None
    """Where the directory as it was lies; None where nothing had to change."""

    def __str__(self) -> str:
        """Return it in a line."""
        if self.before is None:
            return "has what the run knows: nothing changed"
        said = [f"task {old} is task {new} now" for old, new in (self.moved or {}).items()]
        if self.lost:
            said.insert(0, f"the data of {named([*self.lost])} are lost: set aside")
        return f"{', '.join(said)}; the directory as it was is {self.before}"


def recover_tasks(root: Path, client: int, known: ClientFile) -> Recovered:
    """Give a client the tasks that its run knows, and put its new ones behind them.

    A crash at any moment leaves the client as it was or as it will be once this is called again.

    Args:
        root: the directory above the client's.
        client: whose data they are.
        known: what the run knows of them.

    Raises:
        DataError: the data cannot be used, or are of another problem; nothing was changed.
        ArchiveNotWritten: the disk is full, or fails.
    """
    place, part = root / str(client), root / f"{client}.part"
    try:
        if part.is_dir() and not place.exists():  # a crash came between the two renamings
            part.rename(place)
        with alone(place):
            held = open_data(root, client)
            if held.file.input_shape != known.input_shape:
                raise DataError(f"{place} holds inputs of another shape than the run knows of it")
            places = _places(held, known)
            lost = [n for n in range(len(known.tasks)) if n not in places.values()]
            if not lost and all(old == new for old, new in places.items()):
                return Recovered()
            _write(part, held, _ordered(held, known, places), places)
            before = free_path(root / f"{client}.before")
            place.rename(before)
            part.rename(place)
            sync_path(root)
    except OSError as error:
        raise ArchiveNotWritten(f"{place} is not in order yet: {reason_of(error)}") from None
    moved = {old: new for old, new in places.items() if old != new}
    return Recovered(lost, moved, before)


def _places(held: ClientData, known: ClientFile) -> dict[int, int]:
    """Return which task of the run, or which one behind them, each task of a client is."""
    found = dict[int, int]()
    for task in range(held.num_tasks):
        others = [task, *range(len(known.tasks))]
        free = (n for n in others if n < len(known.tasks) and n not in found.values())
        fits = (n for n in free if _is(held, task, known, n))
        if (number := next(fits, None)) is not None:
            found[task] = number
    new = [task for task in range(held.num_tasks) if task not in found]
    return found | {task: len(known.tasks) + n for n, task in enumerate(new)}


def _is(held: ClientData, task: int, known: ClientFile, number: int) -> bool:
    """Tell whether a client's task is the one that the run knows under a number."""
    told = held.file.told(known.counted or "exact").tasks[task]
    wanted = known.tasks[number]
    if not wanted.digest:  # as of the first tasks
        width = max(len(told.train), len(wanted.train))
        return task == number and all(
            _wide(getattr(told, part), width) == _wide(getattr(wanted, part), width)
            for part in PARTS
        )
    if task == number and told.digest:
        return told.digest == wanted.digest
    return _digest(held, task, number) == wanted.digest


def _digest(held: ClientData, task: int, number: int) -> str:
    """Return the digest of a client's task as one of that number; empty where data are gone."""
    if (key := salt_of(held)) is None:
        return ""
    try:
        content = content_of([held.raw(task, part) for part in PARTS], held.file.classes)
    except DataError:
        return ""
    return digest_of(key, number, content)


def _wide(counts: Sequence[int], width: int) -> tuple[int, ...]:
    return (*counts, *[0] * (width - len(counts)))


def _names(held: ClientData, known: ClientFile) -> tuple[str, ...]:
    """Return the classes of a client: those that the run knows come first."""
    return tuple(dict.fromkeys((*known.classes, *held.file.classes)))


def _labels(held: ClientData, names: Sequence[str]) -> IntArray:
    """Return what each label of a client is from now on, (K,)."""
    return np.array([names.index(name) for name in held.file.classes], dtype=np.int64)


def _ordered(held: ClientData, known: ClientFile, places: Mapping[int, int]) -> ClientFile:
    """Return the description of a client whose tasks have these places."""
    names = _names(held, known)
    labels, tasks = _labels(held, names), dict[int, TaskCounts]()
    for number, task in enumerate(known.tasks):
        facts: dict[str, object] = {}
        for part in PARTS:
            facts[part] = _wide(getattr(task, part), len(names))
        lost = {} if task.set_aside else {"set_aside": True, "why": LOST}
        tasks[number] = task.model_copy(update=facts | lost)
    for old, new in places.items():
        task, counts = held.tasks[old], {part: [0] * len(names) for part in PARTS}
        for part, row in counts.items():
            for label, count in zip(labels, getattr(task, part), strict=True):
                row[label] = count
        facts = {part: tuple(row) for part, row in counts.items()}
        if new < len(known.tasks) and (learned := known.tasks[new]).set_aside:
            facts |= {"set_aside": True, "why": learned.why}
        if new >= len(known.tasks) or old != new:
            facts["digest"] = _digest(held, old, new)
        tasks[new] = task.model_copy(update=facts)
    is_unnamed = not held.file.class_names and names == tuple(map(str, range(len(names))))
    more = {
        "num_classes": len(names), "class_names": () if is_unnamed else names,
        "tasks": tuple(tasks[number] for number in sorted(tasks)),
    }  # fmt: skip
    return ClientFile.model_validate({**dict(held.file), **more})


def _write(part: Path, held: ClientData, file: ClientFile, places: Mapping[int, int]) -> None:
    """Write a client's directory anew, with its tasks in other places."""
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    labels = _labels(held, file.classes)
    for path in sorted(held.directory.iterdir()):
        task = path.name.removeprefix("task-")
        if path.name in (ABOUT, LOCK, FILE) or path.suffix == ".part":
            continue
        target = part / path.name
        if path.is_dir() and task.isdecimal() and int(task) in places:
            target = part / f"task-{places[int(task)]}"
        if path.is_dir():
            shutil.copytree(path, target, copy_function=_link)
        else:
            shutil.copy2(path, target)
    for old, new in places.items():
        _relabel(held, old, part / f"task-{new}", labels)
    if (held.directory / FILE).exists():
        changed = [*(old for old, new in places.items() if old != new), held.num_tasks]
        _forget_rows(held.directory / FILE, part / FILE, min(changed))
    write_about(part, file)
    for path in [*part.rglob("*"), part]:
        sync_path(path)


def _link(one: str, other: str) -> None:
    """Make another name of a file; or a copy, where the file system has no links."""
    try:
        os.link(one, other)
    except OSError:
        shutil.copy2(one, other)


def _relabel(held: ClientData, task: int, place: Path, labels: IntArray) -> None:
    """Write the labels of a task as they are called from now on, if that is something else."""
    for part in PARTS:
        if (labels == np.arange(len(labels))).all() or held.is_gone(task, part):
            continue
        found: Labelled = held.raw(task, part)
        y, path = strata(found[1]), place / f"{part}_y.npy"
        if (labels[y] == y).all() or (place / part).is_dir():  # folders go by name
            continue
        if not path.exists():
            raise DataError(f"{held.directory}: the classes of task {task} are not the run's")
        path.unlink()  # it may be another name of the file as it was
        np.save(path, labels[y], allow_pickle=False)


def _forget_rows(source: Path, target: Path, first: int) -> None:
    """Copy what is known of rows, but for tasks from ``first`` on: those are read again."""
    shutil.copy2(source, target)
    with closing(sqlite3.connect(target)) as db:
        for table in ("rows", "sources", "cells"):
            with suppress(sqlite3.OperationalError):  # no task was added yet
                db.execute(f"DELETE FROM {table} WHERE task >= ?", (first,))
        db.execute(f"PRAGMA user_version = {first}")
        db.commit()
