"""Memory for blocks the size of a net, used again and again.

The allocator would break up a returned block for small requests, and the next large block would
need fresh memory: a process that hosts 25 clients of ResNet-18 grew by more than a gigabyte. Fresh
pages also cost as much as the copying.

A process that has begun to use a GPU takes pinned blocks, which are never paged out, up to a limit:
a GPU copies from and to them by itself, and any other memory has to be copied twice.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

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
