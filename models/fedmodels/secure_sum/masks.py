"""Masks: streams of uniform integers that are added to vectors modulo 2^bits."""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

Vector = NDArray[np.unsignedinteger]
"""Integers modulo 2^32 or 2^64, (n,), little-endian."""
CHUNK = 1 << 18
"""Bytes that are drawn at a time: they stay in the cache."""
_ZEROS = memoryview(bytes(CHUNK))


def add_mask(vector: Vector, key: bytes, sign: int) -> None:
    """Add the mask of a key to a vector in place, or subtract it where the sign is below 0."""
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    add, per = np.add if sign > 0 else np.subtract, CHUNK // vector.itemsize
    drawn = bytearray(min(CHUNK, vector.nbytes))
    for start in range(0, len(vector), per):
        part = vector[start : start + per]
        stream.update_into(_ZEROS[: part.nbytes], drawn)
        add(part, np.frombuffer(drawn, vector.dtype, len(part)), out=part)
