"""RealWorld (Sztyler and Stuckenschmidt, PerCom 2016), from the publisher's files.

``realworld2016_dataset/probandN/data/{acc,gyr}_ACTIVITY_csv.zip`` hold a file ``…_POSITION.csv``
for each of seven body positions, with the columns id, attr_time, attr_x, attr_y, attr_z. Some hold
further zips, one for each part of a recording that was interrupted.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.folders import is_foreign
from fedcli.data.sets.source import Source
from fedcli.data.sets.windows import GRAVITY, Recording, gathered, paired, windows_of
from fedmodels.errors import DataError, reason_of

ACTIVITIES = {
    "climbingdown": "down",
    "climbingup": "up",
    "running": "run",
    "sitting": "sit",
    "standing": "stand",
    "walking": "walk",
    "lying": "lie",
    "jumping": "jump",
}
"""The publisher's names and ours, in label order."""
POSITIONS = ("chest", "forearm", "head", "shin", "thigh", "upperarm", "waist")
FOLDERS = ("realworld2016_dataset", "realworld2016", "RealWorld", "realworld")
URL = "www.uni-mannheim.de/dws/research/projects/activity-recognition (realworld2016_dataset.zip)"

Parts = dict[tuple[str, int], NDArray[np.float64]]
"""Samples (n, 3) by position and part of the recording."""


def realworld_arrays(source: Source) -> dict[str, NDArray[Any]]:
    """Cut RealWorld into the arrays of a windows file (:mod:`fedcli.data.sets.har`).

    A device is a body position; the one on the forearm is a watch, the others are phones.

    Raises:
        DataError: the files are missing or damaged.
    """
    root = source.find(*FOLDERS)
    subjects = sorted(root.glob("proband*")) if root else []
    if not subjects:
        raise source.missing("/".join((FOLDERS[0], "proband1")), f"unpack it from {URL} there")
    recordings = []
    for subject in subjects:
        number = int(re.sub(r"\D", "", subject.name) or 0)
        for label, activity in enumerate(ACTIVITIES):
            recordings += _recordings(subject, number, activity, label, source.data.legacy_windows)
    if not any(len(r.windows) for r in recordings):
        raise DataError(f"{root}: no recording of both sensors is long enough for a window")
    return {
        **gathered(recordings),
        "label_names": np.array(list(ACTIVITIES.values())),
        "device_names": np.array(POSITIONS),
        "device_models": np.array(["watch" if p == "forearm" else "phone" for p in POSITIONS]),
    }


def _recordings(
    subject: Path, number: int, activity: str, label: int, legacy: bool
) -> list[Recording]:
    """Cut one subject's recordings of one activity, at every position that has both sensors."""
    acc, gyro = (_read(subject / "data", sensor, activity) for sensor in ("acc", "gyr"))
    return [
        Recording(
            windows_of(paired(acc[key] / GRAVITY, gyro[key]), legacy=legacy),
            label,
            number,
            POSITIONS.index(key[0]),
        )
        for key in sorted(set(acc) & set(gyro))
    ]


def _read(folder: Path, sensor: str, activity: str) -> Parts:
    """Return the samples of one sensor in one activity, from files that are zipped or not."""
    out: Parts = {}
    zips = folder.glob(f"{sensor}_{activity}*.zip")
    for path in sorted([*zips, *_unzipped(folder, sensor, activity)]):
        try:
            files = _files(path.name, path.read_bytes())
            for name, content in files:
                position = name.removesuffix(".csv").rpartition("_")[2]
                if position in POSITIONS:
                    part = sum(key[0] == position for key in out)
                    out[position, part] = _samples(content)
        except (OSError, ValueError, IndexError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    return out


def _unzipped(folder: Path, sensor: str, activity: str) -> list[Path]:
    """Return the CSV files of a sensor and activity that were unzipped by hand."""
    names = {"acc": "acc_", "gyr": "[Gg]yr*_"}
    found = folder.glob(f"**/{names[sensor]}{activity}*.csv")
    return [path for path in found if not any(map(is_foreign, path.relative_to(folder).parts))]


def _files(name: str, content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the CSV files of a zip and of the zips in it, sorted by name."""
    if name.endswith(".csv"):
        yield name, content
    elif name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            named = (n for n in archive.namelist() if not any(map(is_foreign, Path(n).parts)))
            for inner in sorted(named):
                yield from _files(Path(inner).name, archive.read(inner))


def _samples(content: bytes) -> NDArray[np.float64]:
    """Return the samples (n, 3) of one CSV file."""
    return np.loadtxt(
        io.BytesIO(content), delimiter=",", skiprows=1, usecols=(2, 3, 4), ndmin=2
    ).astype(np.float64)
