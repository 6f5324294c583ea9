import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.nets import make_net, net_names
from fedmodels.nets.alp import alp_layers
from fedmodels.nets.hart import LiteConv
from fedmodels.nets.split import SplitNet, load_weights, weights_of
from fedmodels.nets.transformer import DropPath
from fedmodels.numerics.randomness import seeded
from fedmodels.tensors.bundle import Bundle
from fedmodels.tensors.bundle_spec import BundleSpec

RGB, GRAY, DIGIT, INERTIAL = (3, 32, 32), (1, 28, 28), (1, 8, 8), (128, 6)

# name, input shape, classes, parameters of the base, of the head, buffer floats, counters
COUNTS = [
    ("digits-cnn", DIGIT, 10, 39_744, 650, 0, 0),
    ("digits-cnn", GRAY, 10, 39_744, 650, 0, 0),
    ("mlp", DIGIT, 10, 16_576, 650, 0, 0),
    ("cnn5", GRAY, 10, 642_560, 1_290, 0, 0),
    ("acgan", GRAY, 10, 1_573_456, 81_930, 1_984, 5),
    ("acgan", RGB, 100, 1_573_744, 819_300, 1_984, 5),
    ("cnn5", GRAY, 62, 642_560, 7_998, 0, 0),
    ("resnet18", RGB, 10, 11_168_832, 5_130, 9_600, 20),
    ("resnet18", RGB, 100, 11_168_832, 51_300, 9_600, 20),
    ("resnet18-imagenet", RGB, 10, 11_176_512, 5_130, 9_600, 20),
    ("resnet20", RGB, 10, 269_072, 650, 1_376, 19),
    ("resnet20", RGB, 100, 269_072, 6_500, 1_376, 19),
    ("resnet20", GRAY, 10, 268_784, 650, 1_376, 19),
    ("resnet20", GRAY, 62, 268_784, 4_030, 1_376, 19),
    ("resnet20-b", RGB, 10, 271_824, 650, 1_568, 21),
    ("resnet20-b", GRAY, 62, 271_536, 4_030, 1_568, 21),
    ("vit-tiny", RGB, 10, 2_691_648, 1_930, 0, 0),
    ("vit-tiny", RGB, 100, 2_691_648, 19_300, 0, 0),
    ("hart", INERTIAL, 6, 1_439_768, 6_150, 0, 0),
    ("hart", INERTIAL, 8, 1_439_768, 8_200, 0, 0),
    ("hart", INERTIAL, 9, 1_439_768, 9_225, 0, 0),
]
SMALL = [("digits-cnn", DIGIT), ("mlp", DIGIT), ("cnn5", GRAY), ("resnet20", GRAY)]
SMALL += [("resnet20-b", RGB), ("resnet18-imagenet", RGB), ("resnet18", RGB)]
SMALL += [("vit-tiny", RGB), ("hart", INERTIAL), ("acgan", DIGIT)]


def build(
    name: str, input_shape: tuple[int, ...], classes: int = 10, **options: object
) -> SplitNet:
    with seeded(0):
        return make_net(name, num_classes=classes, input_shape=input_shape, **options)


def count(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.parametrize(("name", "shape", "classes", "base", "head", "floats", "counters"), COUNTS)
def test_counts(name, shape, classes, base, head, floats, counters):
    net = build(name, shape, classes)
    assert count(list(net.base.parameters())) == base
    assert count(list(net.head.parameters())) == head
    buffers = list(net.buffers())
    assert count([b for b in buffers if b.is_floating_point()]) == floats
    assert count([b for b in buffers if not b.is_floating_point()]) == counters


def test_wire_sizes_of_the_cards():
    # gldp.md, section 6; pfedgrp.md, section 5; fedmlp.md, section 6
    def base_bytes(net: SplitNet) -> int:
        weights = weights_of(net)
        return sum(t.numel() * t.element_size() for k, t in weights.items() if k[:5] == "base/")

    assert base_bytes(build("resnet18", RGB)) == 44_713_888
    assert base_bytes(build("cnn5", GRAY)) == 2_570_240
    for shape, classes, size in [
        (GRAY, 10, 1_083_392),
        (RGB, 10, 1_084_544),
        (RGB, 100, 1_107_944),
    ]:
        net = build("resnet20", shape, classes)
        assert BundleSpec.of(Bundle(weights_of(net))).max_bytes == size
    assert BundleSpec.of(Bundle(weights_of(build("resnet20", GRAY, 62)))).max_bytes == 1_096_912


@pytest.mark.parametrize(("name", "shape"), SMALL)
def test_forward_is_head_of_features(name, shape):
    net = build(name, shape, 7).eval()
    x = torch.randn(3, *shape)
    z = net.features(x)
    assert z.shape == (3, net.width)
    assert net(x).shape == (3, 7)
    assert torch.equal(net(x), net.head(z))


@pytest.mark.parametrize(("name", "shape"), SMALL)
def test_weights_are_of_the_base_or_of_the_head(name, shape):
    net = build(name, shape)
    weights = weights_of(net)
    assert {key for key in weights if not key.startswith("base/")} == {"head/weight", "head/bias"}
    assert len(weights) == len(net.state_dict())


@pytest.mark.parametrize(("name", "shape"), SMALL)
def test_training_reaches_every_parameter(name, shape):
    net = build(name, shape).eval()  # drop path may leave a branch out of a small batch
    net(torch.randn(4, *shape)).square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in net.parameters())


@pytest.mark.parametrize(("name", "shape"), SMALL)
def test_bfloat16_is_for_the_base_alone(name, shape):
    net, x = build(name, shape), torch.randn(2, *shape)
    plain = net.eval()(x)
    net.mixed_precision = True
    rounded = net(x)
    assert torch.equal(deepcopy(net)(x), rounded)
    assert rounded.dtype == net.features(x).dtype == torch.float32
    assert not torch.equal(rounded, plain)
    assert (rounded - plain).norm() < 0.02 * plain.norm()
    net.train()(x).square().mean().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}


def test_weights_round_trip_in_place():
    source, target = build("resnet20", GRAY), build("resnet20", GRAY)
    source(torch.randn(4, *GRAY))  # moves the running statistics and the counters
    weights = weights_of(source)
    addresses = {k: t.data_ptr() for k, t in target.state_dict().items()}
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.zero_()
    load_weights(target, weights)
    assert addresses == {k: t.data_ptr() for k, t in target.state_dict().items()}
    assert all(torch.equal(t, weights_of(target)[k]) for k, t in weights.items())
    assert all(p.requires_grad and p.grad is None for p in target.parameters())


def test_weights_are_plain_copies():
    net = build("digits-cnn", DIGIT)
    weights = weights_of(net)
    before = {k: t.clone() for k, t in weights.items()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7)
    assert all(torch.equal(t, before[k]) for k, t in weights.items())
    assert all(t.is_contiguous() and not t.requires_grad for t in weights.values())


def test_loading_nothing_changes_nothing():
    net = build("mlp", GRAY)
    before = weights_of(net)
    load_weights(net, {}, strict=False)
    assert all(torch.equal(before[key], tensor) for key, tensor in weights_of(net).items())


@pytest.mark.parametrize("name", ["resnet20", "digits-cnn"])
def test_tensors_are_those_of_the_state_dict_also_after_they_were_replaced(name):
    net = build(name, GRAY)
    net.tensors()
    net.double()  # replaces every buffer
    twin = deepcopy(net)
    for each in (net, twin):
        stated = {k.replace(".", "/", 1): t.data_ptr() for k, t in each.state_dict().items()}
        assert {k: t.data_ptr() for k, t in each.tensors().items()} == stated
    assert not set(twin.tensors().values()) & set(net.tensors().values())


def test_loading_a_part():
    net = build("mlp", DIGIT)
    before = weights_of(net)
    load_weights(net, {"head/bias": torch.full((10,), 3.0)}, strict=False)
    after = weights_of(net)
    assert bool((after["head/bias"] == 3).all())
    assert all(torch.equal(before[k], after[k]) for k in before if k != "head/bias")


def test_loading_keeps_the_dtype():
    net = build("mlp", DIGIT).to(torch.float64)
    load_weights(net, {"head/bias": torch.full((10,), 0.5)}, strict=False)
    assert net.get_parameter("head.bias").dtype == torch.float64


def test_loading_refuses_what_does_not_fit():
    net = build("mlp", DIGIT)
    before = weights_of(net)
    with pytest.raises(PayloadError, match=r"'head/bais'.* Did you mean 'head/bias'"):
        load_weights(net, {"head/weight": torch.ones(10, 64), "head/bais": torch.zeros(10)})
    with pytest.raises(PayloadError, match=r"\[3\]; the net has \[10\]"):
        load_weights(net, {"head/bias": torch.zeros(3)}, strict=False)
    with pytest.raises(PayloadError, match=r"missing \(5 in all\)"):
        load_weights(net, {"head/bias": torch.zeros(10)})
    assert all(torch.equal(before[k], t) for k, t in weights_of(net).items())


def test_an_mlp_without_hidden_layers_is_softmax_regression():
    net = make_net("mlp", num_classes=3, input_shape=DIGIT, hidden=[])
    found = weights_of(net)
    assert {name: tuple(t.shape) for name, t in found.items()} == {
        "head/weight": (3, math.prod(DIGIT)), "head/bias": (3,),
    }  # fmt: skip
    x = torch.randn(5, *DIGIT)
    assert torch.equal(net(x), x.flatten(1) @ found["head/weight"].T + found["head/bias"])


def test_unknown_names_and_options():
    with pytest.raises(ConfigError, match="Did you mean 'resnet20'"):
        make_net("resnt20", num_classes=2, input_shape=RGB)
    with pytest.raises(ConfigError, match=r"has: hidden, adapters\. Did you mean 'hidden'"):
        make_net("mlp", num_classes=2, input_shape=RGB, hiden=[3])
    with pytest.raises(ConfigError, match="has: no options"):
        make_net("resnet20", num_classes=2, input_shape=RGB, width=3)
    with pytest.raises(ConfigError, match="at least 16x16"):
        make_net("cnn5", num_classes=2, input_shape=DIGIT)
    with pytest.raises(ConfigError, match="must list widths"):
        make_net("mlp", num_classes=2, input_shape=DIGIT, hidden=[8, 0])


def test_third_party_nets(monkeypatch):
    import fedmodels.nets as nets

    class Point:
        name = "their-net"

        @staticmethod
        def load():
            return lambda num_classes, input_shape, size=3: build("mlp", input_shape, num_classes)

    def points(group: str, name: str = "their-net") -> list[Point]:
        return [Point()] if (group, name) == ("fedtide.nets", "their-net") else []

    monkeypatch.setattr(nets, "entry_points", points)
    assert "their-net" in net_names()
    assert make_net("their-net", num_classes=2, input_shape=DIGIT, size=1).width == 64


def test_he_initialisation_of_resnet18():
    # fan out: 128 channels of 3x3, behind 64
    conv = dict(build("resnet18", RGB).base.named_parameters())["layer2.0.conv1.weight"]
    assert float(conv.detach().std()) == pytest.approx((2 / (128 * 9)) ** 0.5, rel=0.02)
    bn = dict(build("resnet18", RGB).base.named_parameters())["stem.bn.weight"]
    assert bool((bn == 1).all())


def test_same_seed_same_net():
    first, second = (weights_of(build("resnet20", GRAY)) for _ in range(2))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_embeddings_of_residual_nets_are_not_negative():
    z = build("resnet20", GRAY).features(torch.randn(2, *GRAY))
    assert bool((z >= 0).all())


@pytest.mark.parametrize(("name", "shape"), [("vit-tiny", RGB), ("hart", INERTIAL)])
def test_alignment_layers(name, shape):
    plain, aligned = build(name, shape), build(name, shape, alp=True)
    layers = alp_layers(aligned)
    assert [len(layer.local_prototypes) for layer in layers] == [2048, 1024, 512, 256, 128, 64]
    assert count(list(aligned.parameters())) - count(list(plain.parameters())) == 444_672
    assert count(list(aligned.buffers())) == 2 * 774_144
    assert not alp_layers(plain)
    small = build(name, shape, alp=True, prototypes=[4] * 6, alignment={"beta": 0.5, "glu": False})
    assert [layer.beta for layer in alp_layers(small)] == [0.5] * 6
    small(torch.randn(2, *shape)).sum().backward()


def test_sizes_of_fedali():
    # models.md, section 4; fedali.md, section 6
    assert count(list(build("vit-tiny", RGB, mlp_ratio=2).parameters())) == 1_806_538
    assert count(list(build("vit-tiny", RGB, 100, mlp_ratio=2).parameters())) == 1_823_908
    weights = weights_of(build("hart", INERTIAL, 6, alp=True))
    assert sum(t.numel() * t.element_size() for t in weights.values()) == 13_755_512


def test_options_of_the_transformers():
    with pytest.raises(ConfigError, match="do not tile"):
        build("vit-tiny", (1, 30, 30))
    with pytest.raises(ConfigError, match="pool='max'"):
        build("vit-tiny", RGB, pool="max")
    with pytest.raises(ConfigError, match="6 blocks"):
        build("vit-tiny", RGB, alp=True, prototypes=[3])
    with pytest.raises(ConfigError, match="Did you mean 'gamma'"):
        build("hart", INERTIAL, alp=True, alignment={"gama": 1.0})
    with pytest.raises(ConfigError, match="set alp = true"):
        build("hart", INERTIAL, alignment={"gamma": 1.0})
    with pytest.raises(ConfigError, match="takes windows"):
        build("hart", (100, 6))
    with pytest.raises(ConfigError, match="lite_conv='flat'"):
        build("hart", INERTIAL, lite_conv="flat")


@pytest.mark.parametrize("pool", ["cls", "mean"])
@torch.no_grad()
def test_the_head_reads_the_class_token_or_the_mean_of_the_tokens(pool):
    net, tokens = build("vit-tiny", (1, 8, 8), blocks=1, pool=pool), []
    net.base.norm.register_forward_hook(lambda _layer, _given, out: tokens.append(out))
    embedding, found = net.features(torch.randn(2, 1, 8, 8)), tokens[0]  # (B, d), (B, Z, d)
    torch.testing.assert_close(embedding, found[:, 0] if pool == "cls" else found.mean(1))
    assert not torch.equal(found[:, 0], found.mean(1))


def test_hart_treats_samples_apart():
    x = torch.randn(8, *INERTIAL)
    net = build("hart", INERTIAL, 6).eval()
    with torch.no_grad():
        torch.testing.assert_close(net(x)[3:4], net(x[3:4]), rtol=1e-4, atol=1e-5)


def test_lite_conv_along_time():
    conv = LiteConv(3, "time")
    with torch.no_grad():
        kernels = [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.125, 0.75, 0.125]]
        conv.kernel.copy_(torch.tensor(kernels).log())
    x, y = torch.zeros(1, 8, 96), torch.zeros(1, 8, 96)
    x[0, 2, 5] = x[0, 7, 24] = 4.0  # a channel of head 0, one of head 1
    y[0, 1:4, 5] = torch.tensor([1.0, 2.0, 1.0])
    y[0, 6:8, 24] = torch.tensor([1.0, 1.0])
    torch.testing.assert_close(conv(x), y)


def test_lite_conv_of_the_official_code_mixes_samples():
    # fedali.md, section 16 (a): of 8 samples, output 0 holds 0 to 3 and output 3 holds 4 to 7
    conv = LiteConv(3, "official_flat")
    base = conv(torch.zeros(8, 8, 96))
    touched = []
    for sample in range(8):
        x = torch.zeros(8, 8, 96)
        x[sample] = 1
        touched.append([bool((conv(x)[out] != base[out]).any()) for out in (0, 3)])
    assert touched == [[True, False]] * 4 + [[False, True]] * 4


def test_drop_path_keeps_the_mean_and_whole_samples():
    drop = DropPath(0.25)
    with seeded(0):
        y = drop(torch.ones(4000, 3))
    assert bool((y == y[:, :1]).all())
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert float(y.mean()) == pytest.approx(1, abs=0.05)
    assert torch.equal(drop.eval()(y), y)


def test_another_default_dtype_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ConfigError, match=r"default dtype was set to torch\.float64 .*float32"):
            make_net("digits-cnn", num_classes=10, input_shape=DIGIT)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "shape"), [("vit-tiny", (3, 8, 8)), ("hart", (32, 6))], ids=lambda value: str(value)
)
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"drop_path": 1.0}, "drop_path=1.0 of net .* must be from 0 to below 1"),
        ({"drop_path": -0.5}, "drop_path=-0.5"),
        ({"drop_path": float("nan")}, "drop_path=nan"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"alignment": {"beta": 1.5}}, "alp beta=1.5 must be from 0 to 1"),
        ({"alignment": {"gamma": -0.1}}, "alp gamma=-0.1 must be from 0 to 1"),
        ({"alignment": {"epsilon": 0}}, "alp epsilon=0 must be above 0"),
        ({"alignment": {"iterations": 0}}, "alp iterations=0 must be 1 or more"),
    ],
    ids=str,
)
def test_numbers_of_a_transformer_that_make_no_sense(name, shape, options, line):
    few = {"blocks": 2, "prototypes": [2, 2], "alp": True}
    with pytest.raises(ConfigError, match=line):
        make_net(name, num_classes=3, input_shape=shape, **few, **options)
