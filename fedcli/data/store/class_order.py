"""The classes of a client in the order of a run, which may have got further ones.

Labels of a client count through its own list of classes, as ``client.json`` has it. Labels of a run
count through the run's list. Both lists begin alike in most runs; what comes later may come in
another order at each client. So classes go by name. A class without a name is called by its label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedcli.data.arrays import IntArray
from fedmodels.errors import DataError
from fedmodels.printable import printable

MAX_LETTERS = 60


@dataclass(frozen=True)
class ClassOrder:
    """Which label of a run each label of a client is."""

    names: tuple[str, ...]
    """Names of the client's classes, in its own order."""
    places: IntArray  # (K,) label of the run; -1 where the run lacks the class
    run: tuple[str, ...]
    """Names of the run's classes, in the run's order."""
    first: int
    """How many of them the run began with."""

    @classmethod
    def own(cls, names: tuple[str, ...]) -> Self:
        """Return the order of a client that has the classes of its run."""
        return cls(names, np.arange(len(names)), names, len(names))

    @classmethod
    def of(cls, names: tuple[str, ...], run: tuple[str, ...], first: int) -> Self:
        """Return the order of a client in a run.

        Args:
            names: of the client's classes, in its own order.
            run: names of the run's classes, in the run's order.
            first: how many of them the run began with; of these, a number stands for the label.
        """
        known = {name: label for label, name in enumerate(run)}
        by_number = {label for label in range(min(first, len(names), len(run)))
                     if str(label) in (names[label], run[label])}  # fmt: skip
        found = [known.get(name, label if label in by_number else -1)
                 for label, name in enumerate(names)]  # fmt: skip
        return cls(names, np.array(found, dtype=np.int64), run, first)

    def labels(self, labels: IntArray, where: object) -> IntArray:
        """Return labels (n,) of the client as labels of the run.

        Raises:
            DataError: the run lacks the class of one.
        """
        if self._is_own:
            return labels
        found: IntArray = self.places[labels]
        if (found < 0).any():
            self._refuse(int(labels[found < 0][0]), where)
        return found

    def counts(self, counts: Sequence[int], where: object) -> list[int]:
        """Return counts (K,) of the client's classes as those of the run's classes.

        Raises:
            DataError: the run lacks a class that is counted.
        """
        found = [0] * len(self.run)
        for label, count in enumerate(counts):
            if count and self.places[label] < 0:
                self._refuse(label, where)
            if count:
                found[self.places[label]] = count
        return found

    @property
    def _is_own(self) -> bool:
        """Whether both orders are the same as far as the client knows classes."""
        return bool((self.places == np.arange(len(self.places))).all())

    def _refuse(self, label: int, where: object) -> None:
        name = printable(self.names[label], MAX_LETTERS)
        raise DataError(
            f"{where} has examples of the class {name!r}, which the run does not know yet"
        )
