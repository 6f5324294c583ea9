"""Allocator settings for processes that move large payloads.

By default glibc maps every large block afresh and gives it back at once; page faults then cost more
than the transport itself (two to three times, measured over loopback with 45 MB payloads). And it
gives threads heaps of their own, each of which keeps what it once needed.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_LARGE = 1 << 30


def keep_large_blocks() -> bool:
    """Keep freed large blocks on the heap, one for all threads; call it before threads start.

    False where the C library cannot be told so.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
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
    """Return whole free pages to the system; False where the C library cannot.

    For once after a start: a net that was built to be copied leaves holes that no block of a net's
    size fits into.
    """
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False
