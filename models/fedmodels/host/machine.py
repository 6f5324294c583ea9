"""This process on its machine: its cores and memory, how it keeps memory, and how it ends.

A container limits cores and memory too. By default glibc maps every large block afresh and returns
it at once; page faults then cost more than the transport itself (two to three times, measured over
loopback with 45 MB payloads). It also gives each thread its own heap, and every heap keeps the
memory that it once needed.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import threading
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


def tells_traces() -> bool:
    """Tell whether this process's environment asks for traces, by OpenTelemetry's own variables."""
    asked = os.environ.get
    endpoint = asked("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or asked("OTEL_EXPORTER_OTLP_ENDPOINT")
    is_off = asked("OTEL_SDK_DISABLED", "").lower() == "true"
    exporters = (asked("OTEL_TRACES_EXPORTER") or "otlp").split(",")
    return bool(endpoint) and not is_off and "otlp" in map(str.strip, exporters)


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
    """Check that this is Linux; ConfigError says what runs elsewhere."""
    if sys.platform != "linux":
        raise ConfigError(
            "a coordinator, and processes that fedtide starts, need Linux; elsewhere run fedcli "
            'join, fedcli predict, and fedtide.run(…, backend="inprocess")'
        )


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGE = 1 << 30


def keep_large_blocks() -> bool:
    """Keep freed large blocks on one heap for all threads; call it before threads start.

    Return False if the C library has no such setting.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # Windows has no such library
        return False
    settings = {
        _M_MMAP_THRESHOLD: _LARGE,
        _M_TRIM_THRESHOLD: _LARGE,
        _M_TOP_PAD: 16 << 20,
        _M_ARENA_MAX: 1,
    }
    taken = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(taken)


def give_back_free_pages() -> bool:
    """Return whole free pages to the system; False if the C library cannot.

    Call it once after a start: building a net to copy it leaves holes that are too small for blocks
    of a net's size.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError, TypeError):  # Windows has no such library
        return False


_signals: list[int] = []
"""The signal that asked this process to end, once it has come."""


def end_on_sigterm() -> None:
    """Let SIGTERM end the process with its own exit status, 143; a second one changes nothing.

    A loop that reads files or trains calls :func:`end_if_signalled` each time round, and so does
    whoever takes an error for one of its own.
    """
    signal.signal(signal.SIGTERM, _end_by_signal)


def set_by_sigterm() -> threading.Event:
    """Return an event that SIGTERM sets from now on, in place of ending the process.

    Setting takes a lock. A second signal that comes meanwhile changes nothing: it would wait for
    the lock that the first one's handler holds.
    """
    event, told = threading.Event(), list[int]()

    def asked(number: int, _: object) -> None:
        if not told:
            told.append(number)
            event.set()

    signal.signal(signal.SIGTERM, asked)
    return event


def end_if_signalled() -> None:
    """Raise SystemExit if SIGTERM has come already, and a library dropped what it raised.

    torch does so where it asks an object for its shape: the error becomes a ValueError, and a file
    that is being read looks damaged.
    """
    if _signals:
        raise SystemExit(128 + _signals[0])


def _end_by_signal(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    _signals.append(number)
    raise SystemExit(128 + number)
