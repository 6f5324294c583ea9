"""Runs whose clients hide their examples: what they have spent, and when the run ends.

Clients add the noise and count what they spend, by the content of their examples. So the
coordinator knows of epsilon what they say. A client that may not train declines the order. Where
too few are left by that, the run ends in order, before that interaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedmodels.errors import ClientFailed, OrderDeclined, TooFewClients
from fedmodels.privacy.coverage import assumptions, check_allowed
from fedmodels.training.position import Task
from fedmodels.training.private_steps import check_hides_examples
from fedmodels.training.private_uploads import contributions
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step
from fedsrv.engine.server_part import NOTHING, Interaction, ServerPart, Settle
from fedsrv.events import EventLog
from fedsrv.parts.private_rounds import told
from fedsrv.state.record import Record
from fedsrv.state.store import Store


class ExamplePrivacy(ServerPart):
    """What ``[privacy] level = "example"`` adds to the rounds of a run: when it ends."""

    tells = ("privacy",)

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin, or go on after the last commit."""
        super().__init__(store, events, given)
        self.most = 0.0
        """Epsilon of the client that has spent most."""
        self._next: dict[tuple[int, Task], float] = {}
        """What each client would have spent after one more training on a task, as it last said."""
        privacy = self.experiment.privacy
        assert privacy is not None, "there is something to hide"
        self.privacy, self.limit, self.delta = privacy, privacy.epsilon, privacy.chance

    def gathered(self, plan: Plan) -> None:
        """Check that the method, and the config, fit; take what was spent up to the last commit.

        Raises:
            ConfigError: they do not.
        """
        check_hides_examples(plan.method, plan.run)
        of = contributions(plan.method, plan.run)
        of.clips  # noqa: B018 (it raises where a bound is missing)
        uncovered = (name for name in of.uncovered if name == "generators")
        check_allowed(
            plan.method.name, [*told(plan, self.experiment), *uncovered], self.privacy.allow
        )
        for record, _ in self.store.ledger.records():
            self._see(record, plan.steps[record["interaction"]])

    def records(self, at: Interaction, found: Reduced, record: Record) -> None:
        """Put down what is spent."""
        self._see(record, at.step)

    def _see(self, record: Record, step: Step) -> None:
        """Take what clients of an interaction have spent, and put the most into its metrics."""
        for client, row in record["clients"].items():
            if "epsilon" in row:
                self._next[int(client), step.task_of(int(client))] = float(row["epsilon_next"])
                self.most = max(self.most, float(row["epsilon"]))
        record["metrics"]["epsilon"] = self.most
        record["privacy"] = {"epsilon": self.most, "delta": self.delta}

    def may_go_on(self, step: Step, plan: Plan, settle: Settle) -> str:
        """Return why the run ends before a step; empty if enough clients may train."""
        if self.limit is None:
            return ""
        after = {c: self._next.get((c, step.task_of(c)), 0.0) for c in step.cohort}
        over = [c for c, epsilon in after.items() if epsilon > self.limit * (1 + 1e-9)]
        if not over or len(step.cohort) - len(over) >= plan.needed(step.cohort):
            return ""
        return (
            f"the run ends after round {step.round}: the privacy of "
            f"{clients_text([*map(str, over)])} is spent: one more training would make epsilon "
            f"{max(after.values()):.4g} at delta {self.delta:g}, beyond [privacy] epsilon = "
            f"{self.limit:g}"
        )

    def ends_with(self, error: Exception) -> str:
        """Return why the run ends: too few clients are left that may train."""
        return why_declined(error) if isinstance(error, TooFewClients | ClientFailed) else ""

    def ended(self, records: Sequence[Record]) -> Mapping[str, Any]:
        """Return what the run spent, and under which assumptions."""
        most = [r["metrics"]["epsilon"] for r in records if "epsilon" in r["metrics"]]
        spent = {"epsilon": max(most, default=0.0), "delta": self.privacy.delta}
        return {"privacy": {**spent, "assumes": assumptions(self.experiment)}}


def why_declined(failed: TooFewClients | ClientFailed) -> str:
    """Return why clients declined their orders; empty unless that alone left too few of them."""
    reasons = {failed.client: failed.reason} if isinstance(failed, ClientFailed) else failed.reasons
    said = OrderDeclined.SAID
    if not reasons or not all(why.startswith(said) for why in reasons.values()):
        return ""
    client, why = next(iter(reasons.items()))
    others = f"; {len(reasons) - 1} more declined" if len(reasons) > 1 else ""
    return f"client {client} trains no more: {why.removeprefix(said)}{others}"
