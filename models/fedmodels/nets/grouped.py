"""Several nets of one shape as one net whose channels lie in groups.

A net's own forward pass runs once, on the parameters of all nets, stacked along a first axis. What
mixes channels is replaced: a convolution becomes one of groups, a linear layer a batched product.
Everything else works on each channel or each number alone, and stays as it is.

Shapes: N nets, B examples of each, c channels, d features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedmodels.nets.split import SplitNet
from fedmodels.numerics.randomness import seeded


class Grouped(TorchFunctionMode):
    """A block in which a net's forward pass is that of several nets.

    Images are (B, N*c, H, W) in it, vectors (N, B, d). A net may be called so if its images meet
    nothing but convolutions, pools, group normalisation, ``flatten(1)`` and what works on each
    number alone, and its vectors nothing but linear layers, layer normalisation and the like.
    :func:`can_be_grouped` finds it out.
    """

    def __init__(self, nets: int) -> None:
        super().__init__()
        self.nets = nets
        self._instead: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
            F.conv2d: self._conv2d,
            F.linear: _linear,
            F.group_norm: self._group_norm,
            F.layer_norm: _layer_norm,
            Tensor.flatten: self._flatten,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call what stands for a function of torch in this block."""
        call: Callable[..., Any] = self._instead.get(func, func)
        return call(*args, **(kwargs or {}))

    def inputs(self, x: Tensor) -> Tensor:
        """Return images (B, N*c, H, W) or vectors (N, B, d) of the inputs of all nets (N, B, …)."""
        if x.dim() != 5:
            return x.flatten(2)
        images = x.transpose(0, 1).flatten(1, 2)
        return images.contiguous(memory_format=torch.channels_last)

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: int,
    ) -> Tensor:
        rows = None if bias is None else bias.flatten()
        groups *= self.nets
        return F.conv2d(x, weight.flatten(0, 1), rows, stride, padding, dilation, groups)

    def _group_norm(
        self, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        return F.group_norm(x, groups * self.nets, weight.flatten(), bias.flatten(), eps)

    def _flatten(self, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
        """Return vectors (N, B, d) of images (B, N*c, H, W)."""
        if x.dim() != 4:
            return x
        rows: Tensor = _LikeImages.apply(x)
        return rows.reshape(len(x), self.nets, -1).transpose(0, 1)


def can_be_grouped(net: SplitNet, input_shape: tuple[int, ...]) -> bool:
    """Tell whether two nets like this one, of other weights, come to the same as one net of groups.

    Args:
        net: in training mode; a net that draws random numbers there cannot.
        input_shape: of one example.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, *input_shape, generator=draw)
    rows = {key: torch.stack([_jitter(t, draw) for _ in x]) for key, t in net.tensors().items()}
    alone, nets = [], Grouped(len(x))
    try:
        with torch.no_grad(), seeded(0):
            for number in range(len(x)):
                with net.holding({key: row[number] for key, row in rows.items()}):
                    alone.append(net.head(net.embedded(x[number])))
            with net.holding(rows):
                inputs = nets.inputs(x)
                with nets:
                    at_once = net.head(net.embedded(inputs))
    except Exception:  # whatever a layer says of shapes it does not take
        return False
    expected = torch.stack(alone)
    same = at_once.shape == expected.shape
    return same and torch.allclose(at_once.float(), expected.float(), rtol=1e-3, atol=1e-4)


def _jitter(tensor: Tensor, draw: torch.Generator) -> Tensor:
    held = tensor.detach()
    if not held.is_floating_point():
        return held
    return held + 0.1 * torch.randn(held.shape, generator=draw)


class _LikeImages(torch.autograd.Function):
    """The identity, whose gradient has the memory format of images.

    Layers before it take several times as long with a gradient in another format.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous(memory_format=torch.channels_last)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias[:, None], x, weight.mT)


def _layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.addcmul(bias[:, None], F.layer_norm(x, shape, None, None, eps), weight[:, None])
