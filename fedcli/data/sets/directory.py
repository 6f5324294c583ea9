"""One's own data set: arrays, or a folder of images for each class.

root/train_x.npy train_y.npy test_x.npy test_y.npy     inputs of bytes or numbers, labels int64
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

from fedcli.data.arrays import IntArray, as_numbers, channel_moments, narrowed, read_array
from fedcli.data.class_folders import called, class_folders, images_in, images_of, read_images
from fedcli.data.folders import check_inside, note_left_out
from fedcli.data.sets.dataset import Dataset, Labelled, Source, check_finite, named_classes
from fedmodels.data_description import SCALES
from fedmodels.errors import DataError, reason_of, suggestion
from fedmodels.files import open_regular

KEYS = ("scale", "mean", "std", "class_names")
ABOUT = "dataset.json"
PARTS = ("train", "test")


def directory(source: Source) -> Dataset:
    """Load the data set that lies in ``[data] root``."""
    if source.data.root is None:
        raise DataError("directory: say where the data lie, [data] root = 'DIR'")
    root = source.roots[0]
    _check_root(root)
    about = _read_json(root / ABOUT, root) if (root / ABOUT).exists() else {}
    for key in about:
        if key not in KEYS:
            raise DataError(f"{root / ABOUT}: unknown key {key!r}.{suggestion(key, KEYS)}")
    names = _class_names(root, about)
    if not (root / "train").is_dir():
        train, test = (_read_arrays(root, part) for part in PARTS)
        inputs = narrowed(train[0], test[0])
        return _made(root, (inputs[0], train[1]), (inputs[1], test[1]), names, about)
    for place in class_folders(root / "train", root):
        if not images_in(place, root):
            raise DataError(f"{place} is empty: a class needs images to train on")
    names = names or [*dict.fromkeys(map(called, class_folders(root / "train", root)))]
    listed = [images_of(root / part, names, root) for part in PARTS]
    beside = [root / ABOUT, *(_groups_file(root, part) for part in PARTS)]
    note_left_out(root, {*beside, *(path for part in listed for path, _ in part)})
    return _made(root, read_images(listed[0]), read_images(listed[1]), names, about)


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
    (scale,) = _numbers(root, about, "scale", (SCALES[train[0].dtype.name],))
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
        groups_train=_read_groups(root, "train", len(train[1])),
        groups_test=_read_groups(root, "test", len(test[1])),
        variant=f"{len(train[1])} train and {len(test[1])} test examples",
        has_own_parts=True,
    )


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
        raise DataError(f"{root / ABOUT}: {key} must hold 1 or {len(default)} numbers")
    return tuple(float(v) for v in values)


def _class_names(root: Path, about: dict[str, Any]) -> list[str]:
    """Return the names that ``dataset.json`` gives to classes; none unless it does."""
    names = about.get("class_names", [])
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise DataError(f"{root / ABOUT}: class_names must be a list of names")
    return [normalize("NFC", str(name)) for name in names]


def _read_json(path: Path, root: Path) -> dict[str, Any]:
    check_inside(path, root)
    try:
        with open_regular(path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} must hold an object")
    return content


def _read_inside(path: Path, root: Path) -> NDArray[Any]:
    """Read an array that lies in the root itself."""
    check_inside(path, root)
    return read_array(path)


def _read_arrays(root: Path, part: str) -> Labelled:
    """Read ``PART_x.npy`` and ``PART_y.npy``."""
    files = [root / f"{part}_{name}.npy" for name in "xy"]
    x, y = (_read_inside(path, root) for path in files)
    if x.dtype.kind not in "iuf" or x.ndim < 2:
        raise DataError(
            f"{files[0]} is {x.dtype} {list(x.shape)}; expected bytes or numbers, one input after "
            "the other: (n, C, H, W) for images, (n, 1) for single numbers"
        )
    check_finite(files[0], x)
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) != len(x):
        raise DataError(f"{files[1]} must hold {len(x)} integer labels")
    if len(y) and y.min() < 0:
        raise DataError(f"{files[1]} holds a negative label")
    return as_numbers(x), y.astype(np.int64)


def _groups_file(root: Path, part: str) -> Path:
    return root / f"groups_{part}.npy"


def _read_groups(root: Path, part: str, num_examples: int) -> IntArray | None:
    """Read the natural client of each example of a part, if given."""
    path = _groups_file(root, part)
    if not path.exists():
        return None
    groups = _read_inside(path, root)
    if groups.shape != (num_examples,) or groups.dtype.kind not in "iu":
        raise DataError(f"{path} must hold {num_examples} integers")
    return groups.astype(np.int64)
