"""Named tensors that lie in one block, to be sent and averaged as one vector.

A net has a hundred small tensors. Making, reading and freeing each of them, for every upload and
every round, takes several times as long as all the arithmetic on their elements. A payload is the
bytes of its tensors in order, each at the next multiple of 64, zeros between them.

Memory for blocks the size of a net is used again and again (:func:`lease`). The allocator would
break up a returned block for small requests, and the next large block would need fresh memory: a
process that hosts 25 clients of ResNet-18 grew by more than a gigabyte. Fresh pages also cost as
much as the copying. A process that has begun to use a GPU takes pinned blocks, which are never
paged out, up to a limit: a GPU copies from and to them by itself, and any other memory has to be
copied twice.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNMENT = 64
Facts = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def align(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class BlockLayout:
    """Where tensors of these dtypes and shapes lie in their block.

    Attributes:
        facts: (dtype, shape) of each, in order.
        offsets: where each begins, in bytes.
        ends: where each ends.
        num_bytes: bytes of the tensors, without the gaps.
        size: bytes of the block, with the gaps between tensors.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts, self._hash = facts, hash(facts)
        self.offsets: list[int] = []
        self.num_bytes = self.size = 0
        self.ends: list[int] = []
        self._views: list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]] = []
        self._elements: dict[torch.dtype, Tensor] = {}
        for dtype, shape in facts:
            strides, count = _strides_and_count(shape)
            self._views.append((dtype, shape, strides, self.size // dtype.itemsize))
            self.offsets.append(self.size)
            self.ends.append(self.size + count * dtype.itemsize)
            self.num_bytes += count * dtype.itemsize
            self.size = align(self.ends[-1])
        self.dtypes = frozenset(dtype for dtype, _ in facts)

    def __eq__(self, other: object) -> bool:
        """Tell whether the same tensors lie at the same places."""
        return self is other or (isinstance(other, BlockLayout) and self.facts == other.facts)

    def __hash__(self) -> int:
        """Return the hash of the facts."""
        return self._hash

    @cached_property
    def _gaps(self) -> Tensor:
        """The places (g,) of the bytes between tensors."""
        begins = [*self.offsets[1:], self.size]
        gaps = [torch.arange(*gap) for gap in zip(self.ends, begins, strict=True)]
        return torch.cat(gaps)

    def elements(self, dtype: torch.dtype) -> Tensor:
        """Return the positions (n,) of a dtype's elements in a block viewed as that dtype."""
        if dtype not in self._elements:
            size = dtype.itemsize
            each = zip(self.facts, self.offsets, self.ends, strict=True)
            places = [torch.arange(a // size, b // size) for (d, _), a, b in each if d == dtype]
            self._elements[dtype] = torch.cat(places)
        return self._elements[dtype]

    def empty(self, device: torch.device | str = "cpu") -> Tensor:
        """Return a block (size,) of uint8 in which only the gaps between tensors are set."""
        if torch.device(device).type == "cpu":
            return self.clear(self._memory())
        return self.clear(torch.empty(self.size, dtype=torch.uint8, device=device))

    def copied(self, block: Tensor) -> Tensor:
        """Return a copy on the CPU of a block on any device."""
        return self._memory().copy_(block)

    def _memory(self) -> Tensor:
        return torch.from_numpy(np.frombuffer(lease(self.size), np.uint8))

    def clear(self, block: Tensor) -> Tensor:
        """Put zeros between the tensors of a block, and return it."""
        block[self._gaps.to(block.device)] = 0
        return block

    def is_clear(self, block: Tensor) -> bool:
        """Tell whether all gaps between the tensors of a block are zeros."""
        return not block[self._gaps.to(block.device)].any()

    def views(self, block: Tensor) -> list[Tensor]:
        """Return the tensors that lie in a block (size,) of uint8."""
        typed = {dtype: block.view(dtype) for dtype in self.dtypes}
        return [
            typed[dtype].as_strided(shape, strides, typed[dtype].storage_offset() + offset)
            for dtype, shape, strides, offset in self._views
        ]


def facts_of(tensors: Iterable[Tensor]) -> Facts:
    """Return (dtype, shape) of each tensor."""
    return tuple([(t.dtype, t.shape) for t in tensors])


@lru_cache(maxsize=256)
def layout_of(facts: Facts) -> BlockLayout:
    """Return the layout of tensors of these dtypes and shapes, in this order."""
    return BlockLayout(facts)


def _strides_and_count(shape: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Return the strides of a contiguous tensor, and how many elements it has."""
    strides, count = [], 1
    for n in reversed(shape):
        strides.append(count)
        count *= n
    return tuple(reversed(strides)), count


class PackedWeights(Mapping[str, Tensor]):
    """Read-only tensors by name; all are made when the first one is asked for.

    Attributes:
        names: names in the order of the block; ascending in blocks of this project.
        layout: the layout of the tensors in that order.
        block: the memory of the tensors, (layout.size,) of uint8.
    """

    def __init__(
        self, names: tuple[str, ...], layout: BlockLayout, block: Tensor, listed: Iterable[str] = ()
    ) -> None:
        """Name the tensors of a block; ``listed`` is the order of iteration."""
        self.names, self.layout, self.block = names, layout, block
        self._listed = tuple(listed) or names

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        by_name = dict(zip(self.names, self.layout.views(self.block), strict=True))
        return {name: by_name[name] for name in self._listed}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self.names)

    def items(self) -> ItemsView[str, Tensor]:
        """Return (name, tensor) of each."""
        return self._tensors.items()

    def is_like(self, other: PackedWeights) -> bool:
        """Tell whether the same tensors lie at the same places of both blocks."""
        return self.names == other.names and self.layout == other.layout

    def is_plainly_finite(self) -> bool:
        """Tell whether the block surely holds no NaN and no infinity, at one look at all of it."""
        can_tell = self.block.is_cpu and self.layout.dtypes.isdisjoint(HALF)
        return can_tell and are_plainly_finite(self.block.view(torch.float32))

    def copy(self) -> PackedWeights:
        """Return a copy on the CPU, in its own block."""
        return PackedWeights(self.names, self.layout, self.layout.copied(self.block), self._listed)

    def __repr__(self) -> str:
        """Show the tensors."""
        return f"PackedWeights({self._tensors!r})"


def names_and_layout(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, ...], BlockLayout]:
    """Return the names of tensors, ascending or as they are packed, and their layout."""
    if isinstance(tensors, PackedWeights):
        return tensors.names, tensors.layout
    names = tuple(sorted(tensors))
    return names, layout_of(facts_of(tensors[name] for name in names))


def packed(tensors: Mapping[str, Tensor], names: Iterable[str] = ()) -> PackedWeights:
    """Return tensors in one block on the CPU, by ascending names or in the order of ``names``."""
    order = tuple(names) or tuple(sorted(tensors))
    if isinstance(tensors, PackedWeights) and tensors.names == order:
        return tensors
    layout = layout_of(facts_of(tensors[name] for name in order))
    block = layout.empty()
    for name, place in zip(order, layout.views(block), strict=True):
        place.copy_(tensors[name].detach())
    return PackedWeights(order, layout, block, tensors)


def laid_like(like: PackedWeights, sources: Sequence[Mapping[str, Tensor]]) -> PackedWeights:
    """Return weights in the layout of others; zeros where there is none of that shape.

    Where several sources have a tensor, the first one counts.
    """
    first = next((source for source in sources if len(source)), None)
    if isinstance(first, PackedWeights) and first.is_like(like):
        return first
    block = torch.zeros(like.layout.size, dtype=torch.uint8)
    for name, place in zip(like.names, like.layout.views(block), strict=True):
        found = next((source[name] for source in sources if name in source), None)
        if found is not None and found.shape == place.shape:
            place.copy_(found)
    return PackedWeights(like.names, like.layout, block)


def num_bytes(tensors: Mapping[str, Tensor], prefix: str = "") -> int:
    """Return how many bytes tensors hold whose names begin with a prefix."""
    if isinstance(tensors, PackedWeights):
        return _num_bytes(tensors.names, tensors.layout, prefix)
    return sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith(prefix))


@lru_cache(maxsize=64)
def _num_bytes(names: tuple[str, ...], layout: BlockLayout, prefix: str) -> int:
    places = zip(names, layout.offsets, layout.ends, strict=True)
    return sum(end - begin for name, begin, end in places if name.startswith(prefix))


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


# --- memory of blocks -----------------------------------------------------------------------------


Block = npt.NDArray[np.uint8]
KEPT_BLOCKS, KEPT_SIZES = 2, 8
"""Limits: free blocks of one size, and sizes with free blocks; the latest sizes stay."""
PINNED_BYTES = 1 << 30
"""The most memory that this process takes away from all others' paging."""
_free: OrderedDict[tuple[int, bool], deque[Block]] = OrderedDict()
"""Blocks that nobody uses, by their size and by whether they are pinned."""
_lock = threading.RLock()  # a block may be gone while this thread holds the lock
_pinned_bytes = 0


def lease(size: int) -> memoryview:
    """Return memory (size,), to be used again when the last array or tensor in it is gone."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        kept = _kept(size, pinned=True)
        block = _taken(kept)
        block = _pinned(size) if block is None else block
        if block is not None:
            return lend(block, kept.append)
    kept = _kept(size, pinned=False)
    block = _taken(kept)
    return lend(np.empty(size, np.uint8) if block is None else block, kept.append)


def _taken(kept: deque[Block]) -> Block | None:
    try:
        return kept.pop()
    except IndexError:
        return None


def _kept(size: int, *, pinned: bool) -> deque[Block]:
    """Return the free blocks of a size and kind, which is the latest one now."""
    with _lock:
        kept = _free.setdefault((size, pinned), deque(maxlen=KEPT_BLOCKS))
        _free.move_to_end((size, pinned))
        if len(_free) > KEPT_SIZES:
            _free.popitem(last=False)
    return kept


def _pinned(size: int) -> Block | None:
    """Return a new pinned block; None beyond the limit, or where the system has none."""
    with _lock:
        if _pinned_bytes + size > PINNED_BYTES:
            return None
        _count_pinned(size)
    try:
        block: Block = pinned_tensor(size).numpy()
    except RuntimeError:
        _count_pinned(-size)
        return None
    weakref.finalize(block, _count_pinned, -size).atexit = False
    return block


def pinned_tensor(size: int) -> torch.Tensor:
    """Return bytes (size,) that a GPU reads and writes by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _count_pinned(size: int) -> None:
    global _pinned_bytes
    with _lock:
        _pinned_bytes += size


def forget_free_blocks() -> None:
    """Free the blocks that nobody uses now."""
    with _lock:
        _free.clear()


def lend(block: Block, give_back: Callable[[Block], object]) -> memoryview:
    """Return the memory of a block; call back when the last array or tensor in it is gone."""
    lease = block[:]
    weakref.finalize(lease, give_back, block).atexit = False
    return lease.data  # a view of the array itself would not keep it: NumPy refers to the block
