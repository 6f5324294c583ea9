"""The nets of several GANs as one net, and the gradients of their losses in closed form.

A layer is one batched product over the GANs, of vectors or of small images. Tensors are those
of the GANs, one after the other along the first axis, and so are an optimiser's moments.
docs/decisions/095-gans-without-autograd.md has the reasons.

Shapes: N GANs, B examples of each, c channels, o of the smaller images, d features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmodels.nets.generative.convolutions import Convolution, convolution
from fedmodels.tensors.bundle import Weights

SLOPE = 0.2
"""Of the critics' leaky ReLU."""


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
        case nn.ReLU():
            return _ReLU()
        case nn.Tanh():
            return _Tanh()
    return None


class Layer(nn.Module):
    """A layer with its gradient. Images and vectors are (N, B, …).

    Activations write over what they are given: inputs, moves and gradients.
    """

    def seen(self, x: Tensor) -> Tensor:
        """Return an input in the form that the other functions take."""
        return x

    def begin(self) -> None:
        """Take the weights as they are now."""

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for the input at ``x`` of one for the output."""
        raise NotImplementedError

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        """Return what the output at ``x`` does where the input moves: ``back`` is its adjoint."""
        raise NotImplementedError

    def put(self, slope: Tensor, x: Tensor) -> None:
        """Put the parameters' gradient at ``x`` of one for the output into them."""


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
        weight = self.weight.detach()
        return weight.permute(0, 2, 3, 1).view(self.nets, -1, *weight.shape[2:], weight.shape[1])

    def forward(self, x: Tensor) -> Tensor:
        y = self.along(x, x)
        if self.bias is not None:
            y += self.bias.view(self.nets, *[1] * (y.dim() - 2), -1)
        return y

    def put(self, slope: Tensor, x: Tensor) -> None:
        self.weight.grad = self.weight_slope(slope, x)
        if self.bias is not None:
            self.bias.grad = slope.flatten(1, -2).sum(1).flatten()

    def weight_slope(self, slope: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for the weights at ``x`` of one for the output."""
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

    def weight_slope(self, slope: Tensor, x: Tensor) -> Tensor:
        found = torch.bmm(slope.mT, x.flatten(2))
        if x.dim() == 5:
            found = found.view(-1, *x.shape[2:]).permute(0, 3, 1, 2)
        return found.reshape(self.weight.shape)


class _Conv(_Affine):
    """Images (N, B, 2h, 2w, c) to images (N, B, h, w, o); it sees images of one size."""

    held: Convolution

    def seen(self, x: Tensor) -> Tensor:
        if not hasattr(self, "held"):
            self.held = convolution(self.kernels, x.shape[2] // 2, x.shape[3] // 2)
        return self.held.seen(x)

    def begin(self) -> None:
        self.held.begin()

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return self.held.down(move)

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return self.held.up(slope)

    def weight_slope(self, slope: Tensor, x: Tensor) -> Tensor:
        return self.held.slope(x, slope).flatten(0, 1).permute(0, 3, 1, 2)


class _ConvTranspose(_Affine):
    """Images (N, B, h, w, o) to images (N, B, 2h, 2w, c)."""

    def forward(self, x: Tensor) -> Tensor:
        self.held = convolution(self.kernels, *x.shape[2:4])
        self.held.begin()
        return super().forward(x)

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return self.held.up(move)

    def weight_slope(self, slope: Tensor, x: Tensor) -> Tensor:
        """Keep what ``back`` needs of the same gradient, besides."""
        self.seen_slope = self.held.seen(slope)
        return self.held.slope(self.seen_slope, x).flatten(0, 1).permute(0, 3, 1, 2)

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return self.held.down(self.seen_slope)


class _FirstConvTranspose(_Affine):
    """Images of one cell to images (N, B, 4, 4, c): a product of vectors."""

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        kernels = self.kernels
        images = torch.bmm(move.flatten(2), kernels.flatten(2))
        return images.view(*move.shape[:2], *kernels.shape[2:])

    def weight_slope(self, slope: Tensor, x: Tensor) -> Tensor:
        found = torch.bmm(x.flatten(2).mT, slope.flatten(2)).flatten(0, 1)
        return found.view(len(found), *slope.shape[2:]).permute(0, 3, 1, 2)


class _LeakyReLU(Layer):
    """As torch's. Its output has the signs of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu_(x, SLOPE)

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        moved: Tensor = torch.ops.aten.leaky_relu_backward.grad_input(
            move, x, SLOPE, True, grad_input=move
        )
        return moved

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return self.along(slope, x)


class _ReLU(Layer):
    """As torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu_(x)

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.threshold_backward.grad_input(slope, x, 0, grad_input=slope)
        return found


class _Tanh(Layer):
    """As torch's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh_()

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.tanh_backward.grad_input(slope, x, grad_input=slope)
        return found


class _Flatten(Layer):
    """Nothing: what comes next takes whole images, or comes from one that gives vectors."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def along(self, move: Tensor, x: Tensor) -> Tensor:
        return move

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return slope


class _Unflatten(Layer):
    """Vectors (N, B, d) to images."""

    def __init__(self, cells: Sequence[int]) -> None:
        super().__init__()
        self.cells = tuple(cells)

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], *self.cells).permute(0, 1, 3, 4, 2).contiguous()

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        return slope.permute(0, 1, 4, 2, 3).reshape(x.shape)


class BatchNorm(nn.BatchNorm2d, Layer):
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
        self.apart = apart = now.sub_(mean)
        var = torch.bmm(share, apart.square())
        counts = (self.share > 0).sum(-1, keepdim=True) * cells
        seen = mean.view(nets, steps, -1), var.view(nets, steps, -1) * (counts / (counts - 1))
        for kept, of_steps in zip((self.running_mean, self.running_var), seen, strict=True):
            for step in range(steps):
                kept.view(nets, -1).lerp_(of_steps[:, step], self.momentum)
        self.num_batches_tracked.add_(steps)
        shape = nets, 1, -1
        self.scale = (var + self.eps).rsqrt()
        factor = self.scale.view(nets, steps, -1) * self.weight.view(shape)
        shift = self.bias.view(shape).expand_as(factor).reshape(len(now), 1, -1)
        return torch.addcmul(shift, apart, factor.view(len(now), 1, -1)).view_as(x)

    def put(self, slope: Tensor, x: Tensor) -> None:
        """Keep what ``back`` needs of the same gradient, besides."""
        slope = slope.flatten(1, 3)
        self.sums = slope.sum(1, keepdim=True), (slope * self.apart).sum(1, keepdim=True)
        self.bias.grad = self.sums[0].flatten()
        self.weight.grad = (self.sums[1] * self.scale).flatten()

    def back(self, slope: Tensor, x: Tensor) -> Tensor:
        """Return the gradient for images of one whole batch, after ``put``.

        With a = x - E x, s = (Var x + eps)^(-1/2) and y = weight s a + bias, the gradient of L is
        ``weight s (dL/dy - E dL/dy - s² a E(a dL/dy))``: the mean takes its part, and so does the
        variance.
        """
        factor = self.weight.view(self.nets, 1, -1) * self.scale
        of_mean, of_variance = (each / self.apart.shape[1] for each in self.sums)
        found = torch.addcmul(-factor * of_mean, slope.flatten(1, 3), factor)
        found.addcmul_(self.apart, -factor * self.scale.square() * of_variance)
        return found.view_as(x)


# --- whole nets -----------------------------------------------------------------------------------


@torch.no_grad()
def run(layers: Sequence[Layer], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what each layer takes of what the first one has seen, and what the last one gives."""
    inputs: list[Tensor] = []
    for layer in layers:
        inputs.append(layer.seen(x) if inputs else x)
        layer.begin()
        x = layer(inputs[-1])
    return inputs, x


def score(critic: Sequence[Layer], images: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what each layer of grouped critics takes, and the scores (N, B).

    Args:
        critic: the layers.
        images: as the first layer has seen them.
    """
    inputs, scores = run(critic, images)
    return inputs, scores.squeeze(-1)


@torch.no_grad()
def image_slopes(critic: Sequence[Layer], inputs: Sequence[Tensor], slope: Tensor) -> Tensor:
    """Return the gradient for images, given that for their scores (N, B)."""
    back = slope[..., None]
    for layer, x in zip(reversed(critic), reversed(inputs), strict=True):
        back = layer.back(back, x)
    return back


@torch.no_grad()
def improve(maker: Sequence[Layer], inputs: Sequence[Tensor], slope: Tensor) -> None:
    """Put the gradient of generators into their parameters, given that for their images.

    It is written over.
    """
    first = next(layer for layer in maker if isinstance(layer, _Affine))
    for layer, x in zip(reversed(maker), reversed(inputs), strict=True):
        layer.put(slope, x)
        if layer is first:
            return
        slope = layer.back(slope, x)


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
        real: images (N, B, …), as the first layer has seen them.
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
            x[:, 2 * size :] = move = layer.seen(move)  # nobody needs what it was any more
            layer.weight.grad = layer.weight_slope(slope, x)
            if layer.bias is not None:
                halves = slope[:, : 2 * size].reshape(len(slope), 2, size, *slope.shape[2:])
                within = tuple(range(2, halves.dim() - 1))
                layer.bias.grad = halves.sum(within).sum(1).flatten()  # exactly 0 for a score's
        move = layer.along(move, x[:, 2 * size :])
    apart = scores[:, :size] - scores[:, size : 2 * size]
    loss: Tensor = ((apart + penalty * (norm - 1).square()) * share).sum(1)
    return loss
