"""A small convolutional net with batch normalisation, for studies of data-free training.

MFCL and TARGET read the running statistics that batch normalisation keeps, and ``digits-cnn`` has
none; ``resnet20`` takes too long for a comparison of a dozen methods on two cores: a step on 16
images of 28x28 took it 108 ms of CPU, and ``digits-cnn`` 19.
"""

from __future__ import annotations

from torch import nn

from fedmodels.nets.cnn import image_shape
from fedmodels.nets.split import SplitNet


def small_bn(num_classes: int, input_shape: tuple[int, ...]) -> SplitNet:
    """Build three convolutions of stride 2, each with batch normalisation: d = 64."""
    channels, height, width = image_shape("small-bn", input_shape, 8)
    base = nn.Sequential(
        *_block(channels, 16), *_block(16, 32), *_block(32, 64),
        nn.Flatten(), nn.Linear(64 * -(-height // 8) * -(-width // 8), 64), nn.ReLU(),
    )  # fmt: skip
    return SplitNet(base, nn.Linear(64, num_classes), 64)


def _block(fan_in: int, width: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(fan_in, width, 3, 2, 1, bias=False)
    return conv, nn.BatchNorm2d(width), nn.ReLU()
