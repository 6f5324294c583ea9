"""Residual nets: ``resnet18`` and ``resnet18-imagenet``, ``resnet20`` and ``resnet20-b``.

He et al., Deep Residual Learning for Image Recognition, CVPR 2016, sections 3.3 and 4.2.
https://arxiv.org/abs/1512.03385

The blocks are our own, not torchvision's: importing torchvision costs each client process a second
and some 170 MB, and it offers neither the CIFAR stem nor the shortcut without parameters.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.nets.cnn import image_shape
from fedmodels.nets.split import SplitNet


class Stem(nn.Module):
    """Convolution, batch normalisation, ReLU and, in the ImageNet form, a max pool."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, fan_in: int, width: int, *, imagenet: bool = False) -> None:
        super().__init__()
        kernel, stride = (7, 2) if imagenet else (3, 1)
        self.conv = nn.Conv2d(fan_in, width, kernel, stride, kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.pool = imagenet

    def forward(self, x: Tensor) -> Tensor:
        """Return the first feature maps (B, width, H, W), smaller in the ImageNet form."""
        x = F.relu(self.bn(self.conv(x)))
        return F.max_pool2d(x, 3, 2, 1) if self.pool else x


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    Where the shape changes, the shortcut is a 1x1 convolution (``projection``, option B of the
    paper) or every second pixel with zero channels around it (option A, no parameters).
    """

    rows_are_independent: ClassVar[bool] = True

    def __init__(self, fan_in: int, width: int, stride: int, *, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.missing = stride, width - fan_in
        self.shortcut: nn.Sequential | None = None
        if projection and (stride > 1 or self.missing):
            conv = nn.Conv2d(fan_in, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the feature maps (B, width, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self._identity(x))

    def _identity(self, x: Tensor) -> Tensor:
        if self.shortcut is not None:
            shortcut: Tensor = self.shortcut(x)
            return shortcut
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.missing:
            half = self.missing // 2
            x = F.pad(x, (0, 0, 0, 0, half, self.missing - half))
        return x


class ResNetBase(nn.Sequential):
    """Stem, stages of basic blocks (the first keeps the size, the others halve it), global mean."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(
        self, stem: Stem, width: int, widths: tuple[int, ...], blocks: int, *, projection: bool
    ) -> None:
        super().__init__()
        self.add_module("stem", stem)
        for number, stage_width in enumerate(widths, start=1):
            stage = nn.Sequential()
            for index in range(blocks):
                stride = 2 if number > 1 and index == 0 else 1
                stage.append(BasicBlock(width, stage_width, stride, projection=projection))
                width = stage_width
            self.add_module(f"layer{number}", stage)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embeddings (B, d) of images (B, C, H, W)."""
        for part in self:
            x = part(x)
        return x.mean((2, 3))


def _resnet18(num_classes: int, input_shape: tuple[int, ...], *, imagenet: bool) -> SplitNet:
    name = "resnet18-imagenet" if imagenet else "resnet18"
    channels, _, _ = image_shape(name, input_shape, 8)
    stem = Stem(channels, 64, imagenet=imagenet)
    base = ResNetBase(stem, 64, (64, 128, 256, 512), 2, projection=True)
    for module in base.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return SplitNet(base, nn.Linear(512, num_classes), 512)


def resnet18(num_classes: int, input_shape: tuple[int, ...]) -> SplitNet:
    """Build ResNet-18 with the CIFAR stem (3x3, no pool): d = 512, embeddings >= 0."""
    return _resnet18(num_classes, input_shape, imagenet=False)


def resnet18_imagenet(num_classes: int, input_shape: tuple[int, ...]) -> SplitNet:
    """Build ResNet-18 with the ImageNet stem (7x7, stride 2, max pool): d = 512."""
    return _resnet18(num_classes, input_shape, imagenet=True)


def _resnet20(name: str, num_classes: int, shape: tuple[int, ...], *, projection: bool) -> SplitNet:
    channels, _, _ = image_shape(name, shape, 8)
    base = ResNetBase(Stem(channels, 16), 16, (16, 32, 64), 3, projection=projection)
    net = SplitNet(base, nn.Linear(64, num_classes), 64)
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
    return net


def resnet20(num_classes: int, input_shape: tuple[int, ...]) -> SplitNet:
    """Build ResNet-20 with shortcuts without parameters (option A): d = 64."""
    return _resnet20("resnet20", num_classes, input_shape, projection=False)


def resnet20_b(num_classes: int, input_shape: tuple[int, ...]) -> SplitNet:
    """Build ResNet-20 with 1x1 convolutions as shortcuts (option B): d = 64."""
    return _resnet20("resnet20-b", num_classes, input_shape, projection=True)
