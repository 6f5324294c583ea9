"""What both halves know of prequential scores (``[evaluate] prequential``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fedmodels.errors import PayloadError
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart


class Prequential(SharedPart):
    """Clients keep the number of the last task that they were scored on, and tell an accuracy."""

    section = "prequential/"

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return the part of a run."""
        return cls()

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check that what is told is an accuracy; raise PayloadError."""
        if not 0 <= figures.get("prequential", 0.0) <= 1:
            raise PayloadError(
                f"the report's 'prequential' is {figures['prequential']:g}, not from 0 to 1"
            )
