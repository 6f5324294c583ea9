"""Sums of bounded gradients of examples, without each example's own gradient.

Li et al., Large Language Models Can Be Strong Differentially Private Learners, ICLR 2022, section 4
(norms from what enters a layer and the gradient of what leaves it); Differentially Private
Optimization on Large Foundation Models at Small Cost, ICML 2023, https://arxiv.org/abs/2210.00038
(one backward pass gives norms and sum).

A net runs once on the whole batch, with parameters that take no gradient. Each layer that has
trained ones keeps what entered it, and the backward pass tells the gradient of what left it. Both
give the norm of each example's gradient, and after it the weighted sum of all.

Shapes: B examples, T places of a layer (tokens, cells), i and o its inputs and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode

from fedmodels.nets.independent import row_parameters, rows_are_independent
from fedmodels.nets.split import SplitNet
from fedmodels.training.stepped import Batch, Output

LossOf = Callable[[Batch, Output], Tensor]
AT_ONCE = 1 << 21
"""Numbers of unfolded inputs of a convolution that are held at a time."""
PLACES, CHANNELS = 128, 8
"""From so many on, a convolution with a group for each example is faster than unfolding."""
Sum = Callable[[Tensor], Tensor]
"""Gives the sum of the examples' gradients, weighed by factors (B,)."""
ROUNDED = 1e-6
"""Of the largest that a squared norm may be: more than float32 loses of it."""


@dataclass(frozen=True)
class Bounded:
    """What one pass over a batch tells of the gradients of its examples."""

    squares: Tensor  # (B,) squared norms
    losses: Tensor  # (B,)
    sums: Sequence[Sum]
    """Of each trained parameter."""

    def total(self, factors: Tensor) -> Tensor:
        """Return the sum of all gradients (P,), weighed by factors (B,)."""
        with torch.no_grad():
            return torch.cat([each(factors).flatten() for each in self.sums])


def bounded(
    net: SplitNet,
    trained: Mapping[str, nn.Parameter],
    batch: Batch,
    loss_of: LossOf,
    apart: frozenset[str] = frozenset(),
) -> Bounded | None:
    """Return what a batch tells of its examples' gradients; None where layers do not tell all.

    Args:
        net: has no gradients.
        trained: the parameters that train, by key.
        batch: of B examples.
        loss_of: gives the loss of a batch of one.
        apart: parameters (1, …) of which each example has a copy of its own.
    """
    size = len(batch.y)
    copies = {
        key: trained[key].detach().expand(size, *trained[key].shape[1:]).clone().requires_grad_()
        for key in apart
    }
    with net.holding(copies), Watched(p for k, p in trained.items() if k not in apart) as watch:
        features = net.features(batch.x)
        logits = net.head(features)

    def loss(*one: Tensor) -> Tensor:
        z, scores, x, y, index, *taught = (each[None] for each in one)
        return loss_of(Batch(x, y, index, taught=tuple(taught)), Output(z, scores))

    given = (features, logits, batch.x, batch.y, batch.index, *batch.taught)
    losses = vmap(loss, randomness="different")(*given)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    told = len(watch.used) == len({*watch.used}) == len(trained) - len(apart)
    if not told or any(p.grad is not None for p in trained.values()):
        for parameter in trained.values():
            parameter.grad = None
        return None
    for key, own in copies.items():
        watch.found[id(trained[key])] = kept(
            torch.zeros_like(own) if own.grad is None else own.grad
        )
    found = [watch.found.get(id(p)) or nothing(p, size) for p in trained.values()]
    if any(len(own) != size for own, _ in found):
        return None  # a layer's first dimension is no row
    squares = torch.stack([squares for squares, _ in found]).sum(0)
    return Bounded(squares, losses.detach(), [total for _, total in found])


def nothing(parameter: Tensor, size: int) -> tuple[Tensor, Sum]:
    """Return norms and sum of a parameter that no loss depends on."""
    return parameter.new_zeros(size), lambda factors: torch.zeros_like(parameter)


def per_example(
    net: SplitNet, trained: Mapping[str, nn.Parameter], batch: Batch, loss_of: LossOf
) -> tuple[Tensor, Tensor]:
    """Return the gradients (B, P) of each example's loss, and the losses (B,).

    The ``trained`` parameters are P numbers in all; ``loss_of`` gives the loss of a batch of one.
    """
    whole = _WithLoss(net, loss_of)
    names = {id(p): name for name, p in whole.named_parameters()}
    wanted = {names[id(p)]: p.detach() for p in trained.values()}

    def loss(parameters: dict[str, Tensor], *example: Tensor) -> Any:
        return functional_call(whole, parameters, tuple(each[None] for each in example))

    examples = (batch.x, batch.y, batch.index, *batch.taught)
    places = (None, *[0] * len(examples))
    found, losses = vmap(grad_and_value(loss), places, randomness="different")(wanted, *examples)
    flat = [found[name].flatten(1) for name in wanted]
    return torch.cat(flat, 1).detach(), losses.detach()


def one_by_one(
    net: SplitNet, trained: Mapping[str, nn.Parameter], batch: Batch, loss_of: LossOf
) -> tuple[Tensor, Tensor]:
    """Return what :func:`per_example` does, by batches of one: of nets that torch cannot map."""
    whole, rows, losses = _WithLoss(net, loss_of), list[Tensor](), list[Tensor]()
    for example in zip(batch.x, batch.y, batch.index, *batch.taught, strict=True):
        loss = whole(*(each[None] for each in example))
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
        pairs = zip(found, trained.values(), strict=True)
        flat = [(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]
        rows.append(torch.cat(flat).detach())
        losses.append(loss.detach())
    return torch.stack(rows), torch.stack(losses)


class _WithLoss(nn.Module):
    """A net and a loss in one module: the loss may look at the net's parameters as well."""

    def __init__(self, net: SplitNet, loss_of: LossOf) -> None:
        super().__init__()
        self.net, self._loss_of = net, loss_of

    def forward(self, x: Tensor, y: Tensor, index: Tensor, *taught: Tensor) -> Tensor:
        """Return the loss of a batch."""
        features = self.net.embedded(x)
        batch = Batch(x, y, index, taught=taught)
        return self._loss_of(batch, Output(features, self.net.head(features)))


# --- which nets tell it ---------------------------------------------------------------------------


def apart_in(
    net: SplitNet, trained: Mapping[str, nn.Parameter], batch: Batch
) -> frozenset[str] | None:
    """Return which parameters need a copy for each example; None for a net that must be mapped.

    Rows that are independent by construction alone have norms that layers tell.
    """
    if not batch.x.is_floating_point() or not rows_are_independent(net):
        return None
    return row_parameters(net) & trained.keys()


# --- what the layers tell -------------------------------------------------------------------------


class Watched(TorchFunctionMode):
    """A block in which the layers of a net tell each example's part of their gradient.

    What it finds are pairs of squared norms (B,) and :data:`Sum`, by parameter.
    """

    def __init__(self, trained: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.trained = {id(parameter) for parameter in trained}
        self.used: list[int] = []
        """The parameters that layers have taken, by identity."""
        self.found: dict[int, tuple[Tensor, Sum]] = {}
        self._layers: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
            F.linear: self._linear,
            F.conv1d: partial(self._convolution, F.conv1d),
            F.conv2d: partial(self._convolution, F.conv2d),
            F.group_norm: self._group_norm,
            F.layer_norm: self._layer_norm,
        }

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, or what stands for it where it takes trained parameters."""
        layer, named = self._layers.get(func), kwargs or {}
        taken = {id(each) for each in (*args, *named.values())} & self.trained
        if layer is None or not taken:
            return func(*args, **named)
        self.used += taken
        return layer(*args, **named)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        def told(g: Tensor) -> None:
            left, entered = _rows(g), _rows(x)  # (B, T, o), (B, T, i)
            self._tell(weight, lambda: products(entered.mT, left.mT))
            self._tell(bias, lambda: kept(left.sum(1)))

        return self._watch(F.linear(x, weight.detach(), self._bias(x, weight, bias)), told)

    def _convolution(
        self,
        function: Callable[..., Tensor],
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        if groups != 1 or isinstance(padding, str):
            return function(x, weight, bias, stride, padding, dilation, groups)
        how = _Convolution(weight, stride, padding, dilation)

        def told(g: Tensor) -> None:
            self._tell(weight, lambda: how.gradients(x.detach(), g))
            self._tell(bias, lambda: kept(g.flatten(2).sum(2)))

        given = self._bias(x, weight, bias)
        return self._watch(function(x, weight.detach(), given, stride, padding, dilation), told)

    def _group_norm(
        self,
        x: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal = F.group_norm(x, num_groups, None, None, eps)
        cells = [1] * (x.dim() - 2)
        return self._scaled(normal, weight, bias, cells, lambda each: each.flatten(2).sum(2))

    def _layer_norm(
        self,
        x: Tensor,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        normal, own = F.layer_norm(x, normalized_shape, None, None, eps), len(normalized_shape)
        return self._scaled(
            normal,
            weight,
            bias,
            [],
            lambda each: each.reshape(len(x), -1, *each.shape[-own:]).sum(1),
        )

    def _scaled(
        self,
        normal: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        cells: list[int],
        added: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Return weight * normal + bias; ``added`` sums what each example has over its places."""
        entered = normal.detach()

        def told(g: Tensor) -> None:
            self._tell(weight, lambda: kept(added(g * entered)))
            self._tell(bias, lambda: kept(added(g)))

        shape = None if bias is None else bias.detach().view(*bias.shape, *cells)
        out = normal if weight is None else normal * weight.detach().view(*weight.shape, *cells)
        return self._watch(out if shape is None else out + shape, told)

    def _bias(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the bias of a layer; the first one's takes a gradient, as its inputs have none."""
        if x.requires_grad:
            return None if bias is None else bias.detach()
        own = weight.new_zeros(len(weight)) if bias is None else bias.detach().clone()
        return own.requires_grad_()

    def _watch(self, out: Tensor, told: Callable[[Tensor], None]) -> Tensor:
        """Have the gradient of what leaves a layer told."""
        if not out.requires_grad:
            out.requires_grad_()
        out.register_hook(told)  # type: ignore[no-untyped-call]
        return out

    def _tell(self, parameter: Tensor | None, gradients: Callable[[], tuple[Tensor, Sum]]) -> None:
        if parameter is not None and id(parameter) in self.trained:
            with torch.no_grad():
                self.found[id(parameter)] = gradients()


class _Convolution:
    """How a convolution's gradient follows from what entered it and what came back."""

    def __init__(self, weight: Tensor, stride: Any, padding: Any, dilation: Any) -> None:
        self.shape = weight.shape
        places = weight.dim() - 2
        pairs = [_several(each, places) for each in (stride, padding, dilation)]
        # One line of cells is an image of height 1.
        self.stride, self.padding, self.dilation = (
            (one, *each)[-2:] for one, each in zip((1, 0, 1), pairs, strict=True)
        )
        self.kernel = (1, *weight.shape[2:])[-2:]

    def gradients(self, x: Tensor, g: Tensor) -> tuple[Tensor, Sum]:
        """Return the squared norms and the sum of examples, of inputs and gradients (B, c, …)."""
        if x.dim() == 3:
            x, g = x[:, :, None], g[:, :, None]
        x, g = wide(x), wide(g)
        places, channels = g[0, 0].numel(), x.shape[1]
        if places >= PLACES and channels >= CHANNELS:  # faster than unfolding
            return kept(self._of_each(x, g))
        size = max(1, AT_ONCE // (math.prod((channels, *self.kernel)) * places))
        parts = zip(torch.split(x, size), torch.split(g, size), strict=True)
        pairs = [products(self._unfolded(a), b.flatten(2)) for a, b in parts]

        def total(factors: Tensor) -> Tensor:
            found = [
                each(part)
                for (_, each), part in zip(pairs, torch.split(factors, size), strict=True)
            ]
            return torch.stack(found).sum(0)

        return torch.cat([squares for squares, _ in pairs]), total

    def _of_each(self, x: Tensor, g: Tensor) -> Tensor:
        """Return each example's gradient (B, P), as of a convolution with a group for each."""
        size, (o, c) = len(x), self.shape[:2]
        found: Tensor = nn.grad.conv2d_weight(  # type: ignore[attr-defined]
            x.reshape(1, -1, *x.shape[2:]), (size * o, c, *self.kernel),
            g.reshape(1, -1, *g.shape[2:]), self.stride, self.padding, self.dilation, size,
        )  # fmt: skip
        return found.view(size, -1)

    def _unfolded(self, x: Tensor) -> Tensor:
        """Return what a cell of the output is computed from (B, i, T)."""
        if self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0):
            return x.flatten(2)
        return F.unfold(x, self.kernel, self.dilation, self.padding, self.stride)


def by_places(places: int, inputs: int, outputs: int) -> bool:
    """Tell whether comparing places with one another is less work than a gradient each."""
    return 128 * places**2 < inputs * outputs


def products(entered: Tensor, left: Tensor) -> tuple[Tensor, Sum]:
    """Return squared norms (B,) and sum of the products of (B, i, T) and (B, o, T) over T."""
    entered, left = wide(entered), wide(left)
    places = entered.shape[2]
    if places == 1:
        squares = entered.square().sum((1, 2)) * left.square().sum((1, 2))
    elif by_places(places, entered.shape[1], left.shape[1]):
        squares = (entered.mT @ entered).mul_(left.mT @ left).sum((1, 2))
        # Terms of both signs may cancel: a norm is never below the true one by what was rounded.
        squares += ROUNDED * entered.square().sum((1, 2)) * left.square().sum((1, 2))
    else:
        return kept(left @ entered.mT)

    def total(factors: Tensor) -> Tensor:
        weighed = left * factors[:, None, None]
        return weighed.transpose(0, 1).flatten(1) @ entered.transpose(1, 2).flatten(0, 1)

    return squares, total


def kept(gradients: Tensor) -> tuple[Tensor, Sum]:
    """Return squared norms (B,) and sum of gradients (B, …) that are there."""
    flat = wide(gradients).flatten(1)
    return flat.square().sum(1), lambda factors: factors @ flat


def wide(x: Tensor) -> Tensor:
    """Return numbers that can be added up: bfloat16 as float32."""
    return x.float() if x.dtype is torch.bfloat16 else x


def _rows(x: Tensor) -> Tensor:
    """Return (B, T, c) of (B, …, c)."""
    return x.detach().reshape(len(x), -1, x.shape[-1])


def _several(value: Any, places: int) -> tuple[int, ...]:
    return (value,) * places if isinstance(value, int) else tuple(value)
