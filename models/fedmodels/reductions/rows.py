"""The uploads of several clients as rows of one matrix, read a block of columns at a time.

Uploads may lie in mapped files. Blocks have a fixed width, and what is added over blocks is added
in their order: the bits do not depend on how many threads read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from fedmodels.errors import PayloadError
from fedmodels.host.machine import cores
from fedmodels.tensors.bundle import Weights
from fedmodels.tensors.packed_weights import BlockLayout, PackedWeights, laid_like, packed
from fedmodels.tensors.weighted_mean import weighted_mean

Numbers = NDArray[np.floating]
BLOCK = 1 << 19
"""Elements of all rows that a thread holds at a time: 4 MiB of float64."""
MAX_THREADS = 8
WHOLE = 1e-12
"""A sum of shares that is nearer to 1 than this is 1 up to rounding."""
Found = TypeVar("Found")


@dataclass(frozen=True)
class ColumnBlock:
    """Some columns of all rows: places of a block, read as one dtype."""

    dtype: torch.dtype
    where: slice
    own: Tensor | None  # (c,) int64
    """The places within that hold elements of this dtype; None if all do."""


class Rows:
    """The floating-point numbers of uploads of one net."""

    def __init__(self, uploads: Sequence[Weights], threads: int | None = None) -> None:
        """Take uploads as rows, on as many threads as cores; PayloadError if tensors differ."""
        self.uploads, self._threads = [packed(one, sorted(one)) for one in uploads], threads
        self.first, self._listed = self.uploads[0], uploads[0]
        if not all(one.is_like(self.first) for one in self.uploads):
            raise PayloadError("uploads to reduce differ in names, shapes or dtypes")
        self._blocks = [one.block.cpu() for one in self.uploads]
        self.columns = [
            columns
            for dtype in sorted(self.first.layout.dtypes, key=str)
            if dtype.is_floating_point
            for columns in _columns(self.first.layout, dtype, _width(len(uploads)))
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    def only(self, chosen: Sequence[int]) -> Rows:
        """Return some of the rows."""
        if len(chosen) == len(self):
            return self
        return Rows([self.uploads[number] for number in chosen], self._threads)

    def read(
        self, columns: ColumnBlock, dtype: torch.dtype, centre: Weights | None = None
    ) -> Numbers:
        """Return some columns (n, c) in a dtype that NumPy knows, less the centre if there is one.

        Minus zero is read as zero.
        """
        found = torch.empty(
            len(self._blocks), columns.where.stop - columns.where.start, dtype=dtype
        )
        for row, block in zip(found, self._blocks, strict=True):
            row.copy_(block.view(columns.dtype)[columns.where])
        if centre is not None:
            found -= laid_like(self.first, [centre]).block.cpu().view(columns.dtype)[columns.where]
        found = found if columns.own is None else found[:, columns.own]
        return found.add_(0.0).numpy()

    def gram(self, centre: Weights) -> Numbers:
        """Return the inner products (n, n) of the rows' differences from a centre, in float64."""
        size, kept = len(self), laid_like(self.first, [centre])
        total = np.zeros((size, size))
        with _blas().limit(limits=1, user_api="blas"):
            for part in self._each(partial(self._products, kept)):
                total += part
        return total

    def _products(self, centre: PackedWeights, columns: ColumnBlock) -> Numbers:
        rows = self.read(columns, torch.float64, centre)
        return rows @ rows.T

    def by_column(
        self, make: Callable[[Numbers], tuple[Numbers, Numbers]], mixing: Numbers | None = None
    ) -> tuple[Weights, Numbers]:
        """Return what a function makes of each block of columns, and a figure of each row.

        Args:
            make: takes (n, c), and returns (c,) and the figures (n,), which are added up.
            mixing: (m, n) makes the rows that it takes; None leaves them as they are.
        """
        block = self.first.layout.empty()
        figures = np.zeros(len(self) if mixing is None else len(mixing))
        with _blas().limit(limits=1, user_api="blas"):
            for found in self._each(partial(self._made, block, make, mixing)):
                figures += found
        views = dict(zip(self.first.names, self.first.layout.views(block), strict=True))
        whole = [name for name, view in views.items() if not view.is_floating_point()]
        if whole:
            counters = [{name: one[name] for name in whole} for one in self.uploads]
            for name, largest in weighted_mean(counters, [1.0] * len(self)).items():
                views[name].copy_(largest)
        self.first.layout.clear(block)
        return self._listed_as_came(block), figures

    def sum(self, parts: Numbers, centre: Weights) -> Weights:
        """Return ``centre + sum_i parts_i (x_i - centre)``.

        The centre has no part in it, and is not read, where parts sum to 1.
        """
        total = float(parts.sum())
        if abs(1 - total) < WHOLE:
            found = weighted_mean(self.uploads, parts.tolist(), total)
        else:
            found = weighted_mean(
                [*self.uploads, laid_like(self.first, [centre])], [*parts.tolist(), 1 - total]
            )
        return self._listed_as_came(packed(found).block)

    def _listed_as_came(self, block: Tensor) -> PackedWeights:
        return PackedWeights(self.first.names, self.first.layout, block, self._listed)

    def _made(
        self,
        block: Tensor,
        make: Callable[[Numbers], tuple[Numbers, Numbers]],
        mixing: Numbers | None,
        columns: ColumnBlock,
    ) -> Numbers:
        narrow = mixing is None and columns.dtype.itemsize <= 4
        rows = self.read(columns, torch.float32 if narrow else torch.float64)
        values, figures = make(rows if mixing is None else mixing @ rows)
        place = block.view(columns.dtype)[columns.where]
        kept = torch.from_numpy(np.ascontiguousarray(values))
        if columns.own is None:
            place.copy_(kept)
        else:
            place[columns.own] = kept.to(place.dtype)
        return figures

    def _each(self, work: Callable[[ColumnBlock], Found]) -> Iterator[Found]:
        """Yield what work makes of each block of columns, in their order."""
        threads = min(self._threads or cores(), MAX_THREADS, len(self.columns))
        if threads <= 1:
            yield from map(work, self.columns)
            return
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, self.columns)


def _width(rows: int) -> int:
    """Return how many columns of so many rows are read at a time."""
    return max(256, BLOCK // max(rows, 16))


@lru_cache(maxsize=64)
def _columns(layout: BlockLayout, dtype: torch.dtype, width: int) -> list[ColumnBlock]:
    """Return the blocks of columns of one dtype; blocks without an element of it are left out."""
    length = layout.size // dtype.itemsize
    own = torch.zeros(length, dtype=torch.bool)
    own[layout.elements(dtype)] = True
    found = []
    for start in range(0, length, width):
        where = slice(start, min(start + width, length))
        if bool(own[where].any()):
            places = None if bool(own[where].all()) else own[where].nonzero().flatten()
            found.append(ColumnBlock(dtype, where, places))
    return found


@cache
def _blas() -> ThreadpoolController:
    """Return the limiter of NumPy's threads: the bits of a product depend on their number."""
    np.ones((2, 2)) @ np.ones((2, 2))
    return ThreadpoolController()
