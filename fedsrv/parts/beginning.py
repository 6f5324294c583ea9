"""A run that begins with the models of another one (``[net] begin_from``): do its classes fit?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedmodels.errors import ConfigError
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.server_part import NOTHING, CurrentInteraction, ServerPart
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Record, of_parts
from fedsrv.state.store import Store
from fedsrv.trained.begin_from import beginning_of


class Beginning(ServerPart):
    """Says from what a run began, in its first record."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Read what the file of weights says of itself; raise ConfigError if it says nothing."""
        super().__init__(store, events, given)
        self._from = beginning_of(self.experiment)

    def gathered(self, plan: Plan) -> None:
        """Check that the rows of heads are of the classes that they were of.

        Raises:
            ConfigError: a class has another place.
        """
        before = tuple(map(str, self._from["classes"]))
        named = (profile.class_names for profile in plan.profiles.values() if profile.class_names)
        classes = getattr(plan, "classes", None)  # of an open run, as it began
        now = classes.first if classes else next(named, ())
        if before and now and now[: len(before)] != before:
            raise ConfigError(
                f"[net] begin_from: {self.experiment.net.begin_from} has the classes "
                f"{[*before]}, and this run {[*now]}: list [data] classes in that order, new ones "
                "behind them"
            )

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put into the first record from what the run began, ``began_from``.

        It has the ``run``, the ``interaction`` after which its models were, and their ``sha256``.
        """
        if at.step.interaction == 0:
            from_what = {k: self._from[k] for k in ("run", "interaction", "sha256")}
            of_parts(record)["began_from"] = from_what
