"""Cutting sensor recordings into windows (FedAli §5.1): 50 Hz, 6 channels, 128 samples, hop 64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LENGTH = 128
HOP = 64
GRAVITY = 9.80665
"""m/s² in one g."""
MAX_GAP = 100
"""Samples by which two sensors of one recording may differ before one is resampled."""


@dataclass(frozen=True)
class Recording:
    """Windows of one activity of one subject with one device."""

    windows: NDArray[np.float32]  # (n, 128, 6)
    label: int
    subject: int
    device: int


def window_starts(num_samples: int, length: int, hop: int, legacy: bool = False) -> list[int]:
    """Return where windows start; 256 samples in windows of 128 with hop 64 start at 0, 64, 128.

    ``legacy`` leaves out a window that ends exactly where the recording does, as the authors'
    ``range(0, L - length, hop)`` does.
    """
    return list(range(0, num_samples - length + (0 if legacy else 1), hop))


def windows_of(
    samples: NDArray[np.float64], factor: int = 1, legacy: bool = False
) -> NDArray[np.float32]:
    """Cut samples (n, 6) at ``factor`` times 50 Hz into windows (m, 128, 6) at 50 Hz.

    Windows are cut at the original rate and decimated, with an anti-aliasing filter.
    """
    from scipy.signal import resample_poly

    length = LENGTH * factor
    starts = window_starts(len(samples), length, HOP * factor, legacy)
    if not starts:
        return np.empty((0, LENGTH, samples.shape[1]), dtype=np.float32)
    cut = np.stack([samples[start : start + length] for start in starts])
    if factor > 1:
        # not decimate(): its default filter has a gain of 0.99 for gravity, its other one
        # takes what is outside a window for zero
        cut = resample_poly(cut, 1, factor, axis=1, padtype="line")
    return np.ascontiguousarray(cut, dtype=np.float32)


def paired(acc: NDArray[np.float64], gyro: NDArray[np.float64]) -> NDArray[np.float64]:
    """Put acceleration (n, 3) and angular velocity (m, 3) side by side, (min(n, m), 6).

    Where they differ by more than 100 samples the longer is resampled to the shorter; the authors'
    code overwrites the gyroscope where the accelerometer is the longer one. What is left over is
    cut off.
    """
    shorter = min(len(acc), len(gyro))
    if abs(len(acc) - len(gyro)) > MAX_GAP:
        acc, gyro = _resampled(acc, shorter), _resampled(gyro, shorter)
    return np.concatenate([acc[:shorter], gyro[:shorter]], axis=1)


def _resampled(samples: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Interpolate linearly to ``size`` samples over the same time."""
    if len(samples) == size or size == 0:
        return samples[:size]
    places = np.linspace(0, len(samples) - 1, size)
    known = np.arange(len(samples))
    return np.stack([np.interp(places, known, column) for column in samples.T], axis=1)


def gathered(recordings: list[Recording]) -> dict[str, NDArray[np.generic]]:
    """Return recordings as the arrays of a windows file: X, y, subject, device."""
    counts = [len(r.windows) for r in recordings]

    def repeated(values: list[int]) -> NDArray[np.int64]:
        return np.repeat(np.array(values, dtype=np.int64), counts)

    return {
        "X": np.concatenate([r.windows for r in recordings]),
        "y": repeated([r.label for r in recordings]),
        "subject": repeated([r.subject for r in recordings]),
        "device": repeated([r.device for r in recordings]),
    }
