"""A site's own files, cut as the run wants them: its client's directory, made once and kept.

The run says windows, columns, sizes and classes by its table ``[data]``, and never a place. Classes
go by name: a site may lack some, or have them in another order. What is cut stays at the site, in
its state directory; files that change, or another ``[data]``, are cut anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcli.data.arrays import IntArray, Labelled
from fedcli.data.folders import files_below
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.registry import OWN, load
from fedcli.data.sets.source import Whose
from fedcli.data.store.client_data import PARTS, Part, has_grown
from fedcli.data.store.commands import thinned
from fedcli.data.store.own_files import CUT_FILE, cut_before
from fedcli.data.store.partition_writer import (
    description_of,
    why_not_written,
    write_client,
    write_wholes,
    written_whole,
)
from fedmodels.class_names import composed, named
from fedmodels.config.data import Data
from fedmodels.data_description import ClientFile, TaskCounts
from fedmodels.errors import ConfigError, DataError
from fedmodels.printable import printable
from fedmodels.resolution import received_data

FORMAT = 1
MAX_LETTERS = 60
log = logging.getLogger(__name__)


def cut(files: Path, tables: Mapping[str, Any], seed: int, client: int, cache: Path) -> Path:
    """Return the directory above a client's data, made of its own files unless it was before.

    ``tables`` are the run's ``[data]`` as the server sent it; what is cut is kept in ``cache``.
    Files that are gone are not needed again, and those of a client that has got further tasks are
    not read again.

    Raises:
        ConfigError: the run's data are of no kind that a site brings along.
        DataError: files cannot be read, or the cache cannot be written.
    """
    data = received_data(tables, "the server's [data]")
    if data.name not in OWN:
        raise ConfigError(
            f"--data {files} holds no client's directory, and the run's data are "
            f"{printable(data.name, MAX_LETTERS)}: bring a directory that fedcli partition made"
        )
    before = cut_before(cache, client, (data, seed))
    if before is not None and (has_grown(before / str(client)) or not files.exists()):
        log.info("client %s: goes on with what was cut before; %s is not read", client, files)
        return before
    if not files.exists():
        raise DataError(f"{files} is not there")
    data = data.model_copy(update={"root": str(files)})
    root = cache / _stamp(files, data, seed, client)
    if (root / str(client) / "client.json").is_file():
        log.info("client %s: %s was cut before", client, files)
        return root
    classes = data.classes or (data.columns.classes if data.columns else None)
    dataset = thinned(_by_names(loaded(files, data, "site"), classes or ()), data, seed)
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.mkdir(mode=0o700, exist_ok=True)  # for nobody else
        with written_whole(root) as place:
            _write(place / str(client), dataset, files)
            (place / CUT_FILE).write_text(json.dumps([dict(tables), seed]) + "\n", "utf-8")
    except OSError as error:
        if not (root / str(client) / "client.json").is_file():  # another process may have cut it
            raise DataError(why_not_written(root, error)) from None
    counts = f"{len(dataset.train_y)} examples to train on, {len(dataset.test_y)} to test on"
    log.info("client %s: %s is cut as the run wants it: %s", client, files, counts)
    return root


def loaded(files: Path, data: Data, whose: Whose) -> Dataset:
    """Load a site's files as ``[data]`` says; classes are those that occur.

    ``whose`` tasks they are cut into, where the data say it: the site's, or one task.

    Raises:
        DataError: they cannot be read, or the name of a class is none.
    """
    columns = data.columns and data.columns.model_copy(update={"classes": None})
    update = {"classes": None, "columns": columns, "root": str(files)}
    found = load(data.model_copy(update=update), whose=whose)
    for name in found.class_names:
        try:
            named(name)
        except ValueError as error:
            raise DataError(f"{files}: {error}") from None
    return found


def _by_names(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Return a data set whose labels are the places of its classes among those of the run.

    A class that the run does not know comes after these; the coordinator refuses it by its name.
    """
    if not classes:
        return dataset
    names = [composed(name) for name in classes]
    names += [name for name in dataset.class_names if name not in names]
    places: IntArray = np.array([names.index(name) for name in dataset.class_names], dtype=np.int64)
    return dataset.relabelled(places, names)


def _stamp(files: Path, data: Data, seed: int, client: int) -> str:
    """Return the digest of all that a cut follows from."""
    found = files_below(files) if files.is_dir() else [files]
    stats = [(path, path.stat()) for path in found]
    held = [[str(path.resolve()), stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    facts = [FORMAT, data.identity(), seed, client, held]
    if data.has_groups:
        facts.append("with groups")  # earlier versions kept none
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _write(place: Path, dataset: Dataset, files: Path) -> None:
    """Write the directory of the site's client: one task, or those that ``[data]`` cuts.

    Raises:
        DataError: a task has no training example.
    """
    parts = {
        "train": (dataset.train_x, dataset.train_y, dataset.tasks_train),
        "test": (dataset.test_x, dataset.test_y, dataset.tasks_test),
    }
    tasks = [t for _, _, t in parts.values() if t is not None]
    held, counts = list[tuple[int, Part, Labelled]](), list[TaskCounts]()
    for number in range(1 + max((int(t.max()) for t in tasks), default=0)):
        sizes = dict[str, tuple[int, ...]]()
        for part in PARTS:
            x, y, task = parts[part]
            mine = slice(None) if task is None else task == number
            held.append((number, part, (x[mine], y[mine])))
            sizes[part] = tuple(np.bincount(y[mine], minlength=dataset.num_classes).tolist())
        if not sum(sizes["train"]):
            raise DataError(
                f"{files}: task {number} would have no training example: all are for testing, or "
                "too near to one; give more data, or a shorter window, hop or test_gap"
            )
        counts.append(TaskCounts(train=sizes["train"], test=sizes["test"]))
    described = description_of(dataset, (dataset.mean, dataset.std))
    place.mkdir()
    write_client(place, ClientFile(**described, tasks=tuple(counts)), held)
    if (wholes := dataset.wholes_train) is not None:
        for number in range(len(counts)):
            task = dataset.tasks_train
            write_wholes(place, number, wholes if task is None else wholes[task == number])
