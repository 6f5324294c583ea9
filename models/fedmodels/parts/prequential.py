"""What both halves know of prequential scores (``[evaluate] prequential``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fedmodels.errors import PayloadError
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart

NAMES = ("prequential", "prequential_mae", "prequential_auroc")
"""What is told: an accuracy, the error of numbers, or the area of several labels."""
BOUNDS = {"prequential": (0.0, 1.0)}


class Prequential(SharedPart):
    """Clients keep the number of the last task that they were scored on, and tell one figure."""

    section = "prequential/"

    def __init__(self, bounds: Mapping[str, tuple[float, float]] = BOUNDS) -> None:
        """Know what may be told: the least and the largest of each figure."""
        self._bounds = bounds

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return the part of a run."""
        if run.targets is None:
            return cls()
        known = {f"prequential_{name}": ends for name, ends in run.targets.figures.items()}
        return cls({name: known[name] for name in NAMES if name in known})

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check that what is told is possible; raise PayloadError."""
        for name in (name for name in NAMES if name in figures):
            if name not in self._bounds:
                raise PayloadError(f"the report tells {name!r} of a run that learns something else")
            least, most = self._bounds[name]
            if not least <= figures[name] <= most:
                raise PayloadError(
                    f"the report's {name!r} is {figures[name]:g}, not from {least:g} to {most:g}"
                )
