"""What both halves know of drift (``[evaluate] drift``): summaries stay, figures are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from fedmodels.config.experiment import Experiment
from fedmodels.errors import PayloadError
from fedmodels.numerics.data_drift import DRIFT_PARTS, NAMES
from fedmodels.tensors.bundle import Problem
from fedmodels.training.method import Method
from fedmodels.training.run import RunFacts
from fedmodels.training.wire import SharedPart
from fedplugins.drift.columns import WatchedWords

MOST = 3
"""Numbers that are told of a part, each of another column."""


def places_of(part: str) -> list[str]:
    """Return the figures that say where what moved lies, the surest first."""
    return [f"{part}_drift_number{end}" for end in ("", *(f"_{n}" for n in range(2, MOST + 1)))]


def said_of(experiment: Experiment) -> str:
    """Return what a run predicts of each of its outputs, in words."""
    columns = experiment.data.columns if experiment.data else None
    if columns is None or not columns.targets:
        return WatchedWords.says
    return "the probability of label" if columns.labels else "the prediction of"


class Drift(SharedPart):
    """Clients keep summaries of the inputs of earlier tasks, and tell how far they moved."""

    section = "drift/"

    def __init__(self, problem: Problem) -> None:
        """Know how many numbers are watched."""
        self._counts = {
            part: WatchedWords(part, tuple(problem.input_shape), problem.num_classes).count
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
            amount, chance, places = f"{part}_drift", f"{part}_drift_p", places_of(part)
            chain = zip(places, [amount, *places], strict=False)
            for name, needed in ((amount, chance), (chance, amount), *chain):
                if name in figures and needed not in figures:
                    raise PayloadError(f"the report holds {name!r} without {needed!r}")
            for place in places:
                if place in figures and figures[place] not in range(count):
                    raise PayloadError(
                        f"the report's {place!r} is {figures[place]:g}, no place in a list of "
                        f"{count}"
                    )
