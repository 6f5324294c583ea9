"""Many small tensors as one vector, and back.

A net of a hundred small tensors costs a hundred times the overhead of one operation. Every
operation of torch also releases the interpreter's lock for a moment, which costs far more when
other threads want the lock. NumPy moves the elements in one operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

UNKNOWN_TO_NUMPY = frozenset({torch.bfloat16})
HALF = frozenset({torch.float16, torch.bfloat16})


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one dtype, in order, as a vector (n,) on the CPU: a copy.

    Elements are in the order of a tensor's shape, for every memory format.
    """
    if tensors[0].dtype in UNKNOWN_TO_NUMPY:
        return torch.cat([t.detach().cpu().reshape(-1) for t in tensors])
    arrays = [
        t.numpy() if t.is_cpu and not t.requires_grad else t.numpy(force=True) for t in tensors
    ]
    return torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))


def are_plainly_finite(words: Tensor) -> bool:
    """Tell whether memory that is read as float32 (n,) surely holds no NaN and no infinity.

    The upper half of a float64 NaN or infinity reads as a NaN, too. Integers may read as NaN, so
    False does not say that a number is not finite. Numbers of ``HALF`` cannot be read so.
    """
    if math.isfinite(torch.dot(words, words).item()):  # 0.04 ms a MiB, aminmax 0.12
        return True
    low, high = torch.aminmax(words)  # squares may overflow where values do not
    return bool(torch.isfinite(low) & torch.isfinite(high))


def unflatten(vector: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of a vector (n,) in the shapes of the tensors it was joined from."""
    parts = torch.split(vector, [t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]
