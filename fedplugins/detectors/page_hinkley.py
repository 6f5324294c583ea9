"""The Page-Hinkley test for a rise of the mean.

Page, Continuous Inspection Schemes, Biometrika 1954, with the running mean in place of a known one.
The settings are those that river has.
"""

from __future__ import annotations

BEYOND, THRESHOLD, FEWEST = 0.005, 50.0, 30


class PageHinkley:
    """Finds where values grow: their sum beyond the running mean leaves its least value far behind.

    After a find it begins anew.
    """

    def __init__(self) -> None:
        self.drift_detected = False
        self._begin()

    def _begin(self) -> None:
        self._count, self._mean, self._sum, self._least = 0, 0.0, 0.0, 0.0

    def update(self, x: float) -> None:
        """Take the next value."""
        if self.drift_detected:
            self._begin()
        self._count += 1
        self._mean += (x - self._mean) / self._count
        self._sum += x - self._mean - BEYOND
        self._least = min(self._least, self._sum)
        self.drift_detected = self._count >= FEWEST and self._sum - self._least > THRESHOLD
