"""Targets: what is learned in place of the class of an example.

A net has an output for each name of :attr:`Targets.outputs`, and those are what a run calls its
classes. No count goes by class: all examples count as of the first one. B is a batch, T the number
of targets, K that of outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedmodels.config.columns import Columns
from fedmodels.config.combinations import part_at
from fedmodels.config.experiment import Experiment
from fedmodels.config.training import Training
from fedmodels.config.transforms import TableTransform, parse_transform
from fedmodels.errors import ConfigError

KINDS = {"numbers": "problems.numbers:Numbers", "labels": "problems.labels:Labels"}
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Targets(ABC):
    """What is learned: the targets, the loss, the outputs of a net, the figures of a score."""

    columns: Columns
    """What says the names of the targets, and the unit that they are learned in."""
    training: Training
    """What says the loss."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the targets (T,)."""
        return self.columns.targets

    @property
    def mean(self) -> Floats:
        """What targets are counted from in training (T,)."""
        return np.array(self.columns.target_mean or [0.0] * len(self.names))

    @property
    def std(self) -> Floats:
        """What targets are counted in, in training (T,)."""
        return np.array(self.columns.target_std or [1.0] * len(self.names))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of a net (K,)."""
        return self.columns.outputs

    @property
    @abstractmethod
    def figures(self) -> Mapping[str, tuple[float, float]]:
        """The figures of a score by name: the least and the largest that each can be."""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss (B,) of outputs (B, K) and targets (B, T) as they are learned."""

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch: the mean of :meth:`losses`."""
        return self.losses(outputs, y).mean()

    @abstractmethod
    def score(self, outputs: Tensor, y: Tensor) -> dict[str, float]:
        """Return the figures of outputs (n, K) and targets (n, T) as they are learned; n > 0.

        A figure that a test set has not, such as R² of equal numbers, is left out.
        """

    @abstractmethod
    def answers(self, outputs: Tensor) -> Tensor:
        """Return what outputs (B, K) say, in the unit of their column, (B, K) float64."""

    def check_data(self, own: Targets | None) -> None:
        """Check that a client's data hold these targets.

        Raises:
            ConfigError: they hold classes, or other targets.
        """
        if own is None or own.names != self.names or type(own) is not type(self):
            held = "classes" if own is None else f"the targets {', '.join(own.names)}"
            raise ConfigError(
                f"the run learns {', '.join(self.names)}, and the client's data hold {held}: cut "
                "them by the [data.columns] of the run"
            )

    def learned(self, y: NDArray[Any]) -> NDArray[np.float32]:
        """Return targets (n, T) as they are learned, of those in a file."""
        return ((y - self.mean) / self.std).astype(np.float32)

    @classmethod
    def of(cls, experiment: Experiment, columns: Columns | None = None) -> Targets:
        """Return what a run learns; ``columns`` say the unit, where the config leaves it out."""
        named = experiment.data.columns if experiment.data else None
        assert named is not None, "the config names targets"
        return made(columns or named, experiment.training)


def made(columns: Columns, training: Training) -> Targets:
    """Return the targets of these columns."""
    kind = KINDS["numbers" if columns.target else "labels"]
    found: Targets = part_at(f"fedmodels.{kind}")(columns, training)
    return found


def targets_in(transform: Mapping[str, Any] | None, where: object) -> Targets | None:
    """Return what a file's transform says that is learned; None of classes.

    Raises:
        DataError: it is malformed.
    """
    how = parse_transform(transform, where)
    if not isinstance(how, TableTransform) or not how.columns.targets:
        return None
    return made(how.columns, Training())
