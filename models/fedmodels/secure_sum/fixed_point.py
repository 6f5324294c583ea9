"""Fixed-point numbers: what is summed modulo 2^bits, and what a sum says.

    x   a number of an upload, |x| <= largest, which is 1 at least
    c   what the upload counts in the mean, 0 <= c <= most
    n   the clients that may take part in the sum
    s   the scale: n (largest * 2^s + 1) <= 2^(bits - 1), so that no sum overflows

A client sends round(x * c / most * 2^s) for each number, and the same of x = 1. The mean is the
quotient of the two sums. It does not depend on the order in which uploads are added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.errors import ConfigError, PayloadError
from fedmodels.secure_sum.masks import Vector

AT_ONCE = 1 << 16
"""Numbers that are converted at a time."""
LEAST_SCALE = 8
"""Bits behind the point below which a mean would be too coarse."""


@dataclass(frozen=True)
class FixedPoint:
    """How numbers become integers, equally at every client of a sum."""

    bits: int
    """32 or 64."""
    largest: float
    clients: int
    most: float

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The type of the integers."""
        return np.dtype(f"<u{self.bits // 8}")

    @property
    def scale(self) -> int:
        """Return s, the bits behind the point.

        Raises:
            ConfigError: there are too few.
        """
        room = (2 ** (self.bits - 1) / self.clients - 1) / self.largest
        scale = min(52, math.floor(math.log2(room))) if room > 0 else 0
        if scale < LEAST_SCALE:
            raise ConfigError(
                f"[privacy] secure_sum: {self.bits} bits leave {scale} behind the point for "
                f"{self.clients} clients and numbers up to {self.largest:g}; take bits = 64, or a "
                "smaller largest"
            )
        return scale

    def encode(self, tensors: Mapping[str, Tensor], count: float) -> Vector:
        """Return the integers of an upload's floating-point tensors, and behind them that of 1.

        Raises:
            PayloadError: a number is not finite, or beyond the range; names the tensor.
        """
        if not 0 <= count <= self.most:
            raise PayloadError(f"the upload counts more than the most of this run, {self.most:g}")
        factor = math.ldexp(count / self.most, self.scale)
        found = np.empty(sum(t.numel() for t in tensors.values()) + 1, self.dtype)
        signed, end = found.view(f"<i{self.bits // 8}"), 0
        for name, tensor in tensors.items():
            values = tensor.detach().cpu().reshape(-1)
            for start in range(0, len(values), AT_ONCE):
                part = values[start : start + AT_ONCE].to(torch.float64).numpy()
                if not np.abs(part).max() <= self.largest:  # so is a NaN
                    raise PayloadError(
                        f"tensor {name!r} holds a number beyond [privacy.secure_sum] largest = "
                        f"{self.largest:g}"
                    )
                signed[end : end + len(part)] = np.rint(part * factor)
                end += len(part)
        signed[end] = round(factor)
        return found

    def mean(self, total: Vector, forms: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the mean behind a sum; None if nothing counts.

        Args:
            total: the sum of the clients' integers.
            forms: tensors with the names, shapes and dtypes of an upload's.
        """
        signed: NDArray[np.signedinteger] = total.view(f"<i{self.bits // 8}")
        counted, found, begin = float(signed[-1]), dict[str, Tensor](), 0
        if counted <= 0:
            return None
        for name, form in forms.items():
            part = signed[begin : begin + form.numel()]
            mean = torch.from_numpy(part.astype(np.float64) / counted)
            found[name] = mean.to(form.dtype).reshape(form.shape)
            begin += form.numel()
        return found


def added(vectors: Sequence[Vector]) -> Vector:
    """Return the sum of vectors modulo 2^bits."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        np.add(total, vector, out=total)
    return total
