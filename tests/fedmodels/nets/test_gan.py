import pytest
import torch
from torch import nn

from fedmodels.errors import ConfigError
from fedmodels.nets.generative import gan
from fedmodels.nets.generative.gan import Critic, Generator

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("shape", "dim", "arch", "maker", "critic"),
    [
        (MNIST, 16, "wgan", 224_337, 173_041),
        (CIFAR, 64, "wgan", 2_963_779, 2_758_593),
        (MNIST, 32, "wgan", 792_737, None),
        (CIFAR, 128, "wgan", 11_432_579, None),
        (MNIST, 16, "dcgan", 143_840, 42_240),
        (CIFAR, 64, "dcgan", 1_068_928, 662_528),
    ],
)
def test_counts(shape, dim, arch, maker, critic):
    # models.md, section 6
    assert parameters(Generator(shape, dim, arch)) == maker
    if critic is not None:
        assert parameters(Critic(shape, dim, arch)) == critic


@pytest.mark.parametrize(("shape", "dim", "size"), [(MNIST, 16, 898_268), (CIFAR, 64, 11_858_724)])
def test_bytes_on_the_wire(shape, dim, size):
    # pfedgrp.md, section 5
    tensors = Generator(shape, dim).state_dict().values()
    assert sum(t.numel() * t.element_size() for t in tensors) == size


@pytest.mark.parametrize("arch", ["wgan", "dcgan"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 12, 10), MNIST, CIFAR])
def test_images_and_scores(shape, arch):
    maker, critic = Generator(shape, 4, arch), Critic(shape, 4, arch)
    z = torch.randn(5, gan.LATENT)
    images, canvas = maker.eval()(z), maker.paint(z)
    assert images.shape == (5, *shape)
    assert bool((images.abs() <= 1).all())
    assert torch.equal(images, gan.crop(canvas, shape))
    assert critic(canvas).shape == (5,)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in critic.modules())


def test_a_score_depends_on_its_image_alone():
    critic = Critic(MNIST)
    x = torch.randn(4, 1, 32, 32)
    torch.testing.assert_close(critic(x)[2:3], critic(x[2:3]))


def test_padding_is_black_and_undone_by_cropping():
    x = torch.rand(2, 1, 28, 27)
    padded = gan.pad(x, 32)
    assert padded.shape == (2, 1, 32, 32)
    assert bool((padded[..., :2, :] == -1).all())
    assert torch.equal(gan.crop(padded, (1, 28, 27)), x)


def test_what_it_cannot_make():
    with pytest.raises(ConfigError, match="at most 32x32"):
        Generator((3, 64, 64))
    with pytest.raises(ConfigError, match="at most 32x32"):
        Critic((128, 6))
    with pytest.raises(ConfigError, match="arch='gan'"):
        Generator(MNIST, arch="gan")
