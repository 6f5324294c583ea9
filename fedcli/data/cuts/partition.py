"""Who holds what: index arrays for every client and task of a scenario.

The functions that cut are pure numpy and draw from ``rng_of`` only, so the same seed gives the same
partition in every process. A pair is (client, task); pairs are numbered client by client. K is the
number of classes, U the number of pairs.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from fedcli.data.arrays import IntArray
from fedcli.data.cuts.cut_input import (
    CutInput,
    Partition,
    TaskIndices,
    chunks,
    class_table,
    held_tests,
    rng_of,
)
from fedcli.data.cuts.dirichlet import (
    balanced_proportions,
    counts_of,
    dirichlet,
    drawn_until,
    hand_out,
    multinomial_counts,
    pachinko_counts,
)
from fedcli.data.cuts.held_out import natural_clients, split_along_time
from fedcli.data.cuts.long_tail import long_tail
from fedcli.data.cuts.own import own_cut
from fedcli.data.cuts.replay_streams import (
    circulating_types,
    cut_in_parts,
    gradual_types,
    replay_stream,
)
from fedcli.data.cuts.shards import class_rows, drawn_hands, label_shards, per_class_shards
from fedmodels.config.scenario import (
    Dirichlet,
    DirichletPooled,
    Drawn,
    Iid,
    LabelShards,
    Natural,
    OwnScenario,
    PerClassShards,
    ReplayCirculating,
    ReplayGradual,
    ReplayHeterogeneous,
    ReplayTable,
    ScenarioTable,
)
from fedmodels.config.timeline import Domains
from fedmodels.errors import ConfigError

log = logging.getLogger(__name__)
MAX_NAMED = 5
"""Pairs (client, task) named in a note."""


def partition(
    scenario: ScenarioTable,
    labels_train: IntArray,
    labels_test: IntArray,
    num_classes: int,
    num_clients: int,
    seed: int,
    groups: IntArray | None = None,
    *,
    coarse: IntArray | None = None,
    has_own_parts: bool = False,
    overlapping: bool = False,
    own_tasks: IntArray | None = None,
    origins: IntArray | None = None,
) -> Partition:
    """Deal labels (n,) and (m,) of a data set out to clients and tasks.

    Groups (n + m,) and coarse classes (K,), and what the owner chose, are as :class:`CutInput`
    says. Origins (n + m,) are the domain that each example may be shown in, where a scenario's
    domains take their examples from domains of the data; -1 for none.

    Raises:
        ConfigError: the scenario does not fit the data set or the number of clients.
    """
    kept, kept_test = _kept(scenario, labels_train, labels_test, num_classes, seed)
    given = CutInput(
        train=labels_train[kept].astype(np.int64),
        test=labels_test[kept_test].astype(np.int64),
        num_classes=num_classes,
        tasks=scenario.tasks_per_client(num_clients, num_classes),
        seed=seed,
        groups=groups if groups is None else groups[np.r_[kept, len(labels_train) + kept_test]],
        coarse=coarse,
        has_own_parts=has_own_parts,
        overlapping=overlapping,
        own_tasks=own_tasks,
    )
    if scenario.domains is not None and scenario.domains.deals_apart:
        if origins is not None:
            origins = origins[np.r_[kept, len(labels_train) + kept_test]]
        if isinstance(scenario, Natural):
            out = _natural_by_domain(scenario, scenario.domains, given, origins)
        else:
            out = _cut_apart(scenario, scenario.domains, given, origins)
    else:
        out = _cut(scenario, given)
    if not out.pooled:
        out = _mapped_back(out, kept, kept_test)
    _check_filled(out)
    return out


def _kept(
    scenario: ScenarioTable, train: IntArray, test: IntArray, num_classes: int, seed: int
) -> tuple[IntArray, IntArray]:
    """Return the training and the test examples that remain after the long tail."""
    gamma = scenario.tail_gamma
    kept = long_tail(train, num_classes, gamma, rng_of(seed, "longtail"))
    test_gamma = gamma if scenario.test_long_tail else 1.0
    return kept, long_tail(test, num_classes, test_gamma, rng_of(seed, "longtail", 1))


def _cut(scenario: ScenarioTable, given: CutInput) -> Partition:
    """Return the partition of the examples given, cut by the function of the scenario's kind."""
    match scenario:
        case Iid():
            return _iid(given)
        case Dirichlet():
            return _dirichlet(scenario, given)
        case LabelShards():
            return _label_shards(scenario.shards, given)
        case PerClassShards():
            return _per_class_shards(scenario, given)
        case Natural():
            return _natural(scenario, given)
        case ReplayTable():
            return _replay(scenario, given)
        case DirichletPooled():
            return _dirichlet_pooled(scenario, given)
        case Drawn():
            return _drawn(scenario, given)
        case OwnScenario():
            return own_cut(scenario, given)
    raise ConfigError(f"[scenario] kind {scenario.name!r} has no partition")


def _cut_apart(
    scenario: ScenarioTable, domains: Domains, given: CutInput, origins: IntArray | None
) -> Partition:
    """Cut the examples of each domain by themselves, for the tasks of the clients that show it."""
    train, test = np.arange(len(given.train)), np.arange(len(given.test))
    cut: list[dict[int, TaskIndices]] = [{} for _ in given.tasks]
    for domain, name in enumerate(domains.show):
        shown = [
            [task for task in range(tasks) if domains.main(client, task, tasks) == domain]
            for client, tasks in enumerate(given.tasks)
        ]
        clients = [client for client, tasks in enumerate(shown) if tasks]
        if not clients:
            continue
        if origins is not None:
            train, test = (
                np.flatnonzero(part == domain) for part in np.split(origins, [len(given.train)])
            )
        inner = replace(
            given, train=given.train[train], test=given.test[test], domain=domain, groups=None,
            tasks=[len(shown[client]) for client in clients],
        )  # fmt: skip
        try:
            out = _mapped_back(_cut(scenario, inner), train, test)
        except ConfigError as error:
            raise ConfigError(f"{error} (of domain {name!r})") from None
        for client, tasks in zip(clients, out.clients, strict=True):
            cut[client] |= zip(shown[client], tasks, strict=True)
    clients_cut = tuple(tuple(tasks[m] for m in sorted(tasks)) for tasks in cut)
    return Partition(clients_cut, np.arange(len(given.test), dtype=np.int64))


def _iid(given: CutInput) -> Partition:
    train = given.rng("clients").permutation(len(given.train))
    test = given.rng("test").permutation(len(given.test))
    return given.by_client(
        [np.sort(piece) for piece in np.array_split(train, given.num_pairs)],
        [np.sort(piece) for piece in np.array_split(test, given.num_pairs)],
    )


def _dirichlet(scenario: Dirichlet, given: CutInput) -> Partition:
    over_pairs = scenario.over == "pairs"
    owned = dirichlet(
        given.train,
        given.num_classes,
        given.num_pairs if over_pairs else len(given.tasks),
        scenario.alpha,
        given.rng("clients"),
        min_size=scenario.min_size,
        balanced=not over_pairs,
    )
    if not over_pairs:
        owned = chunks(owned, given.tasks)
    return given.with_held_tests(owned)


def _label_shards(shards: int, given: CutInput) -> Partition:
    return given.with_held_tests(
        label_shards(given.train, given.num_pairs, shards, given.rng("shards"))
    )


def _per_class_shards(scenario: PerClassShards, given: CutInput) -> Partition:
    if scenario.sharding == "equal_size":
        return _label_shards(scenario.shards, given)
    shape = (given.num_classes, given.num_pairs, scenario.shards)
    distinct = scenario.distinct_labels
    train, rows = per_class_shards(
        given.train, *shape, given.rng("shards"), distinct_labels=distinct
    )
    test, _ = per_class_shards(given.test, *shape, given.rng("test"), rows=rows)
    # A class of fewer examples than shards has empty ones: who got one is not tested on it.
    holds = class_table(given.train, train, given.num_classes) > 0
    tested = [part[own[given.test[part]]] for part, own in zip(test, holds, strict=True)]
    return given.by_client(train, tested)


def _drawn(scenario: Drawn, given: CutInput) -> Partition:
    """Draw the classes of each pair, then its examples of each class."""
    width = scenario.classes or min(given.num_classes, scenario.examples)
    if width > given.num_classes:
        raise ConfigError(f"[scenario] classes = {width} exceeds the {given.num_classes} classes")
    rows = class_rows(given.num_classes, given.num_pairs, width, given.rng("shards"))
    train = drawn_hands(given.train, rows, scenario.examples, given.rng("clients"))
    test = drawn_hands(given.test, rows, scenario.test_examples, given.rng("test"))
    return given.by_client(train, test)


def _natural(scenario: Natural, given: CutInput) -> Partition:
    if given.groups is None:
        raise ConfigError(
            "[scenario] natural needs data that say whose each example is: in a table, name the "
            "column of persons in [data.columns] client, or set client_from = 'file' for files of "
            "one person each; a function gives groups, a directory of arrays groups_train.npy"
        )
    if given.has_own_parts and scenario.split != Natural.model_fields["split"].default:
        raise ConfigError(
            "[scenario] split is for sensor data sets that come with fedtide; custom data "
            "are split by [data.columns] test_share or split, or by their function: leave it out"
        )
    labels, clients, tests = given.pooled_labels, [], []
    owned = natural_clients(given.groups, len(given.tasks))
    for indices, num_tasks in zip(owned, given.tasks, strict=True):
        if not given.has_own_parts:
            pieces = np.array_split(indices, num_tasks)
            cut = [split_along_time(piece, labels, scenario.train_folds) for piece in pieces]
        elif given.own_tasks is not None:
            numbers = given.own_tasks[indices]
            most = max(num_tasks, 1 + int(numbers.max()))  # the data may say the tasks themselves
            cut = [_parts(indices[numbers == task], given) for task in range(most)]
        else:
            cut = _of_chosen_parts(indices, num_tasks, given)
        clients.append(tuple(TaskIndices(*parts) for parts in cut))
        tests += [test for _, test in cut]
    return Partition(tuple(clients), np.concatenate(tests), pooled=True, zscore=scenario.zscore)


def _natural_by_domain(
    scenario: Natural, domains: Domains, given: CutInput, origins: IntArray | None
) -> Partition:
    """Cut what persons recorded in each domain, such as a device, into the tasks that show it.

    Persons who lack a domain take no part.
    """
    if origins is None or given.groups is None:
        raise ConfigError(
            "[scenario.domains] whole deals examples to any client, and natural clients have "
            "their own: leave it out"
        )
    if scenario.zscore == "official":
        raise ConfigError(
            '[scenario] zscore = "official" is of a device, and here a client has several: leave '
            "it out"
        )
    labels, clients, tests = given.pooled_labels, [], []
    has_all = [
        set(range(len(domains.show))) <= set(origins[given.groups == group].tolist())
        for group in np.unique(given.groups)
    ]
    groups = np.where(np.isin(given.groups, np.unique(given.groups)[has_all]), given.groups, -1)
    owned = natural_clients(groups[groups >= 0], len(given.tasks))
    kept = np.flatnonzero(groups >= 0)
    for client, (places, num_tasks) in enumerate(zip(owned, given.tasks, strict=True)):
        indices, tasks = kept[places], dict[int, TaskIndices]()
        for domain in range(len(domains.show)):
            shown = [m for m in range(num_tasks) if domains.main(client, m, num_tasks) == domain]
            pieces = np.array_split(indices[origins[indices] == domain], max(len(shown), 1))
            for m, piece in zip(shown, pieces, strict=False):
                tasks[m] = TaskIndices(*split_along_time(piece, labels, scenario.train_folds))
        clients.append(tuple(tasks[m] for m in range(num_tasks)))
        tests += [task.test for task in clients[-1]]
    names = tuple(np.unique(groups[groups >= 0]).tolist())
    return Partition(
        tuple(clients), np.concatenate(tests), pooled=True, zscore=scenario.zscore,
        names=tuple(f"subject {name}" for name in names[: len(clients)]),
    )  # fmt: skip


def _parts(indices: IntArray, given: CutInput) -> tuple[IntArray, IntArray]:
    """Return the training and the test examples among these, (n,), as they were read."""
    train, test = np.split(indices, [np.searchsorted(indices, len(given.train))])
    return train, test


def _of_chosen_parts(
    indices: IntArray, num_tasks: int, given: CutInput
) -> list[tuple[IntArray, IntArray]]:
    """Return the parts of each task of a client whose owner says what is for testing.

    Nothing says of which time a test example is: those of a class go to the tasks with the class.
    """
    labels, (train, test) = given.pooled_labels, _parts(indices, given)
    trains = chunks([train], [num_tasks])
    parts = held_tests(labels[test], class_table(labels, trains, given.num_classes) > 0)
    return [(piece, test[part]) for piece, part in zip(trains, parts, strict=True)]


def _replay(scenario: ReplayTable, given: CutInput) -> Partition:
    """Cut a stream of pFedGRP's for each client; clients draw from the same examples."""
    clients = []
    for i in range(len(given.tasks)):
        rng = given.rng("clients", i)
        permuted = rng.permutation(given.num_classes)
        size, parts = scenario.images_per_part, scenario.parts
        train = cut_in_parts(given.train, given.num_classes, parts, size, rng)
        limit = scenario.test_images if isinstance(scenario, ReplayHeterogeneous) else None
        test = cut_in_parts(given.test, given.num_classes, parts, limit, given.rng("test", i))
        types, width = _types(scenario, given.num_classes // 2, given.rng("tasks", i))
        stream = replay_stream(types, width, permuted, train, test)
        clients.append(tuple(TaskIndices(*task) for task in stream))
    return Partition(tuple(clients), np.arange(len(given.test), dtype=np.int64))


def _types(scenario: ReplayTable, pairs: int, rng: np.random.Generator) -> tuple[list[int], int]:
    """Return the type of each task of one client, and the width of a type."""
    match scenario:
        case ReplayGradual():
            return gradual_types(scenario.parts, scenario.width, pairs), scenario.width
        case ReplayCirculating():
            return circulating_types(scenario.parts, rng.permutation(pairs)), 1
    return [int(j) for j in rng.permutation(pairs)], 1


def _dirichlet_pooled(scenario: DirichletPooled, given: CutInput) -> Partition:
    """Deal training and test set out as one, then split each client's share into both."""
    if scenario.same_props:
        return _same_props(scenario, given)
    if given.overlapping:
        raise ConfigError(
            "[scenario] dirichlet_pooled deals test examples out anew, and these windows overlap: "
            "set same_props = true, or, for a table, [data.columns] hop to the length of a window"
        )
    labels, rng = given.pooled_labels, given.rng("clients")
    sizes = np.bincount(labels, minlength=given.num_classes)
    owners = len(given.tasks)
    if scenario.pachinko:
        if given.coarse is None:
            raise ConfigError("[scenario] pachinko needs a data set with coarse classes: cifar100")
        counts = pachinko_counts(
            sizes, given.coarse, owners, scenario.alpha, scenario.fine_alpha, rng
        )
    else:
        counts = drawn_until(
            lambda: multinomial_counts(sizes, owners, scenario.alpha, rng), scenario.min_size
        )
    owned = [
        given.rng("tasks", i).permutation(o) for i, o in enumerate(hand_out(labels, counts, rng))
    ]
    cuts = [int(scenario.split * len(indices)) for indices in owned]
    train = chunks([o[:cut] for o, cut in zip(owned, cuts, strict=True)], given.tasks)
    tests = [o[cut:] for o, cut in zip(owned, cuts, strict=True)]
    out = given.by_client(train, chunks(tests, given.tasks))
    return replace(out, global_test=np.sort(np.concatenate(tests)), pooled=True)


def _same_props(scenario: DirichletPooled, given: CutInput) -> Partition:
    """Cut the training set and the test set separately, by the same proportions (FedTP)."""
    rng, owners = given.rng("clients"), len(given.tasks)
    sizes = np.bincount(given.train, minlength=given.num_classes)
    test_sizes = np.bincount(given.test, minlength=given.num_classes)
    p = np.zeros((given.num_classes, owners))

    def draw() -> IntArray:
        p[:] = balanced_proportions(sizes, owners, scenario.alpha, rng)
        return counts_of(p, sizes)

    counts = drawn_until(draw, scenario.min_size)
    owned = hand_out(given.train, counts, rng)
    tests = hand_out(given.test, counts_of(p, test_sizes), given.rng("test"))
    owned = [given.rng("tasks", i).permutation(indices) for i, indices in enumerate(owned)]
    tests = [given.rng("test", i).permutation(indices) for i, indices in enumerate(tests)]
    return given.by_client(chunks(owned, given.tasks), chunks(tests, given.tasks))


def _mapped_back(out: Partition, kept: IntArray, kept_test: IntArray) -> Partition:
    """Return the partition with indices into the data set, in place of those after the tail."""
    clients = tuple(
        tuple(TaskIndices(kept[t.train], kept_test[t.test]) for t in tasks) for tasks in out.clients
    )
    return replace(out, clients=clients, global_test=kept_test[out.global_test])


def _check_filled(out: Partition) -> None:
    """Check that every task has something to train on; warn where it has nothing to test on."""
    for i, tasks in enumerate(out.clients):
        for m, task in enumerate(tasks):
            if len(task.train) == 0:
                raise ConfigError(
                    f"[scenario] client {i} would have no training example in task {m}: "
                    "use fewer clients, tasks or shards, or more data"
                )
    untested = [
        f"client {i} in task {m}"
        for i, tasks in enumerate(out.clients)
        for m, task in enumerate(tasks)
        if len(task.test) == 0
    ]
    if untested:
        some, more = ", ".join(untested[:MAX_NAMED]), len(untested) - MAX_NAMED
        log.warning("note: no test example for %s%s", some, f" and {more} more" * (more > 0))
