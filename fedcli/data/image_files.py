"""Images as arrays: one reader for class folders, custom functions, Hugging Face, predict.

An image is read as viewers show it: turned as its EXIF orientation says, laid on a ground where it
is transparent, its palette and its CMYK as colours. What has no single right reading is refused.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, ImageSequence, TiffImagePlugin, UnidentifiedImageError

from fedcli.data.arrays import DAMAGED
from fedmodels.config.data import Sides
from fedmodels.config.transforms import ImageTransform
from fedmodels.errors import DataError, pip_line, reason_of
from fedmodels.host.files import open_regular

OF_DICOM = (".dcm", ".dicom")
ENDS = (
    ".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".pgm", ".ppm",
    ".avif", ".heic", ".heif", *OF_DICOM,
)  # fmt: skip
"""How the names of image files end; capitals count alike."""
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF", "PPM", "AVIF")
"""What Pillow may take a file for, whatever its name says."""
OF_PHONES = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""How the content of a photo of an iPhone begins, after the word ``ftyp``; programs may have called
its file ``*.jpg``."""
OTHERS = {
    **dict.fromkeys(
        (".nef", ".nrw", ".cr2", ".cr3", ".crw", ".arw", ".dng", ".raf", ".orf", ".rw2", ".pef"),
        "raw photos of a camera have to be developed: save them as JPEG or PNG",
    ),
    **dict.fromkeys(
        (".jxl", ".jp2", ".j2k", ".psd", ".xcf", ".tga", ".pcx", ".svg", ".eps", ".ico"),
        "images of these kinds are not read: save them as PNG",
    ),
    **dict.fromkeys(
        (".mov", ".mp4", ".avi", ".m4v", ".webm"), "videos are not read: save frames as PNG"
    ),
}
"""How the names of files end that hold pictures and are not read, and what to do with them."""
WITH_PREVIEW = "MPO"
"""What Pillow calls a photograph with smaller copies of it in the same file, as phones write it."""
WINDOWED = "fedtide window"
"""What is stated of a picture whose shades a window made."""
PLAIN = ImageTransform()
"""An image as it is."""
CHANNELS = {"grey": 1, "rgb": 3}
Pixels = NDArray[np.uint8] | NDArray[np.uint16]
"""An image (C, H, W): 1 channel of grey or 3 of colour; uint16 where a grey has over 8 bits."""


def read_image(path: Path, how: ImageTransform = PLAIN) -> list[Pixels]:
    """Read the image of a file, or each of its frames where these are asked for.

    Raises:
        DataError: it is missing or damaged, or there is no single right way to read it.
    """
    try:
        if is_scan(path):
            dicom = importlib.import_module("fedcli.data.dicom")
            with open_regular(path) as file:
                found = dicom.pictures(file, path, how.frames, how.window)
                return [pixels_of(one, how) for one in found]
        with open_regular(path) as file, _opened(file, path) as image:
            every = how.frames == "all" and image.format != WITH_PREVIEW
            frames = ImageSequence.Iterator(image) if every else [image]
            return [pixels_of(frame, how) for frame in frames]
    except UnidentifiedImageError:
        why = OTHERS.get(path.suffix.lower(), "it is no image, or damaged")
        raise DataError(f"{path} cannot be read: {why}") from None
    except (*DAMAGED, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None


def is_image(path: Path) -> bool:
    """Tell by its name whether a file is an image, or by its content whether it is a scan."""
    return path.suffix.lower() in ENDS or is_scan(path)


def is_scan(path: Path) -> bool:
    """Tell whether a file is an image of DICOM: these are often called by numbers alone."""
    end = path.suffix.lower()
    if end in OF_DICOM or (end and not end[1:].isdecimal()):
        return end in OF_DICOM
    found: bool = importlib.import_module("fedcli.data.dicom").is_dicom(path)
    return found


def _opened(file: BinaryIO, path: Path) -> Image.Image:
    """Open an image by its content; raise DataError if a phone's photo needs another package."""
    start = file.read(12)
    file.seek(0)
    if start[4:8] != b"ftyp" or start[8:] not in OF_PHONES:
        return Image.open(file, formats=FORMATS)
    try:
        importlib.import_module("pillow_heif").register_heif_opener()
    except ImportError:
        raise DataError(
            f"{path} is a HEIC photo, which needs another package: {pip_line('heic')}; or save "
            "such photos as JPEG"
        ) from None
    return Image.open(file, formats=(*FORMATS, "HEIF"))


def pixels_of(picture: Image.Image, how: ImageTransform = PLAIN) -> Pixels:
    """Return a picture of Pillow, turned, laid on the ground, resized and cropped.

    Raises:
        ValueError: there is no single right way to read it; says why, and what to do.
    """
    _check_frames(picture, how)
    if how.window is not None and picture.info.get(WINDOWED) is None:
        raise ValueError(
            "it is no grey DICOM image, and window is of those: leave window or this file out"
        )
    _check_depth(picture)
    white = _white_is_zero(picture)
    picture = _on_ground(ImageOps.exif_transpose(picture), how.ground)
    grey = picture.mode[0] in "1IL" if how.channels is None else how.channels == "grey"
    if picture.mode[0] == "I":
        shades = np.asarray(picture, dtype=np.int64)
        picture = Image.fromarray(_of_16_bits(white - shades if white else shades))
    else:
        picture = picture.convert("L" if grey else "RGB")
    pixels = _of_depth(np.asarray(_sized(picture, how)), how.depth)
    if pixels.ndim == 2:
        return np.repeat(pixels[None], 1 if grey else 3, axis=0)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def first_set(how: ImageTransform) -> str:
    """Return the name of the first key of a transform whose value is not the default."""
    return next(key for key in type(how).model_fields if getattr(how, key) != getattr(PLAIN, key))


def stated(how: ImageTransform, x: NDArray[Any]) -> dict[str, Any]:
    """Return a transform as plain values, with the channels that images (n, C, H, W) have."""
    channels = "grey" if x.shape[1] == 1 else "rgb"
    return how.model_copy(update={"channels": channels}).facts()


def _sized(picture: Image.Image, how: ImageTransform) -> Image.Image:
    """Return a picture resized and cropped as torchvision does it."""
    if how.resize is None and how.crop is None:
        return picture
    from torchvision.transforms import v2  # takes a second to import

    if how.resize is not None:
        _check_size(picture, how.resize)
        resize = how.resize if isinstance(how.resize, int) else list(how.resize)
        picture = v2.Resize(resize)(picture)
    if how.crop is not None:
        height, width = (how.crop,) * 2 if isinstance(how.crop, int) else how.crop
        if picture.height < height or picture.width < width:
            raise ValueError(
                f"it has {picture.width} x {picture.height} pixels to cut {width} x {height} out "
                "of: set resize to that, or crop to less"
            )
        picture = v2.CenterCrop((height, width))(picture)
    return picture


def _check_size(picture: Image.Image, resize: Sides) -> None:
    """Check that an image does not become larger than Pillow reads one, whoever says its size."""
    if isinstance(resize, int):
        pixels = resize**2 * max(picture.size) / max(min(picture.size), 1)
    else:
        pixels = float(resize[0] * resize[1])
    if pixels > (most := Image.MAX_IMAGE_PIXELS or math.inf):
        raise ValueError(
            f"resize makes {pixels / 1e6:.4g} million pixels of its {picture.width} x "
            f"{picture.height}, and at most {most / 1e6:.4g} are made: give a smaller size"
        )


def _check_frames(picture: Image.Image, how: ImageTransform) -> None:
    """Check that a file holds one image, or that it is known which is meant."""
    frames = getattr(picture, "n_frames", 1)
    if frames > 1 and picture.format != WITH_PREVIEW and how.frames is None:
        raise ValueError(
            f"it holds {frames} frames or pages: set frames = 'first' or 'all', or save each as an "
            "image of its own"
        )


def _check_depth(picture: Image.Image) -> None:
    """Check that no bit of a picture's shades would be lost."""
    if picture.mode == "F":
        raise ValueError("its shades are fractions: save it with 8 or 16 bits")
    if picture.mode[0] == "I" and picture.has_transparency_data:
        raise ValueError("it has a transparent shade, and 16 bits: save it without the former")
    said = [str(part.args) for part in getattr(picture, "tile", ())]
    if picture.mode in ("RGB", "RGBA") and any(";16" in raw for raw in said):
        raise ValueError("its channels have 16 bits, of which 8 would be lost: save it with 8")


def _on_ground(picture: Image.Image, ground: str) -> Image.Image:
    """Return a picture without transparency: laid on the ground where it has some."""
    if not picture.has_transparency_data:
        return picture
    above = picture.convert("RGBA")
    laid = Image.alpha_composite(Image.new("RGBA", above.size, ground), above)
    return laid.convert("L" if picture.mode in ("1", "L", "LA", "La") else "RGB")


def _of_depth(shades: NDArray[Any], bits: int | None) -> NDArray[Any]:
    """Return shades with so many bits; white stays white."""
    if bits == 16 and shades.dtype == np.uint8:
        return shades.astype(np.uint16) * 257
    if bits == 8 and shades.dtype == np.uint16:
        return (shades >> 8).astype(np.uint8)
    return shades


def _white_is_zero(picture: Image.Image) -> int:
    """Return the black of a TIFF whose white is 0, and 0 for any other picture.

    Pillow inverts such pictures up to 8 bits, and leaves deeper ones as they are.
    """
    tags = getattr(picture, "tag_v2", {})
    if tags.get(TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) != 0:
        return 0
    return int(2 ** tags.get(TiffImagePlugin.BITSPERSAMPLE, (8,))[0]) - 1


def _of_16_bits(shades: NDArray[Any]) -> NDArray[np.uint16]:
    """Return grey shades (H, W) of over 8 bits; raise ValueError for numbers beyond 16 bits."""
    if shades.size and (shades.min() < 0 or shades.max() > 65535):
        raise ValueError(
            f"its shades go from {shades.min()} to {shades.max()}, beyond 0 to 65535: save it with "
            "8 or 16 bits"
        )
    return shades.astype(np.uint16)
