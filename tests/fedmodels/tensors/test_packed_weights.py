"""Blocks, and the weights that lie in them: the same tensors and bytes as one by one."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from fedmodels.errors import PayloadError
from fedmodels.nets import make_net
from fedmodels.nets.split import load_weights, weights_of
from fedmodels.tensors import packed_weights as blocks
from fedmodels.tensors.bundle import DTYPES, Bundle, Prototypes, check_finite, tensor_bytes
from fedmodels.tensors.bundle_spec import BundleSpec
from fedmodels.tensors.declared_counts import check_numbers
from fedmodels.tensors.packed_weights import (
    ALIGNMENT,
    BlockLayout,
    PackedWeights,
    facts_of,
    layout_of,
    lease,
    names_and_layout,
    num_bytes,
)
from fedmodels.tensors.weighted_mean import weighted_mean
from fedpb.codec import Receiver, encode, read_chunk
from fedpb.v1 import coordinator_pb2 as rpc

SHAPES = [(), (5,), (0,), (3, 0, 2), (2, 3, 4), (16,), (1, 1)]


def some(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=rng).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=rng).to(dtype)


def mixed(seed: int, *, floats: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return weights as a net has them: one floating-point dtype, counters, a mask."""
    kinds = itertools.cycle([floats, torch.int64, floats, torch.bool, floats, torch.uint8])
    pairs = enumerate(zip(SHAPES, kinds, strict=False))
    return {f"base/{9 - i}": some(dtype, shape, seed + i) for i, (shape, dtype) in pairs}


def packed(weights: dict[str, torch.Tensor], between: int = 0) -> PackedWeights:
    """Lay weights into a block, with this byte between them."""
    names, layout = names_and_layout(weights)
    block = torch.full((layout.size,), between, dtype=torch.uint8)
    for view, name in zip(layout.views(block), names, strict=True):
        view.copy_(weights[name])
    return PackedWeights(names, layout, block)


def assert_same(one, other) -> None:
    assert set(one) == set(other)
    for name in one:
        assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape), name
        assert bytes(tensor_bytes(one[name])) == bytes(tensor_bytes(other[name])), name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_tensor_among_others(dtype, shape):
    tensors = [torch.ones(3), some(dtype, shape, 1), torch.ones(2, dtype=torch.int64)]
    layout = layout_of(facts_of(tensors))
    block = layout.empty()
    for view, tensor in zip(layout.views(block), tensors, strict=True):
        view.copy_(tensor)
    assert layout.offsets[:2] == [0, ALIGNMENT]
    assert all(offset % ALIGNMENT == 0 for offset in (*layout.offsets, layout.size))
    assert layout.num_bytes == sum(t.nbytes for t in tensors)
    assert bytes(block[ALIGNMENT : ALIGNMENT + tensors[1].nbytes].numpy()) == bytes(
        tensor_bytes(tensors[1])
    )
    assert layout.is_clear(block)
    assert_same(dict(enumerate(layout.views(block))), dict(enumerate(tensors)))


def test_views_of_a_block_within_a_larger_one():
    larger = torch.arange(256, dtype=torch.uint8)
    layout = layout_of(facts_of([torch.zeros(4, dtype=torch.uint8), torch.zeros(2)]))
    first, second = layout.views(larger[ALIGNMENT : 3 * ALIGNMENT])
    assert first.tolist() == [64, 65, 66, 67]
    assert bytes(tensor_bytes(second)) == bytes(range(128, 136))


def test_what_lies_between_is_seen_and_cleared():
    held = packed(mixed(0), between=7)
    assert not held.layout.is_clear(held.block)
    held.layout.clear(held.block)
    assert held.layout.is_clear(held.block)
    assert_same(held, mixed(0))


def test_packed_is_a_mapping():
    weights = mixed(3)
    held = packed(weights)
    assert list(held) == list(held.names) == sorted(weights)
    assert len(held) == len(weights)
    assert "base/9" in held
    assert "base/none" not in held
    assert_same({**held}, weights)
    assert_same(dict(held.items()), weights)
    assert num_bytes(held) == num_bytes(weights) == sum(t.nbytes for t in weights.values())
    with pytest.raises(KeyError):
        held["base/none"]


def test_a_bundle_counts_packed_weights_as_others():
    weights = {**mixed(1), "eval/head": torch.ones(7)}
    one, other = Bundle(packed(weights), scalars={"n": 1.0}), Bundle(weights, scalars={"n": 1.0})
    assert one.num_bytes() == other.num_bytes()
    assert one.num_evaluation_bytes() == other.num_evaluation_bytes() == 28


def test_weights_that_are_sound_are_checked_as_one_block():
    """A server checks those of each client in each round: no tensor is made of a block for it."""
    weights = {
        "base/bn.running_var": torch.ones(3),
        "base/bn.num_batches_tracked": torch.tensor(7),
        "eval/head": torch.ones(5, 2),
    }
    names, layout = names_and_layout(weights)
    spec = BundleSpec.of(Bundle(weights))
    for number in range(2):
        block = layout.empty()
        for name, place in zip(names, layout.views(block), strict=True):
            place.copy_(weights[name] + number)
        held = PackedWeights(names, layout, block)
        bundle = Bundle(held)
        spec.check_bundle(bundle)
        check_numbers(bundle)
        check_finite(bundle)
        assert (bundle.num_bytes(), bundle.num_evaluation_bytes()) == (20, 40)
        assert "_tensors" not in vars(held)


@pytest.mark.parametrize("form", [dict, packed])
def test_a_bundle_is_compared_with_its_spec_by_names_dtypes_and_shapes(form):
    """Also after one of the same form has passed."""
    weights, rows = {"base/w": torch.ones(2, 3)}, Prototypes.by_position(torch.ones(2, 3))
    spec = BundleSpec.of(Bundle(weights, {"class": rows}))
    for _ in range(2):
        spec.check_bundle(Bundle(form(weights), {"class": rows}))
    more = Prototypes.by_position(torch.ones(3, 3))
    for wrong, line in (
        (Bundle(form({"base/w": torch.ones(3, 2)}), {"class": rows}), "'weights/base/w' is"),
        (Bundle(form({"base/w": torch.ones(2, 3).half()}), {"class": rows}), "is float16"),
        (Bundle(form({"base/v": torch.ones(2, 3)}), {"class": rows}), "unexpected tensor"),
        (Bundle(form(weights), {"class": more}), "'prototypes/class/vectors' is"),
        (Bundle(form(weights)), "'prototypes/class/counts' is missing"),
    ):
        for _ in range(2):
            with pytest.raises(PayloadError, match=line):
                spec.check_bundle(wrong)


# --- travelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [0, 255])
def test_packed_weights_travel_as_the_same_bytes(between):
    """Also where other bytes lie between tensors: they stay at home."""
    weights, scalars = mixed(5), {"n": 2.0}
    one, other = encode(Bundle(packed(weights, between), scalars=scalars)), encode(
        Bundle(weights, scalars=scalars)
    )  # fmt: skip
    assert one.header == other.header
    assert list(one.chunks()) == list(other.chunks())
    assert one.digest == other.digest


def received(bundle: Bundle) -> Bundle:
    encoded = encode(bundle)
    receiver = Receiver(encoded.header, BundleSpec.of(bundle))
    for chunk in encoded.chunks():
        receiver.feed(read_chunk(chunk, rpc.PullHeader)[1])
    return receiver.finish()


def test_weights_arrive_packed():
    weights = mixed(6)
    found = received(Bundle(weights)).weights
    assert isinstance(found, PackedWeights)
    assert_same(found, weights)


@pytest.mark.parametrize("between", [0, 255])
def test_weights_in_another_order_arrive_and_go_on(between):
    """The order of a header is the sender's; ours is ascending."""
    a, b = torch.ones(3), torch.zeros(2, dtype=torch.int64)
    bundle = Bundle({"a": a, "b": b})
    encoded = encode(bundle)
    first, second = encoded.header.weights.tensors
    first.name, second.name = "b", "a"
    receiver = Receiver(encoded.header, BundleSpec.of(Bundle({"b": a, "a": b})))
    for chunk in encoded.chunks():
        receiver.feed(read_chunk(chunk, rpc.PullHeader)[1])
    found = receiver.finish().weights
    assert_same(found, {"a": b, "b": a})
    found.block[20:60] = between  # behind the first, of 12 bytes
    assert_same(received(Bundle(found)).weights, {"a": b, "b": a})


# --- the mean -------------------------------------------------------------------------------------


@pytest.mark.parametrize("floats", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_mean_of_packed_is_the_mean_of_others(floats):
    uploads = [mixed(seed, floats=floats) for seed in (10, 20, 30)]
    shares = [0.2, 0.3, 0.5]
    expected = weighted_mean(uploads, shares)
    found = weighted_mean([packed(u, between=255) for u in uploads], shares)
    assert isinstance(found, PackedWeights)
    assert found.layout.is_clear(found.block)
    assert_same(found, expected)
    assert_same(weighted_mean([packed(uploads[0]), *uploads[1:]], shares), expected)


def test_mean_of_packed_does_not_depend_on_what_was_forgotten():
    """Layouts are kept in a cache; uploads of the same form may come with two of them."""
    one, other = packed(mixed(1)), packed(mixed(2))
    alike = PackedWeights(other.names, BlockLayout(other.layout.facts), other.block)
    assert isinstance(weighted_mean([one, alike], [0.5, 0.5]), PackedWeights)


def test_mean_of_packed_with_two_kinds_of_floats():
    uploads = [{"a": torch.full((2,), x), "b": torch.full((2,), x).double()} for x in (1.0, 2.0)]
    found = weighted_mean(list(map(packed, uploads)), [0.5, 0.5])
    assert found["a"].tolist() == found["b"].tolist() == [1.5, 1.5]
    assert found["b"].dtype == torch.float64


def test_packed_uploads_that_differ():
    one = packed({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(PayloadError, match="'b' is in some uploads only"):
        weighted_mean([one, packed({"a": torch.ones(2)})], [0.5, 0.5])
    with pytest.raises(PayloadError, match="'b' differs in shape or dtype"):
        weighted_mean([one, packed({"a": torch.ones(2), "b": torch.ones(4)})], [0.5, 0.5])


def test_a_round_of_the_coordinator_makes_no_tensors(monkeypatch):
    """From upload to broadcast everything is done on blocks."""
    uploads = [received(Bundle(mixed(seed))) for seed in (1, 2)]

    def views(self, block):
        raise AssertionError("tensors were made one by one")

    layout = uploads[0].weights.layout
    monkeypatch.setattr(layout, "views", views)
    mean = weighted_mean(uploads, [0.5, 0.5])
    assert encode(Bundle(mean)).num_bytes == uploads[0].num_bytes()


# --- of a net -------------------------------------------------------------------------------------


def test_weights_of_a_net_are_packed_copies_in_its_order():
    net = make_net("resnet20", num_classes=10, input_shape=(3, 32, 32))
    held = weights_of(net)
    assert isinstance(held, PackedWeights)
    assert list(held) == list(net.tensors())
    assert held.layout.is_clear(held.block)
    before = {name: tensor.clone() for name, tensor in held.items()}
    assert_same(before, {k: t.detach().contiguous() for k, t in net.tensors().items()})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    assert_same(held, before)
    load_weights(net, held)
    assert_same(weights_of(net), before)


def test_a_part_of_a_net_and_nothing_of_it():
    net = make_net("mlp", num_classes=3, input_shape=(1, 2, 2))
    head = weights_of(net, lambda name: name.startswith("head/"))
    assert set(head) == {"head/weight", "head/bias"}
    assert isinstance(head, PackedWeights)
    assert head.layout.num_bytes == sum(t.nbytes for t in head.values())
    assert dict(weights_of(net, lambda name: False)) == {}


def test_a_net_in_one_block_is_loaded_and_read_as_any_other():
    plain = make_net("resnet20", num_classes=10, input_shape=(1, 8, 8))
    net = plain.copy()
    assert net.packed() is not None
    assert plain.packed() is None
    assert_same(weights_of(net), weights_of(plain))
    sent = {k: t + 1 for k, t in weights_of(plain).items()}
    for weights in (sent, packed(sent, between=7)):
        load_weights(net, weights)
        assert_same(weights_of(net), sent)
        assert net.packed() is not None
    with torch.no_grad():
        for each in net.tensors().values():
            each.add_(1)
    assert_same(weights_of(net), {k: t + 1 for k, t in sent.items()})
    assert list(weights_of(net)) == list(net.tensors())


def test_a_net_in_one_block_learns_as_any_other():
    nets = [make_net("digits-cnn", num_classes=3, input_shape=(1, 8, 8))]
    nets.append(nets[0].copy())
    x, y = some(torch.float32, (6, 1, 8, 8), 0), torch.tensor([0, 1, 2, 0, 1, 2])
    for net in nets:
        stepping = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
        for _ in range(3):
            stepping.zero_grad()
            cross_entropy(net(x), y).backward()
            stepping.step()
    assert_same(weights_of(nets[1]), weights_of(nets[0]))


@pytest.mark.parametrize("how", ["data", "cast", "assigned"])
def test_a_tensor_that_left_the_block_is_not_overlooked(how):
    net = make_net("digits-cnn", num_classes=3, input_shape=(1, 8, 8)).pack()
    before = weights_of(net)
    if how == "data":
        net.head.bias.data = torch.full((3,), 5.0)
    elif how == "cast":
        net.double().float().head.bias.data.fill_(5.0)
    else:
        net.head.bias = torch.nn.Parameter(torch.full((3,), 5.0))
    assert net.packed() is None
    assert weights_of(net)["head/bias"].tolist() == [5.0] * 3
    load_weights(net, before)
    assert_same(weights_of(net), before)
    assert net.pack().packed() is not None
    assert_same(weights_of(net), before)


def test_a_net_in_one_block_takes_no_block_but_its_own():
    net = make_net("mlp", num_classes=2, input_shape=(1, 2, 2), hidden=[4]).pack()
    before = weights_of(net)
    head = packed({k: t + 1 for k, t in before.items() if k.startswith("head/")})
    load_weights(net, head, strict=False)
    assert_same(weights_of(net), {**before, **head})
    renamed = packed({k.replace("head", "tail"): t for k, t in before.items()})
    turned = packed({k: t.T if t.dim() == 2 else t for k, t in before.items()})
    for other in (head, renamed, turned):
        with pytest.raises(PayloadError):
            load_weights(net, other)
    assert_same(weights_of(net), {**before, **head})


def test_tied_tensors_stay_tied():
    net = make_net("mlp", num_classes=4, input_shape=(1, 2, 2), hidden=[4, 4])
    first, second = [m for m in net.base.modules() if isinstance(m, torch.nn.Linear)]
    second.weight = first.weight
    assert net.pack().packed() is None
    assert second.weight is first.weight


def test_a_copy_shares_nothing():
    net = make_net("resnet20", num_classes=3, input_shape=(1, 8, 8)).pack()
    before, other = weights_of(net), net.copy()
    assert other.packed() is not None
    with torch.no_grad():
        for each in other.tensors().values():
            each.add_(1)
    assert_same(weights_of(net), before)


# --- memory ---------------------------------------------------------------------------------------


def test_a_block_is_used_again_when_nothing_lies_in_it_any_more():
    def array():
        return np.frombuffer(lease(12345), np.uint8)

    first = array()
    place, part, tensor = first.ctypes.data, first[5:], torch.from_numpy(first)[5:]
    del first, part
    assert array().ctypes.data != place, "a tensor still lies in the first"
    part = tensor.numpy()[5:]
    del tensor
    assert array().ctypes.data != place, "an array still lies in the first"
    del part
    assert place in {each.ctypes.data for each in (array(), array())}


def test_only_a_few_blocks_wait():
    """Sizes that differ every time, as those of prototypes may, are not kept for ever."""
    for size in range(1000, 1000 + 5 * blocks.KEPT_SIZES):
        lease(size)
    held = [lease(7777) for _ in range(blocks.KEPT_BLOCKS + 3)]
    del held
    assert len(blocks._free) <= blocks.KEPT_SIZES
    assert len(blocks._free[7777, False]) == blocks.KEPT_BLOCKS


def test_a_process_that_uses_a_gpu_pins_its_blocks_up_to_a_limit(monkeypatch):
    """One block of 4,000 bytes fits the limit; it is used again, and counted until it is gone."""
    before, made = lease(4000), []

    def pinned(size):
        made.append(torch.zeros(size, dtype=torch.uint8))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(blocks, "pinned_tensor", pinned)
    monkeypatch.setattr(blocks, "PINNED_BYTES", 5000)
    del before
    for _ in range(3):
        held = lease(4000)
        assert np.frombuffer(held, np.uint8).ctypes.data == made[0].data_ptr(), "it is used again"
        other = lease(4000)  # memory as any other
        del held, other
    assert len(made) == 1
    assert blocks._pinned_bytes == 4000
    blocks.forget_free_blocks()
    assert blocks._pinned_bytes == 0

    def refused(size):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(blocks, "pinned_tensor", refused)
    assert len(lease(4000)) == 4000
    assert blocks._pinned_bytes == 0


def test_layouts_are_shared():
    facts = facts_of([torch.ones(2, 3)])
    assert layout_of(facts) is layout_of(((torch.float32, (2, 3)),))
    assert BlockLayout(facts) == layout_of(facts) != BlockLayout(())
    assert hash(BlockLayout(facts)) == hash(layout_of(facts))
    assert BlockLayout(()).size == 0
