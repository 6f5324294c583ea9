"""Which pictures a method has for its client to draw at the end (``[evaluate] pictures``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedmodels.nets.split import embeddings
from fedmodels.tensors.bundle import Bundle
from fedmodels.training.asked import asked
from fedmodels.training.contexts import ClientContext
from fedmodels.training.method import Method
from fedmodels.training.pictures import Picture, PrototypeMap

Pictures = Mapping[str, Picture]


def pictures_of(
    method: Method, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
) -> Pictures:
    """Return pictures that the client may draw for itself at the end, by file name.

    ``ctx.net`` holds the client's last model, in evaluation mode; ``x`` (n, …) and ``y`` (n,) are
    all its test data. No picture is sent. A method of one's own has them in a function ``pictures``
    of the same arguments.
    """
    found: Callable[..., Pictures] = asked(method, "pictures", OF, _prototypes)
    return found(ctx, payload, state, x, y)


def _prototypes(
    ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
) -> Pictures:
    """Show prototypes of embeddings, if there are any, among the embeddings."""
    known = {
        f"{whose} {name}": found
        for whose, bundle in (("everyone's", payload), ("own", state))
        for name, found in bundle.prototypes.items()
        if len(found.vectors) and found.vectors.shape[1] == ctx.net.width
    }
    if not known or len(x) < 2:
        return {}
    return {"prototypes": PrototypeMap.of(embeddings(ctx.net, x).cpu(), y.cpu(), known)}


def _replayed(
    method: Any, ctx: ClientContext, payload: Bundle, state: Bundle, x: Tensor, y: Tensor
) -> Pictures:
    found: Pictures = method.replay.of(ctx.run).pictures(ctx, state)
    return found


OF = {"pfedgrp": _replayed, "fedavg-replay": _replayed}
"""By method; all others show prototypes."""
