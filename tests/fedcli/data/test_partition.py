"""Every worked number of the scenarios, and what must hold whatever the seed."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from fedcli.data.cuts.cut_input import CutInput, Partition, held_tests, rng_of
from fedcli.data.cuts.dirichlet import (
    balanced_proportions,
    class_cuts,
    dirichlet,
    moved_from_largest,
    pachinko_counts,
)
from fedcli.data.cuts.held_out import stratified_folds
from fedcli.data.cuts.long_tail import long_tail, long_tail_counts
from fedcli.data.cuts.partition import partition
from fedcli.data.cuts.replay_streams import (
    circulating_types,
    classes_of_type,
    gradual_types,
    part_sizes,
    replay_stream_rounds,
)
from fedcli.data.cuts.shards import Deck, drawn_hands, label_shards, per_class_shards, shard_sizes
from fedmodels.config.data import Data
from fedmodels.config.scenario import Scenario, ScenarioTable
from fedmodels.errors import ConfigError

SCENARIOS: TypeAdapter[Scenario] = TypeAdapter(Scenario)
FEW = settings(max_examples=25, deadline=None)
MNIST_TRAIN = np.array([5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
MNIST_TEST = np.array([980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009])

ALL_KINDS = [
    {"kind": "iid", "tasks": 3},
    {"kind": "iid", "gamma": 0.1, "test_long_tail": True},
    {"kind": "dirichlet", "alpha": 0.5, "tasks": 3},
    {"kind": "dirichlet", "alpha": 0.5, "over": "clients", "tasks": [1, 2, 3, 1]},
    {"kind": "label_shards", "shards": 2, "tasks": 5, "gamma": 0.5},
    {"kind": "per_class_shards", "shards": 5, "tasks": 2, "imbalance_factor": 10.0},
    {"kind": "per_class_shards", "shards": 5, "tasks": [2, 1, 1, 2], "distinct_labels": True},
    {"kind": "per_class_shards", "shards": 5, "sharding": "equal_size", "gamma": 0.1},
    {"kind": "natural", "tasks": [1, 2, 3, 1]},
    {"kind": "replay_gradual", "parts": 6},
    {"kind": "replay_gradual", "parts": 8, "width": 2},
    {"kind": "replay_circulating", "parts": 4},
    {"kind": "replay_heterogeneous", "images_per_part": 20, "test_images": 7},
    {"kind": "dirichlet_pooled", "tasks": 2},
    {"kind": "dirichlet_pooled", "same_props": True, "min_size": 0},
    {"kind": "dirichlet_pooled", "pachinko": True},
    {"kind": "drawn", "examples": 30, "classes": 3, "tasks": 2},
]


PINS = [
    "b795f5fa",
    "66cb8688",
    "ca7b4752",
    "89ddfd76",
    "501be842",
    "666e7eea",
    "29fef19e",
    "6b91f973",
    "c51f6c37",
    "c255aa48",
    "ce52eba8",
    "d511d7c4",
    "eb7e825a",
    "82f78ac7",
    "3b55367a",
    "7842dcda",
    "fdd80f97",
]
"""Of each kind, digests of what seed 0 deals: configs of old runs deal out the same."""


def scenario_of(**table: object) -> ScenarioTable:
    return SCENARIOS.validate_python(table)


def small_problem() -> dict[str, object]:
    """Ten classes of 80 training and 20 test examples, of five subjects."""
    rng = np.random.default_rng(7)
    return {
        "labels_train": rng.permutation(np.repeat(np.arange(10), 80)),
        "labels_test": rng.permutation(np.repeat(np.arange(10), 20)),
        "num_classes": 10,
        "groups": np.repeat(np.arange(5), 200),
        "coarse": np.arange(10) // 2,
    }


def cut(table: dict[str, object], seed: int = 0, clients: int = 4) -> Partition:
    return partition(scenario_of(**table), num_clients=clients, seed=seed, **small_problem())


def all_indices(made: Partition, part: str) -> list[int]:
    return [int(j) for tasks in made.clients for task in tasks for j in getattr(task, part)]


# --- 1. long tail


@pytest.mark.parametrize(
    ("n_max", "num_classes", "gamma", "total"),
    [
        *((5000, 10, 0.5, 36223), (5000, 10, 0.1, 20431), (5000, 10, 0.05, 17023)),
        *((5000, 10, 0.02, 13996), (5000, 10, 0.01, 12406)),
        *((500, 100, 0.5, 36029), (500, 100, 0.1, 19573), (500, 100, 0.05, 15907)),
        *((500, 100, 0.02, 12608), (500, 100, 0.01, 10847)),
        *((500, 200, 0.5, 72049), (500, 200, 0.1, 39072), (500, 200, 0.02, 25082)),
        *((500, 200, 0.01, 21549), (600, 62, 0.5, 26820), (600, 62, 0.05, 11892)),
    ],
)
def test_long_tail_totals_are_the_published_ones(n_max, num_classes, gamma, total):
    assert long_tail_counts(n_max, num_classes, gamma).sum() == total


@pytest.mark.parametrize(
    ("gamma", "counts"),
    [
        (0.5, [5000, 4629, 4286, 3968, 3674, 3401, 3149, 2916, 2700, 2500]),
        (0.1, [5000, 3871, 2997, 2320, 1796, 1391, 1077, 834, 645, 500]),
        (0.01, [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]),
    ],
)
def test_long_tail_counts_of_cifar10(gamma, counts):
    assert long_tail_counts(5000, 10, gamma).tolist() == counts


def test_long_tail_ends():
    assert long_tail_counts(5000, 10, 0.05)[-2:].tolist() == [348, 250]
    assert long_tail_counts(5000, 10, 0.02)[-2:].tolist() == [154, 100]
    assert long_tail_counts(7, 1, 0.5).tolist() == [7]
    assert long_tail_counts(7, 2, 0.5).tolist() == [7, 3]


def test_long_tail_of_uneven_classes_uses_the_mean_size_and_clips():
    labels = np.repeat(np.arange(3), [4, 20, 6])  # mean size 10
    kept = long_tail(labels, 3, 0.5, rng_of(0, "longtail"))
    assert np.bincount(labels[kept]).tolist() == [4, 7, 5]  # 10, 7, 5 clipped to 4, 20, 6


@FEW
@given(st.integers(1, 3000), st.integers(1, 60), st.floats(0.01, 1))
def test_long_tail_never_increases(n_max, num_classes, gamma):
    counts = long_tail_counts(n_max, num_classes, gamma)
    assert (np.diff(counts) <= 0).all()
    assert counts[0] == n_max
    if num_classes > 1:
        assert counts[-1] == int(n_max * gamma)


def test_gamma_one_is_the_identity():
    labels = np.array([2, 0, 1, 1, 2, 2, 2])
    assert long_tail(labels, 3, 1.0, rng_of(0, "longtail")).tolist() == list(range(7))


# --- 2. [N, S, M]


def test_shard_sizes():
    assert shard_sizes(7, 3).tolist() == [3, 2, 2]
    assert shard_sizes(500, 30).tolist() == [17] * 20 + [16] * 10  # CIFAR-100, [100, 30, 1]
    assert shard_sizes(50, 40).tolist() == [2] * 10 + [1] * 30  # CIFAR-10, gamma .01
    assert shard_sizes(500, 40).tolist() == [13] * 20 + [12] * 20  # gamma .1


def test_cifar10_100_4_1_gives_500_and_100_each():
    train, test = np.repeat(np.arange(10), 5000), np.repeat(np.arange(10), 1000)
    pieces, rows = per_class_shards(train, 10, 100, 4, rng_of(0, "shards"))
    tests, same = per_class_shards(test, 10, 100, 4, rng_of(0, "test"), rows=rows)
    assert rows.shape == (100, 4)
    assert same is rows
    assert {len(p) for p in pieces} == {500}
    assert {len(p) for p in tests} == {100}
    for row, piece, held in zip(rows, pieces, tests, strict=True):
        want = np.bincount(row, minlength=10)
        assert np.bincount(train[piece], minlength=10).tolist() == (125 * want).tolist()
        assert np.bincount(test[held], minlength=10).tolist() == (25 * want).tolist()


def test_cifar10_with_tail_has_a_mean_task_of_204_3():
    counts = long_tail_counts(5000, 10, 0.1)
    pieces, _ = per_class_shards(np.repeat(np.arange(10), counts), 10, 100, 4, rng_of(0, "shards"))
    assert np.mean([len(p) for p in pieces]) == pytest.approx(204.31)


def test_100_s_1_and_20_s_5_are_the_same_pieces():
    problem = {**small_problem(), "labels_train": np.repeat(np.arange(10), 80)}
    one = partition(
        scenario_of(kind="per_class_shards", shards=4), num_clients=20, seed=3, **problem
    )
    five = partition(
        scenario_of(kind="per_class_shards", shards=4, tasks=5), num_clients=4, seed=3, **problem
    )
    flat = [task for tasks in five.clients for task in tasks]
    for (task,), other in zip(one.clients, flat, strict=True):
        assert np.array_equal(task.train, other.train)
        assert np.array_equal(task.test, other.test)


@FEW
@given(st.integers(0, 99), st.integers(2, 12), st.integers(1, 10))
def test_distinct_labels(seed, num_pairs, shards):
    assume(shards * num_pairs // 10 * 10 >= num_pairs)
    labels = np.repeat(np.arange(10), 60)
    _, rows = per_class_shards(
        labels, 10, num_pairs, shards, rng_of(seed, "shards"), distinct_labels=True
    )
    assert all(len(set(row)) == len(row) for row in rows.tolist())
    assert np.bincount(rows.ravel(), minlength=10).max() <= shards * num_pairs // 10


def test_shards_that_do_not_come_out_even_drop_label_rows(caplog):
    per_class_shards(np.repeat(np.arange(10), 9), 10, 5, 4, rng_of(0, "shards"))
    assert caplog.messages == []  # 20 labels, 4 for each pair
    pieces, rows = per_class_shards(np.repeat(np.arange(10), 9), 10, 6, 4, rng_of(0, "shards"))
    assert caplog.messages == [
        "10 classes do not divide 24 label shards: each (client, task) gets 3, not 4"
    ]
    assert rows.shape == (6, 3)  # int(24 / 10) = 2 shards a class, 20 labels, 3 for each pair
    assert len(np.unique(np.concatenate(pieces))) == sum(len(p) for p in pieces)


def test_too_few_shards_are_refused():
    with pytest.raises(ConfigError, match="4 label shards cannot be cut evenly from 10 classes"):
        cut({"kind": "per_class_shards", "shards": 1})
    with pytest.raises(ConfigError, match="distinct labels do not exist"):
        cut({"kind": "per_class_shards", "shards": 12, "distinct_labels": True}, clients=5)


# --- 3. FedMLP


def test_label_shards_of_the_card():
    labels = np.repeat([0, 1, 2], [5, 4, 3])
    pieces = label_shards(labels, 3, 2, order=(3, 0, 5, 1, 4, 2))
    got = [sorted(labels[p].tolist()) for p in pieces]
    assert got == [[0, 0, 1, 1], [0, 0, 2, 2], [0, 1, 1, 2]]


@pytest.mark.parametrize(("shards", "sizes"), [(2, {181, 182}), (4, {90, 91})])
def test_label_shards_of_cifar10(shards, sizes):
    labels = np.repeat(np.arange(10), long_tail_counts(5000, 10, 0.5))
    assert {len(p) for p in np.array_split(labels, 100 * shards)} == sizes
    pieces = label_shards(labels, 100, shards, rng_of(0, "shards"))
    assert sum(len(p) for p in pieces) == 36223  # nothing is dropped, the tail class least of all
    assert all(abs(len(p) - 362) <= shards for p in pieces)


def test_class_cuts_of_the_card():
    assert class_cuts(np.array([0.5, 0.3, 0.2]), 10).tolist() == [5, 3, 2]
    assert class_cuts(np.array([0.25, 0.35, 0.4]), 10).tolist() == [2, 4, 4]


def test_held_tests_of_the_card():
    labels = np.zeros(10, dtype=np.int64)
    holds = np.array([[1, 0], [0, 1], [1, 0], [1, 1]], dtype=bool)
    got = [len(piece) for piece in held_tests(labels, holds)]
    assert got == [3, 0, 3, 4]


def test_held_tests_are_drawn_where_a_generator_is_given():
    labels, holds = np.zeros(40, dtype=np.int64), np.ones((2, 1), dtype=bool)
    first, second = held_tests(labels, holds, rng_of(0, "test"))
    assert [len(first), len(second)] == [20, 20]
    assert sorted([*first, *second]) == list(range(40))
    assert first.tolist() != list(range(20)) == held_tests(labels, holds)[0].tolist()


def test_one_training_example_of_a_class_is_enough_to_be_tested_on_it():
    train, test = np.array([0, 1, 1]), np.array([0, 0, 1])
    given = CutInput(train, test, 2, [1, 1], seed=0, groups=None, coarse=None)
    made = given.with_held_tests([np.array([0]), np.array([1, 2])])
    assert [task.test.tolist() for (task,) in made.clients] == [[0, 1], [2]]


def test_dirichlet_mends_what_redrawing_cannot():
    labels = np.repeat(np.arange(2), 50)
    pieces = dirichlet(labels, 2, 10, 0.01, rng_of(0, "clients"), min_size=9)
    assert min(len(p) for p in pieces) >= 9
    assert sorted(np.concatenate(pieces).tolist()) == list(range(100))


def test_moving_takes_from_the_largest_class_of_the_largest():
    counts = np.array([[9, 3], [1, 0], [2, 4]])
    assert moved_from_largest(counts, 3).tolist() == [[7, 3], [3, 0], [2, 4]]


def test_balance_trick_stops_who_has_enough():
    sizes = np.full(10, 30)
    for seed in range(20):
        p = balanced_proportions(sizes, 3, 0.05, rng_of(seed, "clients"))
        assert np.allclose(p.sum(axis=1), 1)
        held = np.zeros(3)
        for row, size in zip(p, sizes, strict=True):
            assert (row[held >= 100] == 0).all()  # n / N = 300 / 3
            held += class_cuts(row, int(size))


def test_a_class_that_falls_to_those_who_have_enough_goes_to_the_others():
    """Every draw gives all to owner 0 of three; it holds 40 >= 80 / 3 after the first class."""
    draws_first = SimpleNamespace(dirichlet=lambda alphas: np.eye(len(alphas))[0])
    p = balanced_proportions(np.array([40, 40]), 3, 1.0, draws_first)  # type: ignore[arg-type]
    assert p.tolist() == [[1, 0, 0], [0, 0.5, 0.5]]


def test_only_whole_clients_are_balanced():
    """Who holds 800 / 4 examples gets no more, so 280 are out of reach with 80 of a class."""
    largest = {
        over: [
            max(
                sum(len(task.train) for task in tasks)
                for tasks in cut(
                    {"kind": "dirichlet", "alpha": 0.05, "over": over, "min_size": 1}, seed
                ).clients
            )
            for seed in range(5)
        ]
        for over in ("clients", "pairs")
    }
    assert max(largest["clients"]) < 280 <= max(largest["pairs"])


@pytest.mark.parametrize("table", [{"kind": "iid"}, {"kind": "label_shards", "shards": 2}])
def test_the_test_set_keeps_all_its_examples(table):
    made = cut({**table, "gamma": 0.5})
    assert made.global_test.tolist() == list(range(200))


def test_a_long_tailed_test_set_keeps_its_own_indices():
    problem = small_problem()
    made = cut({"kind": "iid", "gamma": 0.1, "test_long_tail": True})
    want = long_tail_counts(20, 10, 0.1).tolist()
    for indices in (made.global_test, np.array(all_indices(made, "test"))):
        labels = problem["labels_test"][indices]  # type: ignore[index]
        assert np.bincount(labels).tolist() == want


def test_dirichlet_over_clients_comes_class_by_class():
    problem = small_problem()
    made = partition(
        scenario_of(kind="dirichlet", alpha=1.0, over="clients", tasks=4),
        num_clients=3,
        seed=0,
        **problem,
    )
    for tasks in made.clients:
        classes = [problem["labels_train"][t.train] for t in tasks]  # type: ignore[index]
        assert all((np.diff(c) >= 0).all() for c in classes)
        assert all(a[-1] <= b[0] for a, b in itertools.pairwise(classes))


def test_too_little_data_is_one_clear_line():
    with pytest.raises(ConfigError, match="cannot give 500 to each of 4"):
        cut({"kind": "dirichlet", "alpha": 1.0, "min_size": 500})
    with pytest.raises(
        ConfigError, match="800 examples cannot fill 1200 shards: use fewer clients"
    ):
        cut({"kind": "label_shards", "shards": 300})


# --- 4. pFedGRP


@pytest.mark.parametrize(
    ("width", "for_30", "for_25"), [(1, 150, 120), (2, 70, 60), (3, 50, 40), (4, 30, 30)]
)
def test_replay_rounds_are_the_papers(width, for_30, for_25):
    for parts, rounds in ((30, for_30), (25, for_25)):
        assert replay_stream_rounds(parts, width) == rounds
        assert len(gradual_types(parts, width)) == rounds
        scenario = scenario_of(kind="replay_gradual", width=width, parts=parts)
        assert scenario.tasks_per_client(2, 10) == [rounds, rounds]
        assert rounds * 2 * width <= 10 * parts


@pytest.mark.parametrize(
    ("parts", "width", "used"),
    [(30, 1, 30), (25, 1, 24), (30, 2, 28), (30, 3, 30), (30, 4, 24), (25, 4, 24)],
)
def test_parts_used_per_class(parts, width, used):
    permuted = np.arange(10)
    counts = np.zeros(10, dtype=int)
    for kind in gradual_types(parts, width):
        counts[classes_of_type(permuted, kind, width)] += 1
    assert counts.tolist() == [used] * 10


def test_mini_example_of_the_gradual_stream():
    assert "".join(map(str, gradual_types(4, 1))) == "01011212232334344040"


def test_types_of_width_two():
    got = ["".join(map(str, classes_of_type(np.arange(10), j, 2))) for j in range(5)]
    assert got == ["0123", "2345", "4567", "6789", "8901"]


def test_adjacent_segments_share_one_type():
    types = gradual_types(6, 1)
    segments = [set(types[i : i + 6]) for i in range(0, len(types), 6)]
    assert all(len(a & b) == 1 for a, b in itertools.pairwise(segments))


def test_part_sizes_of_mnist():
    assert part_sizes(MNIST_TRAIN, 30, 200).tolist() == [
        *(197, 200, 198, 200, 194, 180, 197, 200, 195, 198)
    ]
    assert part_sizes(MNIST_TEST, 30, None).tolist() == [32, 37, 34, 33, 32, 29, 31, 34, 32, 33]
    assert part_sizes(np.array([1000]), 30, None).tolist() == [33]  # Fashion-MNIST
    assert part_sizes(np.array([1000]), 25, None).tolist() == [40]  # CIFAR-10


@pytest.mark.parametrize(("parts", "rounds"), [(30, 150), (25, 120)])
def test_circulating_rounds(parts, rounds):
    scenario = scenario_of(kind="replay_circulating", parts=parts)
    assert scenario.tasks_per_client(1, 10) == [rounds]
    types = circulating_types(parts, np.array([2, 0, 1, 4, 3]))
    assert types[:10] == [2, 0, 1, 4, 3] * 2
    assert len(types) == rounds


@pytest.mark.parametrize(("num_classes", "rounds"), [(100, 50), (62, 31)])
def test_heterogeneous_rounds(num_classes, rounds):
    assert scenario_of(kind="replay_heterogeneous").tasks_per_client(1, num_classes) == [rounds]


@pytest.mark.parametrize("table", [t for t in ALL_KINDS if str(t["kind"]).startswith("replay")])
def test_no_index_twice_in_one_stream(table):
    made = cut(table)
    for tasks in made.clients:
        for part in ("train", "test"):
            seen = np.concatenate([getattr(task, part) for task in tasks])
            assert len(np.unique(seen)) == len(seen)


def test_a_part_larger_than_its_class_is_refused():
    with pytest.raises(
        ConfigError, match=r"parts = \d+, and class \d has fewer training examples: lower parts"
    ):
        cut({"kind": "replay_gradual", "parts": 90})


# --- natural clients and pools


def test_folds_are_scikit_learns():
    from sklearn.model_selection import StratifiedKFold

    rng = np.random.default_rng(0)
    for _ in range(20):
        labels = rng.permutation(np.repeat(rng.permutation(4), rng.integers(10, 40, 4)))
        folds = stratified_folds(labels)
        splits = StratifiedKFold(10, shuffle=False).split(labels, labels)
        for f, (_, test) in enumerate(splits):
            assert np.flatnonzero(folds == f).tolist() == test.tolist()


def test_natural_clients_keep_their_own_data():
    problem = small_problem()
    made = cut({"kind": "natural", "tasks": 2})
    for i, tasks in enumerate(made.clients):
        both = np.concatenate([a for task in tasks for a in (task.train, task.test)])
        assert sorted(both) == np.flatnonzero(problem["groups"] == i).tolist()
        train = np.concatenate([task.train for task in tasks])
        assert (np.diff(train) > 0).all()  # chunks of time, in order
    assert made.pooled
    assert made.zscore == "per_client_channel"


def test_more_natural_clients_than_exist_are_refused():
    with pytest.raises(ConfigError, match=r"clients = 6, but the data set has 5 natural clients"):
        cut({"kind": "natural"}, clients=6)
    problem = {**small_problem(), "groups": None}
    with pytest.raises(
        ConfigError,
        match=r"name the column of persons in \[data.columns\] client, or set client_from",
    ):
        partition(scenario_of(kind="natural"), num_clients=2, seed=0, **problem)


def test_pachinko_gives_equal_sizes_and_uses_everything():
    sizes = np.array([30, 10, 20, 20])
    counts = pachinko_counts(sizes, np.array([0, 0, 1, 1]), 3, 0.3, 10.0, rng_of(0, "clients"))
    assert counts.sum(axis=0).tolist() == sizes.tolist()
    assert counts.sum(axis=1).tolist() == [27, 27, 26]


def test_pachinko_draws_evenly_where_what_is_left_has_no_weight():
    """Every draw gives all weight to the first class, which has one example of the two."""
    draws_first = SimpleNamespace(
        dirichlet=lambda alphas: np.eye(len(alphas))[0], random=lambda: 0.5
    )
    sizes, coarse = np.array([1, 1]), np.array([0, 0])
    counts = pachinko_counts(sizes, coarse, 1, 0.1, 0.1, draws_first)  # type: ignore[arg-type]
    assert counts.tolist() == [[1, 1]]


def test_pachinko_needs_coarse_classes():
    with pytest.raises(ConfigError, match="needs a data set with coarse classes: cifar100"):
        partition(
            scenario_of(kind="dirichlet_pooled", pachinko=True),
            num_clients=2,
            seed=0,
            **{**small_problem(), "coarse": None},  # type: ignore[arg-type]
        )


def test_pooled_split_is_80_20():
    for tasks in cut({"kind": "dirichlet_pooled"}).clients:
        held = len(tasks[0].train) + len(tasks[0].test)
        assert len(tasks[0].train) == int(0.8 * held)


# --- any number of clients


def test_drawn_hands_repeat_no_example_before_all_were_dealt():
    """Two classes of 6 and 4; five pairs take 2 of each: class 1 is dealt anew after two pairs."""
    labels = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 0])
    hands = drawn_hands(labels, np.tile([0, 1], (5, 1)), 4, rng_of(0, "clients"))
    for hand in hands:
        assert len(set(hand.tolist())) == 4
        assert np.bincount(labels[hand]).tolist() == [2, 2]
    dealt = np.concatenate(hands)
    zeros, ones = dealt[labels[dealt] == 0].tolist(), dealt[labels[dealt] == 1].tolist()
    assert sorted(zeros[:6]) == [0, 2, 4, 6, 8, 9]
    assert sorted(ones[:4]) == sorted(ones[4:8]) == [1, 3, 5, 7]


def test_a_hand_that_crosses_two_decks_holds_no_card_twice():
    deck = Deck(np.arange(5), rng_of(0, "clients"))
    hands = [deck.hand(3).tolist() for _ in range(10)]
    assert all(len(set(hand)) == 3 for hand in hands)
    assert np.bincount(np.concatenate(hands)).tolist() == [6] * 5
    assert Deck(np.arange(2), rng_of(0, "clients")).hand(3).tolist() == [0, 1]


def test_more_clients_than_examples_can_draw():
    made = cut({"kind": "drawn", "examples": 7, "test_examples": 4, "classes": 2}, clients=1000)
    labels = small_problem()["labels_train"]
    assert [len(tasks[0].train) for tasks in made.clients] == [7] * 1000
    held = [np.bincount(labels[tasks[0].train], minlength=10) for tasks in made.clients]  # type: ignore[index]
    assert all(sorted(counts[counts > 0].tolist()) == [3, 4] for counts in held)
    assert set(np.sum(np.array(held) > 0, axis=0).tolist()) == {200}  # clients of each class


@pytest.mark.parametrize(
    ("table", "line"),
    [
        ({"classes": 11}, "classes = 11 exceeds the 10 classes"),
        ({"classes": 5, "examples": 4}, "classes = 5 exceeds examples = 4"),
    ],
)
def test_drawn_classes_must_exist(table, line):
    with pytest.raises(ConfigError, match=line):
        cut({"kind": "drawn", **table})


# --- what must hold for every kind


@pytest.mark.parametrize("table", ALL_KINDS, ids=str)
def test_same_seed_same_partition_other_seed_another(table):
    once, again, other = cut(table), cut(table), cut(table, seed=1)
    assert all_indices(once, "train") == all_indices(again, "train")
    assert all_indices(once, "test") == all_indices(again, "test")
    assert np.array_equal(once.global_test, again.global_test)
    if table["kind"] != "natural":  # which draws nothing
        assert all_indices(once, "train") != all_indices(other, "train")


@pytest.mark.parametrize(("table", "pin"), list(zip(ALL_KINDS, PINS, strict=True)), ids=str)
def test_a_seed_deals_what_it_dealt(table, pin):
    made = cut(table)
    arrays = [a for tasks in made.clients for task in tasks for a in (task.train, task.test)]
    text = str([a.tolist() for a in (*arrays, made.global_test)])
    assert hashlib.sha256(text.encode()).hexdigest()[:8] == pin


@pytest.mark.parametrize("table", ALL_KINDS, ids=str)
def test_training_and_test_indices_are_disjoint_and_in_range(table):
    made = cut(table)
    shared = str(table["kind"]).startswith("replay")  # clients may share images
    for part, size in (("train", 800), ("test", 200)):
        limit = 1000 if made.pooled else size
        indices = all_indices(made, part)
        assert min(indices) >= 0
        assert max(indices) < limit
        assert shared or len(set(indices)) == len(indices)
    if made.pooled:
        assert not set(all_indices(made, "train")) & set(all_indices(made, "test"))
        assert set(all_indices(made, "test")) <= set(made.global_test.tolist())


@pytest.mark.parametrize("table", ALL_KINDS, ids=str)
def test_global_random_state_is_left_alone(table):
    np.random.seed(5)
    before = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    cut(table)
    assert np.random.get_state()[1].tolist() == before  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    "table",
    [t for t in ALL_KINDS if t["kind"] not in ("iid", "dirichlet_pooled")],
    ids=str,
)
def test_test_classes_are_training_classes(table):
    problem = small_problem()
    pooled = np.concatenate([problem["labels_train"], problem["labels_test"]])  # type: ignore[list-item]
    made = cut(table)
    for tasks in made.clients:
        for task in tasks:
            train = pooled[task.train]
            test = pooled[task.test + (0 if made.pooled else 800)]
            assert set(test.tolist()) <= set(train.tolist())


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "iid", "gamma": 0.3},
        {"kind": "label_shards", "shards": 3, "gamma": 0.3},
        {"kind": "dirichlet", "alpha": 0.5, "gamma": 0.3},
        {"kind": "per_class_shards", "shards": 5, "gamma": 0.3},
    ],
    ids=str,
)
def test_everything_left_by_the_tail_is_dealt_out(table):
    labels = small_problem()["labels_train"][all_indices(cut(table), "train")]  # type: ignore[index]
    assert np.bincount(labels).tolist() == long_tail_counts(80, 10, 0.3).tolist()


@FEW
@given(st.integers(0, 10**6), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_unequal_numbers_of_tasks(seed, tasks):
    for kind in ({"kind": "iid"}, {"kind": "label_shards", "shards": 2}):
        made = cut({**kind, "tasks": tasks}, seed, clients=len(tasks))
        assert [len(t) for t in made.clients] == tasks
        assert sorted(all_indices(made, "train")) == list(range(800))


@pytest.mark.parametrize("kind", ["replay_gradual", "replay_circulating", "natural"])
def test_a_client_does_not_depend_on_the_others(kind):
    table: dict[str, object] = {"kind": kind, **({"parts": 6} if kind != "natural" else {})}
    few, many = cut(table, clients=2), cut(table, clients=5)
    for ours, theirs in zip(few.clients, many.clients, strict=False):
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a.train, b.train)
            assert np.array_equal(a.test, b.test)


def test_permuting_natural_clients_permutes_data_only():
    problem = small_problem()
    straight = cut({"kind": "natural"}, clients=5)
    turned = partition(
        scenario_of(kind="natural"),
        num_clients=5,
        seed=0,
        **{**problem, "groups": 4 - problem["groups"]},  # type: ignore[operator]
    )
    for (a,), (b,) in zip(straight.clients, reversed(turned.clients), strict=True):
        assert np.array_equal(a.train, b.train)


def told_of_a_cut(place: Path) -> None:
    parts = dirichlet(np.arange(300) % 10, 10, 5, 0.5, rng_of(3, "clients"))
    print([part.tolist() for part in parts])


def test_another_process_cuts_the_same(fork_server, tmp_path, capsys):
    """The fork server is an interpreter of its own, with hashes of its own."""
    status, there = fork_server.call(f"{__name__}:told_of_a_cut", tmp_path)
    told_of_a_cut(tmp_path)
    assert (status, there) == (0, capsys.readouterr().out)


def test_a_task_without_examples_is_refused():
    with pytest.raises(ConfigError, match="client 3 would have no training example in task 190"):
        partition(
            scenario_of(kind="iid", tasks=[190, 190, 190, 250]),
            np.arange(760) % 10,
            np.arange(100) % 10,
            10,
            4,
            0,
        )


@pytest.mark.parametrize(
    ("tests", "line"),
    [
        (1, "note: no test example for client 1 in task 0"),
        (0, "note: no test example for client 0 in task 0, client 1 in task 0"),
    ],
)
def test_pairs_without_a_test_example_are_named(tests, line, caplog):
    partition(scenario_of(kind="iid"), np.zeros(9, int), np.zeros(tests, int), 1, 2, 0)
    assert caplog.messages == [line]


def test_of_many_pairs_without_a_test_example_some_are_named(caplog):
    partition(scenario_of(kind="iid", tasks=4), np.zeros(9, int), np.zeros(1, int), 1, 2, 0)
    assert caplog.messages == [
        "note: no test example for client 0 in task 1, client 0 in task 2, client 0 in task 3, "
        "client 1 in task 0, client 1 in task 1 and 2 more"
    ]


# --- the tables


def test_unknown_keys_and_wrong_types_are_refused():
    for table in (
        {"kind": "iid", "alpha": 1.0},
        {"kind": "iid", "tasks": 0},
        {"kind": "iid", "tasks": "3"},
        {"kind": "iid", "gamma": 1.5},
        {"kind": "uniform"},
        {"kind": "replay_heterogeneous", "parts": 2},
    ):
        with pytest.raises(ValidationError):
            scenario_of(**table)
    with pytest.raises(ValidationError):
        Data.model_validate({"name": "digits", "labels": "both"})


def test_who_got_an_empty_shard_of_a_class_is_not_tested_on_it():
    """The rarest class has 4 of its 80 examples, cut into 20 shards."""
    made = cut({"kind": "per_class_shards", "shards": 5, "gamma": 0.05}, clients=40)
    problem = small_problem()
    train, test = problem["labels_train"], problem["labels_test"]
    dealt = 0
    for (task,) in made.clients:
        assert {*test[task.test]} <= {*train[task.train]}  # type: ignore[index]
        dealt += len(task.test)
    assert 0 < dealt < 200


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"kind": "replay_gradual", "tasks": 3}, "itself fixes the number of tasks"),
        ({"kind": "natural", "gamma": 0.5}, "natural keeps the data as they are"),
        ({"kind": "natural", "split": 0.75}, "tenths"),
        ({"kind": "iid", "gamma": 0.5, "imbalance_factor": 2.0}, "give one"),
        ({"kind": "iid", "imbalance_factor": 0.5}, "must be >= 1"),
        ({"kind": "iid", "gamma": 0.5, "if_reading": "percent"}, "give both or none"),
        ({"kind": "iid", "imbalance_factor": 200.0, "if_reading": "percent"}, "<= 100"),
        ({"kind": "dirichlet_pooled", "same_props": True, "pachinko": True}, "exclude"),
    ],
)
def test_contradictions_are_config_errors(table, message):
    with pytest.raises(ConfigError, match=message):
        scenario_of(**table)


def test_numbers_that_do_not_fit_the_problem():
    with pytest.raises(ConfigError, match="lists 2 numbers for 3 clients"):
        scenario_of(kind="iid", tasks=[1, 2]).tasks_per_client(3, 10)
    with pytest.raises(ConfigError, match="needs 4 classes"):
        scenario_of(kind="replay_circulating").tasks_per_client(1, 2)
    with pytest.raises(ConfigError, match="width = 6"):
        scenario_of(kind="replay_gradual", width=6).tasks_per_client(1, 10)
    with pytest.raises(ConfigError, match="at least 2"):
        scenario_of(kind="replay_gradual", parts=1).tasks_per_client(1, 10)


@pytest.mark.parametrize(
    ("factor", "reading", "gamma"),
    [(10.0, "ratio", 0.1), (50.0, "ratio", 0.02), (10.0, "percent", 0.1), (100.0, "percent", 1.0)],
)
def test_imbalance_factor(factor, reading, gamma):
    scenario = scenario_of(kind="iid", imbalance_factor=factor, if_reading=reading)
    assert scenario.tail_gamma == pytest.approx(gamma)


@pytest.mark.parametrize("table", ALL_KINDS, ids=str)
def test_a_resolved_scenario_reads_back(table):
    scenario = scenario_of(**table)
    assert scenario_of(**scenario.model_dump(exclude_none=True)) == scenario
