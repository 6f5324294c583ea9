"""Where uploads wait for the reduction: in memory up to a budget, then in unlinked mapped files."""

from __future__ import annotations

import mmap
import tempfile
import threading
from pathlib import Path


class Spool:
    """Hands out upload buffers; buffers of one size are used again."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self._directory = directory
        self._budget = budget_bytes
        self._in_memory = 0
        self._free: dict[int, list[bytearray]] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int) -> memoryview:
        """Return a writable buffer of ``size`` bytes, mapped from disk beyond the budget."""
        with self._lock:
            kept = self._free.get(size)
            if kept:
                return memoryview(kept.pop())
            fits = self._in_memory + size <= self._budget
            if not fits and self._drop_free():
                fits = self._in_memory + size <= self._budget
            if fits:
                self._in_memory += size
        return memoryview(bytearray(size)) if fits else self._mapped(size)

    def release(self, buffer: memoryview) -> None:
        """Take a buffer back; nobody may use it afterwards."""
        held = buffer.obj
        if isinstance(held, bytearray):
            with self._lock:
                self._free.setdefault(len(held), []).append(held)

    def _drop_free(self) -> bool:
        """Give back the memory of buffers nobody uses; their sizes are not asked for any more."""
        freed = sum(size * len(buffers) for size, buffers in self._free.items())
        self._free.clear()
        self._in_memory -= freed
        return freed > 0

    def _mapped(self, size: int) -> memoryview:
        self._directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory) as file:  # gone with its last mapping
            file.truncate(max(size, 1))
            return memoryview(mmap.mmap(file.fileno(), max(size, 1)))[:size]
