"""Detectors of drift by the interface of river: what makes one, and where one finds a change.

A detector is made without arguments. It has ``update(x)`` for the next value, a float, and then
``drift_detected``, whether it found a change there. The detectors of ``river.drift`` are such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fedmodels.errors import ConfigError, suggestion
from fedmodels.own.code_names import is_own, of_a_file
from fedmodels.own.own_code import load_entry_point, own, told
from fedmodels.plugins import offered

GROUP = "fedtide.detectors"


class DriftDetector(Protocol):
    """Looks at one value after the other."""

    @property
    def drift_detected(self) -> bool:
        """Whether the last value showed a change."""

    def update(self, x: float) -> Any:
        """Take the next value."""


def detector_of(name: str) -> Callable[[], DriftDetector]:
    """Return what makes a detector: of a file, ``file.py:Name``, or of an entry point.

    Raises:
        ConfigError: there is none of this name here, or what has it cannot be called.
    """
    points = {} if is_own(name) else {point.name: point for point in offered(GROUP)}
    if not (is_own(name) or name in points):
        there = f"there are {', '.join(points)}" if points else "none is installed"
        raise ConfigError(
            f"{name!r} is no detector of the entry points {GROUP}: {there}."
            f"{suggestion(name, points)}{of_a_file(name)}"
        )
    found = own(name) if is_own(name) else load_entry_point(points[name])
    if not callable(found):
        raise ConfigError(f"{name} is no class or function that makes a detector")
    return found  # type: ignore[no-any-return]


def detections(make: Callable[[], DriftDetector], values: Iterable[float]) -> list[int]:
    """Return at which values, from 0, a new detector finds a change.

    Raises:
        DataError: its code fails.
    """
    found = list[int]()
    with told(f"the detector {getattr(make, '__name__', make)}"):
        detector = make()
        for place, value in enumerate(values):
            detector.update(float(value))
            if detector.drift_detected:
                found.append(place)
    return found
