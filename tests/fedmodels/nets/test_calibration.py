"""Temperature and distance of a model, by numbers calculated by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import tensor

import fedtide
from fedmodels.errors import ArchiveError
from fedmodels.nets import make_net
from fedmodels.nets.calibration import (
    calibrated,
    near_classes,
    temperature_of,
    temperature_of_labels,
)
from fedmodels.nets.trained import ModelFacts, TrainedModel, header_of


def test_a_temperature_makes_of_three_right_in_four_75_percent():
    """Logits (2, 0): sigmoid(2 / T) = 3/4 at T = 2 / ln 3."""
    logits = tensor([[2.0, 0.0]] * 4, dtype=torch.float64)
    assert temperature_of(logits, tensor([0, 0, 0, 1])) == pytest.approx(2 / math.log(3))
    sure = 10 * logits
    assert temperature_of(sure, tensor([0, 0, 0, 1])) == pytest.approx(20 / math.log(3))
    assert temperature_of(logits, tensor([0, 0, 0, 0])) == 1  # nothing says how sure it may be


def test_one_temperature_makes_labels_as_often_right_as_they_say():
    """Logits 2 and -2, each right in three of four: sigmoid(2 / T) = 3/4 at T = 2 / ln 3."""
    one = tensor([[2.0]] * 4, dtype=torch.float64)
    y = tensor([[1.0], [1.0], [1.0], [0.0]])
    assert temperature_of_labels(one, y) == pytest.approx(2 / math.log(3))
    both = torch.cat([one, -one], 1)
    assert temperature_of_labels(both, torch.cat([y, 1 - y], 1)) == pytest.approx(2 / math.log(3))
    assert temperature_of_labels(one, torch.ones(4, 1)) == 1  # nothing says how sure it may be


def test_an_example_is_held_against_its_class_without_itself():
    """Class 0 at 0, 2, 4 (mean 2; without themselves 3, 2, 1), class 1 at 10, a single one."""
    z, y = tensor([[0.0], [2.0], [4.0], [10.0]], dtype=torch.float64), tensor([0, 0, 0, 1])
    means, reach = near_classes(z, y)
    assert means.tolist() == [[2.0], [10.0]]
    assert reach == 8  # the single one is 8 from class 0; the others 3, 0, 3
    z = tensor([[float(i % 100)] for i in range(200)], dtype=torch.float64)
    _, reach = near_classes(z, torch.zeros(200, dtype=torch.int64))
    # mean 49.5; 199 of 201: the second largest of 200, 49.5 without itself
    assert reach == pytest.approx(49.5 * 200 / 199)


def model(net: torch.nn.Module | None = None) -> TrainedModel:
    torch.manual_seed(0)
    found = fedtide.make_net("mlp", num_classes=2, input_shape=(3,), hidden=[4])
    facts = ModelFacts("mlp", {"hidden": [4]}, (3,), 2)
    return TrainedModel(facts, found.tensors())


def test_a_model_keeps_its_calibration_in_its_file(tmp_path):
    plain = model()
    x = torch.randn(40, 3)
    assert calibrated(plain.net, [(x[:19], torch.zeros(19, dtype=torch.int64))]) is None
    found = calibrated(plain.net, [(x, (x[:, 0] > 0).long())])
    assert found.examples == 40
    facts = replace(plain.facts, temperature=4.0, calibrated_on=40, reach=found.reach)
    made = TrainedModel(facts, plain.net.tensors(), None)
    made.seen = found.means
    made.save(tmp_path / "m")
    read = TrainedModel.load(tmp_path / "m")
    logits = plain(x).detach()
    np.testing.assert_allclose(read.probabilities(x), (logits / 4).softmax(1), rtol=1e-6)
    assert read.predict(x).tolist() == plain.predict(x).tolist()
    near, far = read.distances(x), read.distances(1000 * x[:5])
    assert (near <= 1).mean() >= 0.95
    assert (far > 1).all()
    assert read.distances(x[:0]).shape == (0,)
    passes = list[int]()
    read.net.base.register_forward_hook(lambda *given: passes.append(1))
    shares, away = read.answers(x)
    assert len(passes) == 1, "an answer took two passes of the net"
    np.testing.assert_array_equal(shares, read.probabilities(x))
    np.testing.assert_array_equal(away, near)
    assert [found.shape for found in read.answers(x[:0])] == [(0, 2), (0,)]
    assert not plain.answers(x)[1].any()
    assert not plain.distances(x).any()
    for wrong in ({"temperature": -1.0}, {"reach": math.inf}, {"temperature": "1"}):
        text = header_of(replace(facts, **wrong))["model"]
        with pytest.raises(ArchiveError, match="temperature"):
            ModelFacts.parse(text, "m")


def test_classes_that_are_one_are_held_against_their_examples_together():
    """The logits of both are one: log-sum-exp of 0 and 2, where the examples are of the second."""
    net = make_net("mlp", num_classes=3, input_shape=(4,), hidden=[5])
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 3
    found = calibrated(net, [(x, torch.where(y == 0, 2, y))], [(0, 2)])
    logits = net.eval()(x).detach().double()
    both = torch.stack([logits[:, 1], torch.logaddexp(logits[:, 0], logits[:, 2])], 1)
    assert found.temperature == pytest.approx(temperature_of(both, (y != 1).long()))
