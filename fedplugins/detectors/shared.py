"""What both halves know of detectors: the errors stay at the client, and one bit is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fedmodels.errors import PayloadError
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart

NAME = "error_drift"


class Detector(SharedPart):
    """Clients keep their model's errors on earlier tasks, and tell whether these changed."""

    section = "detector/"

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return the part of a run."""
        return cls()

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check that what is told is possible; raise PayloadError."""
        if NAME in figures and figures[NAME] not in (0, 1):
            raise PayloadError(f"the report's {NAME!r} is {figures[NAME]:g}, and may be 0 or 1")
