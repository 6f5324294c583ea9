"""What both halves know of drift (``[evaluate] drift``): summaries stay, figures are told."""

from __future__ import annotations

from collections.abc import Mapping

from fedmodels.errors import PayloadError
from fedmodels.numerics.data_drift import NAMES, PLACES
from fedmodels.training.wire import SharedPart


class Drift(SharedPart):
    """Clients keep summaries of the inputs of earlier tasks, and tell how far they moved."""

    section = "drift/"

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check that what is told of drift is possible; raise PayloadError."""
        for name in NAMES:
            if name in figures and not 0 <= figures[name] <= 1:
                raise PayloadError(f"the report's {name!r} is {figures[name]:g}, not from 0 to 1")
        for name in PLACES:
            if name in figures and not (figures[name] >= 0 and float(figures[name]).is_integer()):
                raise PayloadError(
                    f"the report's {name!r} is {figures[name]:g}, no place in a list"
                )
