"""What papers with private heads leave open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class HeadsReading:
    """Which head a round begins with."""

    heads: Literal["private", "round"] = "private"
    """``round``: every round begins with the mean of the participants' heads, which travel; heads
    are private only within it. Both papers send the shared layers alone, so ``private`` is the
    default. For GLDP without normalisation ``round`` gains 3.3 [1.5, 5.1] points of A_loc. With
    LayerNorm, and for FedMLP, no interval tells the two apart (docs/results/gldp.md,
    docs/results/fedmlp.md)."""
