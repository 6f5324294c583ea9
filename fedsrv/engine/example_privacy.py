"""Runs whose clients hide their examples: what they have spent, and when the run ends.

Clients add the noise and count what they spend, by the content of their examples. So the
coordinator knows of epsilon what they say. A client that may not train declines the order. Where
too few are left by that, the run ends in order, before that interaction.
"""

from __future__ import annotations

from fedmodels.errors import ClientFailed, OrderDeclined, TooFewClients
from fedmodels.privacy.coverage import check_allowed
from fedmodels.training.private_steps import check_hides_examples
from fedmodels.training.private_uploads import contributions
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.plan import Plan
from fedsrv.engine.private_rounds import told
from fedsrv.engine.schedule import Step
from fedsrv.state.record import Record
from fedsrv.state.store import Store


class ExamplePrivacy:
    """What ``[privacy] level = "example"`` adds to the rounds of a run: when it ends."""

    def __init__(self, plan: Plan, store: Store) -> None:
        """Begin, or go on after the last commit.

        Raises:
            ConfigError: the method, or the config, does not fit.
        """
        self.most = 0.0
        """Epsilon of the client that has spent most."""
        self._next: dict[tuple[int, int], float] = {}
        """What each client would have spent after one more training on a task, as it last said."""
        privacy, experiment = store.experiment.privacy, store.experiment
        assert privacy is not None, "there is something to hide"
        self.limit, self.delta = privacy.epsilon, privacy.chance
        check_hides_examples(plan.method, plan.run)
        of = contributions(plan.method, plan.run)
        of.clips  # noqa: B018 (it raises where a bound is missing)
        found = [*told(plan, experiment), *(name for name in of.uncovered if name == "generators")]
        check_allowed(plan.method.name, found, privacy.allow)
        for record, _ in store.ledger.records():
            self.see(record, plan.steps[record["interaction"]])

    def see(self, record: Record, step: Step) -> None:
        """Take what clients of an interaction have spent, and put the most into its metrics."""
        for client, row in record["clients"].items():
            if "epsilon" in row:
                self._next[int(client), step.task_of(int(client))] = float(row["epsilon_next"])
                self.most = max(self.most, float(row["epsilon"]))
        record["metrics"]["epsilon"] = self.most
        record["privacy"] = {"epsilon": self.most, "delta": self.delta}

    def spent_up(self, step: Step, plan: Plan) -> str:
        """Return why the run ends before a step; empty if enough clients may train."""
        if self.limit is None:
            return ""
        after = {c: self._next.get((c, step.task_of(c)), 0.0) for c in step.cohort}
        over = [c for c, epsilon in after.items() if epsilon > self.limit * (1 + 1e-9)]
        if not over or len(step.cohort) - len(over) >= plan.needed(step.cohort):
            return ""
        return (
            f"the privacy of {clients_text([*map(str, over)])} is spent: one more training would "
            f"make epsilon {max(after.values()):.4g} at delta {self.delta:g}, beyond [privacy] "
            f"epsilon = {self.limit:g}"
        )


def why_declined(failed: TooFewClients | ClientFailed) -> str:
    """Return why clients declined their orders; empty unless that alone left too few of them."""
    reasons = {failed.client: failed.reason} if isinstance(failed, ClientFailed) else failed.reasons
    said = OrderDeclined.SAID
    if not reasons or not all(why.startswith(said) for why in reasons.values()):
        return ""
    client, why = next(iter(reasons.items()))
    others = f"; {len(reasons) - 1} more declined" if len(reasons) > 1 else ""
    return f"client {client} trains no more: {why.removeprefix(said)}{others}"
