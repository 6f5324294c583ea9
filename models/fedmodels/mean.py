"""The weighted mean of uploads: the sum every method's server half is built on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.flat import joined, separated
from fedmodels.packed import Packed
from fedmodels.types import Bundle, Weights

CHUNK = 1 << 15
"""Elements summed at a time: two float64 buffers of this size stay in a core's cache."""
PER_THREAD, MOST_THREADS = 1 << 21, 8
"""Elements worth a thread of their own; more threads than these wait for memory."""


def weighted_mean(
    uploads: Iterable[Mapping[str, Tensor] | Bundle], coefficients: Sequence[float]
) -> Weights:
    """Return the weighted mean of equally shaped weights, tensor by tensor.

    ``sum_i p_i x_i`` in float64 and in the given order, rounded once to the dtype of the inputs.
    Equal inputs of float32 or narrower come out as themselves, and a coefficient of 1 among zeros
    returns that input. Uploads may be zero-copy views; beyond the result and small buffers no
    memory is needed.

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
    inputs, shares = [w for w, _ in pairs], [p for _, p in pairs]
    whole = _mean_of_blocks(inputs, shares)
    if whole is not None:
        return whole
    first = inputs[0]
    for other in inputs[1:]:
        if other.keys() != first.keys():
            key = min(other.keys() ^ first.keys())
            raise PayloadError(f"tensor {key!r} is in some uploads only")
    found: dict[str, Tensor] = {}
    for keys in _groups(first):
        found |= _mean(keys, inputs, shares)
    return {key: found[key] for key in first}


def _mean_of_blocks(uploads: list[Mapping[str, Tensor]], shares: list[float]) -> Packed | None:
    """Return the mean of uploads that lie in one block each, as they come, in such a block.

    None where they do not, or where there is not one floating-point dtype.
    """
    first, packed = uploads[0], [each for each in uploads if isinstance(each, Packed)]
    if not isinstance(first, Packed) or len(packed) < len(uploads):
        return None
    names, layout = first.names, first.layout
    floats = [dtype for dtype in layout.dtypes if dtype.is_floating_point]
    if len(floats) != 1 or any((u.names, u.layout) != (names, layout) for u in packed):
        return None
    blocks = [upload.block.cpu() for upload in packed]
    mean = layout.empty()
    _mean_of_flat([block.view(floats[0]) for block in blocks], shares, mean.view(floats[0]))
    for other in layout.dtypes - set(floats):
        places = layout.elements(other)
        mean.view(other)[places] = _mean_of_flat([b.view(other)[places] for b in blocks], shares)
    return Packed(names, layout, layout.clear(mean))


def _groups(weights: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield keys whose tensors are summed together: many small ones cost as much as one."""
    by_dtype: dict[torch.dtype, tuple[list[str], int]] = {}
    for key, tensor in weights.items():
        keys, held = by_dtype.get(tensor.dtype, ([], 0))
        if keys and held + tensor.numel() > CHUNK:
            yield keys
            keys, held = [], 0
        by_dtype[tensor.dtype] = ([*keys, key], held + tensor.numel())
    for keys, _ in by_dtype.values():
        yield keys


def _mean(
    keys: list[str], uploads: list[Mapping[str, Tensor]], shares: list[float]
) -> dict[str, Tensor]:
    """Return the weighted mean of tensors of one dtype over the uploads."""
    first = [uploads[0][key] for key in keys]
    shapes = [t.shape for t in first]
    flats = []
    for upload in uploads:
        tensors = [upload[key] for key in keys]
        if [t.shape for t in tensors] != shapes or any(t.dtype != first[0].dtype for t in tensors):
            pairs = zip(keys, tensors, first, strict=True)
            key = next(k for k, t, f in pairs if (t.shape, t.dtype) != (f.shape, f.dtype))
            raise PayloadError(f"tensor {key!r} differs in shape or dtype between uploads")
        alone = len(tensors) == 1
        flats.append(tensors[0].detach().cpu().reshape(-1) if alone else joined(tensors))
    result = _mean_of_flat(flats, shares)
    return dict(zip(keys, separated(result, first), strict=True))


def _mean_of_flat(flats: list[Tensor], shares: list[float], out: Tensor | None = None) -> Tensor:
    """Return the weighted mean of equally long vectors, in ``out`` if that is given."""
    if not flats[0].is_floating_point():
        result = flats[0].clone()
        for flat in flats[1:]:
            torch.maximum(result, flat, out=result)
        return result
    result = torch.empty_like(flats[0]) if out is None else out
    fill = partial(_fill, result, flats, shares)
    ranges = _ranges(len(result), len(flats))
    if len(ranges) == 1:
        fill(ranges[0])
    else:
        with ThreadPoolExecutor(len(ranges)) as pool:
            list(pool.map(fill, ranges))
    return result


def _ranges(length: int, count: int) -> list[range]:
    """Divide vectors among the cores, where there is enough to do; each range begins a chunk."""
    cores = len(os.sched_getaffinity(0))
    threads = min(cores, MOST_THREADS, length * count // PER_THREAD) or 1
    share = max(1, -(-length // (threads * CHUNK))) * CHUNK
    return [range(i, min(i + share, length)) for i in range(0, length, share)] or [range(0)]


def _fill(result: Tensor, flats: list[Tensor], shares: list[float], where: range) -> None:
    """Put the weighted mean of a range of the vectors into the result."""
    scratch, total = torch.empty(2, min(CHUNK, len(where)), dtype=torch.float64).unbind()
    for start in where[::CHUNK]:
        stop = min(start + CHUNK, where.stop)
        x, mean = scratch[: stop - start], total[: stop - start]
        mean.copy_(flats[0][start:stop]).mul_(shares[0])
        for flat, share in zip(flats[1:], shares[1:], strict=True):
            mean.add_(x.copy_(flat[start:stop]), alpha=share)
        result[start:stop] = mean
