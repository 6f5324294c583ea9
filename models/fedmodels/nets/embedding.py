"""The embeddings of many inputs, without a gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from fedmodels.nets.split import SplitNet

BATCH = 256
"""Examples embedded at a time."""


@torch.no_grad()
def embeddings(net: SplitNet, x: Tensor) -> Tensor:
    """Return the embeddings (n, d) of a data set, in evaluation mode, in which the net stays."""
    net.eval()
    return embed(net, x)


@torch.no_grad()
def embed(net: SplitNet, x: Tensor) -> Tensor:
    """Return the embeddings (n, d) of a data set in the mode the net is in; n may be 0."""
    parts = [net.features(part) for part in net.split(x, BATCH)] if len(x) else []
    return torch.cat(parts) if parts else torch.zeros(0, net.width, device=x.device)
