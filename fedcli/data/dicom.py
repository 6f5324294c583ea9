"""DICOM images, by pydicom: shades as the file's own modality and window say them.

Of a file's tags, those that say how to show its pixels are read, and nothing of the patient.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedcli.data.image_files import WINDOWED
from fedmodels.config.data import Window
from fedmodels.errors import DataError, pip_line

MARK, AT = b"DICM", 128
"""What a file holds at this place, whatever it is called."""
INDEX = "dicomdir"
"""A list of files, as on a CD, and no image."""
DEFLATED = "1.2.840.10008.1.2.1.99"
"""The syntax of a file that is packed as a whole, whose size nothing tells before."""
GREYS = {"MONOCHROME1": True, "MONOCHROME2": False}
"""Whether the lowest value is white."""
COLOURS = ("RGB", "PALETTE COLOR", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")

SHADES = (
    "PhotometricInterpretation", "PixelRepresentation", "BitsStored", "BitsAllocated",
    "RescaleSlope", "RescaleIntercept", "ModalityLUTSequence", "WindowCenter", "WindowWidth",
    "VOILUTFunction", "VOILUTSequence",
)  # fmt: skip
"""The tags by which stored values become shades."""


def is_dicom(path: Path) -> bool:
    """Tell by its content whether a file is an image of DICOM; its name often has no ending."""
    if path.name.casefold() == INDEX or not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(AT + len(MARK))[AT:] == MARK
    except OSError:
        return False


def pictures(
    file: BinaryIO, path: Path, frames: str | None, window: Window | None = None
) -> list[Image.Image]:
    """Return the frames of a file that are asked for, as pictures of grey or of colour.

    A ``window``, centre and width, goes before those of the file.

    Raises:
        DataError: pydicom is missing.
        ValueError: there is no single right way to read it, or it is damaged; says why.
    """
    pydicom = _library(path)
    try:
        return _pictures(pydicom, file, frames, window)
    except (pydicom.errors.InvalidDicomError, AttributeError, RuntimeError, NotImplementedError,
            ArithmeticError) as error:  # fmt: skip
        raise ValueError((str(error) or type(error).__name__).splitlines()[0]) from None


def pixels_in(path: Path) -> int:
    """Return how many pixels a file says that it has; nothing is unpacked.

    Raises:
        DataError: pydicom is missing.
        ValueError: it is damaged, or says nothing of it.
    """
    pydicom = _library(path)
    try:
        with path.open("rb") as file:
            _check_syntax(pydicom, file)
            found = pydicom.dcmread(file, stop_before_pixels=True)
        return int(found.Rows * found.Columns * int(found.get("NumberOfFrames") or 1))
    except (pydicom.errors.InvalidDicomError, AttributeError, RuntimeError) as error:
        raise ValueError(str(error)) from None


def _library(path: Path) -> Any:
    """Return pydicom; raise DataError if it is missing."""
    try:
        return importlib.import_module("pydicom")
    except ImportError:
        raise DataError(
            f"{path} is a DICOM image, which needs another package: {pip_line('dicom')}"
        ) from None


def _check_syntax(pydicom: Any, file: BinaryIO) -> None:
    """Check that a file is not packed as a whole, and go back to its begin."""
    file.seek(AT + len(MARK))
    meta = pydicom.filereader._read_file_meta_info(file)
    if meta.get("TransferSyntaxUID") == DEFLATED:
        raise ValueError("it is packed as a whole: save it unpacked")
    file.seek(0)


def _pictures(
    pydicom: Any, file: BinaryIO, frames: str | None, window: Window | None
) -> list[Image.Image]:
    _check_syntax(pydicom, file)
    found = pydicom.dcmread(file)
    if "PixelData" not in found:
        raise ValueError("it holds no image")
    count = int(found.get("NumberOfFrames") or 1)
    pixels = found.Rows * found.Columns * count
    if pixels > (Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(f"it has {pixels / 1e6:.4g} million pixels, more than are read")
    if count > 1 and frames is None:
        raise ValueError(
            f"it holds {count} frames or pages: set frames = 'first' or 'all', or save each as an "
            "image of its own"
        )
    kind = found.PhotometricInterpretation
    if kind not in (*GREYS, *COLOURS):
        raise ValueError(f"its shades are {kind}: save it as grey or in colour")
    shades = found.pixel_array
    shades = shades if count > 1 else shades[None]
    shades = shades[:1] if frames == "first" else shades
    if kind in GREYS:
        made = [
            Image.fromarray(_grey(pydicom, one, _tags_of(pydicom, found, number), window))
            for number, one in enumerate(shades)
        ]
        for one in made if window else ():
            one.info[WINDOWED] = window
        return made
    return [Image.fromarray(_colour(pydicom, one, found)) for one in shades]


def _tags_of(pydicom: Any, found: Any, frame: int) -> Any:
    """Return what says how a frame's values become shades; a tag without a value is not there.

    It stands in the functional groups of the frame, in those that all frames share, or at the top
    (PS3.3 C.7.6.16).
    """
    tags = pydicom.Dataset()
    _take(tags, found)
    shared = found.get("SharedFunctionalGroupsSequence") or ()
    own = found.get("PerFrameFunctionalGroupsSequence") or ()
    for group in (*shared[:1], *own[frame : frame + 1]):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            for item in (group.get(name) or ())[:1]:
                _take(tags, item)
    return tags


def _take(tags: Any, item: Any) -> None:
    """Put the tags of an item that have a value into others."""
    for name in SHADES:
        if name in item and not _is_empty(item[name].value):
            tags[name] = item[name]


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and not len(value))


def _grey(pydicom: Any, values: NDArray[Any], found: Any, window: Window | None) -> NDArray[Any]:
    """Return stored values (H, W) as shades of 8 or 16 bits, by the file's modality and window.

    A ``window`` that is given counts in place of the file's, and is linear. Without any, the
    darkest and the lightest are the least and the greatest value that the file's bits can hold, so
    images of one device are alike.
    """
    lowest, highest = _reach(found)
    has_window = window is None and ("WindowCenter" in found or "VOILUTSequence" in found)
    values = pydicom.pixels.apply_modality_lut(values, found).astype(np.float64)
    if window is not None:  # PS3.3 C.11.2.1.2.1
        centre, width = window
        lowest, highest = centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2
    if has_window:
        if "VOILUTSequence" in found:
            lowest, highest = 0.0, 2.0 ** found.VOILUTSequence[0].LUTDescriptor[2] - 1
            values = values.astype(np.int64)
        values = pydicom.pixels.apply_voi_lut(values, found).astype(np.float64)
    share = np.clip((values - lowest) / (highest - lowest), 0, 1)
    if has_window and "VOILUTSequence" not in found and found.get("RescaleSlope", 1) < 0:
        share = 1 - share  # pydicom maps a window from the end where stored values are 0
    share = 1 - share if GREYS[found.PhotometricInterpretation] else share
    is_deep = found.BitsStored > 8
    return np.rint(share * (65535 if is_deep else 255)).astype(np.uint16 if is_deep else np.uint8)


def _reach(found: Any) -> tuple[float, float]:
    """Return the least and the greatest value, after the modality, that a file can hold."""
    if "ModalityLUTSequence" in found:
        return 0.0, 2.0 ** found.ModalityLUTSequence[0].LUTDescriptor[2] - 1
    bits, is_signed = int(found.BitsStored), found.PixelRepresentation == 1
    ends = [-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1] if is_signed else [0.0, 2.0**bits - 1]
    slope, more = (float(found.get(key, default) or default)
                   for key, default in (("RescaleSlope", 1), ("RescaleIntercept", 0)))  # fmt: skip
    low, high = sorted(slope * end + more for end in ends)
    return low, high


def _colour(pydicom: Any, values: NDArray[Any], found: Any) -> NDArray[np.uint8]:
    """Return the colours (H, W, 3) of a picture; pydicom has made red, green and blue of others."""
    if found.PhotometricInterpretation == "PALETTE COLOR":
        values = pydicom.pixels.apply_color_lut(values, found)
        tables = (found[f"{name}PaletteColorLookupTableData"].value for name in
                  ("Red", "Green", "Blue"))  # fmt: skip
        is_deep = any(any(bytes(table)[1::2]) for table in tables)  # else entries have 8 bits
        values = values >> 8 if values.dtype == np.uint16 and is_deep else values
    elif found.BitsStored != 8:
        raise ValueError(f"its colours have {found.BitsStored} bits: save it with 8")
    return np.ascontiguousarray(values.astype(np.uint8))
