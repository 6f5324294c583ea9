"""Writing a partition: what clients hold, the global test set, and a table of who holds what.

Clients get a directory each, as :mod:`fedcli.data.store.client_data` reads it, or are parts of one
store, which :mod:`fedcli.data.store.partition_store` describes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import Inputs, IntArray, Labelled, channel_moments, strata
from fedcli.data.cuts.cut_input import Partition
from fedcli.data.sets.dataset import Dataset
from fedcli.data.store.client_data import GROUP, PARTS, PEOPLE, STORE, TABLE, Part
from fedcli.data.store.people import keys_of, new_salt, people_table
from fedcli.data.store.reserve import Reserve
from fedmodels.config.origin import placeless
from fedmodels.errors import DataError
from fedmodels.facts.data_description import (
    FORMAT,
    ClientFile,
    Normaliser,
    ProblemFile,
    TaskCounts,
)
from fedmodels.host.shortages import lack_of, why_cut_off
from fedmodels.own.code_names import is_own

Moments = tuple[tuple[float, ...], tuple[float, ...]]
MAX_DIRECTORIES = 200
"""Clients beyond which a partition is a store, unless the layout is given."""
_IN_THE_WAY = (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS)
"""Why a directory that is there cannot be replaced: a mount point, or of another's parent."""


class Layout(StrEnum):
    """How clients' data lie on the disk."""

    DIRECTORIES = "directories"
    """A directory for each client, which can be carried to its machine."""
    STORE = "store"
    """A few files for all clients."""

    @classmethod
    def of(cls, root: Path) -> Layout:
        """Return the layout of a partition that is there."""
        return cls.STORE if (root / STORE).is_dir() else cls.DIRECTORIES


def digest_of(config: Mapping[str, Any]) -> str:
    """Return the sha256 of all that determines a partition, written as canonical JSON."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def same_partition(out: Path, config: Mapping[str, Any]) -> bool:
    """Tell whether ``out`` already holds the partition of this config.

    Raises:
        DataError: it holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        table = json.loads((out / TABLE).read_bytes())
        found, stated = table["digest"], table.get("config")
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise DataError(f"{out} exists and is not a partition: choose another directory") from None
    stated = placeless(stated) if isinstance(stated, dict) else stated
    if digest_of(config) in (found, _digest_or_none(stated)):
        return True
    other = {**stated, "variant": config.get("variant")} if isinstance(stated, dict) else None
    if _digest_or_none(other) == digest_of(config):
        name = config["data"]["name"]
        cause = f"{name} changed, or draws at random" if is_own(name) else f"{name} changed"
        raise DataError(
            f"{out} was made of other data: {cause}. Put it back as it was: a run goes on with the "
            "data that it began with; what is new needs a directory of its own"
        )
    raise DataError(
        f"{out} holds another partition ({_difference(stated, config)}): "
        "delete it or choose another directory"
    )


def _digest_or_none(config: Any) -> str | None:
    return digest_of(config) if isinstance(config, dict) else None


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    """Name the first entry in which two configs differ."""
    if isinstance(found, dict):
        for key in sorted({*found, *wanted}):
            ours, theirs = wanted.get(key), found.get(key)
            if ours != theirs and isinstance(ours, dict) and isinstance(theirs, dict):
                return f"{key}.{_difference(theirs, ours)}"
            if ours != theirs:
                return f"{key} was {theirs!r}, is {ours!r}"
    return "its config differs"


def write_partition(
    out: Path,
    dataset: Dataset,
    partition: Partition,
    config: Mapping[str, Any],
    reserve: Reserve | None = None,
    layout: Layout | None = None,
) -> bool:
    """Write a partition into ``out`` as a whole, or not at all; tell whether it was written.

    It is not where the same partition was there already. ``config`` has all that determines it, as
    JSON values. The server's reserve goes into ``out/server``. Unless the layout is given, more
    than ``MAX_DIRECTORIES`` clients make a store.

    Raises:
        DataError: ``out`` holds something else, or cannot be written.
    """
    if same_partition(out, config):
        _check_layout(out, layout)
        return False
    if layout is None:
        many = len(partition.clients) > MAX_DIRECTORIES
        layout = Layout.STORE if many else Layout.DIRECTORIES
    try:
        with written_whole(out) as place:
            _write_all(place, dataset, partition, config, layout)
            if reserve is not None:
                described = description_of(dataset, (dataset.mean, dataset.std))
                held = {"x": reserve.x, "y": reserve.y, "unlabelled_x": reserve.unlabelled}
                _write_described(place / "server", ProblemFile(**described), config, held)
    except OSError as error:
        if out.is_dir() and any(out.iterdir()) and same_partition(out, config):
            return False  # another process wrote it meanwhile
        raise DataError(why_not_written(out, error)) from None
    return True


def why_not_written(out: Path, error: OSError) -> str:
    """Return a line that says why nothing can be written into ``out``, and what to do."""
    reason = lack_of(error) or error.strerror or why_cut_off()  # numpy counts bytes alone
    if error.errno in _IN_THE_WAY and out.is_dir():
        return f"{out} cannot be replaced as a whole: {reason}; name a directory in it"
    return f"{out} cannot be written: {reason}"


def _check_layout(out: Path, layout: Layout | None) -> None:
    """Check that the partition in ``out`` has this layout, if one is given.

    Raises:
        DataError: it has the other one.
    """
    found = Layout.of(out)
    if layout not in (None, found):
        raise DataError(
            f"{out} holds this partition with the layout {found.value!r}: choose another directory"
        )


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes ``out`` at the end; an error leaves nothing.

    Raises:
        OSError: it cannot be written, or ``out`` holds something.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield place
        os.rename(place, out)  # it stays its owner's, as the data in it are
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _write_all(
    place: Path, dataset: Dataset, partition: Partition, config: Mapping[str, Any], layout: Layout
) -> None:
    """Write every file of a partition into an empty directory."""
    moments, counts = client_moments(dataset, partition), task_counts(dataset, partition)
    if layout is Layout.STORE:
        _write_store(place / STORE, dataset, partition, moments, config)
    else:
        for i, tasks in enumerate(partition.clients):
            about = description_of(dataset, moments[i])
            file = ClientFile(**about, name=partition.name_of(i), tasks=tuple(counts[i]))
            file = file.model_copy(update={"partition": config})
            held = (
                (m, part, examples_of(dataset, partition, getattr(task, part), part))
                for m, task in enumerate(tasks)
                for part in PARTS
            )
            write_client(place / str(i), file, held)
            if (wholes := dataset.train.wholes) is not None:
                for m, task in enumerate(tasks):
                    if (task.train < len(wholes)).all():  # of test examples no group is known
                        write_wholes(place / str(i), m, wholes[task.train])
            if (whose := dataset.whose) is not None:
                shift = 0 if partition.pooled else len(dataset.train.y)
                of_tasks = [(whose[task.train], whose[task.test + shift]) for task in tasks]
                write_people(place / str(i), dataset.whole_names, of_tasks)
    _write_global_test(place / "global-test", dataset, partition, moments, config)
    content = {
        "format": FORMAT,
        "digest": digest_of(config),
        "config": config,
        "dataset": dataset.name,
        "variant": dataset.variant,
        "class_names": dataset.class_names,
        "client_names": partition.names,
        "clients": [[task.model_dump(mode="json") for task in tasks] for tasks in counts],
    }
    (place / TABLE).write_text(json.dumps(content) + "\n", "utf-8")


def write_client(place: Path, file: ClientFile, held: Iterable[tuple[int, Part, Labelled]]) -> None:
    """Write one client's directory: ``client.json``, inputs and labels of each task and part."""
    for task, part, (x, y) in held:
        folder = place / f"task-{task}"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{part}_x.npy", x, allow_pickle=False)
        np.save(folder / f"{part}_y.npy", y, allow_pickle=False)
    (place / "client.json").write_text(file.text(indent=1) + "\n", "utf-8")


def write_wholes(place: Path, task: int, wholes: IntArray) -> None:
    """Write the group (n,) of each training example of a task into a client's directory."""
    np.save(place / f"task-{task}" / f"{GROUP}.npy", wholes, allow_pickle=False)


def write_people(
    place: Path, names: Sequence[str], tasks: Sequence[tuple[IntArray, IntArray]]
) -> None:
    """Write into a client's directory in which part each person is, of each task.

    Args:
        place: the directory.
        names: of groups, by their number.
        tasks: of each task the group of each training, and of each test example.
    """
    keys = keys_of(names, new_salt(place))
    for number, (train, test) in enumerate(tasks):
        table = people_table(keys, train, test)
        np.save(place / f"task-{number}" / f"{PEOPLE}.npy", table, allow_pickle=False)


def description_of(
    dataset: Dataset, moments: Moments, scale: float | None = None
) -> dict[str, Any]:
    """Return the fields that client.json and problem.json share."""
    return {
        "dataset": dataset.name,
        "input_shape": dataset.input_shape,
        "num_classes": dataset.num_classes,
        "scale": dataset.scale if scale is None else scale,
        "mean": moments[0],
        "std": moments[1],
        "class_names": dataset.class_names,
        "transform": dataset.transform,
    }


def examples_of(
    dataset: Dataset, partition: Partition, indices: IntArray, part: str
) -> tuple[Inputs, IntArray]:
    """Return the inputs (n, *input_shape) and labels (n,) at a partition's indices, in their order.

    The partition says what the indices of a part count through.
    """
    first = len(dataset.train.y)
    if not partition.pooled and part == "test":
        indices = indices + first
    train, test = indices[indices < first], indices[indices >= first] - first
    # training examples come first below; order leads back to the order of the indices
    order = np.argsort(np.argsort(indices >= first, kind="stable"), kind="stable")
    x = np.concatenate([dataset.train.x[train], dataset.test.x[test]])[order]
    y = np.concatenate([dataset.train.y[train], dataset.test.y[test]])[order]
    return x, y


def task_counts(dataset: Dataset, partition: Partition) -> list[list[TaskCounts]]:
    """Return the examples per class of each task of each client."""
    labels = {
        "train": strata(dataset.train.y),
        "test": np.concatenate([strata(dataset.train.y), strata(dataset.test.y)])
        if partition.pooled
        else strata(dataset.test.y),
    }
    if partition.pooled:
        labels["train"] = labels["test"]

    def counts(indices: IntArray, part: str) -> tuple[int, ...]:
        return tuple(np.bincount(labels[part][indices], minlength=dataset.num_classes).tolist())

    return [
        [TaskCounts(train=counts(t.train, "train"), test=counts(t.test, "test")) for t in tasks]
        for tasks in partition.clients
    ]


def client_moments(dataset: Dataset, partition: Partition) -> list[Moments]:
    """Return each client's mean and deviation of ``x / scale``, per channel, to normalise with."""
    if partition.zscore == "none" or dataset.moments_given:
        return [(dataset.mean, dataset.std)] * len(partition.clients)
    if partition.zscore == "official":
        return _official_moments(dataset, partition)
    out = []
    for tasks in partition.clients:
        first = tasks[0].train  # others are not there yet when a run begins
        x, _ = examples_of(dataset, partition, first, "train")
        out.append(channel_moments(x, dataset.scale, dataset.levels))
    return out


def _official_moments(dataset: Dataset, partition: Partition) -> list[Moments]:
    """Return each client's moments as FedAli's code has them.

    A device model has one mean and one deviation for each of its two sensors, over all windows of
    that model. Channels 0 to 2 are of the accelerometer, the others of the gyroscope.
    """
    devices = [dataset.devices[group] for group in owners_of(dataset, partition)]
    groups = groups_of(dataset)
    found: dict[str, Moments] = {}
    for device in dict.fromkeys(devices):
        of_device = [g for g, name in enumerate(dataset.devices) if name == device]
        indices = np.flatnonzero(np.isin(groups, of_device))
        x, _ = examples_of(dataset, partition, indices, "train")
        sensors = [x[..., :3], x[..., 3:]]
        mean = [float(s.mean(dtype=np.float64)) for s in sensors for _ in range(3)]
        std = [float(s.std(dtype=np.float64)) or 1.0 for s in sensors for _ in range(3)]
        found[device] = (tuple(mean), tuple(std))
    return [found[device] for device in devices]


def groups_of(dataset: Dataset) -> IntArray:
    """Return the natural client of every training, then of every test example, (n + m,).

    Raises:
        DataError: the data set does not say whose its examples are.
    """
    groups = dataset.groups
    if groups is None:
        raise DataError(f"{dataset.name} does not identify its subjects")
    return groups


def owners_of(dataset: Dataset, partition: Partition) -> list[int]:
    """Return which natural client each client is."""
    return [int(groups_of(dataset)[tasks[0].train[0]]) for tasks in partition.clients]


def _write_global_test(
    place: Path,
    dataset: Dataset,
    partition: Partition,
    moments: list[Moments],
    config: Mapping[str, Any],
) -> None:
    """Write the global test set.

    Where clients have moments of their own, each owner's moments normalise its examples.
    """
    x, y = examples_of(dataset, partition, partition.global_test, "test")
    file = ProblemFile(**description_of(dataset, (dataset.mean, dataset.std)))
    if partition.zscore != "none":
        groups = groups_of(dataset)[partition.global_test]
        raw, x = x, np.zeros(x.shape, dtype=np.float32)
        for owner, own in zip(owners_of(dataset, partition), moments, strict=True):
            described = ProblemFile(**description_of(dataset, own))
            x[groups == owner] = Normaliser.of(described)(raw[groups == owner])
        file = ProblemFile(**description_of(dataset, ((0.0,), (1.0,)), scale=1.0))
    _write_described(place, file, config, {"x": x, "y": y})


def _write_described(
    place: Path, file: ProblemFile, config: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
) -> None:
    """Write a directory of arrays, by name, with a description that names the partition."""
    place.mkdir()
    file = file.model_copy(update={"partition": config})
    (place / "problem.json").write_text(file.model_dump_json(indent=1) + "\n", "utf-8")
    for name, array in arrays.items():
        np.save(place / f"{name}.npy", array, allow_pickle=False)


def _write_store(
    place: Path,
    dataset: Dataset,
    partition: Partition,
    moments: Sequence[Moments],
    config: Mapping[str, Any],
) -> None:
    """Write a partition as a store into a new directory.

    Mean and deviation of each client are stored where they differ from the shared ones.
    """
    shared = ProblemFile(**description_of(dataset, (dataset.mean, dataset.std)))
    first = len(dataset.train.y)
    pieces = [
        indices if partition.pooled or part == "train" else indices + first
        for tasks in partition.clients
        for task in tasks
        for part, indices in (("train", task.train), ("test", task.test))
    ]
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64).reshape(-1, 2)
    begins = np.concatenate([[0], ends[:-1, 1]])
    arrays = {
        "y": np.concatenate([dataset.train.y, dataset.test.y]),
        "indices": np.concatenate(pieces).astype(np.int64),
        "starts": np.column_stack([begins, ends]),
        "pairs": np.cumsum([0, *map(len, partition.clients)], dtype=np.int64),
    }
    if dataset.train.wholes is not None:
        arrays["group"] = dataset.train.wholes
    whose = dataset.whose
    if any(own != (shared.mean, shared.std) for own in moments):
        arrays["moments"] = np.array(moments, dtype=np.float64)
    _write_described(place, shared, config, arrays)
    if whose is not None:
        np.save(place / f"{PEOPLE}.npy", keys_of(dataset.whole_names, new_salt(place)))
        np.save(place / "whose.npy", whose)
    _write_inputs(place / "x.npy", dataset.train.x, dataset.test.x)
    if partition.names:
        names = [partition.name_of(client) for client in range(len(partition.clients))]
        (place / "names.json").write_text(json.dumps(names) + "\n", "utf-8")


def _write_inputs(path: Path, train: Inputs, test: Inputs) -> None:
    """Write training inputs (n, *input_shape), then test inputs (m, *input_shape), as one array.

    The file is not mapped: where the disk is full, writing to a mapped file ends the process.

    Raises:
        OSError: the file cannot be written.
    """
    header = np.lib.format.header_data_from_array_1_0(train)
    header |= {"fortran_order": False, "shape": (len(train) + len(test), *train.shape[1:])}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in (train, test):
            np.ascontiguousarray(part, dtype=train.dtype).tofile(file)
