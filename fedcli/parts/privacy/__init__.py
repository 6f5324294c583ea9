"""What hides a client, or its examples, and what a site itself requires of that."""

from __future__ import annotations

import math

FAILED = "failed"
"""What a charge says was made, of a training that failed: an answer without an upload."""


def coarse(seconds: float) -> float:
    """Return seconds as they leave where noise hides a client: up to a power of two, from 1 on."""
    return float(2 ** max(0, math.ceil(math.log2(max(seconds, 1.0)))))
