"""Every net steps on a GPU without waiting for it, by operators that have a deterministic form."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedmodels.nets import make_net, net_names
from fedmodels.training.optimizer import SGD, descend
from tests.fake_card import CARD, LOOSE, card
from tests.integration.test_gpu import NETS


@pytest.mark.parametrize("name", net_names())
def test_a_step_of_every_net(name):
    if name == "timm":
        pytest.importorskip("timm", reason="needs timm: pip install 'fedtide[timm]'")
    shape, options = NETS[name]
    net = make_net(name, num_classes=3, input_shape=shape, **options)
    x, y = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2])
    with card() as found:
        there, x, y = net.to(CARD).pack().train(), x.to(CARD), y.to(CARD)
        optimizer = SGD([p for p in there.parameters() if p.requires_grad], lr=0.1, fused=True)
        found.waits.clear()
        loss = descend(F.cross_entropy(there.head(there.features(x)), y), optimizer)
        there.eval()(x)
        assert found.waits == {}
        assert loss.isfinite()


LOOSENED = [
    (nn.AdaptiveAvgPool2d(2), (1, 1, 5, 5)),
    (nn.Upsample(scale_factor=2, mode="bilinear"), (1, 1, 3, 3)),
    (nn.ReflectionPad2d(1), (1, 1, 3, 3)),
    (lambda x: x.median(1).values, (2, 3)),
    (lambda x: torch.bincount(torch.zeros(3, dtype=torch.int64, device=CARD), x), (3,)),
]


@pytest.mark.parametrize(("function", "shape"), LOOSENED)
def test_the_card_refuses_what_a_gpu_would(function, shape):
    with card(), pytest.raises(RuntimeError, match="deterministic implementation"):
        function(torch.zeros(shape, device=CARD).requires_grad_()).sum().backward()


def test_the_list_is_that_of_this_release_of_torch():
    told = torch.use_deterministic_algorithms.__doc__.partition("operations will throw a")[2]
    listed, _ = told.split("In addition")
    assert set(re.findall(r"^\s*\* :\w+:`([\w.]+)`", listed, re.M)) == LOOSE.keys()
