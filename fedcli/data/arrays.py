"""Reading array files, never a pickle, and one line about what is wrong with arrays."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from threading import Lock
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedmodels.data_description import ProblemFile
from fedmodels.errors import DataError, reason_of

IntArray = NDArray[np.int64]
DAMAGED = (
    OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error, TypeError, OverflowError,
    SyntaxError, TokenError, RecursionError, MemoryError, IndexError, struct.error,
)  # fmt: skip
"""What numpy and Pillow raise for a damaged file; numpy parses a header as Python's expressions."""

_PARSING = Lock()
"""Held while numpy parses a header. Python 3.11 raises SystemError (``AST constructor recursion
depth mismatch``) where a thread parses while a finalizer interrupts another that does."""


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
        with _PARSING:
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
        with path.open("rb") as file, _PARSING, np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (*DAMAGED, AttributeError) as error:  # an .npy under that name
        raise DataError(f"{path} cannot be read: {_reason_of(error)}") from None


def check_examples(
    inputs: object, labels: object, x: NDArray[Any], y: NDArray[Any], problem: ProblemFile
) -> None:
    """Check dtypes, shapes and the range of labels.

    Args:
        inputs: where the inputs come from, for error lines.
        labels: where the labels come from.
        x: inputs (n, *input_shape).
        y: labels (n,).
        problem: what they must fit.

    Raises:
        DataError: says what is wrong with which of them.
    """
    if x.dtype not in (np.uint8, np.float32):
        raise DataError(f"{inputs}: inputs are {x.dtype}; expected uint8 or float32")
    if x.shape[1:] != problem.input_shape:
        raise DataError(
            f"{inputs}: inputs have shape {list(x.shape[1:])}; expected {list(problem.input_shape)}"
        )
    if y.dtype != np.int64 or y.shape != (len(x),):
        raise DataError(
            f"{labels}: labels are {y.dtype} {list(y.shape)}; expected int64 [{len(x)}]"
        )
    if len(y) and (y.min() < 0 or y.max() >= problem.num_classes):
        raise DataError(
            f"{labels}: labels go from {y.min()} to {y.max()}; "
            f"expected 0 to {problem.num_classes - 1}"
        )
