"""Clients trained as one stack (``[training] together``): the net must allow it."""

from __future__ import annotations

from fedmodels.training.stack_trial import check_together
from fedsrv.engine.plan import Plan
from fedsrv.engine.server_part import ServerPart


class Stacking(ServerPart):
    """Refuses a method or a net whose clients cannot train as one stack."""

    def gathered(self, plan: Plan) -> None:
        """Raise ConfigError where they cannot."""
        check_together(plan.method, plan.run)
