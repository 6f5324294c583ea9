"""The memory layout in which a net takes images."""

import pytest
import torch

from fedmodels.nets import make_net


@pytest.mark.parametrize(("name", "is_wide"), [("resnet18", True), ("resnet20", False)])
def test_a_net_of_wide_convolutions_takes_images_as_they_are(name, is_wide, monkeypatch):
    """On a processor, in float32; in bfloat16 all take them channels-last."""
    net, seen = make_net(name, num_classes=2, input_shape=(3, 8, 8)), []
    assert net.is_wide == is_wide
    embedded = type(net).embedded

    def looked_at(self, x):
        seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return embedded(self, x)

    monkeypatch.setattr(type(net), "embedded", looked_at)
    x = torch.randn(2, 3, 8, 8)
    net.features(x)
    net.mixed_precision = True
    net.features(x)
    assert seen == [not is_wide, True]
