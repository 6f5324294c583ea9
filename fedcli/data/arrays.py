"""Reading array files, never a pickle, with one line about what is wrong with them."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedmodels.errors import DataError, reason_of

IntArray = NDArray[np.int64]
DAMAGED = (
    OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error, TypeError, OverflowError,
    SyntaxError, TokenError, RecursionError, MemoryError, IndexError, struct.error,
)  # fmt: skip
"""What numpy and Pillow raise for a damaged file; numpy parses a header as Python's expressions."""


def _reason_of(error: Exception) -> str:
    """Return why numpy cannot read a file, without its advice to load what is pickled."""
    if "pickle" in str(error):
        return "it is no file of numpy, or holds objects; give an array of numbers"
    return reason_of(error)


def read_array(path: Path, mmap: bool = False) -> NDArray[Any]:
    """Read an ``.npy`` file, memory-mapped if ``mmap``.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        out: NDArray[Any] = np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except DAMAGED as error:
        raise DataError(f"{path} cannot be read: {_reason_of(error)}") from None
    return out


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read every array of an ``.npz`` file.

    Raises:
        DataError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (*DAMAGED, AttributeError) as error:  # an .npy under that name
        raise DataError(f"{path} cannot be read: {_reason_of(error)}") from None
