"""The weighted mean of uploads, the basis of every method's server half.

Weights are added as blocks (:class:`PackedWeights`). A block is read once as each floating-point
dtype that it holds: where it holds others, numbers of no meaning come out, and are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.host.machine import cores
from fedmodels.tensors.bundle import Bundle, Weights
from fedmodels.tensors.packed_weights import (
    BlockLayout,
    PackedWeights,
    layout_of,
    num_bytes,
    packed,
)

CHUNK = 1 << 15
"""Elements summed at a time: two float64 buffers of this size stay in a core's cache."""
MAX_INTEGER = 10**12
"""Limit of an integer in an upload, such as of batches counted. What is sent down is at most half
of it: clients count on from there."""
PACKED_AT_ONCE = 1 << 22
"""Bytes of uploads that are packed before they are added."""
PER_THREAD, MAX_THREADS = 1 << 21, 8
"""Elements that justify one more thread, and the most threads: more would wait for memory."""


def weighted_mean(
    uploads: Iterable[Mapping[str, Tensor] | Bundle],
    coefficients: Sequence[float],
    total: float = 1.0,
) -> Weights:
    """Return the weighted mean of equally shaped weights, tensor by tensor.

    ``sum_i p_i x_i / total`` in float64 and in the given order, rounded once to the dtype of the
    inputs. Equal inputs of float32 or narrower come out as themselves, and a coefficient of 1 among
    zeros returns that input. Uploads may be zero-copy views. Of uploads in blocks of one layout the
    result and small buffers are all the memory it needs; others are packed one after the other.

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
    if not inputs[0]:
        for key in min(inputs, key=lambda weights: not weights):
            raise PayloadError(f"tensor {key!r} is in some uploads only")
        return {}
    first, alike = inputs[0], [w for w in inputs if isinstance(w, PackedWeights)]
    if len(alike) == len(inputs) and all(w.is_like(alike[0]) for w in alike):
        return _mean_of_blocks(alike, shares, total)
    running, at_once = RunningMean(), max(1, PACKED_AT_ONCE // max(1, num_bytes(first)))
    for begin in range(0, len(inputs), at_once):
        some = slice(begin, begin + at_once)
        running.add(inputs[some], shares[some])
    running.total = total
    found = running.mean()
    assert isinstance(found, PackedWeights), "something was added"
    return PackedWeights(found.names, found.layout, found.block, first)


def mean_of_vectors(
    vectors: Sequence[Tensor],
    shares: Sequence[float],
    total: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Return the weighted mean of floating-point vectors (n,) on the CPU, in ``out`` if given.

    Raises:
        PayloadError: no share is above 0, or the vectors differ in length.
    """
    pairs = [(vector, share) for vector, share in zip(vectors, shares, strict=True) if share != 0]
    if len({len(vector) for vector, _ in pairs}) != 1:
        raise PayloadError("vectors to average differ in length, or none has a share above 0")
    result = torch.empty_like(pairs[0][0]) if out is None else out
    held, parts = [vector for vector, _ in pairs], [share for _, share in pairs]
    _in_ranges(partial(_fill, result, held, parts, total), len(result), len(held))
    return result


class RunningMean:
    """The weighted mean of uploads that are added a few at a time and not kept.

    Its bits are those of ``weighted_mean`` over all uploads in the same order, with the sum of the
    coefficients as total. It holds two or three times the bytes of one upload.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._form: tuple[tuple[str, ...], BlockLayout] | None = None
        """Names and layout of the uploads."""
        self._sums: dict[torch.dtype, Tensor] = {}
        """Of whole blocks, in float64, by the dtype that they are read as."""
        self._largest: dict[torch.dtype, Tensor] = {}

    def add(self, uploads: Sequence[Mapping[str, Tensor]], coefficients: Sequence[float]) -> None:
        """Add uploads of one net, but for coefficient 0; PayloadError if keys or shapes differ."""
        pairs = [(u, float(p)) for u, p in zip(uploads, coefficients, strict=True) if p != 0]
        if not pairs:
            return
        if self._form is None:
            first = packed(pairs[0][0])
            self._form = first.names, first.layout
        names, layout = self._form
        blocks, shares = [_block(u, names, layout) for u, _ in pairs], [p for _, p in pairs]
        for dtype in layout.dtypes:
            if not dtype.is_floating_point:
                parts = [block.view(dtype)[layout.elements(dtype)] for block in blocks]
                known = self._largest.get(dtype)
                self._largest[dtype] = _largest(parts if known is None else [*parts, known])
                continue
            vectors, is_fresh = [block.view(dtype) for block in blocks], dtype not in self._sums
            if is_fresh:
                self._sums[dtype] = torch.empty(len(vectors[0]), dtype=torch.float64)
            work = partial(_add_range, self._sums[dtype], vectors, shares, is_fresh)
            _in_ranges(work, len(vectors[0]), len(vectors))
        self.total += sum(shares)

    def mean(self) -> Weights | None:
        """Return the mean of the added uploads; None if there are no uploads.

        Call it once, at the end: it divides the sums in place.
        """
        if self._form is None:
            return None
        names, layout = self._form
        means = {dtype: sums.div_(self.total) for dtype, sums in self._sums.items()}
        return PackedWeights(names, layout, _laid_out(layout, {**means, **self._largest}))

    def sums(self) -> Weights | None:
        """Return the weighted sums so far; None if there are no uploads.

        Floating-point tensors are in float64; integers are the maximum, booleans "any".
        """
        if self._form is None:
            return None
        names, layout = self._form
        facts = [(torch.float64 if d.is_floating_point else d, s) for d, s in layout.facts]
        wide = layout_of(tuple(facts))
        found, largest = wide.empty(), _laid_out(layout, self._largest)
        views = wide.views(found), layout.views(largest)
        for (dtype, _), offset, place, integers in zip(
            layout.facts, layout.offsets, *views, strict=True
        ):
            begin = offset // dtype.itemsize
            source = self._sums.get(dtype, integers)
            if dtype in self._sums:
                source = source[begin : begin + place.numel()].view(place.shape)
            place.copy_(source)
        return PackedWeights(names, wide, found)


def _block(upload: Mapping[str, Tensor], names: tuple[str, ...], layout: BlockLayout) -> Tensor:
    """Return the block of an upload with these tensors, in this order; PayloadError of others."""
    if isinstance(upload, PackedWeights) and (upload.names, upload.layout) == (names, layout):
        return upload.block.cpu()
    if upload.keys() != {*names}:
        key = min(upload.keys() ^ {*names})
        raise PayloadError(f"tensor {key!r} is in some uploads only")
    for name, facts in zip(names, layout.facts, strict=True):
        if (upload[name].dtype, upload[name].shape) != facts:
            raise PayloadError(f"tensor {name!r} differs in shape or dtype between uploads")
    return packed(upload, names).block


def _mean_of_blocks(
    uploads: Sequence[PackedWeights], shares: list[float], total: float
) -> PackedWeights:
    """Return the mean of blocks of one layout."""
    names, layout = uploads[0].names, uploads[0].layout
    blocks, found = [upload.block.cpu() for upload in uploads], dict[torch.dtype, Tensor]()
    block, is_alone = layout.empty(), sum(d.is_floating_point for d in layout.dtypes) == 1
    for dtype in layout.dtypes:
        vectors = [each.view(dtype) for each in blocks]
        if dtype.is_floating_point:
            out = block.view(dtype) if is_alone else None
            found[dtype] = mean_of_vectors(vectors, shares, total, out)
        else:
            found[dtype] = _largest([vector[layout.elements(dtype)] for vector in vectors])
    return PackedWeights(names, layout, _laid_out(layout, found, block))


def _laid_out(
    layout: BlockLayout, found: Mapping[torch.dtype, Tensor], block: Tensor | None = None
) -> Tensor:
    """Return a block with these numbers: floats as whole blocks, others by their elements.

    Numbers of the only floating-point dtype may lie in ``block`` already.
    """
    block = layout.empty() if block is None else block
    is_alone = sum(dtype.is_floating_point for dtype in found) == 1
    for dtype in sorted(found, key=lambda dtype: not dtype.is_floating_point):  # floats first
        view, numbers = block.view(dtype), found[dtype]
        if dtype.is_floating_point and is_alone:  # no list of places: it takes 8 bytes an element
            if numbers.data_ptr() != view.data_ptr():
                view.copy_(numbers)
            continue
        places = layout.elements(dtype)
        view[places] = numbers[places].to(dtype) if dtype.is_floating_point else numbers
    return layout.clear(block)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest integers, or whether any boolean is true, element by element."""
    result = tensors[0].clone()
    for tensor in tensors[1:]:
        torch.maximum(result, tensor, out=result)
    return result.clamp_(max=MAX_INTEGER // 2) if result.dtype == torch.int64 else result


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
    threads = min(cores(), MAX_THREADS, length * count // PER_THREAD) or 1
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
