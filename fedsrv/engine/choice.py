"""What chooses: which round of a run is the best, and when a run has seen enough.

A choice sees numbers of validation parts alone. Test data enter no function of this file, so that
what is chosen flatters no method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.numerics.metrics import best_round


def chosen(values: Sequence[float | None]) -> int | None:
    """Return which of several validation scores is the best, the earliest of equal ones."""
    known = [number for number, value in enumerate(values) if value is not None]
    scores = [value for value in values if value is not None]
    return known[best_round(scores)] if known else None


@dataclass
class Stopping:
    """Whether a run has seen enough, from its validation scores so far alone."""

    patience: int | None
    target: float | None
    by: str
    scores: list[float] = field(default_factory=list)
    seen: int = 0
    """Interactions so far."""

    @classmethod
    def of(cls, experiment: Experiment) -> Stopping:
        """Return what the schedule says, before the first score."""
        schedule = experiment.schedule
        return cls(schedule.patience, schedule.target, experiment.chosen_by)

    @property
    def may(self) -> bool:
        """Whether the run may end before its last round."""
        return self.patience is not None or self.target is not None

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of the next interaction, which may have no validation score."""
        self.seen += 1
        self.scores += [metrics[self.by]] if self.by in metrics else []

    def why(self) -> str:
        """Return why the run ends here; empty if it goes on."""
        if not self.scores:
            return ""
        if self.target is not None and max(self.scores) >= self.target:
            return f"{self.by} = {max(self.scores):.4f} reaches target = {self.target:g}"
        since = len(self.scores) - 1 - best_round(self.scores)
        if self.patience is not None and since >= self.patience:
            return f"{self.by} has not risen in {since} scored rounds (patience = {self.patience})"
        return ""


def check_stopping(experiment: Experiment, tasks: Iterable[int]) -> None:
    """Check that a run may end before its last round, if its schedule says so.

    Raises:
        ConfigError: tasks would be left out.
    """
    one_by_one = experiment.schedule.order == "tasks_outer" and max(tasks) > 1
    if Stopping.of(experiment).may and one_by_one:
        raise ConfigError(
            "[schedule] patience and target would leave later tasks out: take "
            'order = "rounds_outer", or leave them out'
        )
