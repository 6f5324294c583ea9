"""One's own data set: arrays, or a folder of images for each class.

root/train_x.npy train_y.npy test_x.npy test_y.npy     inputs uint8 or float32, labels int64
root/train/<class>/*.png   root/test/<class>/*.png     images of one size
root/dataset.json                                      optional: any of the keys scale, mean,
std, class_names
root/groups_train.npy groups_test.npy                  optional: natural clients (n,) int64
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import DAMAGED, IntArray, read_array
from fedcli.data.sets.dataset import Dataset, Inputs, Source, check_finite, named_classes
from fedmodels.errors import DataError, reason_of, suggestion

KEYS = ("scale", "mean", "std", "class_names")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
Labelled = tuple[Inputs, IntArray]


def directory(source: Source) -> Dataset:
    """Load the data set that lies in ``[data] root``."""
    if source.data.root is None:
        raise DataError("directory: say where the data lie, [data] root = 'DIR'")
    root = source.roots[0]
    _check_root(root)
    about = _read_json(root / "dataset.json") if (root / "dataset.json").exists() else {}
    for key in about:
        if key not in KEYS:
            raise DataError(f"{root / 'dataset.json'}: unknown key {key!r}.{suggestion(key, KEYS)}")
    folders = (root / "train").is_dir()
    names = _class_names(root, about)
    for place in class_folders(root / "train") if folders else ():
        if not images_in(place):
            raise DataError(f"{place} is empty: a class needs images to train on")
    if folders and not names:
        names = [*dict.fromkeys(map(called, class_folders(root / "train")))]
    parts = [
        read_class_folders(root / part, names) if folders else _read_arrays(root, part)
        for part in ("train", "test")
    ]
    return _made(root, parts[0], parts[1], names, about)


def _check_root(root: Path) -> None:
    """Check that there is a directory which holds images or arrays for training.

    Raises:
        DataError: says what is missing, and what the directory may hold.
    """
    if not root.is_dir():
        what = "no directory" if root.exists() else "not there"
        raise DataError(f"{root} is {what}: [data] root must name the directory of the data")
    if not (root / "train").is_dir() and not any(root.glob("*_[xy].npy")):
        raise DataError(
            f"{root} holds no data: put images into {root / 'train' / 'CLASS' / '*.png'} and "
            f"{root / 'test' / 'CLASS' / '*.png'}, or arrays into train_x.npy, train_y.npy, "
            "test_x.npy and test_y.npy"
        )


def _made(
    root: Path, train: Labelled, test: Labelled, names: list[str], about: dict[str, Any]
) -> Dataset:
    """Put the parts together; what ``dataset.json`` leaves out is derived."""
    (scale,) = _numbers(root, about, "scale", (255.0 if train[0].dtype == np.uint8 else 1.0,))
    if not len(train[1]):
        raise DataError(f"{root} holds no example for training")
    if not len(test[1]):
        test = (np.empty((0, *train[0].shape[1:]), dtype=train[0].dtype), test[1])
    highest = max((int(y.max()) for _, y in (train, test) if len(y)), default=-1)
    classes = named_classes(names, highest, root)
    mean, std = channel_moments(train[0], scale)
    return Dataset(
        name="directory",
        train_x=train[0],
        train_y=train[1],
        test_x=test[0],
        test_y=test[1],
        num_classes=len(classes),
        scale=scale,
        mean=_numbers(root, about, "mean", mean),
        std=_numbers(root, about, "std", std),
        class_names=classes,
        groups_train=_read_groups(root / "groups_train.npy", len(train[1])),
        groups_test=_read_groups(root / "groups_test.npy", len(test[1])),
        variant=f"{len(train[1])} train and {len(test[1])} test examples",
        has_own_parts=True,
    )


def channel_moments(x: Inputs, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of ``x / scale`` per channel; a deviation of 0 becomes 1.

    The channel of images (n, C, H, W) is axis 1, that of anything else the last axis.
    """
    axis = 1 if x.ndim == 4 else x.ndim - 1
    others = tuple(a for a in range(x.ndim) if a != axis)
    mean = x.mean(axis=others, dtype=np.float64) / scale
    std = x.std(axis=others, dtype=np.float64) / scale
    std = np.where(std > 0, std, 1.0)
    return tuple(mean.tolist()), tuple(std.tolist())


def _numbers(
    root: Path, about: dict[str, Any], key: str, default: tuple[float, ...]
) -> tuple[float, ...]:
    """Return one number, or as many as the default has, that ``dataset.json`` gives for a key."""
    if key not in about:
        return default
    given = about[key]
    values = given if isinstance(given, list | tuple) else [given]
    fits = len(values) in (1, len(default)) and all(
        isinstance(v, int | float) and np.isfinite(v) and (v > 0 or key == "mean") for v in values
    )
    if not fits:
        raise DataError(f"{root / 'dataset.json'}: {key} must hold 1 or {len(default)} numbers")
    return tuple(float(v) for v in values)


def _class_names(root: Path, about: dict[str, Any]) -> list[str]:
    """Return the names that ``dataset.json`` gives to classes; none unless it does."""
    names = about.get("class_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise DataError(f"{root / 'dataset.json'}: class_names must be a list of names")
    return [normalize("NFC", str(name)) for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object")
    return content


def _read_arrays(root: Path, part: str) -> Labelled:
    """Read ``PART_x.npy`` and ``PART_y.npy``."""
    x, y = read_array(root / f"{part}_x.npy"), read_array(root / f"{part}_y.npy")
    if x.dtype not in (np.uint8, np.float32) or x.ndim < 2:
        raise DataError(
            f"{root / f'{part}_x.npy'} is {x.dtype} {list(x.shape)}; expected uint8 or float32 "
            "inputs, one after the other: (n, C, H, W) for images, (n, 1) for single numbers"
        )
    check_finite(root / f"{part}_x.npy", x)
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) != len(x):
        raise DataError(f"{root / f'{part}_y.npy'} must hold {len(x)} integer labels")
    if len(y) and y.min() < 0:
        raise DataError(f"{root / f'{part}_y.npy'} holds a negative label")
    return x, y.astype(np.int64)


def _read_groups(path: Path, num_examples: int) -> IntArray | None:
    """Read the natural client of each example, if given."""
    if not path.exists():
        return None
    groups = read_array(path)
    if groups.shape != (num_examples,) or groups.dtype.kind not in "iu":
        raise DataError(f"{path} must hold {num_examples} integers")
    return groups.astype(np.int64)


def read_class_folders(folder: Path, class_names: list[str]) -> Labelled:
    """Read ``folder/<class>/*.png``; a class is named by its name, or by its number.

    Args:
        folder: holds one directory for each class.
        class_names: names in label order.

    Returns:
        Images (n, C, H, W) uint8, C = 1 for greyscale files and 3 for others, and labels (n,).

    Raises:
        DataError: a directory names no class, an image is damaged, or sizes differ.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is missing")
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    first: Path | None = None
    for place in class_folders(folder):
        label = _label_of(place, class_names)
        for path in images_in(place):
            images.append(read_image(path))
            labels.append(label)
            first = first or path
            if images[-1].shape != images[0].shape:
                raise DataError(
                    f"{path} is {images[-1].shape}, and {first} is {images[0].shape}: all images "
                    "must have one size, and be all grey or all in colour"
                )
    x = np.stack(images) if images else np.empty((0, 1, 1, 1), dtype=np.uint8)
    return x, np.array(labels, dtype=np.int64)


def class_folders(folder: Path) -> list[Path]:
    """Return the directories of classes by what they are called; hidden ones are none.

    Raises:
        DataError: a name holds bytes that are no UTF-8, which no ``client.json`` can give.
    """
    found = (path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
    for path in (folders := sorted(found, key=called)):
        try:
            path.name.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(
                f"{folder} has a directory {path.name!a}, which is no name in UTF-8: rename it"
            ) from None
    return folders


def images_in(place: Path) -> list[Path]:
    """Return the images of a class by name.

    Raises:
        DataError: there are files, and none is an image; or there is a directory among them.
    """
    found = sorted(path for path in place.iterdir() if path.name[0] != ".")
    images = [path for path in found if path.suffix.lower() in IMAGES]
    known = ", ".join(f"*{end}" for end in IMAGES)
    inner = [path for path in found if path.is_dir()]
    if inner:
        raise DataError(f"{inner[0]} is a directory; images ({known}) lie in {place} itself")
    if found and not images:
        raise DataError(f"{found[0]} is no image, and {place} has none: {known}")
    return images


def _label_of(place: Path, class_names: list[str]) -> int:
    """Return the label a class directory stands for."""
    if (name := class_of(place, class_names)) is not None:
        return class_names.index(name)
    if place.name.isdecimal() and (not class_names or int(place.name) < len(class_names)):
        return int(place.name)
    raise DataError(f"{place} names no class; known are {', '.join(class_names[:20]) or 'numbers'}")


def called(place: Path) -> str:
    """Return the name of a class directory, in the one form in which names are compared.

    A Mac writes ``ü`` in a name as ``u`` and an accent, which looks the same.
    """
    return normalize("NFC", place.name)


def class_of(place: Path, class_names: list[str]) -> str | None:
    """Return the class whose name a directory has, however accents in the name are written."""
    return called(place) if called(place) in class_names else None


def read_image(path: Path, channels: int | None = None) -> NDArray[np.uint8]:
    """Read one image as (C, H, W) uint8: with so many channels, or as many as the file has.

    Raises:
        DataError: it is missing or damaged, or its shades do not fit into 16 bits.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            deep = image.mode[0] in "IF"  # over 8 bits of grey, which convert() would cut at 255
            grey = deep or image.mode in ("L", "1") if channels is None else channels == 1
            flat = Image.fromarray(_of_8_bits(np.asarray(image))) if deep else image
            array = np.asarray(flat.convert("L" if grey else "RGB"), dtype=np.uint8)
    except (*DAMAGED, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    return array[None] if grey else np.ascontiguousarray(array.transpose(2, 0, 1))


def _of_8_bits(shades: NDArray[Any]) -> NDArray[np.uint8]:
    """Return shades of 16 bits (H, W) as ones of 8.

    Raises:
        ValueError: they are fractions, or whole numbers beyond 16 bits.
    """
    if shades.dtype.kind == "f":
        raise ValueError("its shades are fractions: save it with 8 or 16 bits")
    if shades.size and (shades.min() < 0 or shades.max() > 65535):
        raise ValueError(
            f"its shades go from {shades.min()} to {shades.max()}, beyond 0 to 65535: save it with "
            "8 or 16 bits"
        )
    return (shades // 257).astype(np.uint8)
