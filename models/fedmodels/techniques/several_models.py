"""Several models of the run's net, side by side in one set of weights, each under its own role.

A client may train one of several and send that one alone, under the names that it was given. The
server then takes a mean for each.

Shapes: n examples, K classes, M models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from fedmodels.errors import PayloadError
from fedmodels.host.devices import to_device
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.roles import under
from fedmodels.training.contexts import ClientContext
from fedmodels.training.scoring import batch_size


def side_by_side(role: str, models: Sequence[Weights]) -> Weights:
    """Return the weights of all models: those of model m are ``ROLEm/…``."""
    return {k: t for m, own in enumerate(models) for k, t in under(f"{role}{m}", own).items()}


def role_in(upload: Bundle, names: Mapping[str, object]) -> str:
    """Return the role of the one model that an upload holds.

    Args:
        upload: its weights; names without a known role are of all models.
        names: the names of a whole model, without its role.

    Raises:
        PayloadError: it holds no model, several, or a part of one.
    """
    found = roles_in(upload, names)
    if len(found) != 1:
        raise PayloadError(f"an upload holds one of the models, and this one holds {len(found)}")
    return found[0]


def roles_in(upload: Bundle, names: Mapping[str, object]) -> list[str]:
    """Return the roles of the models that an upload holds, as :func:`role_in` does of one.

    Raises:
        PayloadError: it holds a part of one.
    """
    parts = (key.partition("/") for key in upload.weights)
    found = sorted({role for role, _, name in parts if name in names})
    for role in found:
        if lacking := sorted(name for name in names if f"{role}/{name}" not in upload.weights):
            raise PayloadError(f"tensor 'weights/{role}/{lacking[0]}' is missing")
    return found


def losses_of(ctx: ClientContext, models: Sequence[Weights], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss (n, M) of every example under every model, in evaluation mode.

    The loss is the one that scores tell: cross-entropy, or that of targets.
    """
    if (targets := ctx.run.targets) is not None:
        return torch.stack([targets.losses(c.float(), y) for c in answers_of(ctx, models, x)], 1)
    found = [cross_entropy(c, y, reduction="none") for c in answers_of(ctx, models, x)]
    return torch.stack(found, 1)


def correct_of(ctx: ClientContext, models: Sequence[Weights], x: Tensor, y: Tensor) -> Tensor:
    """Return to how many of n examples each model (M,) gives the right class, on the processor."""
    right = [(logits.argmax(1) == y).sum() for logits in answers_of(ctx, models, x)]
    return torch.stack(right).cpu()


@torch.no_grad()
def answers_of(ctx: ClientContext, models: Sequence[Weights], x: Tensor) -> list[Tensor]:
    """Return the logits (n, K) of every model, in evaluation mode."""
    size = batch_size(ctx)
    ctx.net.eval()
    return [
        torch.cat([logits_of(ctx, model, part) for part in ctx.net.split(x, size)])
        for model in (placed(ctx, model) for model in models)
    ]


def placed(ctx: ClientContext, model: Weights) -> dict[str, Tensor]:
    """Return a model's weights on the client's device, by the names that modules have."""
    return {k.replace("/", ".", 1): to_device(t, ctx.device) for k, t in model.items()}


def logits_of(ctx: ClientContext, model: dict[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits of a placed model; the net in ``ctx`` lends its form."""
    logits: Tensor = functional_call(ctx.net, model, x)
    return logits
