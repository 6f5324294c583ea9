"""Where uploads wait for the reduction: in memory up to a budget, then in unlinked mapped files."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np

from fedmodels.errors import PayloadTooLarge
from fedmodels.host.guarded import Guarded
from fedmodels.tensors.packed_weights import Block, lend


class Spool:
    """Hands out upload buffers, and uses a block again once no tensor refers to it.

    No caller returns a buffer. The tensors in a block keep it, and the block returns when the last
    tensor is gone. So a method may keep an upload's tensor in its state. A returned block waits for
    the next buffer of its size, since fresh pages cost as much as copying. When the budget is
    reached, blocks of sizes that are no longer asked for are freed.
    """

    _in_memory: Guarded[int] = Guarded("_lock")
    _free: Guarded[dict[int, list[Block]]] = Guarded("_lock")

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory, self.budget = directory, budget_bytes
        self._in_memory, self._free = 0, {}
        self._lock = threading.RLock()  # a block may come back while this thread holds the lock

    def allocate(self, size: int) -> memoryview:
        """Return a writable buffer of ``size`` bytes, mapped from disk beyond the budget.

        Raises:
            PayloadTooLarge: the disk is full.
        """
        with self._lock:
            kept = self._free.get(size)
            block = kept.pop() if kept else self._fresh(size)
        return lend(block, self._take_back)

    def _fresh(self, size: int) -> Block:
        """Return a new block, of memory where the budget allows it."""
        if self._in_memory + size > self.budget:
            unused = [block for blocks in self._free.values() for block in blocks]
            self._in_memory -= sum(block.size for block in unused if block.flags.owndata)
            self._free.clear()
        if self._in_memory + size > self.budget or size > self.budget // 2:
            return self._mapped(size)
        self._in_memory += size
        return np.empty(size, dtype=np.uint8)

    def _take_back(self, block: Block) -> None:
        with self._lock:
            blocks = self._free.setdefault(block.size, [])
            blocks.insert(len(blocks) if block.flags.owndata else 0, block)  # memory is taken first

    def _mapped(self, size: int) -> Block:
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory) as file:  # gone with its last mapping
            try:
                os.posix_fallocate(file.fileno(), 0, max(size, 1))  # a full disk shows here
            except OSError as error:
                raise PayloadTooLarge(
                    f"the coordinator has no room for it in {self._directory}: {error.strerror}"
                ) from None
            return np.frombuffer(mmap.mmap(file.fileno(), max(size, 1)), np.uint8)[:size]
