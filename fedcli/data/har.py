"""Sensor windows that are already cut: UCI HAR, MotionSense, WISDM (``.npz`` files).

A file holds ``X`` (n, 128, 6), acceleration in g, then angular velocity in rad/s; ``y``,
``subject``, ``device`` (n,), ``label_names``, ``device_names``. A natural client is a subject with
one device. Windows of one subject are never split between training and test set.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import read_npz
from fedcli.data.datasets import DATASETS, Dataset, Source
from fedmodels.errors import DataError

WINDOW = 128
CHANNELS = 6


def uci_har(source: Source) -> Dataset:
    """Load UCI HAR (Anguita et al., 2013) with its official test subjects."""
    return _windows(source, "uci_har.npz")


def motionsense(source: Source) -> Dataset:
    """Load MotionSense (Malekzadeh et al., 2019); every fifth subject is for test."""
    return _windows(source, "motionsense.npz")


def wisdm(source: Source) -> Dataset:
    """Load WISDM (Weiss, 2019) at 20 Hz; every fifth subject is for test."""
    return _windows(source, "wisdm.npz")


def _windows(source: Source, file: str) -> Dataset:
    """Load one file."""
    path = source.find(file)
    if path is None:
        raise source.missing(file, DATASETS[source.data.name].advice)
    arrays = read_npz(path)
    absent = {"X", "y", "subject", "device", "label_names", "device_names"} - set(arrays)
    if absent:
        raise DataError(f"{path} holds no {', '.join(sorted(absent))}")
    x = arrays["X"].astype(np.float32)
    y, subject = arrays["y"].astype(np.int64), arrays["subject"].astype(np.int64)
    device = arrays["device"].astype(np.int64)
    names = tuple(str(name) for name in arrays["label_names"])
    device_names = tuple(str(name) for name in arrays["device_names"])
    test = arrays["official_test"] == 1 if "official_test" in arrays else every_fifth(subject)
    return windows_dataset(
        source.data.name,
        x,
        y,
        test,
        subject,
        device,
        names,
        device_names,
        f"{file}, {len(y)} windows",
    )


def every_fifth(subject: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which windows belong to the subjects 4, 9, 14 … in sorted order; they are for test."""
    return np.isin(subject, np.unique(subject)[4::5])


def windows_dataset(
    name: str,
    x: NDArray[np.float32],
    y: NDArray[np.int64],
    test: NDArray[np.bool_],
    subject: NDArray[np.int64],
    device: NDArray[np.int64],
    class_names: tuple[str, ...],
    device_names: tuple[str, ...],
    variant: str,
) -> Dataset:
    """Make a data set of windows (n, 128, 6), one natural client per subject and device."""
    if x.shape[1:] != (WINDOW, CHANNELS):
        raise DataError(f"{name}: windows are {x.shape[1:]}, not ({WINDOW}, {CHANNELS})")
    clients, group = np.unique(np.stack([subject, device], axis=1), axis=0, return_inverse=True)
    group = group.reshape(-1).astype(np.int64)
    return Dataset(
        name=name,
        train_x=x[~test],
        train_y=y[~test],
        test_x=x[test],
        test_y=y[test],
        num_classes=len(class_names),
        scale=1.0,
        mean=tuple(float(m) for m in x[~test].mean(axis=(0, 1), dtype=np.float64)),
        std=tuple(float(s) for s in x[~test].std(axis=(0, 1), dtype=np.float64)),
        class_names=class_names,
        groups_train=group[~test],
        groups_test=group[test],
        group_names=tuple(f"subject {s}, {device_names[d]}" for s, d in clients),
        devices=tuple(device_names[d] for _, d in clients),
        variant=variant,
    )
