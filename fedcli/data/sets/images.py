"""Image data sets: digits, MNIST and its kin, CIFAR.

Means and deviations are those of the training set, the values usual in the literature.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import IntArray, read_npz
from fedcli.data.cuts.natural import stratified_folds
from fedcli.data.sets.archives import torchvision_pair
from fedcli.data.sets.class_names import (
    CIFAR10,
    CIFAR100,
    CIFAR100_COARSE,
    CIFAR100_COARSE_OF,
    DIGITS,
    FASHION_MNIST,
    LETTERS,
)
from fedcli.data.sets.dataset import Dataset
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError

DIGITS_FILE = "data/digits.csv.gz"
"""Where scikit-learn has the digits, below its data sets."""
log = logging.getLogger(__name__)


def digits(source: Source) -> Dataset:
    """Load scikit-learn's digits: (1, 8, 8), 0 … 16; the last fifth of a class is for test."""
    table = _table_of_digits()  # (1797, 65): 64 pixels and the label
    x, y = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    test = stratified_folds(y, 5) == 4
    return Dataset(
        name="digits",
        train_x=x[~test],
        train_y=y[~test],
        test_x=x[test],
        test_y=y[test],
        num_classes=10,
        scale=16.0,
        mean=(0.3053,),
        std=(0.3754,),
        class_names=DIGITS,
    )


def _table_of_digits() -> NDArray[np.float64]:
    """Read scikit-learn's file without importing scikit-learn, which takes two seconds."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    return np.loadtxt(Path(package.origin).with_name("datasets") / DIGITS_FILE, delimiter=",")


def mnist(source: Source) -> Dataset:
    """Load MNIST (LeCun and Cortes)."""
    return _published(source, "MNIST", DIGITS, (0.1307,), (0.3081,))


def fashion_mnist(source: Source) -> Dataset:
    """Load Fashion-MNIST (Xiao et al., 2017)."""
    return _published(source, "FashionMNIST", FASHION_MNIST, (0.2860,), (0.3530,))


def emnist_byclass(source: Source) -> Dataset:
    """Load EMNIST-ByClass (Cohen et al., 2017), upright: 0-9, A-Z, a-z."""
    names, full = (*DIGITS, *LETTERS), ("EMNIST/raw", "EMNIST/gzip.zip")
    subset = _subset(source, "emnist_byclass_subset.npz", full)
    return _published(source, "EMNIST", names, (0.1736,), (0.3317,), subset)


def cifar10(source: Source) -> Dataset:
    """Load CIFAR-10 (Krizhevsky, 2009)."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    full = ("cifar-10-batches-py", "cifar-10-python.tar.gz")
    subset = _subset(source, "cifar10_subset.npz", full)
    return _published(source, "CIFAR10", CIFAR10, mean, std, subset)


def cifar100(source: Source) -> Dataset:
    """Load CIFAR-100 (Krizhevsky, 2009) with its 100 fine or 20 coarse classes."""
    mean, std = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    full = ("cifar-100-python", "cifar-100-python.tar.gz")
    subset = _subset(source, "cifar100_subset.npz", full)
    fine = _published(source, "CIFAR100", CIFAR100, mean, std, subset)
    coarse = np.array([CIFAR100_COARSE_OF[name] for name in CIFAR100], dtype=np.int64)
    if source.data.labels == "fine":
        return replace(fine, coarse=coarse)
    return replace(
        fine,
        train_y=coarse[fine.train_y],
        test_y=coarse[fine.test_y],
        num_classes=20,
        class_names=CIFAR100_COARSE,
    )


def _published(
    source: Source,
    kind: str,
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    subset: Path | None = None,
) -> Dataset:
    """Load a data set whole through torchvision, or a file that holds a part of it.

    Args:
        source: where to look.
        kind: torchvision's class.
        class_names: in label order.
        mean: of each channel.
        std: of each channel.
        subset: ``x_train`` (n, H, W[, C]) uint8, ``y_train`` (n,), ``x_test`` and ``y_test``.
    """
    variant = "full"
    if subset is None:
        train, test = torchvision_pair(source, kind)
    else:
        train, test = _read_npz(subset, "train"), _read_npz(subset, "test")
        variant = f"subset, {len(train[1])} train and {len(test[1])} test examples"
        log.warning(
            "%s: the full set is absent; %s is used (%s)", source.data.name, subset.name, variant
        )
    return Dataset(
        name=source.data.name,
        train_x=train[0],
        train_y=train[1],
        test_x=test[0],
        test_y=test[1],
        num_classes=len(class_names),
        scale=255.0,
        mean=mean,
        std=std,
        class_names=class_names,
        variant=variant,
    )


def _subset(source: Source, file: str, full: tuple[str, ...]) -> Path | None:
    """Return the file of a subset where nothing is there of the full set."""
    return None if source.find(*full) is not None else source.find(file)


def _read_npz(path: Path, part: str) -> tuple[NDArray[np.uint8], IntArray]:
    """Read images (n, C, H, W) uint8 and labels (n,) of one part of a subset."""
    arrays = read_npz(path)
    if not {f"x_{part}", f"y_{part}"} <= set(arrays):
        raise DataError(f"{path} holds no x_{part} and y_{part}")
    x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: x_{part} must hold images (n, H, W) or (n, H, W, C) uint8, and y_{part} "
            "whole numbers"
        )
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(x), y.astype(np.int64)
