"""The ACGAN's nets: sizes, and the slot of z that says the class."""

import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.nets import make_net
from fedmodels.nets.generative.acgan import SourceHead, conditional_generator, latents
from fedmodels.nets.generative.gan import LATENT, Generator
from fedmodels.numerics.randomness import generator, seeded


@pytest.mark.parametrize(("classes", "latent"), [(10, 110), (62, 110), (2, 3)])
def test_labels_round_trip_through_z(classes, latent):
    y = torch.arange(3 * classes) % classes
    z = latents(y, classes, latent, generator(0))
    assert z.shape == (len(y), latent)
    assert torch.equal(z[:, :classes].argmax(1), y)
    assert torch.equal(z[:, :classes].sum(1), torch.ones(len(y)))
    assert torch.equal(z[:, :classes].max(1).values, torch.ones(len(y)))


def test_noise_is_what_is_left_and_does_not_depend_on_the_class():
    y, other = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.int64)
    z, again = (latents(labels, 10, 110, generator(3)) for labels in (y, other))
    assert torch.equal(z[:, 10:], again[:, 10:])
    assert z[:, 10:].std().item() == pytest.approx(1, abs=0.15)


def test_z_needs_room_for_noise():
    with pytest.raises(ConfigError, match="'latent' larger than 110"):
        conditional_generator((1, 28, 28), 110, 110, 16)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_images_and_judgement(shape):
    with seeded(0):
        net = make_net("acgan", num_classes=5, input_shape=shape, width=2).eval()
        maker = conditional_generator(shape, 5, 12, 4).eval()
    y = torch.arange(6) % 5
    images = maker(latents(y, 5, 12, generator(0)))
    assert images.shape == (6, *shape)
    features = net.features(images)
    assert SourceHead(net.width)(features).shape == (6,)
    assert net.head(features).shape == (6, 5)


def test_layers_are_those_of_the_table():
    """Six 3x3 convolutions, every second one halving the map, normalised from the second on."""
    net = make_net("acgan", num_classes=10, input_shape=(3, 32, 32))
    convolutions = [m for m in net.base.modules() if isinstance(m, nn.Conv2d)]
    assert [m.out_channels for m in convolutions] == [16, 32, 64, 128, 256, 512]
    assert [m.stride[0] for m in convolutions] == [2, 1, 2, 1, 2, 1]
    assert sum(isinstance(m, nn.BatchNorm2d) for m in net.base.modules()) == 5
    assert [m.p for m in net.base.modules() if isinstance(m, nn.Dropout)] == [0.5] * 6
    assert net.width == 512 * 4 * 4


def test_the_usual_generator_is_as_it_was():
    with seeded(0):
        plain = Generator((1, 28, 28))
    with seeded(0):
        told = Generator((1, 28, 28), latent=LATENT)
    for one, other in zip(plain.parameters(), told.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{"width": 0}, {"dropout": 1.0}])
def test_options_out_of_range(options):
    with pytest.raises(ConfigError, match="net 'acgan' takes"):
        make_net("acgan", num_classes=10, input_shape=(1, 28, 28), **options)
