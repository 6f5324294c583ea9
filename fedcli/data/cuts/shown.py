"""Which domain and concept each example of a partition is shown in, and borders that overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedcli.data.arrays import IntArray
from fedcli.data.cuts.cut_input import Partition, TaskIndices, rng_of
from fedmodels.config.scenario import ScenarioTable
from fedmodels.config.timeline import Timeline
from fedmodels.errors import ConfigError


@dataclass(frozen=True)
class Shown:
    """Every example of a data set in every way in which it is shown, once: R rows."""

    examples: IntArray  # (R,) index of each row's example
    domains: IntArray  # (R,)
    concepts: IntArray  # (R,)


def shown(
    scenario: ScenarioTable,
    made: Partition,
    num_train: int,
    seed: int,
    origins: IntArray | None = None,
) -> tuple[Partition, Shown, Shown]:
    """Return a partition of rows, each of an example as it is shown, and those rows.

    Rows are of examples for training, then of those for testing, each in their order. An example of
    the global test set is shown as to the first client and task that it tests; one that tests
    nobody as to a client and task that are drawn. Where domains take their examples from domains of
    the data, it is shown in its own one, and not there if no task shows that.

    Args:
        scenario: says what is shown.
        made: who holds which examples.
        num_train: examples for training.
        seed: the run's.
        origins: the domain that each example may be shown in (n + m,), or -1; none for any.

    Raises:
        ConfigError: a domain or concept is shown to nobody.
    """
    timelines = [scenario.domains, scenario.concepts]
    used: list[set[int]] = [set(), set()]
    parts: dict[str, list[list[IntArray]]] = {"train": [], "test": []}
    for client, tasks in enumerate(made.clients):
        for number, task in enumerate(tasks):
            for place, part in enumerate(parts):
                indices = getattr(task, part)
                looks = [
                    _drawn(line, client, number, len(tasks), len(indices),
                           rng_of(seed, f"shown {kind}", client, number, place))
                    for kind, line in zip(("domains", "concepts"), timelines, strict=True)
                ]  # fmt: skip
                for seen, found in zip(used, looks, strict=True):
                    seen.update(np.unique(found).tolist())
                parts[part].append([indices, *looks])
    _check_all_shown(scenario, used)
    offset = 0 if made.pooled else num_train
    every = made.global_test
    own = None if origins is None else origins[every + offset]
    if own is not None:
        every, own = every[own >= 0], own[own >= 0]
    indices, domains, concepts = _global_looks(parts["test"], every, rng_of(seed, "shown global"))
    parts["global"] = [[indices, domains if own is None else own, concepts]]
    for part in ("test", "global"):
        parts[part] = [[found[0] + offset, *found[1:]] for found in parts[part]]
    return _rows(made, parts, num_train)


def _drawn(
    line: Timeline | None, client: int, task: int, tasks: int, size: int, rng: np.random.Generator
) -> IntArray:
    """Return what each of so many examples of a task shows (size,): parts of exact sizes."""
    if line is None:
        return np.zeros(size, dtype=np.int64)
    shares = np.array(line.shares(client, task, tasks))
    ends = np.rint(np.cumsum(shares) * size).astype(np.int64)
    counts = np.diff(np.concatenate([[0], ends]))
    found = np.repeat(np.arange(len(shares)), counts)
    return rng.permutation(found) if np.count_nonzero(counts) > 1 else found


def _check_all_shown(scenario: ScenarioTable, used: Sequence[set[int]]) -> None:
    for line, seen in zip((scenario.domains, scenario.concepts), used, strict=True):
        left = [text for v, text in enumerate(line.show) if v not in seen] if line else []
        if line is not None and left:
            raise ConfigError(
                f"[scenario.{line.table}] {left[0]!r} is shown to no client at any task: give more "
                "tasks, a smaller every, or leave it out"
            )


def _global_looks(
    tests: list[list[IntArray]], indices: IntArray, rng: np.random.Generator
) -> list[IntArray]:
    """Return how each example of the global test set is shown: indices, domains and concepts."""
    every = [np.concatenate(found) for found in zip(*tests, strict=True)]
    held, first = np.unique(every[0], return_index=True)
    if not len(held):
        return [indices, np.zeros_like(indices), np.zeros_like(indices)]
    place = np.minimum(np.searchsorted(held, indices), len(held) - 1)
    at = np.where(
        held[place] == indices, first[place], rng.integers(len(every[0]), size=len(indices))
    )
    return [indices, every[1][at], every[2][at]]


def _rows(
    made: Partition, parts: dict[str, list[list[IntArray]]], num_train: int
) -> tuple[Partition, Shown, Shown]:
    """Number the rows, and put their numbers in the place of examples."""
    sizes = [1 + max(int(f[c].max(initial=0)) for p in parts.values() for f in p) for c in (1, 2)]
    codes = {
        part: [(found[0] * sizes[0] + found[1]) * sizes[1] + found[2] for found in several]
        for part, several in parts.items()
    }
    rows = np.unique(np.concatenate([code for several in codes.values() for code in several]))
    examples, looks = np.divmod(rows, sizes[0] * sizes[1])
    split = int(np.searchsorted(examples, num_train))
    offset = 0 if made.pooled else split
    places = {
        part: [np.searchsorted(rows, code) for code in several] for part, several in codes.items()
    }
    pairs = iter(zip(places["train"], places["test"], strict=True))
    clients = tuple(
        tuple(TaskIndices(train, test - offset) for train, test in (next(pairs) for _ in tasks))
        for tasks in made.clients
    )
    out = replace(made, clients=clients, global_test=places["global"][0] - offset)
    domains, concepts = np.divmod(looks, sizes[1])
    first = Shown(examples[:split], domains[:split], concepts[:split])
    return out, first, Shown(examples[split:] - num_train, domains[split:], concepts[split:])


def blurred(made: Partition, share: float, seed: int) -> Partition:
    """Return a partition whose tasks give a share of their examples to the client's other tasks.

    Each other task gets equally many of them. So of tasks of one size exactly that share of the
    examples comes from the others, and other tasks change their size a little. Training and test
    examples do so alike.

    Raises:
        ConfigError: each client has one task.
    """
    if all(len(tasks) == 1 for tasks in made.clients):
        raise ConfigError(
            "[scenario] blur exchanges examples of a client's tasks, and here clients have one "
            "task each: leave it out"
        )
    clients: list[tuple[TaskIndices, ...]] = []
    for client, tasks in enumerate(made.clients):
        if len(tasks) == 1:
            clients.append(tasks)
            continue
        halves = [
            _exchanged([getattr(task, part) for task in tasks], share,
                       rng_of(seed, "blur", client, place))
            for place, part in enumerate(("train", "test"))
        ]  # fmt: skip
        clients.append(tuple(TaskIndices(*both) for both in zip(*halves, strict=True)))
    return replace(made, clients=tuple(clients))


def _exchanged(tasks: list[IntArray], share: float, rng: np.random.Generator) -> list[IntArray]:
    """Return the examples of each task after each gave a share of its own to the others."""
    held: list[list[IntArray]] = [[] for _ in tasks]
    for place, indices in enumerate(tasks):
        mixed = rng.permutation(indices)
        given, kept = np.split(mixed, [round(share * len(indices))])
        held[place].append(kept)
        for step, piece in enumerate(np.array_split(given, len(tasks) - 1), 1):
            held[(place + step) % len(tasks)].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in held]
