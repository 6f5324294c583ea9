"""Convolutions of several nets at once, in each of their forms, beside torch's of each alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedmodels.nets.generative import convolutions
from fedmodels.nets.generative.convolutions import convolution

NETS, EXAMPLES, OUT = 3, 5, 6


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("height", [1, 2, 4])
@pytest.mark.parametrize(
    ("form", "channels"), [("_Patches", 1), ("_Dense", 1), ("_Dense", 3), ("_Sliding", 3)]
)
def test_a_form_computes_what_torch_does(form: str, channels: int, height: int) -> None:
    width = height + 1
    weight = drawn(NETS, OUT, 4, 4, channels)
    x = drawn(NETS, EXAMPLES, 2 * height, 2 * width, channels)
    y = drawn(NETS, EXAMPLES, height, width, OUT)
    given = torch.zeros_like(weight)
    held = getattr(convolutions, form)(given, height, width)
    given.copy_(weight)  # a step changes weights in place
    held.begin()
    seen = held.seen(x)
    down, up, slope = held.down(seen), held.up(y), held.slope(seen, y)
    for net in range(NETS):
        kernels = weight[net].permute(0, 3, 1, 2).clone().requires_grad_()
        expected = F.conv2d(x[net].permute(0, 3, 1, 2), kernels, None, 2, 1)
        small = y[net].permute(0, 3, 1, 2)
        (of_kernels,) = torch.autograd.grad(expected, kernels, small)
        torch.testing.assert_close(down[net].permute(0, 3, 1, 2), expected.detach())
        expected = F.conv_transpose2d(small, kernels.detach(), None, 2, 1)
        torch.testing.assert_close(up[net].permute(0, 3, 1, 2), expected)
        torch.testing.assert_close(slope[net].permute(0, 3, 1, 2), of_kernels)


def test_the_form_goes_by_size_and_channels() -> None:
    """A matrix of 8x8 to 4x4 images, 1 to 16 channels, has 16,384 numbers; 16 to 32, 524,288."""

    def form(out: int, channels: int, side: int) -> str:
        return type(convolution(torch.zeros(2, out, 4, 4, channels), side, side)).__name__

    assert form(16, 1, 4) == "_Patches"
    assert form(32, 16, 2) == "_Dense"
    assert form(16, 1, 8) == form(32, 16, 4) == "_Sliding"
