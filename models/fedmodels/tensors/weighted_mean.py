"""The weighted mean of uploads, the basis of every method's server half."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.tensors.block_layout import BlockLayout
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.joined import joined, separated
from fedmodels.tensors.packed_weights import PackedWeights, names_and_layout

CHUNK = 1 << 15
"""Elements summed at a time: two float64 buffers of this size stay in a core's cache."""
MOST_COUNTED = 10**12
"""Limit of an integer in an upload, such as of batches counted. What is sent down is at most half
of it: clients count on from there."""
PER_THREAD, MOST_THREADS = 1 << 21, 8
"""Elements that justify one more thread, and the most threads: more would wait for memory."""


def weighted_mean(
    uploads: Iterable[Mapping[str, Tensor] | Bundle],
    coefficients: Sequence[float],
    total: float = 1.0,
) -> Weights:
    """Return the weighted mean of equally shaped weights, tensor by tensor.

    ``sum_i p_i x_i / total`` in float64 and in the given order, rounded once to the dtype of the
    inputs. Equal inputs of float32 or narrower come out as themselves, and a coefficient of 1 among
    zeros returns that input. Uploads may be zero-copy views. The result and small buffers are all
    the memory it needs.

    Args:
        uploads: weights by key, or bundles with ``weights``; all have the same keys.
        coefficients: p, one per upload; uploads of coefficient 0 are not read.
        total: the sum of the coefficients.

    Returns:
        The mean, on the CPU. Integer tensors come out as the maximum, booleans as "any".

    Raises:
        PayloadError: no upload has a coefficient above 0, or keys, shapes or numbers of inputs
            differ.
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
    whole = _mean_of_blocks(inputs, shares, total)
    if whole is not None:
        return whole
    first = inputs[0]
    for other in inputs[1:]:
        if other.keys() != first.keys():
            key = min(other.keys() ^ first.keys())
            raise PayloadError(f"tensor {key!r} is in some uploads only")
    found: dict[str, Tensor] = {}
    for keys in _groups(first):
        found |= _mean(keys, inputs, shares, total)
    return {key: found[key] for key in first}


class RunningMean:
    """The weighted mean of uploads that are added a few at a time and not kept.

    Its bits are those of ``weighted_mean`` over all uploads in the same order, with the sum of the
    coefficients as total. It holds two or three times the bytes of one upload.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._form: tuple[tuple[str, ...], BlockLayout, torch.dtype] | None = None
        """Names, layout and floating-point dtype of the uploads."""
        self._sum = torch.empty(0)
        self._largest: dict[torch.dtype, Tensor] = {}

    @staticmethod
    def takes(weights: Mapping[str, Tensor]) -> bool:
        """Tell whether weights lie in one block with one floating-point dtype."""
        return isinstance(weights, PackedWeights) and _float_of(weights) is not None

    def add(self, uploads: Sequence[Mapping[str, Tensor]], coefficients: Sequence[float]) -> None:
        """Add uploads of one net that pass ``takes``; skip uploads of coefficient 0."""
        pairs = [(u, float(p)) for u, p in zip(uploads, coefficients, strict=True) if p != 0]
        packed = [u for u, _ in pairs if isinstance(u, PackedWeights)]
        if not packed:
            return
        fresh = self._form is None
        if self._form is None:
            dtype = _float_of(packed[0])
            assert dtype is not None, "not what takes() says"
            self._form = *names_and_layout(dict(packed[0])), dtype
        names, layout, dtype = self._form
        blocks = [_block(upload, names, layout) for upload in packed]
        vectors = [block.view(dtype) for block in blocks]
        if fresh:
            self._sum = torch.empty(len(vectors[0]), dtype=torch.float64)
        work = partial(_add_range, self._sum, vectors, [p for _, p in pairs], fresh)
        _in_ranges(work, len(self._sum), len(vectors))
        self.total += sum(p for _, p in pairs)
        for other in layout.dtypes - {dtype}:
            parts = [block.view(other)[layout.elements(other)] for block in blocks]
            parts += [] if fresh else [self._largest[other]]
            self._largest[other] = _mean_of_vectors(parts, [])

    def mean(self) -> Weights | None:
        """Return the mean of the added uploads; None if there are no uploads.

        Call it once, at the end: it divides the sums in place.
        """
        if self._form is None:
            return None
        names, layout, dtype = self._form
        mean = layout.empty()
        mean.view(dtype).copy_(self._sum.div_(self.total))
        for other, largest in self._largest.items():
            mean.view(other)[layout.elements(other)] = largest
        return PackedWeights(names, layout, layout.clear(mean))

    def sums(self) -> Weights | None:
        """Return the weighted sums so far, by name; None if there are no uploads.

        Floating-point tensors are float64 copies; integers are the maximum, booleans "any".
        """
        if self._form is None:
            return None
        names, layout, dtype = self._form
        block = layout.empty()
        for other, largest in self._largest.items():
            block.view(other)[layout.elements(other)] = largest
        found: dict[str, Tensor] = {}
        places = zip(names, layout.offsets, layout.views(block), strict=True)
        for name, offset, tensor in places:
            if tensor.dtype == dtype:
                begin = offset // dtype.itemsize
                tensor = self._sum[begin : begin + tensor.numel()].view(tensor.shape)
            found[name] = tensor.clone()
        return found


def mean_of_sums(
    sums: Sequence[Mapping[str, Tensor]], total: float, dtypes: Mapping[str, torch.dtype]
) -> Weights:
    """Return the mean behind weighted sums of disjoint groups of uploads.

    The groups are added in float64 and in the given order, divided by the total and rounded once.
    One group has the bits of ``weighted_mean`` over its uploads. Several groups have them as well
    where no sum of a group is rounded: for whole coefficients of sum N and float32 inputs of
    magnitude 0 or within [2**a, 2**b), that is where 2**(b - a + 23) * N <= 2**53. Other elements
    may differ in the last bit of float64, and so, near the middle of two values, of the dtype.

    Args:
        sums: of each group, as ``RunningMean.sums`` returns them; all have the same names.
        total: the sum of all coefficients, above 0.
        dtypes: the dtype of each tensor of the mean.

    Returns:
        The mean, by name. Integer tensors come out as the maximum, booleans as "any".

    Raises:
        PayloadError: there is no group, the total is not above 0, or names or shapes differ.
    """
    if not sums or not 0 < total < float("inf"):
        raise PayloadError("there is nothing to average: no group, or no total above 0")
    for group in sums:
        if group.keys() != dtypes.keys():
            key = min(group.keys() ^ dtypes.keys())
            raise PayloadError(f"tensor {key!r} is in some sums only")
    found: dict[str, Tensor] = {}
    for name, dtype in dtypes.items():
        parts = [group[name] for group in sums]
        if any(part.shape != parts[0].shape for part in parts):
            raise PayloadError(f"tensor {name!r} differs in shape between sums")
        if not dtype.is_floating_point:
            found[name] = _largest(parts)
            continue
        whole = parts[0].clone()
        for part in parts[1:]:
            whole += part
        found[name] = whole.div_(total).to(dtype)
    return found


def _block(upload: PackedWeights, names: tuple[str, ...], layout: BlockLayout) -> Tensor:
    """Return the tensors of an upload in the order of these names, not in its sender's."""
    if (upload.names, upload.layout) == (names, layout):
        return upload.block.cpu()
    block = layout.empty()
    for name, place in zip(names, layout.views(block), strict=True):
        place.copy_(upload[name])
    return layout.clear(block)


def _float_of(weights: PackedWeights) -> torch.dtype | None:
    """Return the floating-point dtype of weights that have just one."""
    floats = [dtype for dtype in weights.layout.dtypes if dtype.is_floating_point]
    return floats[0] if len(floats) == 1 else None


def _mean_of_blocks(
    uploads: list[Mapping[str, Tensor]], shares: list[float], total: float
) -> PackedWeights | None:
    """Return the mean of uploads that lie in one block each; the mean lies in such a block, too.

    None if an upload does not lie in one block, or has not exactly one floating-point dtype.
    """
    first, packed = uploads[0], [each for each in uploads if isinstance(each, PackedWeights)]
    if not isinstance(first, PackedWeights) or len(packed) < len(uploads):
        return None
    names, layout, dtype = first.names, first.layout, _float_of(first)
    if dtype is None or any((u.names, u.layout) != (names, layout) for u in packed):
        return None
    blocks = [upload.block.cpu() for upload in packed]
    mean = layout.empty()
    _mean_of_vectors([block.view(dtype) for block in blocks], shares, total, mean.view(dtype))
    for other in layout.dtypes - {dtype}:
        places = layout.elements(other)
        mean.view(other)[places] = _mean_of_vectors([b.view(other)[places] for b in blocks], shares)
    return PackedWeights(names, layout, layout.clear(mean))


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
    keys: list[str], uploads: list[Mapping[str, Tensor]], shares: list[float], total: float
) -> dict[str, Tensor]:
    """Return the weighted mean of tensors of one dtype over the uploads."""
    first = [uploads[0][key] for key in keys]
    shapes = [t.shape for t in first]
    vectors = []
    for upload in uploads:
        tensors = [upload[key] for key in keys]
        if [t.shape for t in tensors] != shapes or any(t.dtype != first[0].dtype for t in tensors):
            pairs = zip(keys, tensors, first, strict=True)
            key = next(k for k, t, f in pairs if (t.shape, t.dtype) != (f.shape, f.dtype))
            raise PayloadError(f"tensor {key!r} differs in shape or dtype between uploads")
        alone = len(tensors) == 1
        vectors.append(tensors[0].detach().cpu().reshape(-1) if alone else joined(tensors))
    result = _mean_of_vectors(vectors, shares, total)
    return dict(zip(keys, separated(result, first), strict=True))


def _mean_of_vectors(
    vectors: list[Tensor], shares: list[float], total: float = 1.0, out: Tensor | None = None
) -> Tensor:
    """Return the weighted mean of equally long vectors, in ``out`` if given.

    For integers the result is the maximum, and shares are unused.
    """
    if not vectors[0].is_floating_point():
        return _largest(vectors)
    result = torch.empty_like(vectors[0]) if out is None else out
    _in_ranges(partial(_fill, result, vectors, shares, total), len(result), len(vectors))
    return result


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest integers, or whether any boolean is true, element by element."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        torch.maximum(result, tensor, out=result)
    return result.clamp_(max=MOST_COUNTED // 2) if result.dtype == torch.int64 else result


def _in_ranges(work: Callable[[range], None], length: int, count: int) -> None:
    """Do work on ``count`` vectors, divided among the cores."""
    ranges = _ranges(length, count)
    if len(ranges) == 1:
        work(ranges[0])
    else:
        with ThreadPoolExecutor(len(ranges)) as pool:
            list(pool.map(work, ranges))


def _ranges(length: int, count: int) -> list[range]:
    """Divide vectors among the cores, where there is enough to do; each range begins a chunk."""
    cores = len(os.sched_getaffinity(0))
    threads = min(cores, MOST_THREADS, length * count // PER_THREAD) or 1
    share = max(1, -(-length // (threads * CHUNK))) * CHUNK
    return [range(i, min(i + share, length)) for i in range(0, length, share)] or [range(0)]


def _fill(
    result: Tensor, vectors: list[Tensor], shares: list[float], total: float, where: range
) -> None:
    """Put the weighted mean of a range of the vectors into the result."""
    scratch, sums = torch.empty(2, min(CHUNK, len(where)), dtype=torch.float64).unbind()
    for chunk in _chunks(where):
        mean = sums[: chunk.stop - chunk.start]
        _add(mean, scratch, [vector[chunk] for vector in vectors], shares, is_fresh=True)
        result[chunk] = mean if total == 1.0 else mean.div_(total)


def _add_range(
    sums: Tensor, vectors: list[Tensor], shares: list[float], is_fresh: bool, where: range
) -> None:
    """Add a range of weighted vectors to float64 sums."""
    scratch = torch.empty(min(CHUNK, len(where)), dtype=torch.float64)
    for chunk in _chunks(where):
        _add(sums[chunk], scratch, [vector[chunk] for vector in vectors], shares, is_fresh=is_fresh)


def _chunks(where: range) -> Iterator[slice]:
    for start in where[::CHUNK]:
        yield slice(start, min(start + CHUNK, where.stop))


def _add(
    sums: Tensor, scratch: Tensor, vectors: list[Tensor], shares: list[float], *, is_fresh: bool
) -> None:
    """Add weighted vectors to float64 sums; overwrite the sums if they are fresh."""
    x = scratch[: len(sums)]
    for number, (vector, share) in enumerate(zip(vectors, shares, strict=True)):
        if is_fresh and number == 0:
            sums.copy_(vector).mul_(share)
        else:
            sums.add_(x.copy_(vector), alpha=share)
