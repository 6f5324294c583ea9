"""Data-free training: a frozen classifier stands in for the data it was trained on.

:mod:`fedmodels.techniques.generator_training` trains generators on real images. Here a generator is
trained without any, so that a classifier takes its output for real: confident, of all classes, and
with the statistics that batch normalisation remembers. Those must have travelled with the weights.

Shapes: B batch, c channels of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmodels.nets.split import SplitNet, load_weights
from fedmodels.tensors.bundle import Weights
from fedmodels.training.run import RunFacts

REPORTS = 10
"""Progress events of one training."""


def freeze(run: RunFacts, weights: Weights, device: torch.device | str) -> SplitNet:
    """Return a net of its own with these weights, in evaluation mode, that nothing trains.

    Gradients pass through it to its input.
    """
    net = run.make_net()
    load_weights(net, weights)
    return net.to(device).requires_grad_(False).eval()


@dataclass(frozen=True)
class LayerMoments:
    """Mean and variance of what enters one batch normalisation, and what the layer remembers."""

    mean: Tensor  # (c,) of the batch, with gradient
    var: Tensor  # (c,) of the batch, not corrected for its size
    running_mean: Tensor  # (c,)
    running_var: Tensor  # (c,)

    @property
    def running(self) -> tuple[Tensor, Tensor]:
        """Return what the layer remembers, mean and variance."""
        return self.running_mean, self.running_var


class MomentWatch:
    """The moments of the last batch that went through a net, layer by layer."""

    def __init__(self) -> None:
        self._seen: dict[int, LayerMoments] = {}

    def layers(self) -> list[LayerMoments]:
        """Return the moments of every layer, in the order of the net; none without such layers."""
        return [self._seen[number] for number in sorted(self._seen)]

    def see(self, number: int, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Take in what enters a layer, (B, c, …), before the layer normalises it."""
        x: Tensor = inputs[0].float()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        var, mean = torch.var_mean(x, axes, correction=0)
        kept = (layer.get_buffer(name).float() for name in ("running_mean", "running_var"))
        self._seen[number] = LayerMoments(mean, var, *kept)


@contextmanager
def watch_moments(net: nn.Module) -> Iterator[MomentWatch]:
    """Watch the batch normalisations of a net that remember statistics."""
    watch, hooks = MomentWatch(), []
    for number, module in enumerate(net.modules()):
        if isinstance(module, _BatchNorm) and module.track_running_stats:

            def see(layer: nn.Module, inputs: tuple[Any, ...], number: int = number) -> None:
                watch.see(number, layer, inputs)

            hooks.append(module.register_forward_pre_hook(see))
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def is_reported(step: int, of: int) -> bool:
    """Tell whether a training reports its progress after this step, counted from 1."""
    return step == of or step % max(1, of // REPORTS) == 0


def shuffle(n: int, size: int, draw: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of positions without end, epoch by epoch; each of ``size``, or of all n."""
    while True:
        for index in torch.split(torch.randperm(n, generator=draw), size):
            if len(index) == min(n, size):
                yield index


def as_inputs(images: Tensor, limits: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return images (B, C, H, W), in [0, 1] or uint8, as a classifier sees them."""
    x = images.float() / 255 if images.dtype == torch.uint8 else images
    if limits is None:
        return x
    low, high = (edge.to(x.device).view(-1, 1, 1) for edge in limits)
    return low + (high - low) * x


def quantise(images: Tensor) -> Tensor:
    """Return images in [0, 1] as uint8."""
    return (255 * images.detach()).round().clamp(0, 255).to(torch.uint8)


def follow(
    net: nn.Module,
    adapted: nn.Module,
    gradients: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Move a net by gradients of its adapted copy, and take over the copy's statistics.

    Finn et al., Model-Agnostic Meta-Learning, ICML 2017, section 5.2: the first-order form.
    """
    for own, gradient in zip(net.parameters(), gradients, strict=True):
        own.grad = gradient
    optimizer.step()
    for kept, found in zip(net.buffers(), adapted.buffers(), strict=True):
        kept.copy_(found)
