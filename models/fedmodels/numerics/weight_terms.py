"""Terms of a loss that depend on the weights alone, with their gradients in closed form.

Autograd takes such a term through several operations for each of a net's tensors, forward and
backward. Here a term is one operation: its gradient is known, and torch calculates it for all
tensors at once. A term is a number like any other of a loss.

    term                   here                gradient for w
    sum of (w - w0)^2      squared_distance    2 (w - w0)
    sum of w^2             squared_norm        2 w
    sum of c w             inner_product       c
    0                      tilt                c

Where torch maps a loss over clients or examples, the same terms are calculated by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Tensors = Iterable[Tensor]


def squared_distance(weights: Tensors, others: Tensors) -> Tensor:
    """Return the sum of squares () of what weights differ from others; those are constants."""
    each, fixed = _pairs(weights, others)
    if _is_mapped():
        pairs = zip(each, fixed, strict=True)
        return torch.stack([(w - w0).square().sum() for w, w0 in pairs]).sum()
    return _applied(_Squares, fixed, each)


def squared_norm(weights: Tensors) -> Tensor:
    """Return the sum of squares () of weights."""
    each = [*weights]
    if _is_mapped():
        return torch.stack([w.square().sum() for w in each]).sum()
    return _applied(_Squares, [], each)


def inner_product(weights: Tensors, direction: Tensors) -> Tensor:
    """Return the sum of products () of weights and a direction, which is constant."""
    each, fixed = _pairs(weights, direction)
    if _is_mapped():
        return torch.stack([(c * w).sum() for w, c in zip(each, fixed, strict=True)]).sum()
    return _applied(_Linear, fixed, each)


def tilt(weights: Tensors, direction: Tensors) -> Tensor:
    """Return 0 with the gradient of :func:`inner_product`: a loss keeps its value, and leans."""
    if _is_mapped():
        product = inner_product(weights, direction)
        return product - product.detach()
    each, fixed = _pairs(weights, direction)
    return _applied(_Tilt, fixed, each)


def _pairs(weights: Tensors, others: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    each, fixed = [*weights], [other.detach() for other in others]
    if len(each) != len(fixed):
        raise ValueError(f"{len(each)} weights, and {len(fixed)} tensors beside them")
    return each, fixed


def _is_mapped() -> bool:
    """Tell whether torch.func is at work, which maps no operation that it does not know."""
    return torch._C._are_functorch_transforms_active()


def _applied(term: type[Function], fixed: list[Tensor], weights: list[Tensor]) -> Tensor:
    found: Tensor = term.apply(fixed, *weights)
    return found


class _Squares(Function):
    """The sum of squared differences, or of squares where there is nothing to differ from."""

    @staticmethod
    def forward(ctx: Any, others: list[Tensor], *weights: Tensor) -> Tensor:
        apart = torch._foreach_sub(weights, others) if others else torch._foreach_mul(weights, 1)
        ctx.apart = apart
        return torch.stack(torch._foreach_norm(apart)).square().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.apart, 2 * grad)


class _Linear(Function):
    """The sum of products with a direction."""

    @staticmethod
    def forward(ctx: Any, direction: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.direction = direction
        return torch.stack([*map(torch.sum, torch._foreach_mul(weights, direction))]).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.direction, grad)


class _Tilt(Function):
    """Nothing, with the gradient of a sum of products."""

    @staticmethod
    def forward(ctx: Any, direction: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.direction = direction
        return weights[0].new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(ctx.direction, grad)
