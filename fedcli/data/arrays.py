"""Arrays of examples: read from files, never a pickle, narrowed to float32, and checked."""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from tokenize import TokenError
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from fedmodels.console.printable import bytes_text
from fedmodels.errors import DataError, reason_of
from fedmodels.facts.data_description import SCALES, ProblemFile, channel_axis
from fedmodels.host.files import open_regular
from fedmodels.host.machine import free_bytes

IntArray = NDArray[np.int64]
Inputs = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.float32] | NDArray[np.float64]
Labelled = tuple[Inputs, IntArray]
"""Inputs (n, *input_shape) and labels (n,)."""
DAMAGED = (
    OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error, TypeError, OverflowError,
    SyntaxError, TokenError, RecursionError, MemoryError, IndexError, struct.error,
)  # fmt: skip
"""What numpy and Pillow raise for a damaged file; numpy parses a header as Python's expressions."""

_PARSING = Lock()
"""Held while numpy parses a header. Python 3.11 raises SystemError (``AST constructor recursion
depth mismatch``) where a thread parses while a finalizer interrupts another that does."""


def check_memory(wanted: float, what: str, advice: str) -> None:
    """Raise DataError, with the advice, unless memory is free for so many bytes of arrays."""
    if wanted > (free := free_bytes()):
        raise DataError(
            f"{what} take {bytes_text(wanted)} of memory, and {bytes_text(free)} are free: {advice}"
        )


AT_ONCE = 256
"""Images after which memory is looked at anew."""
LOST = 1e-3
"""Part of a channel's deviation by which float32 may change a number."""


def read_array(path: Path, mmap: bool = False) -> NDArray[Any]:
    """Read an ``.npy`` file, memory-mapped if ``mmap``; DataError if it is missing or damaged."""
    try:
        with open_regular(path) as file, _PARSING:
            if not mmap:
                return np.lib.format.read_array(file, allow_pickle=False)
            # numpy resolves a Path, and asks its subclass for leave at each step of a calculation
            return np.asarray(np.lib.format.open_memmap(str(path), mode="r"))
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except DAMAGED as error:
        raise DataError(f"{path} cannot be read: {_reason_of(error)}") from None


_OF_OTHERS = ("pickle", "Object arrays", "Python objects", "magic string")
"""Words of numpy about a file that is none of its own, or holds objects."""


def _reason_of(error: Exception) -> str:
    """Return why numpy cannot read a file, without its advice to load what is pickled."""
    if any(words in str(error) for words in _OF_OTHERS):
        return "it is no file of numpy, or holds objects; give an array of numbers"
    return reason_of(error)


def read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read every array of an ``.npz`` file; raise DataError if it is missing or damaged."""
    try:
        with open_regular(path) as file, _PARSING, np.load(file, allow_pickle=False) as arrays:
            return {key: arrays[key] for key in arrays.files}
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None
    except (*DAMAGED, AttributeError) as error:  # an .npy under that name
        raise DataError(f"{path} cannot be read: {_reason_of(error)}") from None


def strata(y: NDArray[Any]) -> IntArray:
    """Return what examples are counted and cut by (n,): labels; 0 for all with targets (n, T)."""
    return np.zeros(len(y), dtype=np.int64) if y.ndim == 2 else y


def as_numbers(x: NDArray[Any]) -> NDArray[Any]:
    """Return inputs of any type of numbers as bytes, float32 or, to be narrowed, float64."""
    return x if x.dtype in (np.uint8, np.float32) else x.astype(np.float64)


def narrowed(train: NDArray[Any], test: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs (n, …) and (m, …) of float64 as float32, unless that changes one too much.

    :data:`LOST` says how much. Time stamps of a day differ by parts of a second and lie beyond 1e9,
    where float32 has every 128th whole number only. Such numbers stay, and are narrowed after they
    are normalised. So do inputs of another type.
    """
    if train.dtype != np.float64:
        return train, test
    axes = _but_channels(train)
    spread = train.std(axis=axes)
    found = train.astype(np.float32), test.astype(np.float32)
    for wide, narrow in zip((train, test), found, strict=True):
        change = np.abs(wide - narrow).max(axis=axes, initial=0)
        if ((change > LOST * spread) & (spread > 0)).any():
            return train, test
    return found


def channel_moments(
    x: NDArray[Any], scale: float, levels: Sequence[bool] = ()
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation per channel of inputs (n, *input_shape) over ``scale``; 1 for 0.

    They are 0 and 1 for channels that are so told, (C,): those stay as they are.
    """
    others = _but_channels(x)
    mean = x.mean(axis=others, dtype=np.float64) / scale
    std = x.std(axis=others, dtype=np.float64) / scale
    std = np.where(std > 0, std, 1.0)
    if any(levels):
        mean, std = np.where(levels, 0.0, mean), np.where(levels, 1.0, std)
    return tuple(mean.tolist()), tuple(std.tolist())


def content_hashes(x: NDArray[Any]) -> NDArray[np.uint64]:
    """Return a hash of the content of each input (n, …), without its label (n,).

    Numbers count as float32, so that the type of the whole array does not matter.
    """
    found = np.empty(len(x), dtype=np.uint64)
    for start in range(0, len(x), AT_ONCE):
        with np.errstate(over="ignore"):
            rows = np.asarray(x[start : start + AT_ONCE]).astype("<f4") + np.float32(0)  # no -0.0
        for place, row in enumerate(rows, start):
            digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
            found[place] = int.from_bytes(digest, "little")
    return found


def _but_channels(x: NDArray[Any]) -> tuple[int, ...]:
    """Return every axis of inputs (n, *input_shape) but that of their channels."""
    channels = 1 + channel_axis(x.shape[1:])
    return tuple(axis for axis in range(x.ndim) if axis != channels)


def check_examples(
    inputs: object, labels: object, x: NDArray[Any], y: NDArray[Any], problem: ProblemFile
) -> None:
    """Check inputs (n, *input_shape) and labels (n,); DataError says which of them is wrong."""
    if x.dtype.name not in SCALES:
        raise DataError(f"{inputs}: inputs are {x.dtype}; expected {', '.join(SCALES)}")
    if x.shape[1:] != problem.input_shape:
        raise DataError(
            f"{inputs}: inputs have shape {list(x.shape[1:])}; expected {list(problem.input_shape)}"
        )
    if y.dtype == np.float64 and y.ndim == 2 and len(y) == len(x):
        if not np.isfinite(y).all():
            raise DataError(f"{labels}: a target is NaN or infinite")
        return
    if y.dtype != np.int64 or y.shape != (len(x),):
        raise DataError(
            f"{labels}: labels are {y.dtype} {list(y.shape)}; expected int64 [{len(x)}]"
        )
    if len(y) and (y.min() < 0 or y.max() >= problem.num_classes):
        raise DataError(
            f"{labels}: labels go from {y.min()} to {y.max()}; "
            f"expected 0 to {problem.num_classes - 1}"
        )


def ranges_of(x: NDArray[Any]) -> list[list[float]]:
    """Return the plausible range of each column of raw inputs (n, …, C) of a table.

    It goes from the 0.5 % to the 99.5 % quantile, and half of their distance beyond both.
    """
    low, high = np.quantile(x.reshape(-1, x.shape[-1]).astype(np.float64), (0.005, 0.995), axis=0)
    more = (high - low) / 2
    return [[float(a), float(b)] for a, b in zip(low - more, high + more, strict=True)]
