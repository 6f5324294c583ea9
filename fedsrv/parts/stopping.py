"""When a run has seen enough: ``[schedule] patience`` and ``target``.

Only scores of validation parts are looked at, so that what is chosen flatters no method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ConfigError
from fedmodels.facts.position import Interaction
from fedmodels.numerics.metrics import best_round
from fedsrv.engine.plan import Plan
from fedsrv.engine.schedule import Step
from fedsrv.engine.server_part import NOTHING, ServerPart, Settle
from fedsrv.progress.events import EventLog
from fedsrv.state.store import Store


class Patience(ServerPart):
    """Ends a run that has seen enough."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin; no score was seen."""
        super().__init__(store, events, given)
        self._stopping = Stopping.of(self.experiment)

    def gathered(self, plan: Plan) -> None:
        """Refuse a schedule whose later tasks would be left out."""
        check_stopping(self.experiment, plan.tasks.values())

    def may_go_on(self, step: Step, plan: Plan, settle: Settle) -> str:
        """Return why the run ends; all interactions before the step are committed and count."""
        settle()
        for number in map(Interaction, range(self._stopping.seen, step.interaction)):
            record = self.store.ledger.record(number)
            assert record is not None, "it was committed"
            self._stopping.see(record["metrics"])
        why = self._stopping.why()
        return why and f"{step.round} rounds are enough: {why}"


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
    """Check that a run may end before its last round.

    Raises:
        ConfigError: tasks would be left out.
    """
    one_by_one = experiment.schedule.order == "tasks_outer" and max(tasks) > 1
    if one_by_one:
        raise ConfigError(
            "[schedule] patience and target would leave later tasks out: take "
            'order = "rounds_outer", or leave them out'
        )
