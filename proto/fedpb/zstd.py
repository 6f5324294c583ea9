"""zstd for the bytes of a frame: an extra, and bounded before memory is taken.

A receiver knows how many bytes a frame has before it decompresses the frame, and where they
belong. So it decompresses into that place, and never asks the compressed bytes how many they are.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from fedmodels.errors import ConfigError, PayloadError, pip_line

LEVEL = 1
"""On differences of float16 and int8, level 3 saves at most 0.02 more, and takes up to ten times
as long."""
MAX_WINDOW = 4 << 20
"""Memory that a sender may make a receiver look back on; frames are smaller."""
WORTH = 0.95
"""A frame is compressed if it becomes this much smaller."""


def check_installed() -> None:
    """Check that compression is there for a run that asks for it.

    Raises:
        ConfigError: says how to install it.
    """
    if importlib.util.find_spec("zstandard") is None:
        raise ConfigError(f"[compression] zstd = true needs a package more: {pip_line('zstd')}")


def _zstandard() -> Any:
    """Return the library; it is loaded when the first frame needs it."""
    check_installed()
    return importlib.import_module("zstandard")


def compressed(data: bytes) -> bytes | None:
    """Return fewer bytes for these; None where that is not worth it."""
    found: bytes = _zstandard().ZstdCompressor(level=LEVEL).compress(data)
    return found if len(found) < WORTH * len(data) else None


def decompress_into(data: memoryview, place: memoryview) -> None:
    """Decompress bytes into a place that they must fill.

    Raises:
        PayloadError: the bytes are not what ``compressed`` writes, or do not fill the place; or the
            library is missing, so that nobody can have asked for compressed bytes.
    """
    try:
        library, filled = _zstandard(), 0
    except ConfigError:
        raise PayloadError("a frame is compressed with zstd, which was not requested") from None
    try:
        reader = library.ZstdDecompressor(max_window_size=MAX_WINDOW).stream_reader(data)
        while filled < len(place) and (count := reader.readinto(place[filled:])):
            filled += count
        more = bool(reader.read(1))
    except library.ZstdError as error:
        raise PayloadError(f"a frame cannot be decompressed: {error}") from None
    if more or filled < len(place):
        what = "more" if more else f"{filled}"
        raise PayloadError(f"a frame holds {what} bytes, not the {len(place)} it states")
