"""Robust rules (``[server] reduce``): what the uploads become where some of the clients may lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedmodels.config.reduction import Reduction
from fedmodels.reductions.rule import rule_of
from fedmodels.training.hooks import reads_singly
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import NOTHING, CurrentInteraction, ServerPart
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Record, of_parts
from fedsrv.state.store import Store


class RobustRules(ServerPart):
    """Takes a rule in place of the mean, and says what it does not reach."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Take the rule of the run."""
        super().__init__(store, events, given)
        self.rule = rule_of(store.experiment.server)
        self._told = False
        """Whether rare classes were told: they are the same in most rounds."""

    def gathered(self, plan: Plan) -> None:
        """Say that a method reads single uploads beside the rule."""
        if singly := reads_singly(plan.method):
            named = self.experiment.server.named
            line = f"{named} does not reach all of {plan.method.name}: {singly}"
            self.events.tell("note", line=line)

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down the classes whose prototypes came from so few clients that all may lie.

        ``rare_classes`` has them by level.
        """
        if found.rare_classes:
            of_parts(record)["rare_classes"] = dict(found.rare_classes)

    def committed(self, record: Record) -> None:
        """Tell of such classes once."""
        if (rare := of_parts(record).get("rare_classes")) and not self._told:
            self._told = True
            self.events.tell("note", line=rare_line(rare, self.experiment.server))


def rare_line(rare: Mapping[str, Sequence[int]], rule: Reduction) -> str:
    """Return a line on classes whose prototypes too few clients have for the run's rule."""
    classes = ", ".join(map(str, sorted({label for labels in rare.values() for label in labels})))
    what = f"{rule.few_holders} clients or fewer have prototypes of classes {classes}"
    if rule.rare_classes == "keep":
        return f"{what}: these stay as they were (rare_classes)"
    return (
        f'{what}: liars among them may choose these prototypes; [server] rare_classes = "keep" '
        "leaves such classes as they were"
    )
