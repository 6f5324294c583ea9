"""The nets of several GANs as one net, whose channels lie in groups.

A convolution has a group for each GAN, a linear layer is a batched product. Tensors are those of
the GANs, one after the other along the first axis, and so are an optimiser's moments.
:mod:`fedmodels.nets.grouped` does it for any net that can bear it, by calls that it replaces. The
steps of a GAN are too small for what these calls cost, so its layers are replaced once.

Shapes: N GANs, B examples of each, c channels, d features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedmodels.tensors.bundle import Weights


class Groups:
    """What layers of one net have in common.

    Attributes:
        nets: N.
        counts: how many of each GAN's examples, from the first on, count in batch normalisation,
            (N,); None where all do.
    """

    def __init__(self, nets: int) -> None:
        self.nets = nets
        self.counts: Tensor | None = None

    def images(self, x: Tensor) -> Tensor:
        """Return (B, N*c, H, W) of images (N, B, c, H, W)."""
        return x.transpose(0, 1).flatten(1, 2)

    def apart(self, x: Tensor) -> Tensor:
        """Return (N, B, c, H, W) of images (B, N*c, H, W)."""
        return self.split(x, 1).transpose(0, 1)

    def split(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return a view with the GANs as an axis of its own."""
        return x.view(*x.shape[:dim], self.nets, -1, *x.shape[dim + 1 :])


def grouped(net: nn.Module, groups: Groups, rows: Weights) -> nn.Module:
    """Return a generator or a critic as the net of several.

    It takes and returns images (B, N*c, H, W), and vectors (N, B, d).

    Args:
        net: of one GAN; not to be used afterwards.
        groups: for this net.
        rows: of :func:`rows_of`, by the keys of the net's state dict.
    """
    for path, layer in list(net.named_modules()):
        place, _, name = path.rpartition(".")
        owner, instead = net.get_submodule(place), _instead(layer, groups)
        if instead is not layer:
            setattr(owner, name, instead)
    for key, row in rows.items():
        path, _, name = key.rpartition(".")
        owner = net.get_submodule(path)
        if row.dim() == 4:
            row = row.contiguous(memory_format=torch.channels_last)
        setattr(owner, name, nn.Parameter(row) if name in ("weight", "bias") else row)
    return net


def rows_of(tensors: Sequence[Weights]) -> Weights:
    """Return tensors of several GANs, one after the other along the first axis.

    An optimiser counts its steps once, for all.
    """
    rows: dict[str, Tensor] = {}
    for key, first in tensors[0].items():
        beside = torch.stack([each[key] for each in tensors])
        rows[key] = beside.flatten(0, 1) if first.dim() else beside
        if key.endswith("/step"):
            rows[key] = first
    return rows


def tensors_of(rows: Weights, nets: int) -> list[dict[str, Tensor]]:
    """Return the tensors of each GAN: the inverse of :func:`rows_of`."""
    found: list[dict[str, Tensor]] = [{} for _ in range(nets)]
    for key, row in rows.items():
        parts = row.chunk(nets) if row.dim() else [row] * nets
        for tensors, part in zip(found, parts, strict=True):
            tensors[key] = (part[0] if key.endswith("num_batches_tracked") else part).clone()
    return found


def _instead(layer: nn.Module, groups: Groups) -> nn.Module:
    """Return what takes the place of a layer of one GAN."""
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        layer.groups = groups.nets
    if isinstance(layer, nn.Linear):
        return _Linear(groups)
    if isinstance(layer, nn.BatchNorm2d):
        return _BatchNorm(groups)
    if isinstance(layer, nn.Unflatten):
        return _Unflatten(groups, layer.unflattened_size)
    return _Flatten(groups) if isinstance(layer, nn.Flatten) else layer


class _Linear(nn.Module):
    """Vectors (N, B, d) to vectors."""

    weight: Tensor
    bias: Tensor

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.groups.split(self.weight), self.groups.split(self.bias)
        return torch.baddbmm(bias[:, None], x, weight.mT)


class _BatchNorm(nn.BatchNorm2d):
    """Normalises over the examples that count."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(1)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        counts, split = self.groups.counts, self.groups.split
        if counts is None:
            return super().forward(x)
        mean, var, batches = self.running_mean, self.running_var, self.num_batches_tracked
        assert mean is not None
        assert var is not None
        assert batches is not None
        assert self.momentum is not None
        now = split(x, 1)  # (B, N, c, H, W)
        cells = counts * (x.shape[2] * x.shape[3])
        counted = torch.arange(len(x), device=x.device)[:, None] < counts
        share = (counted / cells)[..., None, None, None]
        now_mean = (now * share).sum((0, 3, 4))
        apart = now - now_mean[..., None, None]
        now_var = (apart.square() * share).sum((0, 3, 4))
        with torch.no_grad():
            split(mean).lerp_(now_mean, self.momentum)
            split(var).lerp_(now_var * (cells / (cells - 1))[:, None], self.momentum)
            batches.add_(1)
        factor = (now_var + self.eps).rsqrt() * split(self.weight)
        return (apart * factor[..., None, None] + split(self.bias)[..., None, None]).flatten(1, 2)


class _Unflatten(nn.Module):
    """Vectors (N, B, d) to images."""

    def __init__(self, groups: Groups, cells: Sequence[int]) -> None:
        super().__init__()
        self.groups, self.cells = groups, tuple(cells)

    def forward(self, x: Tensor) -> Tensor:
        return self.groups.images(x.view(*x.shape[:-1], *self.cells))


class _Flatten(nn.Module):
    """Images to vectors (N, B, d)."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        return self.groups.apart(x).flatten(2)
