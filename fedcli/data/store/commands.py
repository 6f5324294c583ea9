"""What ``fedcli partition`` and ``fedcli export-partition`` do."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedcli.data.arrays import IntArray, Labelled, strata
from fedcli.data.cuts.cut_input import Partition, TaskIndices, rng_of
from fedcli.data.cuts.long_tail import keep_per_class
from fedcli.data.cuts.partition import partition
from fedcli.data.cuts.shown import blurred, shown
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.looks import as_shown, origins
from fedcli.data.sets.registry import load
from fedcli.data.store.client_data import PARTS, STORE, TABLE, ClientData, Part
from fedcli.data.store.findings import tell
from fedcli.data.store.partition_store import PartitionStore
from fedcli.data.store.partition_writer import (
    Layout,
    client_moments,
    description_of,
    groups_of,
    owners_of,
    why_not_written,
    write_client,
    write_partition,
    write_wholes,
    written_whole,
)
from fedcli.data.store.reserve import Reserve, set_apart
from fedmodels.config.data import Data
from fedmodels.config.origin import placeless
from fedmodels.config.scenario import DirichletPooled, Natural, ScenarioTable
from fedmodels.console.charts import Chart, Spread, document
from fedmodels.console.printable import printable
from fedmodels.errors import ConfigError, DataError, reason_of
from fedmodels.facts.data_description import Normaliser, ProblemFile
from fedmodels.host.files import write_atomically
from fedmodels.tensors.bundle import EVALUATOR, ClientId

log = logging.getLogger(__name__)

MAX_ROWS = 40
"""Pairs (client, task) printed; ``partition.json`` holds all of them."""
MAX_CLASSES = 12
"""Classes printed of one task."""
MAX_NAMES = 5
"""Natural clients named in a note."""
MAX_LETTERS = 40
"""Letters printed of a natural client's name, and of the names of all classes."""
PER_CLASS = "training examples per class"


def run_partition(
    experiment_data: Data,
    experiment_scenario: ScenarioTable,
    num_clients: int,
    seed: int,
    out: Path,
    console: Console | None = None,
    *,
    gather: bool = False,
    layout: Layout | None = None,
    strict: bool = False,
) -> str:
    """Deal a data set out to clients, and print who holds what; return the path of the root.

    Args:
        experiment_data: ``[data]``.
        experiment_scenario: ``[scenario]``.
        num_clients: ``[schedule] clients``.
        seed: the run's seed.
        out: the partition's root; reused if it holds the same partition already.
        console: where to print; standard output by default.
        gather: put all training data into client 0's directory (Centralized on pooled data).
        layout: how clients' data lie in ``out``; unless given, a store where clients are many, and
            directories where they are few.
        strict: refuse custom data in which something may not be meant.

    Raises:
        ConfigError: the scenario does not fit.
        DataError: the data set is missing, or ``out`` holds something else; or ``strict``, and
            something may not be meant.
    """
    console = console or Console()
    _check_dealt_anew(experiment_scenario, experiment_data)
    tasks = _tasks_along_time(experiment_scenario, num_clients)
    dataset, reserve = set_apart(load(experiment_data, tasks), experiment_data, seed)
    dataset = thinned(dataset, experiment_data, seed)
    config: dict[str, Any] = {
        "data": experiment_data.identity(),
        "variant": dataset.identity,
        "scenario": experiment_scenario.identity(),
        "clients": num_clients,
        "seed": seed,
    }
    config = placeless(config)
    dataset, made = _dealt(dataset, experiment_scenario, num_clients, seed)
    _tell_order(dataset, experiment_data, experiment_scenario)
    if reserve is not None and made.zscore != "none":
        raise ConfigError(
            "[data] server_examples: clients of this scenario normalise by themselves, so there is "
            "no way to normalise what the server holds"
        )
    if reserve is not None and reserve.x.shape[1:] != dataset.input_shape:
        raise ConfigError(
            "[data] server_examples: the server would hold grey images, and 'colour' makes others "
            "of those of clients"
        )
    if gather:
        dataset, made = gathered(dataset, made)
        config["gathered"] = True
    written = write_partition(out, dataset, made, config, reserve, layout)
    _show(console, out, reserve, written=written)
    if dataset.has_own_parts:
        tell(out, strict=strict)
    return str(out)


def _check_dealt_anew(scenario: ScenarioTable, data: Data) -> None:
    """Raise ConfigError if ``[data]`` says how a test part is chosen that is dealt out anew."""
    if not isinstance(scenario, DirichletPooled) or scenario.same_props:
        return
    columns = data.columns
    given = {
        "[data] group": data.group, "[data.columns] group": columns and columns.group,
        "[data] test_seed": data.test_seed, "[data] test_gap": data.test_gap,
    }  # fmt: skip
    for key, value in given.items():
        if value is not None:
            raise ConfigError(
                f"[scenario] dirichlet_pooled deals test examples out anew, without a look at "
                f"{key}: set same_props = true, or leave {key.split()[-1]} out"
            )


def _tasks_along_time(scenario: ScenarioTable, num_clients: int) -> list[int]:
    """Return the tasks of each natural client; none in another scenario, or if all have one."""
    if not isinstance(scenario, Natural):
        return []
    tasks = scenario.tasks_per_client(num_clients, 0)
    return tasks if max(tasks) > 1 else []


IN_ORDER = ("natural", "iid", "label_shards", "per_class_shards", "drawn")
"""Scenarios in which examples of a task stand in the order that the data have them in."""


def _dealt(
    dataset: Dataset, scenario: ScenarioTable, num_clients: int, seed: int
) -> tuple[Dataset, Partition]:
    """Return the examples as they are shown, and who holds which.

    A line says which natural clients take no part.
    """
    domains = scenario.domains
    if isinstance(scenario, Natural) and domains is not None and domains.deals_apart:
        dataset = dataset.by_person()
    taken_from = origins(dataset, domains) if domains is not None else None
    made = partition(
        scenario,
        strata(dataset.train.y),
        strata(dataset.test.y),
        dataset.num_classes,
        num_clients,
        seed,
        dataset.groups,
        coarse=dataset.coarse,
        has_own_parts=dataset.has_own_parts,
        overlapping=dataset.overlapping,
        own_tasks=dataset.tasks,
        origins=taken_from,
    )
    if isinstance(scenario, Natural):
        names = list(made.names) or dataset.client_names
        _tell_left_out(names, num_clients)
        made = replace(made, names=tuple(names[:num_clients]))
    if scenario.timelines:
        made, train, test = shown(scenario, made, len(dataset.train.y), seed, taken_from)
        dataset = as_shown(dataset, scenario, train, test, seed)
    if scenario.blur is not None:
        made = blurred(made, scenario.blur, seed)
    return dataset, made


def _tell_order(dataset: Dataset, data: Data, scenario: ScenarioTable) -> None:
    """Say where validation parts share rows with what is trained on: nothing tells them apart."""
    by_windows = data.validation_share is not None and not data.has_groups and dataset.overlapping
    if by_windows and scenario.name not in IN_ORDER:
        log.warning(
            "note: windows overlap, and [scenario] %s deals them out in another order than that of "
            "their recording: windows for validation share rows with some that are trained on",
            scenario.name,
        )


def _tell_left_out(names: list[str], num_clients: int) -> None:
    """Say which natural clients take no part, if any: those behind the first ``num_clients``."""
    left = names[num_clients:]
    if left:
        more = f" and {len(left) - MAX_NAMES} more" if len(left) > MAX_NAMES else ""
        some = ", ".join(printable(name, MAX_LETTERS) for name in left[:MAX_NAMES])
        log.warning(
            "note: %d natural clients, of which schedule.clients = %d are used; left out: %s%s",
            len(names), num_clients, some, more,
        )  # fmt: skip


def _show(console: Console, out: Path, reserve: Reserve | None, *, written: bool) -> None:
    """Print who holds what, and where the partition is."""
    console.print(_table_of(json.loads((out / TABLE).read_bytes())))
    if reserve is not None:
        counts = f"{len(reserve.y)} labelled and {len(reserve.unlabelled)} unlabelled"
        console.print(f"the server holds {counts} training examples that no client holds")
    done = "written to" if written else "the same partition is already in"
    console.print(f"{done} {out}", markup=False, highlight=False, soft_wrap=True)


def thinned(dataset: Dataset, data: Data, seed: int) -> Dataset:
    """Return the data set with at most as many examples of each class as ``[data]`` allows."""
    if data.max_per_class is not None:
        kept = _some(dataset, dataset.train, data.max_per_class, seed, "max_per_class")
        dataset = dataset.at(train=kept)
    if data.max_test_per_class is not None:
        kept = _some(dataset, dataset.test, data.max_test_per_class, seed, "max_test_per_class")
        dataset = dataset.at(test=kept)
    return dataset


def _some(dataset: Dataset, part: Examples, most: int, seed: int, purpose: str) -> IntArray:
    """Draw at most ``most`` examples of each class; return their positions, ascending.

    Of each domain, where the data have several that hold the same classes.
    """
    counts, labels = np.full(dataset.num_classes, most, dtype=np.int64), part.y
    if part.domains is not None and dataset.groups is None:
        labels = labels + dataset.num_classes * part.domains
        counts = np.full(dataset.num_classes * len(dataset.domain_names), most, dtype=np.int64)
    return keep_per_class(labels, counts, rng_of(seed, purpose))


def _table_of(content: dict[str, Any]) -> Table:
    """Return the table of who holds what, from what ``partition.json`` says."""
    table = Table(title=Text(f"{content['dataset']} ({content['variant']})"), title_justify="left")
    people, classes = content.get("client_names", ()), _shown(content["class_names"])
    for column in ("client", *(["name"] if people else ()), "task", "train", "test", PER_CLASS):
        table.add_column(column, justify="left" if column in ("name", PER_CLASS) else "right")
    rows = [(i, m, task) for i, c in enumerate(content["clients"]) for m, task in enumerate(c)]
    for i, m, task in rows[:MAX_ROWS]:
        held = [(k, n) for k, n in enumerate(task["train"]) if n]
        text = "  ".join(f"{classes[k]}:{n}" for k, n in held[:MAX_CLASSES])
        more = f"  and {len(held) - MAX_CLASSES} more" if len(held) > MAX_CLASSES else ""
        name = [printable(people[i], MAX_LETTERS)] if people else []
        sizes = (str(sum(task["train"])), str(sum(task["test"])))
        table.add_row(*(Text(cell) for cell in (str(i), *name, str(m), *sizes, text + more)))
    if len(rows) > MAX_ROWS:
        table.caption = f"{len(rows) - MAX_ROWS} more rows: {TABLE} holds all of them"
    return table


def _shown(names: list[str]) -> list[str]:
    """Return what a table calls classes: their names, or their numbers if that is too long."""
    shown = [printable(name, MAX_LETTERS) for name in names]
    return shown if len(" ".join(shown)) <= MAX_LETTERS else [str(k) for k in range(len(names))]


def draw_partition(root: Path) -> Path:
    """Draw ``root/partition.svg`` from ``root/partition.json``; return its path.

    Columns are clients, or pairs of a client and a task, rows classes; the shade is the number of
    training examples.

    Raises:
        DataError: the picture cannot be written.
    """
    content = json.loads((root / TABLE).read_bytes())
    people = content.get("client_names") or [str(i) for i in range(len(content["clients"]))]
    pairs = [
        (f"{name}/{task}" if len(tasks) > 1 else name, counts["train"])
        for name, tasks in zip(people, content["clients"], strict=True)
        for task, counts in enumerate(tasks)
    ]
    cells = {
        (label, column): Spread(count)
        for column, (_, counts) in enumerate(pairs)
        for label, count in enumerate(counts)
        if count
    }
    rows, columns = dict(enumerate(content["class_names"])), dict(enumerate(n for n, _ in pairs))
    x = "client/task" if len(pairs) > len(people) else "client"
    caption = "training examples of each class"
    chart = Chart(caption, "cells", {"": cells}, x, "class", "", columns, rows, is_log=True)
    path = root / "partition.svg"
    try:
        write_atomically(path, document([chart]))
    except OSError as error:
        raise DataError(
            f"the data are dealt out, but their picture {path} cannot be written: "
            f"{reason_of(error)}"
        ) from None
    return path


def gathered(dataset: Dataset, partition: Partition) -> tuple[Dataset, Partition]:
    """Move all training examples to client 0, task by task; test data stay where they are.

    Where clients have moments of their own, the returned inputs are normalised by their owner's.
    """
    if partition.zscore != "none":
        dataset = _normalised_by_owner(dataset, partition)
    nothing: IntArray = np.zeros(0, dtype=np.int64)
    most = max(len(tasks) for tasks in partition.clients)
    union = [
        np.unique(np.concatenate([tasks[m].train for tasks in partition.clients if m < len(tasks)]))
        for m in range(most)
    ]
    first = partition.clients[0]
    clients = [
        tuple(
            TaskIndices(union[m], first[m].test if m < len(first) else nothing) for m in range(most)
        ),
        *(tuple(TaskIndices(nothing, t.test) for t in tasks) for tasks in partition.clients[1:]),
    ]
    return dataset, replace(partition, clients=tuple(clients), zscore="none")


def _normalised_by_owner(dataset: Dataset, partition: Partition) -> Dataset:
    """Return the data set with each natural client's inputs normalised by its own moments."""
    raw = np.concatenate([dataset.train.x, dataset.test.x])
    x = np.zeros(raw.shape, dtype=np.float32)
    groups = groups_of(dataset)
    moments = client_moments(dataset, partition)
    for owner, own in zip(owners_of(dataset, partition), moments, strict=True):
        normalise = Normaliser.of(ProblemFile(**description_of(dataset, own)))
        x[groups == owner] = normalise(raw[groups == owner])
    first = len(dataset.train.y)
    return dataset.showing(x[:first], x[first:], scale=1.0, mean=(0.0,), std=(1.0,))


def export_partition(root: Path, out: Path, clients: Sequence[ClientId] | None = None) -> int:
    """Write clients of a store as directories into ``out``, with all else that the root holds.

    By default everybody's data are written. Returns how many clients those are.

    Raises:
        DataError: there is no store, it holds no such client, or ``out`` is neither absent nor
            empty, or cannot be written.
    """
    store = PartitionStore.find(root)
    if store is None:
        raise DataError(f"{root} holds no store: its clients have directories already, if any")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} holds something: choose another directory")
    wanted = range(len(store)) if clients is None else clients
    if EVALUATOR in wanted:
        raise DataError(f"the {EVALUATOR} has no directory: its data are in global-test")
    opened = [store.client(int(client)) for client in wanted]
    try:
        with written_whole(out) as place:
            shutil.copytree(root, place, ignore=shutil.ignore_patterns(STORE), dirs_exist_ok=True)
            for client in opened:
                write_client(place / client.directory.name, client.file, _held(client))
                for task in range(client.num_tasks):
                    if (wholes := client.wholes(task)) is not None:
                        write_wholes(place / client.directory.name, task, wholes)
    except OSError as error:
        raise DataError(why_not_written(out, error)) from None
    return len(opened)


def _held(client: ClientData) -> Iterator[tuple[int, Part, Labelled]]:
    """Yield inputs and labels of each task and part."""
    for task in range(client.num_tasks):
        for part in PARTS:
            yield task, part, client.arrays(task, part)
