"""The net of an auxiliary-classifier GAN: ``acgan``, whose class head is the classifier.

Odena et al., Conditional Image Synthesis with Auxiliary Classifier GANs, ICML 2017, table 2.
https://arxiv.org/abs/1610.09585

``acgan`` is the critic without its second head: six convolutions. Any other net of images can be
the critic too, since :class:`SourceHead` judges embeddings. The generator is :class:`gan.Generator`
with a z whose first K coordinates say the class.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.host.devices import to_device
from fedmodels.nets.cnn import image_shape
from fedmodels.nets.generative.gan import Generator
from fedmodels.nets.split import SplitNet


def acgan(
    num_classes: int, input_shape: tuple[int, ...], *, width: int = 16, dropout: float = 0.5
) -> SplitNet:
    """Build the critic and its class head; d = 32 ``width`` cells of a map an eighth of the image.

    Args:
        num_classes: K.
        input_shape: (C, height, width) of the images.
        width: channels of the first convolution; each later one has twice as many.
        dropout: share of the activations dropped after every convolution.

    Raises:
        ConfigError: the inputs are no images, or an option is out of range.
    """
    if width < 1 or not 0 <= dropout < 1:
        raise ConfigError(f"net 'acgan' takes width >= 1 and 0 <= dropout < 1: {width}, {dropout}")
    fan_in, rows, columns = image_shape("acgan", input_shape, 4)
    layers: list[nn.Module] = []
    for number in range(6):
        stride = 2 if number % 2 == 0 else 1
        layers.append(nn.Conv2d(fan_in, width << number, 3, stride, 1, bias=False))
        if number:
            layers.append(nn.BatchNorm2d(width << number))
        layers += [nn.LeakyReLU(0.2), nn.Dropout(dropout)]
        fan_in, rows, columns = width << number, -(-rows // stride), -(-columns // stride)
    d = fan_in * rows * columns
    return SplitNet(nn.Sequential(*layers, nn.Flatten()), nn.Linear(d, num_classes), d)


class SourceHead(nn.Linear):
    """Embeddings (B, d) -> how real each image looks (B,), as a logit."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (B,): above 0 is real."""
        return super().forward(features).flatten()


def conditional_generator(
    input_shape: tuple[int, ...], num_classes: int, latent: int, dim: int
) -> Generator:
    """Build the generator.

    Args:
        input_shape: (C, height, width) of the images.
        num_classes: K, less than ``latent``.
        latent: coordinates of z.
        dim: width of the generator.

    Raises:
        ConfigError: z has no room for noise beside the class.
    """
    if latent <= num_classes:
        raise ConfigError(
            f"z has {latent} coordinates, of which {num_classes} say the class: make 'latent' "
            f"larger than {num_classes}"
        )
    return Generator(input_shape, dim, latent=latent)


def latents(y: Tensor, num_classes: int, latent: int, noise: torch.Generator) -> Tensor:
    """Return z (B, latent) of labels (B,): one-hot in the first K coordinates, noise in the rest.

    Args:
        y: labels.
        num_classes: K.
        latent: coordinates of z.
        noise: a CPU generator, so that every device draws the same z.
    """
    z = to_device(torch.randn(len(y), latent, generator=noise), y.device)
    z[:, :num_classes] = F.one_hot(y, num_classes).to(z.dtype)
    return z


def critic_loss(
    net: SplitNet, source: SourceHead, real: Tensor, y: Tensor, fake: Tensor, fake_y: Tensor
) -> Tensor:
    """Return the critic's loss: on real or fake, and on the class, of both kinds of inputs.

    Args:
        net: embeddings and classes.
        source: real or fake.
        real: inputs (B, …); replayed ones count as real.
        y: their labels (B,).
        fake: generated inputs (m, …), constants here.
        fake_y: their labels (m,).
    """
    loss = torch.zeros((), device=real.device)
    for x, labels, is_real in ((real, y, 1.0), (fake.detach(), fake_y, 0.0)):
        features = net.features(x)
        judged = source(features)
        loss = loss + F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, is_real))
        loss = loss + F.cross_entropy(net.head(features), labels)
    return loss


def generator_loss(net: SplitNet, source: SourceHead, fake: Tensor, fake_y: Tensor) -> Tensor:
    """Return the generator's loss: fakes (m, …) shall pass for real ones of their classes (m,)."""
    features = net.features(fake)
    judged = source(features)
    passed = F.binary_cross_entropy_with_logits(judged, torch.ones_like(judged))
    return passed + F.cross_entropy(net.head(features), fake_y)
