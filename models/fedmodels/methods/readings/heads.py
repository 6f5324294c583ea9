"""What papers with private heads leave open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class HeadsReading:
    """Which head a round begins with."""

    heads: Literal["private", "round"] = "private"
    """``round``: every round begins with the mean of the participants' heads, which travel; heads
    are private only within it. No interval tells the two apart for GLDP and FedMLP on the small
    Fashion-MNIST streams (docs/results/gldp.md, docs/results/fedmlp.md)."""
