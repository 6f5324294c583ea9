"""What this process may use of its machine: cores and memory, as a container limits them too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0))


def free_bytes() -> int:
    """Return the memory that processes can still take here."""
    found = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no limit, or none of this kind
        limit, used = (int((CGROUP / f"memory.{of}").read_text()) for of in ("max", "current"))
        found = min(found, max(limit - used, 0))
    return found
