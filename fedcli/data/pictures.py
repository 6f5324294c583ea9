"""Images as arrays: one reader for class folders, functions of one's own, Hugging Face, predict.

An image is read as viewers show it: turned as its EXIF orientation says, laid on white where it is
transparent, its palette and its CMYK as colours. What has no single right reading is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from fedcli.data.arrays import DAMAGED
from fedmodels.errors import DataError, reason_of
from fedmodels.files import open_regular

ENDS = (
    ".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".pgm", ".ppm",
)  # fmt: skip
"""How the names of image files end; capitals count alike."""
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM")
"""What Pillow may take a file for, whatever its name says."""
GROUND = "white"
"""What transparent images are laid on."""
Pixels = NDArray[np.uint8] | NDArray[np.uint16]
"""An image (C, H, W): 1 channel of grey or 3 of colour; uint16 where a grey has over 8 bits."""


def read_image(path: Path, channels: int | None = None) -> Pixels:
    """Read one image: with so many channels, or as many as the file has.

    Raises:
        DataError: it is missing or damaged, or there is no single right way to read it.
    """
    try:
        with open_regular(path) as file, Image.open(file, formats=FORMATS) as image:
            return pixels_of(image, channels)
    except UnidentifiedImageError:
        raise DataError(f"{path} cannot be read: it is no image, or damaged") from None
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None


def pixels_of(picture: Image.Image, channels: int | None = None) -> Pixels:
    """Return a picture of Pillow: with so many channels, or as many as it has itself.

    Raises:
        ValueError: there is no single right way to read it; says why, and what to do.
    """
    _check_single(picture)
    _check_depth(picture)
    picture = _on_ground(ImageOps.exif_transpose(picture))
    grey = picture.mode[0] in "1IL" if channels is None else channels == 1
    if picture.mode[0] != "I":
        flat = np.asarray(picture.convert("L" if grey else "RGB"), dtype=np.uint8)
        return flat[None] if grey else np.ascontiguousarray(flat.transpose(2, 0, 1))
    shades = _of_16_bits(np.asarray(picture))[None]
    return shades if grey else np.repeat(shades, 3, axis=0)


def _check_single(picture: Image.Image) -> None:
    """Check that a file holds one image; a phone's photograph may hold smaller copies beside it."""
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != "MPO":
        raise ValueError(f"it holds {frames} frames or pages: save each as an image of its own")


def _check_depth(picture: Image.Image) -> None:
    """Check that no bit of a picture's shades would be lost."""
    if picture.mode == "F":
        raise ValueError("its shades are fractions: save it with 8 or 16 bits")
    if picture.mode[0] == "I" and picture.has_transparency_data:
        raise ValueError("it has a transparent shade, and 16 bits: save it without the former")
    said = [str(part.args) for part in getattr(picture, "tile", ())]
    if picture.mode in ("RGB", "RGBA") and any(";16" in raw for raw in said):
        raise ValueError("its channels have 16 bits, of which 8 would be lost: save it with 8")


def _on_ground(picture: Image.Image) -> Image.Image:
    """Return a picture without transparency: laid on the ground where it has some."""
    if not picture.has_transparency_data:
        return picture
    above = picture.convert("RGBA")
    ground = Image.new("RGBA", above.size, GROUND)
    laid = Image.alpha_composite(ground, above)
    return laid.convert("L" if picture.mode in ("1", "L", "LA", "La") else "RGB")


def _of_16_bits(shades: NDArray[Any]) -> NDArray[np.uint16]:
    """Return grey shades (H, W) of over 8 bits.

    Raises:
        ValueError: they are whole numbers beyond 16 bits.
    """
    if shades.size and (shades.min() < 0 or shades.max() > 65535):
        raise ValueError(
            f"its shades go from {shades.min()} to {shades.max()}, beyond 0 to 65535: save it with "
            "8 or 16 bits"
        )
    return shades.astype(np.uint16)
