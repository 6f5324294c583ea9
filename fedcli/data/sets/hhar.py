"""HHAR, phones only (Stisen et al., SenSys 2015), from the publisher's CSV files.

``Phones_accelerometer.csv`` and ``Phones_gyroscope.csv`` have the columns Index, Arrival_Time (ms),
Creation_Time, x, y, z, User, Model, Device, gt. The two phones of a model are one device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcli.data.sets.source import Source
from fedcli.data.sets.windows import GRAVITY, Recording, gathered, windows_of
from fedmodels.errors import DataError, reason_of

ACTIVITIES = ("sit", "stand", "walk", "stairsup", "stairsdown", "bike")
FACTORS = {"nexus4": 4, "s3": 3, "s3mini": 2, "samsungold": 1}
"""Sampling rate of each phone model, as a multiple of 50 Hz."""
MAX_GAP_MS = 500
ROW = np.dtype(
    [
        *(("time", "i8"), ("x", "f8"), ("y", "f8"), ("z", "f8")),
        *(("user", "S2"), ("model", "S12"), ("device", "S14"), ("gt", "S12")),
    ]
)
FOLDERS = ("", "Activity recognition exp", "HHAR", "hhar")
URL = "archive.ics.uci.edu/dataset/344/heterogeneity+activity+recognition"


def hhar_arrays(source: Source) -> dict[str, NDArray[Any]]:
    """Cut HHAR into the arrays of a windows file (:mod:`fedcli.data.sets.har`).

    Examples labelled ``null`` are left out, and so is a pair (user, phone model) without windows
    of all six activities.

    Raises:
        DataError: a file is missing or does not have the publisher's form.
    """
    acc, gyro = (_read(source, f"Phones_{name}.csv") for name in ("accelerometer", "gyroscope"))
    recordings = []
    for user, device in sorted({(r["user"], r["device"]) for r in _heads(acc)}):
        one_acc, one_gyro = (
            rows[(rows["user"] == user) & (rows["device"] == device)] for rows in (acc, gyro)
        )
        recordings += _recordings(one_acc, one_gyro, source.data.legacy_windows)
    kept = _complete(recordings)
    if not kept:
        raise DataError("hhar: no user has recordings of all six activities with one phone model")
    names = {"label_names": np.array(ACTIVITIES), "device_names": np.array(list(FACTORS))}
    return {**gathered(kept), **names}


def _read(source: Source, name: str) -> NDArray[Any]:
    """Read one file as an array (n,) of ``ROW``."""
    path = source.find(*(str(Path(folder) / name) for folder in FOLDERS))
    if path is None:
        raise source.missing(name, f"unpack 'Activity recognition exp' from {URL} there")
    columns = (1, 3, 4, 5, 6, 7, 8, 9)
    try:
        rows: NDArray[Any] = np.loadtxt(
            path, dtype=ROW, delimiter=",", skiprows=1, usecols=columns, ndmin=1
        )
    except (OSError, ValueError, IndexError) as error:
        raise DataError(f"{path} cannot be read: {reason_of(error)}") from None
    return rows


def _heads(rows: NDArray[Any]) -> NDArray[Any]:
    """Return the first of each stretch of rows with the same user and device."""
    change = (rows["user"][1:] != rows["user"][:-1]) | (rows["device"][1:] != rows["device"][:-1])
    heads: NDArray[Any] = rows[np.concatenate([[True], change])]
    return heads


def _recordings(acc: NDArray[Any], gyro: NDArray[Any], legacy: bool) -> list[Recording]:
    """Cut what one user recorded with one phone into windows.

    The gyroscope is interpolated at the times of the accelerometer. A stretch of one activity that
    the gyroscope does not cover is left out.
    """
    model = acc["model"][0].decode()
    if model not in FACTORS or len(gyro) == 0:
        return []
    acc, gyro = acc[np.argsort(acc["time"], kind="stable")], gyro[np.argsort(gyro["time"])]
    new = (acc["gt"][1:] != acc["gt"][:-1]) | (np.diff(acc["time"]) > MAX_GAP_MS)
    out = []
    for run in np.split(acc, np.flatnonzero(new) + 1):
        activity = run["gt"][0].decode()
        inside = (run["time"] >= gyro["time"][0]) & (run["time"] <= gyro["time"][-1])
        if activity not in ACTIVITIES or not inside.all():
            continue
        columns = [run[axis] / GRAVITY for axis in "xyz"]
        columns += [np.interp(run["time"], gyro["time"], gyro[axis]) for axis in "xyz"]
        windows = windows_of(np.stack(columns, axis=1), FACTORS[model], legacy)
        label, device = ACTIVITIES.index(activity), list(FACTORS).index(model)
        out.append(Recording(windows, label, ord(run["user"][0][:1]) - ord("a"), device))
    return out


def _complete(recordings: list[Recording]) -> list[Recording]:
    """Keep the recordings of the pairs (user, phone model) with windows of every activity."""
    held: dict[tuple[int, int], set[int]] = {}
    for r in recordings:
        if len(r.windows):
            held.setdefault((r.subject, r.device), set()).add(r.label)
    whole = {client for client, labels in held.items() if len(labels) == len(ACTIVITIES)}
    return [r for r in recordings if (r.subject, r.device) in whole]
