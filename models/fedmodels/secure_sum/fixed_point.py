"""Fixed-point numbers: what is summed modulo 2^bits, and what a sum says.

    x   a number of an upload, |x| <= largest, which is 1 at least
    c   what the upload counts in the mean, 0 <= c <= most
    n   the clients that may take part in the sum
    s   the scale: n (largest * 2^s + 1) <= 2^(bits - 1), so that no sum overflows

A client sends round(x * c / most * 2^s) for each number, and c in the clear. The mean is the sum
over all clients, divided by the sum of c / most * 2^s. It does not depend on the order in which
uploads are added. A sum of 64 bits is rounded when it is read, as a float64 has 53 bits for a
number.

Nobody sees a single upload, so a client may send any integer. Of honest clients the mean is within
``largest``, and a sum that is not tells that one of them lied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    """The bound of |x|."""
    clients: int
    """n."""
    most: float
    """The bound of c."""

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

    def encode(self, parts: Sequence[CountedNumbers]) -> Vector:
        """Return the integers of the parts of an upload, one after the other.

        Raises:
            PayloadError: a number is not finite, or beyond the range; names the part.
        """
        found = np.empty(sum(part.values.numel() for part in parts), self.dtype)
        signed, end = found.view(f"<i{self.bits // 8}"), 0
        for part in parts:
            if not 0 <= part.count <= self.most:
                raise PayloadError(f"the upload counts more than the most of a run: {self.most:g}")
            factor = math.ldexp(part.count / self.most, self.scale)
            values = part.values.detach().cpu().reshape(-1)
            for start in range(0, len(values), AT_ONCE):
                some = values[start : start + AT_ONCE].to(torch.float64).numpy()
                if not np.abs(some).max() <= self.largest:  # a NaN is refused as well
                    raise PayloadError(
                        f"tensor {part.name!r} holds a number beyond [privacy.secure_sum] largest "
                        f"= {self.largest:g}"
                    )
                signed[end : end + len(some)] = np.rint(some * factor)
                end += len(some)
        return found

    def mean(
        self, sums: NDArray[np.float64], counts: Sequence[float], name: str
    ) -> NDArray[np.float64]:
        """Return the mean behind the sum of the integers of numbers.

        Args:
            sums: of each number, (n,).
            counts: the c of each upload in the sum; one of them is above 0.
            name: what is summed.

        Raises:
            PayloadError: the sum is beyond what uploads within the range come to.
        """
        unit = math.ldexp(sum(counts) / self.most, self.scale)
        rounded = sum(count > 0 for count in counts) / 2
        worst = float(np.abs(sums).max(initial=0.0))
        if worst > self.largest * unit * (1 + 1e-9) + rounded:
            raise PayloadError(
                f"the mean of tensor {name!r} is {worst / unit:.4g}, beyond [privacy.secure_sum] "
                f"largest = {self.largest:g}, so one of its clients sent a number beyond it"
            )
        return sums / unit


@dataclass(frozen=True)
class CountedNumbers:
    """Numbers of an upload that count alike."""

    name: str
    values: Tensor
    count: float


def signed(total: Vector) -> NDArray[np.float64]:
    """Return the integers of a sum as signed numbers."""
    return total.view(f"<i{total.itemsize}").astype(np.float64)


def added(vectors: Sequence[Vector]) -> Vector:
    """Return the sum of vectors modulo 2^bits."""
    total = vectors[0].copy()
    for vector in vectors[1:]:
        np.add(total, vector, out=total)
    return total
