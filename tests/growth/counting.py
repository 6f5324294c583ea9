"""What work costs in operations, and how fast a cost grows."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np

MOST = 1.1
"""The exponent above which a cost grows too fast."""


def operations(work: Callable[[], Any]) -> int:
    """Return how many lines of Python ran in this thread, and calls; each pass of a loop is one."""
    count = 0

    def traced(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        count += event in ("call", "line")
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def exponent(costs: Mapping[int, float]) -> float:
    """Return how a cost grows beyond that of the smallest size: 0 is flat, 1 linear, 2 a square.

    A fixed part of the cost does not count, so a few sizes are enough. The fit is of
    log(cost(n) - cost(n_0)) over log(n - n_0).
    """
    (least, first), *others = sorted(costs.items())
    grown = [(n - least, cost - first) for n, cost in others]
    if any(more <= 0 for _, more in grown):
        return 0.0
    x, y = ([math.log(pair[place]) for pair in grown] for place in (0, 1))
    return float(np.polyfit(x, y, 1)[0])
