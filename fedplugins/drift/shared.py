"""What both halves know of drift (``[evaluate] drift``): summaries stay, figures are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fedmodels.config.experiment import Experiment
from fedmodels.errors import PayloadError
from fedmodels.numerics.data_drift import DRIFT_PARTS, NAMES
from fedmodels.numerics.data_drift_numbers import Words
from fedmodels.tensors.bundle import Problem
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart


def said_of(experiment: Experiment) -> str:
    """Return what a run predicts of each of its outputs, in words."""
    columns = experiment.data.columns if experiment.data else None
    if columns is None or not columns.targets:
        return Words.says
    return "the probability of label" if columns.labels else "the prediction of"


class Drift(SharedPart):
    """Clients keep summaries of the inputs of earlier tasks, and tell how far they moved."""

    section = "drift/"

    def __init__(self, problem: Problem) -> None:
        """Know how many numbers are watched."""
        self._counts = {
            part: Words(part, tuple(problem.input_shape), problem.num_classes).count
            for part in DRIFT_PARTS
        }

    @classmethod
    def of(cls, method: Method, run: RunFacts) -> Self:
        """Return the part of a run."""
        return cls(run.problem)

    def check_told(self, figures: Mapping[str, float], num_examples: int) -> None:
        """Check that what is told of drift is possible; raise PayloadError."""
        for name in NAMES:
            if name in figures and not 0 <= figures[name] <= 1:
                raise PayloadError(f"the report's {name!r} is {figures[name]:g}, not from 0 to 1")
        for part, count in self._counts.items():
            amount, chance, place = (f"{part}_drift{end}" for end in ("", "_p", "_number"))
            for name, needed in ((amount, chance), (chance, amount), (place, amount)):
                if name in figures and needed not in figures:
                    raise PayloadError(f"the report holds {name!r} without {needed!r}")
            if place in figures and figures[place] not in range(count):
                raise PayloadError(
                    f"the report's {place!r} is {figures[place]:g}, no place in a list of {count}"
                )
