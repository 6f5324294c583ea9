"""What this process may use of its machine: cores and memory, as a container limits them too."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

import psutil

from fedmodels.errors import ConfigError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

CGROUP = Path("/sys/fs/cgroup")
"""Where Linux shows control groups, whose limits are those of a container."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""Says in which group of each hierarchy this process is."""


def cores() -> int:
    """Return on how many cores this process may run, and has time of; a part of one counts."""
    affinity = getattr(os, "sched_getaffinity", None)
    mine = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, math.ceil(min(mine, _quota(CGROUP))))


@cache
def _quota(root: Path) -> float:
    """Return how many cores' time the groups of this process have; infinite without a limit."""
    found = math.inf
    for group in _groups("cpu", root):
        given = _words(group / "cpu.max") or (
            _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        )
        with suppress(ValueError):  # "max", or a hierarchy without this limit
            quota, period = map(int, given)
            found = min(found, quota / period) if quota > 0 and period > 0 else found
    return found


def free_bytes() -> int:
    """Return the memory that processes can still take here.

    What the system takes back when it is short counts as free: of the cache of files what is read
    no more, and half of what is read again and again.
    """
    found = int(psutil.virtual_memory().available)
    for group in _groups("memory", CGROUP):
        for limits, used, stat in MEMORY_FILES:
            given = [word for limit in limits for word in _words(group / limit) if word != "max"]
            with suppress(ValueError):  # no limit, or none of this kind
                left = min(map(int, given)) - int(*_words(group / used))
                found = min(found, max(left + _reclaimable(group, stat), 0))
    return found


MEMORY_FILES = (
    (("memory.max", "memory.high"), "memory.current", ""),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
)
"""Limits, use, and how the lines of ``memory.stat`` begin: of version 2 and of version 1."""


def _reclaimable(group: Path, prefix: str) -> int:
    """Return the bytes of a group's cache of files that the system would take back."""
    words = iter(_words(group / "memory.stat"))
    stat = dict(zip(words, words, strict=False))
    idle, active = (int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return idle + active // 2


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the groups whose limits hold for this process, and each group that they lie in.

    A container may see its own group as the top of the tree, under another name than the one that
    the process is told; so a group that is not there is passed over.
    """
    for line in _lines(OWN_GROUPS) or ["0::/", f"1:{controller}:/"]:
        _, controllers, inside = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        tops = [root / controllers, root / controller] if controllers else [root, root / "unified"]
        own = PurePosixPath(inside.lstrip("/"))
        yield from {top / group: None for top in tops for group in (own, *own.parents)}


def _words(file: Path) -> list[str]:
    return [word for line in _lines(file) for word in line.split()]


def _lines(file: Path) -> list[str]:
    """Return the lines of a file of the system; none where it is not there."""
    try:
        return file.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


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
