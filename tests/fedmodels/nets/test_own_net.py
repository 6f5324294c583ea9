"""A custom net: any module with features and head; one line for each that does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fedmodels.errors import ConfigError
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet, weights_of
from fedmodels.own.own_code import renew

START = "import torch\nfrom torch import nn\n"
METHOD = """
class Net(nn.Module):
    def __init__(self, num_classes, input_shape, width=5):
        super().__init__()
        self.stem = nn.Linear(input_shape[0], width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, num_classes)
    def features(self, x):
        return torch.relu(self.norm(self.stem(x)))
    def forward(self, x):
        return self.head(self.features(x))
"""
SUBMODULE = """
class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], 4))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(4, num_classes))
"""


def built(folder: Path, text: str, **options: object) -> SplitNet:
    (folder / "mine.py").write_text(START + text)
    name = f"{folder / 'mine.py'}:Net"
    renew(name)
    return make_net(name, num_classes=3, input_shape=(2,), **options)


def test_a_module_with_functions_is_split(tmp_path):
    net = built(tmp_path, METHOD, width=6)
    assert net.width == 6
    keys = set(net.tensors())
    assert {key for key in keys if not key.startswith("base/")} == {"head/weight", "head/bias"}
    assert {"base/net.stem.weight", "base/net.norm.running_mean"} <= keys
    assert net.training
    assert net.base.training


def test_a_module_of_modules_is_split_under_their_names(tmp_path):
    net = built(tmp_path, SUBMODULE)
    assert set(net.tensors()) == {"base/1.weight", "base/1.bias", "head/1.weight", "head/1.bias"}


@pytest.mark.parametrize("text", [METHOD, SUBMODULE])
def test_it_packs_copies_and_trains(tmp_path, text):
    net = built(tmp_path, text).pack()
    other, x = net.copy(), torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    before = weights_of(net)
    other(x).square().sum().backward()
    with torch.no_grad():
        for parameter in other.parameters():
            assert parameter.grad is not None
            parameter -= 0.1 * parameter.grad
    changed = [k for k, w in weights_of(other).items() if not torch.equal(w, before[k])]
    assert any(key.startswith("base/") for key in changed)
    assert any(key.startswith("head/") for key in changed)
    assert all(torch.equal(w, before[k]) for k, w in weights_of(net).items())


def changed(old: str, new: str) -> str:
    assert old in METHOD
    return METHOD.replace(old, new)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def Net(num_classes, input_shape):\n    return 3\n", "is int, not a torch.nn.Module"),
        (changed("features", "embed"), "has no features(x)"),
        (changed("self.head", "self.out"), "has no module head"),
        (changed("return torch.relu", "return torch.sum"), "features gives a scalar"),
        (changed("torch.relu(self.norm(self.stem(x)))", "None"), "features gives NoneType, not a"),
        (changed("(width, num_classes)", "(width, 7)"), "head gives 2 x 7; 2 x 3 are needed"),
        (changed("(width, num_classes)", "(9, 3)"), "head fails on a batch 2 x 5: RuntimeError"),
        (changed("return self.head(", "return 2 * self.head("), "forward(x) is not head(features"),
        (changed("nn.Linear(input_shape[0], width)", "nn.LazyLinear(width)"), "use no lazy layer"),
        (
            changed(
                "self.norm = ", "self.register_buffer('c', torch.zeros(1, dtype=torch.cfloat))"
                "\n        self.norm = "
            ),
            "c is a tensor torch.complex64",
        ),
        (changed("super().__init__()", "super().__init__()\n        1 / 0"), "ZeroDivisionError"),
        (
            SUBMODULE + "        self.requires_grad_(False)\n",
            "is frozen as a whole: there is nothing to train",
        ),
        (changed("input_shape, width", "shape, width"), "takes no input_shape: what builds a net"),
        (
            changed("self.head = nn.Linear(width, num_classes)",
                    "self.head = nn.Linear(width, 3)\n        self.tied = self.head.weight"),
            "share a parameter",
        ),
        (
            SUBMODULE.replace("nn.Linear(input_shape[0], 4)", "nn.ReLU()").replace(
                "nn.Linear(4, num_classes)", "nn.ConstantPad1d((0, 1), 0.0)"
            ),
            "has no parameter: there is nothing to train",
        ),
    ],
)  # fmt: skip
def test_a_net_that_does_not_fit_gets_one_line(tmp_path, text, line):
    with pytest.raises(ConfigError, match=re.escape(line)) as caught:
        built(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_a_wrong_value_of_an_option_gets_one_line():
    with pytest.raises(ConfigError, match=r"\[net\] 'mlp' cannot be built with hidden = 'abc'"):
        make_net("mlp", num_classes=3, input_shape=(4,), hidden="abc")


DRAWN = """
class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.features = nn.Linear(input_shape[0], 4)
        self.head = nn.Linear(4, num_classes)
        with torch.no_grad():
            self.head.bias.copy_(DRAW)
"""


def test_a_net_that_draws_outside_of_torch_is_refused(tmp_path):
    by_numpy = "import numpy as np\n" + DRAWN.replace(
        "DRAW", "torch.from_numpy(np.random.randn(num_classes))"
    )
    with pytest.raises(ConfigError, match=r"draws random numbers outside of torch: head/bias"):
        built(tmp_path, by_numpy)
    by_torch = DRAWN.replace("DRAW", "torch.randn(num_classes)")
    torch.manual_seed(0)
    first, drawn = weights_of(built(tmp_path, by_torch)), torch.rand(1)
    torch.manual_seed(0)
    again = weights_of(built(tmp_path, by_torch))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert torch.equal(torch.rand(1), drawn)
