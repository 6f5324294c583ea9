"""FEMNIST (Caldas et al., LEAF, 2018), from the JSON files that LEAF's script writes.

``femnist/data/{train,test}/*.json``, or ``femnist/data/all_data/*.json``, hold ``users`` and
``user_data``: {writer: {"x": [images of 784 numbers, where 1 is white], "y": [labels]}}.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray, channel_moments
from fedcli.data.cuts.held_out import stratified_folds
from fedcli.data.folders import is_foreign
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.images import DIGITS, LETTERS
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError, reason_of

FOLDERS = ("femnist/data", "leaf/data/femnist/data", "femnist", "FEMNIST")
Written = tuple[NDArray[np.uint8], IntArray, NDArray[np.str_]]
"""Images (n, 1, 28, 28), labels (n,), and the writer of each (n,)."""


def femnist(source: Source) -> Dataset:
    """Load FEMNIST, one natural client per writer.

    Without LEAF's own split, the last fifth of each class is for test. ``max_per_class = 600``
    makes FedMLP's balanced set of 62 x 600.

    Raises:
        DataError: the files are missing or damaged.
    """
    advice = "run LEAF's data/femnist/preprocess.sh (github.com/TalwalkarLab/leaf) and put it there"
    root = next((p for p in map(source.find, FOLDERS) if p is not None), None)
    if root is None:
        raise source.missing("femnist/data/train/*.json", advice)
    if _json_in(root / "train"):
        train, test = _read(root / "train"), _read(root / "test")
    elif _json_in(root / "all_data"):
        x, y, who = _read(root / "all_data")
        held = stratified_folds(y, 5) == 4
        train, test = (x[~held], y[~held], who[~held]), (x[held], y[held], who[held])
    else:
        raise source.missing("femnist/data/train/*.json", advice)
    return _made(train, test)


def _made(train: Written, test: Written) -> Dataset:
    """Return the data set of both parts, with writers numbered in sorted order."""
    writers, numbers = np.unique(np.concatenate([train[2], test[2]]), return_inverse=True)
    groups = np.split(numbers.astype(np.int64), [len(train[1])])
    mean, std = channel_moments(train[0], 255.0)
    return Dataset(
        "femnist", Examples(*train[:2], groups[0]), Examples(*test[:2], groups[1]),
        (*DIGITS, *LETTERS), scale=255.0, mean=mean, std=std,
        group_names=tuple(f"writer {writer}" for writer in writers),
        variant=f"{len(writers)} writers, {len(train[1])} train and {len(test[1])} test examples",
    )  # fmt: skip


def _json_in(folder: Path) -> list[Path]:
    """Return the JSON files of a folder by name."""
    return sorted(path for path in folder.glob("*.json") if not is_foreign(path.name))


def _read(folder: Path) -> Written:
    """Read every JSON file of a folder, in order of name."""
    images: list[NDArray[np.uint8]] = []
    labels: list[int] = []
    who: list[str] = []
    for path in _json_in(folder):
        try:
            content = json.loads(path.read_bytes())
            for writer in content["users"]:
                held = content["user_data"][writer]
                x = np.array(held["x"], dtype=np.float64).reshape(-1, 1, 28, 28)
                images.append(np.rint(255 * x).astype(np.uint8))
                labels += [int(label) for label in held["y"]]
                who += [str(writer)] * len(x)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    if not images or len(labels) != len(who) or not 0 <= min(labels) <= max(labels) < 62:
        raise DataError(f"{folder} does not hold images with labels from 0 to 61")
    return np.concatenate(images), np.array(labels, dtype=np.int64), np.array(who)
