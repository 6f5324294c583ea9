"""A part of a client's task as its own images: a folder for each class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from fedcli.data.arrays import Labelled
from fedcli.data.class_folders import Listed, class_folders, class_of, images_of, read_images
from fedcli.data.image_files import PLAIN
from fedmodels.config.transforms import ImageTransform, parse_transform
from fedmodels.errors import DataError, suggestion
from fedmodels.facts.data_description import ClientFile


class ImageFolder:
    """The images of one part of a task."""

    def __init__(self, directory: Path, file: ClientFile, place: Path) -> None:
        """List the images below ``place``, which lies in a client's directory.

        Raises:
            DataError: a folder's name is none of ``class_names``; the line says what to write.
        """
        self.listed = _listed(directory, file, place)
        found = parse_transform(file.transform, directory / "client.json")
        self._how = found if isinstance(found, ImageTransform) else PLAIN
        self._shape = file.input_shape

    def read(self, first: int | None = None) -> Labelled:
        """Return inputs (n, *input_shape) and labels (n,) of the images, or of the first ones."""
        x, y, _ = read_images(self.listed[:first], self._how)
        return (x if len(x) else np.empty((0, *self._shape), dtype=np.uint8)), y


def _listed(directory: Path, file: ClientFile, place: Path) -> Listed:
    """Return the images of a folder that has one folder for each class."""
    names = list(file.class_names)
    folders = class_folders(place, directory)
    found = [path.name for path in folders]
    unnamed = [path.name for path in folders if class_of(path, names) is None]
    strange = [name for name in unnamed if not name.isdecimal()]
    if strange:
        about, known = directory / "client.json", ", ".join(names[:20]) or "numbers"
        line = f"{place / strange[0]} names no class; known are {known}"
        if near := suggestion(strange[0], names):
            raise DataError(f"{line}.{near} Rename the directory, or mend {about}")
        wanted = [*names, *strange] if names else found
        raise DataError(
            f'{line}: name every class in {about}, such as "num_classes": {len(wanted)}, '
            f'"class_names": {json.dumps(wanted)}, in the same order at every client'
        )
    return images_of(place, names, directory)
