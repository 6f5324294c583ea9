"""Data sets of sensor windows: UCI HAR, MotionSense, WISDM, HHAR, RealWorld.

A windows file (``.npz``) holds

    X (n, 128, 6)                   three axes of acceleration in g, three of rotation in rad/s
    y, subject, device (n,)         numbers
    label_names, device_names       what labels and devices are called
    device_models                   optional: the model of each device, where several share one
    official_test (n,)              optional: 1 where the publisher has the window for test

HHAR and RealWorld are cut from the publishers' files once, into such a file in the cache. A natural
client is a subject with one device. Windows of one subject are never split between training and
test set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.arrays import channel_moments, read_npz
from fedcli.data.sets.dataset import Dataset, Examples
from fedcli.data.sets.hhar import hhar_arrays
from fedcli.data.sets.realworld import realworld_arrays
from fedcli.data.sets.registry import DATASETS
from fedcli.data.sets.source import Source
from fedmodels.errors import DataError
from fedmodels.host.files import replacing

log = logging.getLogger(__name__)

Arrays = dict[str, NDArray[Any]]
WINDOW = 128
CHANNELS = 6
NEEDED = ("X", "y", "subject", "device", "label_names", "device_names")
COMBINED = ("sit", "stand", "walk", "up", "down", "bike", "run", "lie", "jump")
REALWORLD_LABELS = (4, 3, 6, 0, 1, 2, 7, 8)
"""What each label of RealWorld becomes in the combined set; labels of HHAR stay as they are."""
REALWORLD_SUBJECTS = 100
"""Added to the numbers of RealWorld's subjects in the combined set."""


def windows(source: Source) -> Dataset:
    """Load UCI HAR (Anguita et al., 2013), MotionSense (Malekzadeh et al., 2019) or WISDM.

    WISDM (Weiss, 2019) is at 20 Hz. UCI HAR has official test subjects; of the others every fifth
    subject is for test.
    """
    (file,) = DATASETS[source.data.name].files
    path = source.find(file)
    if path is None:
        raise source.missing(file, DATASETS[source.data.name].advice)
    arrays = _read(path)
    return _made(source.data.name, arrays, f"{file}, {len(arrays['y'])} windows")


def hhar(source: Source) -> Dataset:
    """Load HHAR (Stisen et al., 2015): 9 users, 4 phone models; every fifth user is for test."""
    return _made("hhar", _cut_once(source, "hhar", hhar_arrays), "full")


def realworld(source: Source) -> Dataset:
    """Load RealWorld (Sztyler, 2016): 15 subjects, 7 positions; every fifth is for test."""
    return _made("realworld", _cut_once(source, "realworld", realworld_arrays), "full")


def hhar_realworld(source: Source) -> Dataset:
    """Load HHAR and RealWorld as one set, with FedAli's nine activities: 36 + 105 clients."""
    first = _cut_once(source, "hhar", hhar_arrays)
    second = _cut_once(source, "realworld", realworld_arrays)
    return _made(source.data.name, merged(first, second), "hhar and realworld")


def merged(first: Arrays, second: Arrays) -> Arrays:
    """Return the arrays of HHAR and of RealWorld as one set, with the labels of ``COMBINED``."""
    shift = len(first["device_names"])
    return {
        "X": np.concatenate([first["X"], second["X"]]),
        "y": np.concatenate([first["y"], np.array(REALWORLD_LABELS)[second["y"]]]),
        "subject": np.concatenate([first["subject"], second["subject"] + REALWORLD_SUBJECTS]),
        "device": np.concatenate([first["device"], second["device"] + shift]),
        "label_names": np.array(COMBINED),
        "device_names": np.concatenate([first["device_names"], second["device_names"]]),
        "device_models": np.concatenate([first["device_names"], second["device_models"]]),
    }


def _cut_once(source: Source, name: str, cut: Callable[[Source], Arrays]) -> Arrays:
    """Return the windows of a set from its file; cut that file into the cache if there is none."""
    file = f"{name}{'_legacy' if source.data.legacy_windows else ''}.npz"
    found = source.find(file)
    if found is not None:
        return _read(found)
    arrays = cut(source)
    try:
        source.cache.mkdir(parents=True, exist_ok=True)
        with replacing(source.cache / file) as temporary, temporary.open("wb") as out:
            np.savez(out, allow_pickle=False, **arrays)
    except OSError as error:
        log.warning(
            "%s cannot be kept, and will be cut again next time: %s", source.cache / file, error
        )
    return arrays


def _read(path: Path) -> Arrays:
    """Read a windows file; raise DataError unless its arrays are there and fit together."""
    arrays = read_npz(path)
    absent = set(NEEDED) - set(arrays)
    if absent:
        raise DataError(f"{path} holds no {', '.join(sorted(absent))}")
    shape = arrays["X"].shape
    if shape[1:] != (WINDOW, CHANNELS) or arrays["X"].dtype.kind not in "iuf":
        raise DataError(f"{path}: windows are {shape[1:]}, not numbers ({WINDOW}, {CHANNELS})")
    for key in ("y", "subject", "device", "official_test"):
        if key in arrays and (
            arrays[key].shape != shape[:1] or arrays[key].dtype.kind not in "iub"
        ):
            raise DataError(f"{path}: {key} must hold {shape[0]} whole numbers")
    names, models = arrays["device_names"], arrays.get("device_models", arrays["device_names"])
    if arrays["label_names"].ndim != 1 or names.ndim != 1 or models.shape != names.shape:
        raise DataError(f"{path}: label_names, device_names or device_models is no list of names")
    if not np.isin(arrays["device"], np.arange(len(names))).all():
        raise DataError(f"{path}: device must be a number from 0 to {len(names) - 1}")
    return arrays


def _made(name: str, arrays: Arrays, variant: str) -> Dataset:
    """Make a data set, one natural client per subject and device."""
    x, y = arrays["X"].astype(np.float32), arrays["y"].astype(np.int64)
    subject = arrays["subject"].astype(np.int64)
    test = np.isin(subject, np.unique(subject)[4::5])  # every fifth one in sorted order
    if "official_test" in arrays:
        test = arrays["official_test"] == 1
    device_names = [str(device) for device in arrays["device_names"]]
    models = [str(model) for model in arrays.get("device_models", arrays["device_names"])]
    pairs = np.stack([subject, arrays["device"].astype(np.int64)], axis=1)
    clients, group = np.unique(pairs, axis=0, return_inverse=True)
    group = group.reshape(-1).astype(np.int64)
    domain = clients[group, 1]
    whole = Examples(x, y, group, domains=domain)
    train, held = whole.at(~test), whole.at(test)
    mean, std = channel_moments(train.x, 1.0)
    return Dataset(
        name, train, held, tuple(str(label) for label in arrays["label_names"]),
        scale=1.0, mean=mean, std=std,
        group_names=tuple(f"subject {s}, {device_names[d]}" for s, d in clients),
        devices=tuple(models[d] for _, d in clients), variant=variant, overlapping=True,
        persons=tuple(int(s) for s, _ in clients),
        domain_names=tuple(n.partition(" (")[0] for n in device_names),
    )  # fmt: skip
