"""Tiny ImageNet (Stanford CS231n, 2015), from the publisher's folder or zip."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedcli.data.folders import is_foreign
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError, reason_of

NAME = "tiny-imagenet-200"
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"
Place = Path | zipfile.Path
"""A folder, or one inside a zip."""


def tiny_imagenet(source: Source) -> Dataset:
    """Load Tiny ImageNet: 200 classes of 500 training images (3, 64, 64).

    The published validation images are the test set, since those for test have no labels.

    Raises:
        DataError: it is missing or damaged.
    """
    found = source.find(NAME, f"{NAME}.zip")
    if found is None:
        raise source.missing(NAME, f"get {URL} and put it there, zipped or not")
    try:
        if found.suffix != ".zip":
            return _load(found)
        with zipfile.ZipFile(found) as archive:
            return _load(zipfile.Path(archive, f"{NAME}/"))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{found} cannot be read: {reason_of(error)}") from None


def _load(root: Place) -> Dataset:
    """Load the data set from its folder."""
    ids = (root / "wnids.txt").read_text("utf-8").split()
    label = {name: k for k, name in enumerate(ids)}
    words = dict(
        line.split("\t", 1) for line in (root / "words.txt").read_text("utf-8").splitlines() if line
    )
    train = [
        (image, label[name])
        for name in ids
        for image in _images_in(root / "train" / name / "images")
    ]
    lines = (root / "val" / "val_annotations.txt").read_text("utf-8").splitlines()
    rows = [line.split("\t")[:2] for line in lines if line]
    test = [(root / "val" / "images" / file, label[name]) for file, name in rows]
    class_names = tuple(words.get(name, name).split(",")[0] for name in ids)
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return Dataset(
        "tiny-imagenet", _read(train), _read(test), class_names, scale=255.0, mean=mean, std=std
    )


def _images_in(folder: Place) -> list[Any]:
    """Return the images of a folder by name; some systems leave hidden files there."""
    found: list[Any] = [path for path in folder.iterdir() if not is_foreign(path.name)]
    return sorted(found, key=lambda path: path.name)


def _read(images: list[tuple[Any, int]]) -> Examples:
    """Decode images into one array (n, 3, 64, 64)."""
    from PIL import Image

    x = np.empty((len(images), 3, 64, 64), dtype=np.uint8)
    for j, (path, _) in enumerate(images):
        file: IO[bytes]
        with path.open("rb") as file, Image.open(file) as image:
            x[j] = np.asarray(image.convert("RGB"), dtype=np.uint8).transpose(2, 0, 1)
    return Examples(x, np.array([k for _, k in images], dtype=np.int64))
