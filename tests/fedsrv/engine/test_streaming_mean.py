"""The engine adds up uploads as they arrive, in the order of their clients, and drops them."""

from __future__ import annotations

import random
import threading
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmodels.tensors.bundle import Bundle, Prototypes
from fedmodels.tensors.packed_weights import PackedWeights, facts_of, layout_of, names_and_layout
from fedmodels.tensors.packed_weights import packed as in_a_block
from fedmodels.tensors.weighted_mean import RunningMean, weighted_mean
from fedpb.v1 import coordinator_pb2 as rpc
from fedsrv.engine.cohort import Answer
from fedsrv.engine.reduction import StreamingMean


def packed(seed: int, size: int = 300) -> PackedWeights:
    draw = torch.Generator().manual_seed(seed)
    return in_a_block({
        "base/w": torch.randn(size, generator=draw),
        "base/steps": torch.randint(100, (), generator=draw),
        "head/b": torch.randn(3, 5, generator=draw),
    })  # fmt: skip


def assert_same(one, other):
    assert one.keys() == other.keys()
    for key in one:
        assert torch.equal(one[key], other[key]), key


# --- the mean -------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=9),
    st.integers(0, 2**30),
    st.sampled_from([7, 300, 40_000]),
)
def test_a_running_mean_has_the_bits_of_the_mean(counts, seed, size):
    uploads, split = [packed(i, size) for i in range(len(counts))], random.Random(seed)
    running, begun = RunningMean(), 0
    while begun < len(uploads):
        end = split.randint(begun + 1, len(uploads))
        running.add(uploads[begun:end], counts[begun:end])
        begun = end
    assert running.total == sum(counts)
    if not sum(counts):
        assert running.mean() is None
        return
    assert_same(running.mean(), weighted_mean(uploads, counts, sum(counts)))


def test_tensors_may_lie_in_another_order():
    """A sender states the order of its tensors; another make of clients may have its own."""
    first, other = packed(0), packed(1)
    names = other.names[::-1]
    layout = layout_of(facts_of(other[name] for name in names))
    block = layout.empty()
    for name, view in zip(names, layout.views(block), strict=True):
        view.copy_(other[name])
    turned = PackedWeights(names, layout, layout.clear(block))
    expected = weighted_mean([first, other], [1, 3], 4)
    for uploads, counts in (([first, turned], [1, 3]), ([turned, first], [3, 1])):
        running = RunningMean()
        running.add(uploads, counts)
        assert_same(running.mean(), expected)
        assert running.mean().names == first.names


def test_counts_and_their_sum_keep_equal_inputs():
    same = packed(1)
    assert_same(weighted_mean([same, same, same], [3, 7, 90], 100), same)
    assert_same(weighted_mean([packed(2), same], [0, 7], 7), same)


def test_a_running_mean_takes_tensors_of_several_dtypes_in_blocks_or_alone():
    dtypes = {"a": torch.float32, "b": torch.float64, "c": torch.bool, "d": torch.bfloat16}
    draw = torch.Generator().manual_seed(0)
    uploads = [{n: torch.randn(3, generator=draw).to(d) for n, d in dtypes.items()} for _ in "123"]
    expected = weighted_mean(uploads, [1, 2, 3], 6)
    for forms in (
        uploads,
        [in_a_block(u) for u in uploads],
        [uploads[0], in_a_block(uploads[1]), uploads[2]],
    ):
        running = RunningMean()
        running.add(forms, [1, 2, 3])
        assert_same(running.mean(), expected)
    for name, dtype in dtypes.items():
        by_hand = sum(p * u[name].double() for p, u in zip((1, 2, 3), uploads, strict=True)) / 6
        assert torch.equal(expected[name], by_hand.to(dtype)) or dtype == torch.bool


# --- folding --------------------------------------------------------------------------------------


def result_of(client: int, examples: float | None = None) -> Answer:
    upload = Bundle(
        weights=packed(client),
        prototypes={"class": Prototypes.of({client: (torch.ones(4), 1)}, 4)},
        scalars={"num_examples": float(client + 1) if examples is None else examples},
    )
    return Answer(upload, rpc.Report(), upload.num_bytes())


def count(upload: Bundle) -> float:
    return upload.scalars["num_examples"]


SIZE = result_of(0).logical_up


def expected(*clients: int):
    uploads = [result_of(c).upload for c in clients]
    counts = [count(u) for u in uploads]
    return weighted_mean([u.weights for u in uploads], counts, sum(counts))


class World:
    """Results that come one after the other."""

    def __init__(self, clients, kept_bytes=0, count=count):
        self.folding = StreamingMean(clients, count, kept_bytes)
        self.results: dict[int, Answer] = {}
        self.failed: dict[int, str] = {}

    def come(self, *clients):
        for client in clients:
            self.results[client] = result_of(client)
            self.folding.add_answer(self.results[client], self.results, self.failed)
        for step in self.folding._steps:
            step.result()

    def held(self):
        return sorted(c for c, r in self.results.items() if r.upload.weights)


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_the_mean_does_not_depend_on_who_comes_first(order):
    world = World(range(5))
    world.come(*order)
    assert_same(world.folding.finish(world.results), expected(0, 1, 2, 3, 4))
    assert world.held() == []


def test_who_is_next_is_let_go_of_and_others_wait():
    world = World(range(5))
    world.come(0)
    assert world.held() == []
    world.come(3, 2)
    assert world.held() == [2, 3]
    world.come(1)
    assert world.held() == []
    rest = world.results[2].upload
    assert rest.scalars == {"num_examples": 3.0}
    assert rest.prototypes["class"].labels.tolist() == [2]


def test_the_memory_of_an_upload_is_given_back():
    """Its prototypes came in the same buffer, and are still wanted."""
    like = packed(0)
    memory = np.zeros(len(like.block), np.uint8)
    weights = PackedWeights(like.names, like.layout, torch.from_numpy(memory))
    rows = Prototypes.by_position(weights["base/w"][:4].view(1, 4))
    upload = Bundle(weights=weights, prototypes={"class": rows}, scalars={"num_examples": 1.0})
    world, gone = World(range(4)), weakref.ref(memory)
    world.results[0] = Answer(upload, rpc.Report(), upload.num_bytes())
    del memory, weights, rows, upload
    world.folding.add_answer(world.results[0], world.results, world.failed)
    world.folding._steps[0].result()
    assert gone() is None
    assert world.results[0].upload.prototypes["class"].vectors.tolist() == [[0.0] * 4]


def test_some_are_added_at_a_time_where_memory_allows():
    world = World(range(10), kept_bytes=4 * SIZE)  # three quarters of it
    world.come(0, 1)
    assert world.held() == [0, 1]
    world.come(2)
    assert world.held() == []
    world.come(3)
    assert_same(world.folding.finish(world.results), expected(0, 1, 2, 3))


def test_clients_that_failed_or_never_answered_are_left_out():
    world = World(range(5))
    world.failed[1] = "it fell ill"
    world.come(0, 2, 4)
    assert world.held() == [4]
    assert_same(world.folding.finish(world.results), expected(0, 2, 4))


def test_uploads_that_memory_holds_are_left_alone():
    world = World(range(3), kept_bytes=3 * SIZE)
    world.come(0, 1, 2)
    assert world.folding.finish(world.results) is None
    assert world.held() == [0, 1, 2]


def test_uploads_a_method_wants_one_by_one_are_left_alone():
    world = World(range(3), count=None)
    world.come(0, 1, 2)
    assert world.folding.finish(world.results) is None
    assert world.held() == [0, 1, 2]


def test_uploads_with_tensors_for_scoring_are_left_alone():
    """The record counts the bytes of these apart, so they must still be there."""
    world, tensors = World(range(2)), {"w": torch.ones(3), "eval/head/b": torch.ones(2)}
    for client in (0, 1):
        names, layout = names_and_layout(tensors)
        weights = PackedWeights(names, layout, layout.clear(layout.empty()))
        upload = Bundle(weights, scalars={"num_examples": 1.0})
        world.results[client] = Answer(upload, rpc.Report(), upload.num_bytes())
        world.folding.add_answer(world.results[client], world.results, world.failed)
    assert world.folding.finish(world.results) is None
    assert [r.upload.num_evaluation_bytes() for r in world.results.values()] == [8, 8]


def test_uploads_that_count_nothing():
    world = World(range(2), count=lambda upload: 0.0)
    world.come(0, 1)
    assert world.folding.finish(world.results) is None


def test_an_error_shows_when_the_mean_is_asked_for():
    def broken(upload):
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("too large")
        return 1.0

    world = World(range(4), count=broken)
    world.results[0] = result_of(0)
    world.folding.add_answer(world.results[0], world.results, world.failed)
    with pytest.raises(MemoryError, match="too large"):
        world.folding.finish(world.results)
