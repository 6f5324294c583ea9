"""The small nets' normalisation: embeddings stay bounded, and the plain nets stay as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.nets import make_net
from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded

NETS = pytest.mark.parametrize("name", ["digits-cnn", "cnn5"])


def made(name: str, **options: object) -> SplitNet:
    with seeded(0):
        return make_net(name, num_classes=3, input_shape=(1, 16, 16), **options)


@NETS
@pytest.mark.parametrize("norm", ["group", "layer"])
@torch.no_grad()
def test_an_embedding_is_bounded_whatever_the_inputs(name, norm):
    """After layer normalisation and ReLU an embedding is at most as long as the root of d."""
    x = 1000 * torch.randn(4, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    net, plain = made(name, norm=norm), made(name)
    for layer in net.base.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.mul_(100)  # nor do large weights behind the convolutions make it longer
    assert float(net.features(x).norm(dim=1).max()) <= net.width**0.5
    assert float(plain.features(x).norm(dim=1).min()) > net.width**0.5
    torch.testing.assert_close(net.features(x)[:1], net.features(x[:1]), rtol=1e-4, atol=1e-5)


@NETS
def test_the_plain_net_has_no_further_weight_and_the_same_values(name):
    plain, normed = made(name).tensors(), made(name, norm="layer").tensors()
    assert not [key for key in plain if "norms" in key]
    assert all(torch.equal(normed[key], tensor) for key, tensor in plain.items())


@NETS
def test_an_unknown_normalisation(name):
    with pytest.raises(ConfigError, match="must be none, group, layer or batch"):
        made(name, norm="instance")
