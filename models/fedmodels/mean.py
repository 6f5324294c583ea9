"""The weighted mean of uploads: the sum every method's server half is built on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.types import Bundle, Weights

CHUNK = 1 << 16
"""Elements summed at a time: two float64 buffers of this size stay in a core's cache."""


def weighted_mean(
    uploads: Iterable[Mapping[str, Tensor] | Bundle], coefficients: Sequence[float]
) -> Weights:
    """Return the weighted mean of equally shaped weights, tensor by tensor.

    ``x_0 + sum_i p_i (x_i - x_0)`` in float64 and in the given order, rounded once to the dtype of
    the inputs. Equal inputs come out as themselves, and a coefficient of 1 among zeros returns that
    input. Uploads may be zero-copy views; beyond the result and small buffers no memory is needed.

    Args:
        uploads: weights by key, or bundles, whose ``weights`` are meant; all with the same keys.
        coefficients: p, one per upload, summing to 1; uploads of coefficient 0 are not read.

    Returns:
        The mean, on the CPU. Integer tensors come out as the maximum, booleans as "any".

    Raises:
        PayloadError: there is nothing to average, or keys, shapes or numbers of inputs differ.
    """
    weights = [u.weights if isinstance(u, Bundle) else u for u in uploads]
    if len(weights) != len(coefficients):
        raise PayloadError(
            f"{len(weights)} uploads but {len(coefficients)} coefficients to average"
        )
    pairs = [(w, float(p)) for w, p in zip(weights, coefficients, strict=True) if p != 0]
    if not pairs:
        raise PayloadError("there is nothing to average: no upload has a coefficient above 0")
    first = pairs[0][0]
    for other, _ in pairs[1:]:
        if other.keys() != first.keys():
            key = min(other.keys() ^ first.keys())
            raise PayloadError(f"tensor {key!r} is in some uploads only")
    shares = [p for _, p in pairs]
    return {key: _mean(key, [w[key] for w, _ in pairs], shares) for key in first}


def _mean(key: str, tensors: list[Tensor], shares: list[float]) -> Tensor:
    """Return the weighted mean of one tensor over the uploads."""
    first = tensors[0]
    if any(t.shape != first.shape or t.dtype != first.dtype for t in tensors):
        raise PayloadError(f"tensor {key!r} differs in shape or dtype between uploads")
    if not first.is_floating_point():
        result = first.detach().to("cpu", copy=True)
        for tensor in tensors[1:]:
            torch.maximum(result, tensor.to("cpu"), out=result)
        return result
    flats = [t.detach().to("cpu").reshape(-1) for t in tensors]
    result = torch.empty_like(flats[0])
    rows = min(CHUNK, len(result))
    reference, scratch, total = torch.empty(3, rows, dtype=torch.float64).unbind()
    for start in range(0, len(result), CHUNK):
        stop = min(start + CHUNK, len(result))
        x0, x, mean = (buffer[: stop - start] for buffer in (reference, scratch, total))
        x0.copy_(flats[0][start:stop])
        mean.copy_(x0)
        for flat, share in zip(flats[1:], shares[1:], strict=True):
            x.copy_(flat[start:stop]).sub_(x0)
            mean.add_(x, alpha=share)
        result[start:stop] = mean
    return result.reshape(first.shape)
