"""Memory for blocks the size of a net, used again and again.

The allocator would break up a returned block for small requests, and the next large block would
need fresh memory: a process that hosts 25 clients of ResNet-18 grew by more than a gigabyte. Fresh
pages also cost as much as the copying.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Block = npt.NDArray[np.uint8]
KEPT_BLOCKS, KEPT_SIZES = 2, 8
"""Limits: free blocks of one size, and sizes with free blocks; the latest sizes stay."""
_free: OrderedDict[int, deque[Block]] = OrderedDict()
_lock = threading.Lock()


def lease(size: int) -> memoryview:
    """Return memory (size,), to be used again when the last array or tensor in it is gone."""
    with _lock:
        kept = _free.setdefault(size, deque(maxlen=KEPT_BLOCKS))
        _free.move_to_end(size)
        if len(_free) > KEPT_SIZES:
            _free.popitem(last=False)
    try:
        block = kept.pop()
    except IndexError:
        block = np.empty(size, np.uint8)
    return lend(block, kept.append)


def forget_free_blocks() -> None:
    """Free the blocks that nobody uses now."""
    with _lock:
        _free.clear()


def lend(block: Block, give_back: Callable[[Block], object]) -> memoryview:
    """Return the memory of a block; call back when the last array or tensor in it is gone."""
    lease = block[:]
    weakref.finalize(lease, give_back, block).atexit = False
    return lease.data  # a view of the array itself would not keep it: NumPy refers to the block
