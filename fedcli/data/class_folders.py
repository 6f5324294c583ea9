"""A folder of images for each class: which image is of which class, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import AT_ONCE, IntArray, check_memory
from fedcli.data.folders import entries
from fedcli.data.image_files import ENDS, OTHERS, PLAIN, Pixels, is_image, read_image
from fedcli.data.set_aside import SetAside
from fedmodels.config.recipe import EMPTY, Recipe
from fedmodels.config.transforms import ImageTransform
from fedmodels.errors import DataError
from fedmodels.facts.class_names import composed

Listed = list[tuple[Path, int]]
"""Image files with their labels."""


def class_folders(folder: Path, root: Path) -> list[Path]:
    """Return the directories of classes, sorted by name, without hidden ones.

    Raises:
        DataError: one leads out of ``root``, or has a name that is no UTF-8, which no
            ``client.json`` can give.
    """
    folders = sorted((path for path in entries(folder, root) if path.is_dir()), key=called)
    for path in folders:
        try:
            path.name.encode("utf-8")
        except UnicodeEncodeError:
            raise DataError(
                f"{folder} has a directory {path.name!a}, which is no name in UTF-8: rename it"
            ) from None
    return folders


def images_in(place: Path, root: Path, *, nested: bool = False) -> list[Path]:
    """Return the images of a class by name; those in folders of it last, where it may be nested.

    Raises:
        DataError: there are files, and none is an image; or there is a directory among them, and
            it may not be nested.
    """
    found = entries(place, root)
    images = [path for path in found if is_image(path)]
    known = ", ".join(f"*{end}" for end in ENDS)
    inner = [path for path in found if path.is_dir()]
    if inner and not nested:
        raise DataError(
            f"{inner[0]} is a directory; images ({known}) lie in {place} itself, or, where a "
            "folder holds what belongs together, set [data] group = 'folder'"
        )
    if len(found) > len(inner) and not images:
        what = OTHERS.get(found[0].suffix.lower())
        raise DataError(
            f"{found[0]} is no image that is read, and {place} has none: {what or known}"
        )
    return [*images, *(path for each in inner for path in images_in(each, root, nested=True))]


def images_of(
    folder: Path,
    class_names: Sequence[str],
    root: Path,
    *,
    nested: bool = False,
    recipe: Recipe = EMPTY,
) -> Listed:
    """Return the images ``folder/<class>/*.png``; a class is named by its name, or by its number.

    ``nested`` images may lie in folders of their class. A site's recipe may say which class it is.

    Raises:
        DataError: the folder is missing, leads out of ``root``, or a directory names no class.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is missing")
    return [
        (path, label)
        for place in class_folders(folder, root)
        for label in [_label_of(place, class_names, recipe)]
        for path in images_in(place, root, nested=nested)
    ]


def read_images(
    listed: Listed, how: ImageTransform = PLAIN, aside: SetAside | None = None
) -> tuple[Pixels, IntArray, IntArray]:
    """Return the images (n, C, H, W) of a list, their labels and their places in it, (n,) each.

    Those that cannot be read are refused all together, or set ``aside``.

    Raises:
        DataError: an image cannot be read, or two differ in size, colour or depth; names them.
    """
    images: list[NDArray[Any]] = []
    places: list[int] = []
    aside = aside or SetAside("images")
    aside.total += len(listed)
    for place, (path, _) in enumerate(listed):
        try:
            frames = read_image(path, how)
        except DataError as error:
            aside.add(str(error), error=error)
            continue
        for image in frames:
            if len(images) % AT_ONCE == 0:
                _check_memory(image, len(images), len(listed), path.parent.parent)
            images.append(image)
            places.append(place)
            if image.shape != images[0].shape or image.dtype != images[0].dtype:
                raise DataError(
                    f"{path} is {_described(image)}, and {listed[0][0]} is {_described(images[0])}:"
                    f" {_advice(image, images[0])}"
                )
    if listed:
        aside.settle(listed[0][0].parent.parent)
    x: Pixels = np.stack(images) if images else np.empty((0, 1, 1, 1), dtype=np.uint8)
    labels = [listed[place][1] for place in places]
    return x, np.array(labels, dtype=np.int64), np.array(places, dtype=np.int64)


def _check_memory(image: Pixels, held: int, expected: int, where: Path) -> None:
    """Check that images find room in memory: as they are read, and once more when they are joined.

    Of at least ``expected`` images like this one, ``held`` are in memory.
    """
    count = max(expected, held + 1)
    check_memory(
        float(image.nbytes) * (2 * count - held), f"{where}: {count} images, {_described(image)},",
        "set resize to a smaller size, or leave files out",
    )  # fmt: skip


def _advice(image: NDArray[Any], first: NDArray[Any]) -> str:
    """Return what makes two images alike."""
    if image.shape[1:] != first.shape[1:]:
        return "give all one size, by resize = [HEIGHT, WIDTH]"
    if len(image) != len(first):
        return 'make all grey or all coloured, by channels = "grey" or "rgb"'
    return "give all as many bits, by depth = 8 or 16"


def _described(image: NDArray[Any]) -> str:
    """Return size, colour and depth of an image, in words."""
    channels, height, width = image.shape
    colour = "grey" if channels == 1 else "in colour"
    return f"{width} x {height}, {colour}, with {8 * image.itemsize} bits"


def _label_of(place: Path, class_names: Sequence[str], recipe: Recipe) -> int:
    """Return the label a class directory stands for."""
    if (name := recipe.class_of(called(place))) in class_names:
        return class_names.index(name)
    if place.name.isdecimal() and (not class_names or int(place.name) < len(class_names)):
        return int(place.name)
    raise DataError(f"{place} names no class; known are {', '.join(class_names[:20]) or 'numbers'}")


def called(place: Path) -> str:
    """Return the name of a class directory, in the one form in which names are compared.

    A Mac writes ``ü`` in a name as ``u`` and an accent, which looks the same.
    """
    return composed(place.name)


def class_of(place: Path, class_names: Sequence[str]) -> str | None:
    """Return the class whose name a directory has, however accents in the name are written."""
    return called(place) if called(place) in class_names else None
