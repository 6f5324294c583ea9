"""The columns that watched numbers belong to, and numbers that are watched in one class alone.

Of windows, a column is a channel; of tables, a column; of images and of what is pooled, each number
is one of its own. Each share of a class is a column, too, and each class of predictions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedmodels.numerics.data_drift_numbers import Numbers, Words


@dataclass(frozen=True)
class WatchedWords(Words):
    """The words of all numbers: of all classes, shares of classes, then those of each class."""

    @property
    def count(self) -> int:
        """Return how many numbers are watched of this part."""
        return self.of_all + self.num_classes * (1 + self.of_all)

    @property
    def columns(self) -> tuple[int, ...]:
        """Return to which column each number belongs."""
        labels, own = range(self.num_classes), _columns(self.shape)
        if self.part != "input":
            return (*labels, *labels, *[*labels] * self.num_classes)
        return (*own, *(max(own) + 1 + label for label in labels), *own * self.num_classes)

    def name(self, place: int) -> str:
        """Return what people call a number."""
        label, number = self._of_class(place)
        if label is None:
            return super().name(number)
        share = Words("input", (1,), self.num_classes, (), self.classes)
        named = share.name(share.of_all + label).removeprefix("the share of ")
        return f"{super().name(number)}, in {named}"

    def by(self, place: int, amount: float) -> str:
        """Return how far a number moved, given the gap between two distributions."""
        return super().by(self._of_class(place)[1], amount)

    def column(self, place: int) -> str:
        """Return what people call the column of a number."""
        number, shape = self._of_class(place)[1], Numbers(self.shape)
        is_own = len(self.shape) > 2 or (not shape.channels and shape.grid != self.shape)
        if self.part != "input" or number >= self.of_all or is_own:
            return self.name(number)
        at = _columns(self.shape)[number]
        if len(self.channels) == self.shape[-1]:
            return self.channels[at]
        return f"{'channel' if shape.channels else 'number'} {at}"

    def _of_class(self, place: int) -> tuple[int | None, int]:
        """Return the class that a number is watched in, if it is one alone, and the number."""
        beyond = place - self.of_all - self.num_classes
        return divmod(beyond, self.of_all) if beyond >= 0 else (None, place)


def _columns(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return to which column each number of all classes belongs."""
    numbers = Numbers(shape)
    if len(shape) != 2 or not numbers.channels:
        return tuple(n % math.prod(numbers.grid) if len(shape) == 1 else n
                     for n in range(numbers.count))  # fmt: skip
    each = [*range(numbers.channels)]
    steps = [channel for channel in each for _ in range(numbers.grid[1])]
    return (*each, *each, *steps, *each * (len(numbers.octaves) + 1))
