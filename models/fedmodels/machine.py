"""What this process may use of its machine: cores and memory, as a container limits them too."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from fedmodels.errors import ConfigError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CGROUP = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return on how many cores this process may run."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def free_bytes() -> int:
    """Return the memory that processes can still take here."""
    found = int(psutil.virtual_memory().available)
    with suppress(OSError, ValueError):  # no limit, or none of this kind
        limit, used = (
            int((CGROUP / f"memory.{of}").read_text("ascii")) for of in ("max", "current")
        )
        found = min(found, max(limit - used, 0))
    return found


def peak_rss_bytes() -> int:
    """Return the most memory this process ever had resident."""
    if resource is None:
        return int(psutil.Process().memory_info().peak_wset)
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak << 10


def require_linux() -> None:
    """Check that this is Linux.

    Raises:
        ConfigError: it is not; the line says what runs elsewhere.
    """
    if sys.platform != "linux":
        raise ConfigError(
            "a coordinator, and processes that fedtide starts, need Linux; elsewhere run fedcli "
            'join, fedcli predict, and fedtide.run(…, backend="inprocess")'
        )
