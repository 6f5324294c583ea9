"""bfloat16 for the operations that autocast holds safe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def in_bfloat16(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return the result of a function of tensors as float32, computed in bfloat16 by autocast.

    That is where torch holds it safe: matrix products and convolutions, not sums and norms.
    Weights are cast for this call alone, so that they are float32 to whoever else sees them.
    """
    with torch.autocast(inputs[0].device.type, torch.bfloat16, cache_enabled=False):
        found = function(*inputs)
    return found.float()
