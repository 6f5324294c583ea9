"""The nets of several GANs as one net, and the gradient of their critics' loss in closed form.

A layer is one batched product over the GANs, of vectors or of small images. Tensors are those
of the GANs, one after the other along the first axis, and so are an optimiser's moments.
docs/decisions/095-gans-trained-as-one.md and 098-closed-form-of-the-penalty.md have the reasons.

Shapes: N GANs, B examples of each, c channels, o of the smaller images, d features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.tensors.bundle import Weights

SLOPE = 0.2
"""Of the critics' leaky ReLU."""
DENSE = 65_536
"""Numbers of the largest matrix that stands for a convolution; torch's are faster beyond: each cell
would give to many others, most of them out of its reach."""


# --- tensors --------------------------------------------------------------------------------------


def grouped(net: nn.Module, nets: int, rows: Weights) -> nn.Module:
    """Return a generator or a critic as the net of several.

    It takes and returns images (N, B, H, W, c), and vectors (N, B, d).

    Args:
        net: of one GAN; not to be used afterwards.
        nets: N.
        rows: of :func:`rows_of`, by the keys of the net's state dict.
    """
    for path, layer in list(net.named_modules()):
        place, _, name = path.rpartition(".")
        instead = _instead(layer, nets)
        if instead is not None:
            setattr(net.get_submodule(place), name, instead)
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


# --- convolutions ---------------------------------------------------------------------------------


class Convolution:
    """A convolution of 4x4 cells, stride 2, padding 1 and padding 1, for images of one size.

    It takes images (N, B, 2h, 2w, c) to images (N, B, h, w, o).

    For small images of few channels it is a product with a matrix of what each cell gives to each.
    """

    def __init__(self, weight: Tensor, height: int, width: int) -> None:
        """Take weights (N, o, 4, 4, c), and h and w."""
        self.weight, self.small = weight, (height, width)
        self.nets = len(weight)
        dense = math.prod(self._shape[1:]) <= DENSE
        self.places = list(_places(height, width)) if dense else None
        if self.places is None:
            self.kernels = weight.flatten(0, 1).permute(0, 3, 1, 2)
        else:
            matrix = weight.new_zeros(self._shape)
            for (row, column), cells, kernel in self.places:
                matrix[:, row, column, :, *cells] = weight[:, :, *kernel]
            self.matrix = matrix.flatten(4).flatten(1, 3)

    @property
    def _shape(self) -> tuple[int, ...]:
        """Of the matrix: (N, h, w, o, 2h, 2w, c)."""
        (height, width), (nets, out, _, _, into) = self.small, self.weight.shape
        return nets, height, width, out, 2 * height, 2 * width, into

    def down(self, x: Tensor) -> Tensor:
        """Return the convolution (N, B, h, w, o) of images (N, B, 2h, 2w, c)."""
        if self.places is not None:
            return torch.bmm(x.flatten(2), self.matrix.mT).view(*x.shape[:2], *self.small, -1)
        flat = _side_by_side(x)
        return _apart(F.conv2d(flat, self.kernels, None, 2, 1, 1, self.nets), self.nets)

    def up(self, y: Tensor) -> Tensor:
        """Return the transposed convolution (N, B, 2h, 2w, c) of images (N, B, h, w, o)."""
        if self.places is not None:
            return torch.bmm(y.flatten(2), self.matrix).view(*y.shape[:2], *self._shape[4:])
        flat = _side_by_side(y)
        return _apart(F.conv_transpose2d(flat, self.kernels, None, 2, 1, 0, self.nets), self.nets)

    def slope(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the gradient (N, o, 4, 4, c) of ``sum(y * down(x))`` for the weights."""
        if self.places is not None:
            found = torch.zeros_like(self.weight)
            matrix = torch.bmm(y.flatten(2).mT, x.flatten(2)).view(self._shape)
            for (row, column), cells, kernel in self.places:
                found[:, :, *kernel] += matrix[:, row, column, :, *cells]
            return found
        of_kernels: Tensor = torch.ops.aten.convolution_backward(
            _side_by_side(y), _side_by_side(x), self.kernels, [0],
            [2, 2], [1, 1], [1, 1], False, [0, 0], self.nets, [False, True, False],
        )[1]  # fmt: skip
        return of_kernels.permute(0, 2, 3, 1).reshape(self.weight.shape)


def _places(
    height: int, width: int
) -> Iterator[tuple[tuple[int, int], tuple[slice, slice], tuple[slice, slice]]]:
    """Yield each cell of a small image, what it sees of the large one, and by which weights."""
    for cell in itertools.product(range(height), range(width)):
        first = [2 * at - 1 for at in cell]
        low = [max(0, at) for at in first]
        high = [min(2 * size, at + 4) for at, size in zip(first, (height, width), strict=True)]
        rows, columns = map(slice, low, high)
        edges = zip(low, high, first, strict=True)
        kernel_rows, kernel_columns = (slice(a - at, b - at) for a, b, at in edges)
        yield cell, (rows, columns), (kernel_rows, kernel_columns)


def _side_by_side(x: Tensor) -> Tensor:
    """Return images (B, N*c, H, W), channels last, of images (N, B, H, W, c)."""
    flat = x.permute(1, 0, 4, 2, 3).flatten(1, 2)
    return flat.contiguous(memory_format=torch.channels_last)


def _apart(x: Tensor, nets: int) -> Tensor:
    """Return images (N, B, H, W, c): the inverse of :func:`_side_by_side`."""
    return x.view(len(x), nets, -1, *x.shape[2:]).permute(1, 0, 3, 4, 2)


# --- layers ---------------------------------------------------------------------------------------


def _instead(layer: nn.Module, nets: int) -> nn.Module | None:
    """Return what takes the place of a layer of one GAN; None where it can stay."""
    match layer:
        case nn.Linear():
            return _Linear(nets)
        case nn.Conv2d():
            return _Conv(nets) if layer.stride == (2, 2) else _Linear(nets)
        case nn.ConvTranspose2d():
            return _ConvTranspose(nets) if layer.stride == (2, 2) else _FirstConvTranspose(nets)
        case nn.BatchNorm2d():
            return BatchNorm(layer, nets)
        case nn.Unflatten():
            return _Unflatten(layer.unflattened_size)
        case nn.Flatten():
            return _Flatten()
        case nn.LeakyReLU():
            return _LeakyReLU()
    return None


class Layer(nn.Module):
    """A layer of a critic: linear where its input holds.

    Images and vectors are (N, B, …).
    """

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        """Return what the output at ``x`` does where the input moves."""
        raise NotImplementedError

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for the input at ``x`` of one for the output: the adjoint."""
        raise NotImplementedError


class _Affine(Layer):
    """A layer with weights, (N*out, …) as those of the GANs, and perhaps a bias, (N*out,)."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, nets: int) -> None:
        super().__init__()
        self.nets = nets
        for name in ("weight", "bias"):  # in the order of the GANs' parameters, as moments have it
            self.register_parameter(name, None)

    @property
    def kernels(self) -> Tensor:
        """The weights of convolutions, (N, out, 4, 4, in), as they lie in memory."""
        return self.weight.permute(0, 2, 3, 1).view(
            self.nets, -1, *self.weight.shape[2:], self.weight.shape[1]
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.along(x, x)
        if self.bias is None:
            return y
        return y + self.bias.view(self.nets, *[1] * (y.dim() - 2), -1)

    def weight_slope(self, x: Tensor, slope: Tensor) -> Tensor:
        """Return the gradient for the weights, given inputs and the gradient for the output."""
        raise NotImplementedError


class _Linear(_Affine):
    """Vectors, or whole images, to vectors (N, B, d)."""

    def _matrix(self, x: Tensor) -> Tensor:
        """Return the weights (N, out, in), cell by cell for images."""
        if x.dim() == 3:
            return self.weight.view(self.nets, -1, x.shape[2])
        weight = self.weight.reshape(-1, x.shape[4], *x.shape[2:4])
        return weight.permute(0, 2, 3, 1).reshape(self.nets, -1, x[0, 0].numel())

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(move.flatten(2), self._matrix(x).mT)

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return torch.bmm(slope, self._matrix(x)).view(x.shape)

    def weight_slope(self, x: Tensor, slope: Tensor) -> Tensor:
        found = torch.bmm(slope.mT, x.flatten(2))
        if x.dim() == 5:
            found = found.view(-1, *x.shape[2:]).permute(0, 3, 1, 2)
        return found.reshape(self.weight.shape)


class _Conv(_Affine):
    """Images (N, B, 2h, 2w, c) to images (N, B, h, w, o)."""

    def forward(self, x: Tensor) -> Tensor:
        self.held = Convolution(self.kernels, x.shape[2] // 2, x.shape[3] // 2)
        return super().forward(x)

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return self.held.down(move)

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return self.held.up(slope)

    def weight_slope(self, x: Tensor, slope: Tensor) -> Tensor:
        return self.held.slope(x, slope).flatten(0, 1).permute(0, 3, 1, 2)


class _LeakyReLU(Layer):
    """As torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, SLOPE)

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        moved: Tensor = torch.ops.aten.leaky_relu_backward(move, x, SLOPE, False)
        return moved

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return self.along(slope, x)


class _Flatten(Layer):
    """Nothing: what comes next takes whole images, or comes from one that gives vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return move

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return slope


class _Unflatten(nn.Module):
    """Vectors (N, B, d) to images."""

    def __init__(self, cells: Sequence[int]) -> None:
        super().__init__()
        self.cells = tuple(cells)

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], *self.cells).permute(0, 1, 3, 4, 2)


class _Up(torch.autograd.Function):
    """A transposed convolution with a gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        ctx.held = held = Convolution(weight, y.shape[2], y.shape[3])
        return held.up(y)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor]:
        (y,) = ctx.saved_tensors
        return ctx.held.down(slope), ctx.held.slope(slope, y)


class _ConvTranspose(_Affine):
    """Images (N, B, h, w, o) to images (N, B, 2h, 2w, c)."""

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return _Up.apply(move, self.kernels)  # type: ignore[no-any-return]


class _FirstConvTranspose(_Affine):
    """Images of one cell to images (N, B, 4, 4, c): a product of vectors."""

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        kernels = self.kernels
        images = torch.bmm(move.flatten(2), kernels.flatten(2))
        return images.view(*move.shape[:2], *kernels.shape[2:])


class BatchNorm(nn.BatchNorm2d):
    """Normalises each GAN's images over the examples of a batch that count.

    Attributes:
        share: weights of the examples in means, (N, T, B) for T batches: 1 over their number, and 0
            for what does not count.
    """

    def __init__(self, layer: nn.BatchNorm2d, nets: int) -> None:
        super().__init__(1, layer.eps, layer.momentum)
        self.nets = nets
        self.share: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return images (N, T*B, H, W, c), normalised batch by batch, or as kept in evaluation."""
        assert self.running_mean is not None
        assert self.running_var is not None
        if not self.training:
            factor = (self.running_var + self.eps).rsqrt() * self.weight
            shift = self.bias - self.running_mean * factor
            across = self.nets, 1, 1, 1, -1
            return torch.addcmul(shift.view(across), x, factor.view(across))
        assert self.share is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        nets, steps, examples = self.share.shape
        cells = x.shape[2] * x.shape[3]
        now = x.reshape(nets * steps, examples * cells, -1)
        share = (self.share / cells)[..., None].expand(-1, -1, -1, cells).reshape(len(now), 1, -1)
        mean = torch.bmm(share, now)
        apart = now - mean
        var = torch.bmm(share, apart.square())
        with torch.no_grad():
            counts = (self.share > 0).sum(-1, keepdim=True) * cells
            seen = mean.view(nets, steps, -1), var.view(nets, steps, -1) * (counts / (counts - 1))
            for kept, of_steps in zip((self.running_mean, self.running_var), seen, strict=True):
                for step in range(steps):
                    kept.view(nets, -1).lerp_(of_steps[:, step], self.momentum)
            self.num_batches_tracked.add_(steps)
        shape = nets, 1, -1
        factor = (var + self.eps).rsqrt().view(nets, steps, -1) * self.weight.view(shape)
        shift = self.bias.view(shape).expand_as(factor).reshape(len(now), 1, -1)
        return torch.addcmul(shift, apart, factor.view(len(now), 1, -1)).view_as(x)


# --- the critics ----------------------------------------------------------------------------------


def score(critic: Sequence[Layer], images: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what each layer of grouped critics takes of images, and the scores (N, B)."""
    inputs, x = [], images
    for layer in critic:
        inputs.append(x)
        x = layer(x)
    return inputs, x.squeeze(-1)


def image_slopes(critic: Sequence[Layer], inputs: Sequence[Tensor], slope: Tensor) -> Tensor:
    """Return the gradient for images, given that for their scores (N, B)."""
    back = slope[..., None]
    for layer, x in zip(reversed(critic), reversed(inputs), strict=True):
        back = layer.back(back, x)
    return back


@torch.no_grad()
def learn(
    critic: Sequence[Layer], real: Tensor, fake: Tensor, mix: Tensor, share: Tensor, penalty: float
) -> Tensor:
    """Put the gradient of the critics' loss into their parameters, and return the loss (N,).

    The loss of a critic C is ``E C(fake) - E C(real) + penalty * E (|g| - 1)²``, where g is C's
    gradient at ``x = u real + (1 - u) fake`` (Gulrajani et al., eq. 3). For given signs of the
    leaky ReLUs C is a product of linear layers, and a penalty's gradient for weights is that of
    ``<g, v>``, ``v = 2 penalty (|g| - 1) g / |g|`` held fixed. So v takes the way of an image
    through the layers, without biases: at each layer the weights' gradient is the product of what
    came in and of the score's gradient for what goes out, as for real and fake images.

    Args:
        critic: the layers of grouped critics.
        real: (N, B, S, S, C).
        fake: likewise.
        mix: u (N, B) in [0, 1].
        share: weights of the means, (N, B): 1 over the number of a GAN's images, and 0 for what
            does not count.
        penalty: weight of the gradient penalty.
    """
    size = mix.shape[1]
    between = torch.lerp(fake, real, mix[..., None, None, None])
    inputs, scores = score(critic, torch.cat([fake, real, between], 1))
    slope = torch.cat([share, -share, torch.ones_like(share)], 1)[..., None]
    slopes: list[Tensor] = []  # of the score, for what each layer gives, the last layer first
    for number in reversed(range(len(critic))):
        slopes.append(slope)
        x = inputs[number]
        if not number:  # nobody needs it of real and fake images
            slope, x = slope[:, 2 * size :], x[:, 2 * size :]
        slope = critic[number].back(slope, x)
    norm = slope.flatten(2).norm(dim=-1)
    factor = 2 * penalty * share * (norm - 1) / norm.clamp_min(torch.finfo(norm.dtype).tiny)
    move = slope * factor[..., None, None, None]
    for layer, x, slope in zip(critic, inputs, reversed(slopes), strict=True):
        if isinstance(layer, _Affine):
            came = torch.cat([x[:, : 2 * size], move], 1)
            layer.weight.grad = layer.weight_slope(came, slope)
            if layer.bias is not None:
                halves = slope[:, : 2 * size].reshape(len(slope), 2, size, *slope.shape[2:])
                within = tuple(range(2, halves.dim() - 1))
                layer.bias.grad = halves.sum(within).sum(1).flatten()  # exactly 0 for a score's
        move = layer.along(move, x[:, 2 * size :])
    apart = scores[:, :size] - scores[:, size : 2 * size]
    loss: Tensor = ((apart + penalty * (norm - 1).square()) * share).sum(1)
    return loss
