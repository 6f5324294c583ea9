"""LoRA: small trainable maps beside frozen layers.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022.
https://arxiv.org/abs/2106.09685

Where clients take the mean of A and the mean of B, their product is not the mean of their products.
With A frozen it is: FFA-LoRA, Sun, Li, Li and Ding, Improving LoRA in Privacy-preserving Federated
Learning, ICLR 2024. https://arxiv.org/abs/2403.12313
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from fedmodels.errors import ConfigError
from fedmodels.nets.split import SplitNet


class Adapted(nn.Module):
    """A frozen layer W and a trainable map of rank r: ``W x + alpha / r B A x``; B begins as 0."""

    rows_are_independent: ClassVar[bool] = True

    def __init__(
        self, layer: nn.Linear | nn.Conv2d, rank: int, alpha: float, freeze_a: bool = False
    ) -> None:
        super().__init__()
        self.layer, self.scale = layer, alpha / rank
        down, up = _maps(layer, rank)
        nn.init.kaiming_uniform_(down.weight, a=5**0.5)
        nn.init.zeros_(up.weight)
        self.down, self.up = down.requires_grad_(not freeze_a), up

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output with the map's added."""
        found: Tensor = self.layer(x) + self.scale * self.up(self.down(x))
        return found


def _maps(
    layer: nn.Linear | nn.Conv2d, rank: int
) -> tuple[nn.Linear, nn.Linear] | tuple[nn.Conv2d, nn.Conv2d]:
    """Return A and B; of a convolution A has its form, and B is 1x1."""
    if isinstance(layer, nn.Linear):
        return (
            nn.Linear(layer.in_features, rank, bias=False),
            nn.Linear(rank, layer.out_features, bias=False),
        )
    down = nn.Conv2d(
        layer.in_channels,
        rank,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        bias=False,
        padding_mode=layer.padding_mode,
    )
    return down, nn.Conv2d(rank, layer.out_channels, 1, bias=False)


def add_adapters(
    module: nn.Module, rank: int, alpha: float | None = None, *, freeze_a: bool = False
) -> None:
    """Freeze a module, and put an adapter beside each of its linear layers and convolutions.

    Grouped convolutions, and what torch's attention reads the weights of, stay without one.

    Args:
        module: changed in place.
        rank: r of the adapters, at least 1.
        alpha: their scale times r; by default r, so that the scale is 1.
        freeze_a: whether A stays as it was drawn, and B alone trains.

    Raises:
        ConfigError: the rank is below 1, or there is no such layer.
    """
    if rank < 1:
        raise ConfigError(f"adapters = {rank}: the rank of adapters is at least 1; 0 is for none")
    module.requires_grad_(False)
    found = list(_layers(module))
    if not found:
        raise ConfigError("adapters need a linear layer or a convolution, and there is none")
    scale = rank if alpha is None else alpha
    for parent, name, layer in found:
        setattr(parent, name, Adapted(layer, rank, scale, freeze_a))


def _layers(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear | nn.Conv2d]]:
    """Yield each layer that takes an adapter, with its parent and its name there."""
    for name, child in module.named_children():
        if isinstance(child, nn.MultiheadAttention):
            continue
        if isinstance(child, nn.Linear) or (isinstance(child, nn.Conv2d) and child.groups == 1):
            yield module, name, child
        else:
            yield from _layers(child)


def adapters_in(net: SplitNet) -> dict[str, str]:
    """Return the key of B by the key of A, of each adapter of a net whose A and B train."""
    paths = (path for path, part in net.named_modules() if isinstance(part, Adapted))
    keys = (f"{path}.{{}}.weight".replace(".", "/", 1) for path in paths)
    own = net.tensors()
    return {key.format("down"): key.format("up") for key in keys if key.format("down") in own}
