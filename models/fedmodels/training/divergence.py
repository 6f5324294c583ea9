"""A training that diverged: how a client finds out, and what it says of it.

The line names a cause that was measured: inputs, the learning rate times the weight decay, or the
norm of the gradient at the weights that the client was given. Under ``[privacy]`` the line goes
without what depends on the data.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedmodels.tensors.bundle import Bundle
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.optimizer import lr_of
from fedmodels.training.settings import to_table

HUGE = 100.0
"""A normalised input beyond this, or below its negative, makes a usual learning rate diverge."""
DECOUPLED = ("sgd", "adamw")
"""Optimisers of which each step multiplies the weights by 1 - lr x weight_decay."""


class Half(Protocol):
    """What is read of a client's half of an interaction."""

    method: Method
    ctx: ClientContext
    payload: Bundle
    state: Bundle
    x: Tensor  # (n, …)
    y: Tensor  # (n,)


def explanation(half: Half) -> str:
    """Return what was measured of a training that diverged, and what usually helps."""
    ctx, training = half.ctx, half.ctx.run.experiment.training
    said, helps = list[str](), 'a net that normalises, such as [net] norm = "layer"'
    if "optimizer" in ctx.asked:  # else the method takes steps of its own
        lr, decay = lr_of(ctx), training.weight_decay
        if training.optimizer in DECOUPLED and lr * decay >= 1:
            return (
                f"[training] lr x weight_decay is {lr * decay:.4g}, so each step multiplies the "
                f"weights by {1 - lr * decay:.4g}: a lower weight_decay helps"
            )
        said.append(f"[training] lr is {lr:g}")
    own = {key: rate for key, rate in to_table(half.method).items() if key.endswith("lr") and rate}
    said += [f"[method] {key} is {rate:g}" for key, rate in own.items()]
    if said:
        helps = f"a lower {'one of these rates' if len(said) > 1 else 'rate'}, or {helps}"
    if ctx.run.experiment.privacy is None and len(half.y):
        low, high = (float(edge) for edge in half.x.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            return "its inputs hold NaN or infinity: remove or replace those examples"
        said += [
            f"its inputs go from {low:.4g} to {high:.4g} once normalised",
            f"the gradient at the weights it was given has norm {_first_gradient(half):.4g}",
        ]
        if max(-low, high) > HUGE:
            helps = f"inputs near 0, by scale, mean and std in client.json, {helps}"
    return f"{', '.join(said) or 'it has steps of its own'}; what usually helps is {helps}"


def _first_gradient(half: Half) -> float:
    """Return the norm of the gradient of the first batch's cross-entropy at the given weights."""
    ctx = half.ctx
    size = ctx.run.experiment.training.batch_size
    with suppress(RuntimeError, ValueError):  # such as a batch of one under batch normalisation
        half.method.load(ctx, half.payload, half.state)
        parameters = [*ctx.net.parameters_by_key().values()]
        for parameter in parameters:
            parameter.requires_grad_(True)
        logits = ctx.net.head(ctx.net.features(half.x[:size]))
        loss = cross_entropy(logits, half.y[:size])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms = [float(g.norm()) for g in found if g is not None]
        return math.hypot(*norms)
    return math.nan
