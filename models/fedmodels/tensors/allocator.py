"""Allocator settings for processes that move large payloads.

By default glibc maps every large block afresh and returns it at once; page faults then cost more
than the transport itself (two to three times, measured over loopback with 45 MB payloads). It also
gives each thread its own heap, and every heap keeps the memory that it once needed.
"""

from __future__ import annotations

import ctypes

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
