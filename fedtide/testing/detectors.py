"""What every detector of drift must do, whatever it computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

MANY = 1000
"""Errors before a change, and after it."""
MOST_FALSE = 0.005
"""Changes told of errors that do not change, of so many values; of ADWIN it is below 0.001."""


def check_detector(make: Callable[[], Any]) -> None:
    """Check a detector on errors of 0 and 1, which is what ``[evaluate] detector`` shows it.

    Args:
        make: returns a new one: a class, or a function. It has ``update(x)`` and
            ``drift_detected``, as those of ``river.drift``.

    Raises:
        AssertionError: it finds no change where errors rise from 10 % to 60 %, finds changes where
            nothing changes, or another one of its kind changes what it finds.
    """
    rises = _errors(0.1, 1) + _errors(0.6, 2)
    places = _found(make(), rises)
    late = [place for place in places if place >= MANY]
    assert late, f"of {MANY} errors that rise from 10 % to 60 % it finds no change"
    for what, values in (("all the same", [0.0] * 2 * MANY), ("at 10 %", _errors(0.1, 3, 4))):
        false, most = _found(make(), values), MOST_FALSE * len(values)
        assert len(false) <= most, f"of {len(values)} errors {what} it finds {len(false)} changes"
    other = make()
    again = _found(make(), rises, lambda x: other.update(1 - x))
    assert again == places, "another detector beside it, or a second run, changes what it finds"


def _found(
    detector: Any, values: Sequence[float], also: Callable[[float], object] = lambda x: None
) -> list[int]:
    places = list[int]()
    for place, value in enumerate(values):
        detector.update(value)
        also(value)
        if detector.drift_detected:
            places.append(place)
    return places


def _errors(share: float, *seeds: int) -> list[float]:
    return [float(random.Random(f"{s} {n}").random() < share) for s in seeds for n in range(MANY)]
