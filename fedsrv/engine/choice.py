"""What chooses: which round of a run is the best.

A choice sees numbers of validation parts alone. Test data enter no function of this file, so that
what is chosen flatters no method.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedmodels.numerics.metrics import best_round


def chosen(values: Sequence[float | None]) -> int | None:
    """Return which of several validation scores is the best, the earliest of equal ones."""
    known = [number for number, value in enumerate(values) if value is not None]
    scores = [value for value in values if value is not None]
    return known[best_round(scores)] if known else None
