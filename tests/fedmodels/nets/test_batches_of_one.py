"""One example where a layer normalises over the batch: in training, in scoring, and alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmodels.errors import ConfigError, DataError
from fedmodels.nets import make_net
from fedmodels.nets.cost import multiply_adds
from fedmodels.nets.split import SplitNet, embeddings, weights_of
from fedmodels.nets.trained import ModelFacts, TrainedModel
from fedmodels.own.own_code import renew

NET = """
import torch
from torch import nn
from torch.nn.functional import batch_norm

class Net(nn.Module):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.stem = nn.Linear(input_shape[0], 5)
        self.norm = {norm}
        self.head = {head}
    def features(self, x):
        z = self.stem(x)
        return {z}
"""
LINEAR = "nn.Linear(5, num_classes)"
KINDS = {
    "none": ("nn.Identity()", "torch.relu(self.norm(z))", (True, False, False)),
    "statistics": ("nn.BatchNorm1d(5)", "torch.relu(self.norm(z))", (True, False, True)),
    "no statistics": (
        "nn.BatchNorm1d(5, track_running_stats=False)", "torch.relu(self.norm(z))",
        (False, True, True),
    ),
    "a function": ("None", "batch_norm(z, None, None, training=True)", (False, True, True)),
    "a function in training": (
        "None", "batch_norm(z, None, None, training=True) if self.training else z",
        (True, False, True),
    ),
    "by hand": ("None", "(z - z.mean(0)) / (z.std(0) + 1)", (False, True, True)),
    "of examples": ("nn.LayerNorm(5)", "self.norm(z)", (True, False, False)),
}  # fmt: skip


def built(folder: Path, norm: str, z: str, head: str = LINEAR) -> SplitNet:
    (folder / "mine.py").write_text(NET.format(norm=norm, z=z, head=head))
    name = f"{folder / 'mine.py'}:Net"
    renew(name)
    torch.manual_seed(0)
    return make_net(name, num_classes=3, input_shape=(2,))


def without_statistics(folder: Path) -> SplitNet:
    return built(folder, *KINDS["no statistics"][:2])


X = torch.randn(9, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_net_is_tried_with_one_example(kind, tmp_path):
    norm, z, expected = KINDS[kind]
    net = built(tmp_path, norm, z)
    assert (net.takes_one, net.mixes_examples, net.normalises_batches) == expected
    again = make_net(f"{tmp_path / 'mine.py'}:Net", num_classes=3, input_shape=(2,))
    assert (again.takes_one, again.mixes_examples, again.normalises_batches) == expected


def test_images_that_mix_may_be_alone():
    """A plane has positions to normalise over; the result depends on the batch all the same."""
    norm = torch.nn.BatchNorm2d(1, track_running_stats=False)
    from fedmodels.nets.own_net import Batches

    base = torch.nn.Sequential(norm, torch.nn.Flatten())
    net = SplitNet(base, torch.nn.Linear(16, 3), 16)
    assert Batches.of(net, (1, 4, 4), "mine") == Batches(True, True, True)


@pytest.mark.parametrize("size", [8, 4, 1])
def test_the_last_example_joins_the_batch_before_it(size, tmp_path):
    net = without_statistics(tmp_path).eval()
    assert [len(part) for part in net.split(X, size)] == {8: [9], 4: [4, 5], 1: [2, 2, 2, 3]}[size]
    assert [len(part) for part in net.split(X[:1], size)] == [1]
    assert [len(part) for part in net.split(X[:0], size)] == [0]
    plain = built(tmp_path, *KINDS["statistics"][:2]).eval()
    assert len(plain.split(X, 8)[-1]) == 1
    assert len(plain.train().split(X, 8)[-1]) == 9


def test_one_example_alone_is_embedded_beside_a_copy_of_itself(tmp_path):
    net = without_statistics(tmp_path).eval()
    found = embeddings(net, X[:1])
    assert torch.equal(found, net.features(X[:1].repeat(2, 1))[:1])
    assert torch.allclose(found, torch.relu(net.base.net.norm.bias)[None], atol=1e-4)
    assert net(X[:1]).shape == (1, 3)


def test_the_cost_of_a_net_without_statistics_is_that_of_its_products(tmp_path):
    assert multiply_adds(without_statistics(tmp_path), (2,)) == 2 * 5 + 5 * 3


def test_a_head_that_could_predict_no_single_example_is_refused(tmp_path):
    norm = "nn.BatchNorm1d(5, track_running_stats=False)"
    with pytest.raises(ConfigError, match="has a head that normalises over the batch"):
        built(tmp_path, "None", "z", f"nn.Sequential({norm}, {LINEAR})")
    kept = norm.replace(", track_running_stats=False", "")
    assert built(tmp_path, "None", "z", f"nn.Sequential({kept}, {LINEAR})").takes_one


def test_a_net_that_fails_in_training_alone_is_refused_when_it_is_built(tmp_path):
    with pytest.raises(ConfigError, match=r"training mode fails on a batch 2 x 2: ZeroDivision"):
        built(tmp_path, "None", "z / (0 if self.training else 1) if not self.training else 1 / 0")


def test_batches_of_one_alone_are_refused(tmp_path):
    net = without_statistics(tmp_path)
    net.check_batches(batch_size=2, replay_batch=3)
    with pytest.raises(ConfigError, match=r"^replay_batch = 1: the net normalises over the batch"):
        net.check_batches(batch_size=2, replay_batch=1)
    built(tmp_path, *KINDS["none"][:2]).check_batches(batch_size=1)


def test_a_trained_net_without_statistics_judges_no_input_alone(tmp_path):
    net = without_statistics(tmp_path)
    facts = ModelFacts(f"{tmp_path / 'mine.py'}:Net", {}, (2,), 3)
    model = TrainedModel(facts, weights_of(net))
    assert model.predict(np.zeros((3, 2))).shape == (3,)
    with pytest.raises(DataError, match="this net normalises over the batch"):
        model.predict(np.zeros((1, 2)))
    assert "depends on the inputs that are given with it" in model.caveats()[0]
