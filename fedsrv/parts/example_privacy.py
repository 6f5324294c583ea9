"""Runs whose clients hide their examples: what they have spent, and when the run ends.

Clients add the noise and count what they spend, by the content of their examples. So the
coordinator knows of epsilon what they say. Who failed, was set aside or has an order under way may
have trained once more, and counts as if it had. A client that may not train declines the order.
Where too few are left by that, the run ends in order, before that interaction. An open run goes on
without who has spent its limit, unless its config says that it needs all: new data have a budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedmodels.config.experiment import Experiment
from fedmodels.errors import ClientFailed, OrderDeclined, TooFewClients
from fedmodels.facts.position import Task
from fedmodels.privacy.coverage import assumptions, check_allowed
from fedmodels.tensors.bundle import ClientId
from fedmodels.training.private_steps import SPENT, check_hides_examples
from fedmodels.training.private_uploads import contributions
from fedsrv.engine.client_profile import clients_text
from fedsrv.engine.cohort import Answers
from fedsrv.engine.plan import Plan
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step, end_before
from fedsrv.engine.server_part import NOTHING, CurrentInteraction, ServerPart, Settle
from fedsrv.parts.private_rounds import rule_of_noise, told
from fedsrv.progress.events import EventLog
from fedsrv.state.record import Record, of_parts, trained_in
from fedsrv.state.store import Store


class ExamplePrivacy(ServerPart):
    """What ``[privacy] level = "example"`` adds to the rounds of a run: when it ends."""

    def __init__(self, store: Store, events: EventLog, given: Mapping[str, Any] = NOTHING) -> None:
        """Begin, or go on after the last commit."""
        super().__init__(store, events, given)
        self.most = 0.0
        """Epsilon of the client that has spent most."""
        self._next: dict[tuple[int, Task], float] = {}
        """What each client would have spent after one more training on a task, as it last said."""
        self._seen = -1
        """The last interaction that this was said in."""
        self._ordered: dict[int, int] = {}
        """The interaction of each client's order that was under way after it."""
        self._told = set[tuple[int, Task]]()
        """The clients and tasks of which a record says that they are trained no more."""
        self._abstain: dict[int, str] = {}
        """Who does not train in the present interaction, and why."""
        self._came: dict[ClientId, dict[str, float]] = {}
        """What clients tell with uploads of the present interaction, whether these count or not."""
        self._ahead = 0.0
        """The most that a client may have spent whose order is not answered."""
        privacy = self.experiment.privacy
        assert privacy is not None, "there is something to hide"
        self.privacy, self.limit, self.delta = privacy, privacy.epsilon, privacy.chance

    @classmethod
    def takes_up(cls, store: Store, before: Experiment) -> Mapping[str, str]:
        """Say so if clients drew their noise by another rule when the run began."""
        return rule_of_noise(store)

    def gathered(self, plan: Plan) -> None:
        """Check that the method, and the config, fit; take what was spent up to the last commit.

        Raises:
            ConfigError: they do not.
        """
        for run in plan.run.of_each_net:
            check_hides_examples(plan.method, run)
        of = contributions(plan.method, plan.run)
        of.clips  # noqa: B018 (it raises where a bound is missing)
        uncovered = (name for name in of.uncovered if name == "generators")
        check_allowed(
            plan.method.name, [*told(plan, self.experiment), *uncovered], self.privacy.allow
        )
        self._read(plan, self.store.committed)

    def leaves_out(self, at: CurrentInteraction, results: Answers) -> dict[int, str]:
        """Note what clients tell of their spending: an upload that is left out has come as well."""
        for client, answer in results.by_client.items():
            told = answer.report.extra
            self._came[client] = {key: told[key] for key in SPENT if key in told}
        return {}

    def came(self, at: CurrentInteraction, settle: Settle) -> None:
        """Say of clients that do not train any more that they did not."""
        for client, why in self._abstain.items():
            if (client, at.step.task_of(client)) not in self._told:
                at.results.failed[client] = why

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down what is spent, ``privacy``: ``epsilon`` at ``delta``."""
        for client in at.results.failed:
            if told := self._came.get(client):
                record["clients"].setdefault(str(client), {}).update(told)
        self._see(record, at.plan)

    def tells(self, record: Record) -> Mapping[str, Any]:
        """Tell what is spent."""
        return {"privacy": of_parts(record)["privacy"]}

    def _read(self, plan: Plan, last: int) -> None:
        """Take what records up to an interaction say, and nothing else."""
        self._next, self._told, self._ordered = {}, set(), {}
        self.most, self._ahead, self._seen = 0.0, 0.0, -1
        for record, _ in self.store.ledger.records():
            if record["interaction"] <= last:
                self._see(record, plan)

    def _see(self, record: Record, plan: Plan) -> None:
        """Take what clients of an interaction have spent, and put the most into its metrics."""
        self._seen = record["interaction"]
        ordered, self._ordered = {**self._ordered, **trained_in(record)}, {}
        self._ordered |= record.get("under_way", ())

        def place(client: int) -> tuple[int, Task]:
            """Return a client, and the task of the order that it answered."""
            return client, plan.steps[ordered.get(client, self._seen)].task_of(client)

        for client, row in record["clients"].items():
            if "epsilon" in row:
                self._next[place(int(client))] = float(row["epsilon_next"])
                self.most = max(self.most, float(row["epsilon"]))
        for name, why in record.get("failed", {}).items():
            if name.isdecimal() and why.startswith(OrderDeclined.SAID):
                self._told.add(place(int(name)))
            elif name.isdecimal() and "epsilon" not in record["clients"].get(name, {}):
                self.most = max(self.most, self._next.get(place(int(name)), 0.0))  # it may have
        out = {c for c, first in self.store.aside().items() if first <= self._seen}
        self.most = max(self.most, *(e for (c, _), e in self._next.items() if c in out), 0.0)
        ahead = (self._next.get(place(client), 0.0) for client in self._ordered)
        self._ahead = max(ahead, default=0.0)
        record["metrics"]["epsilon"] = self.most
        of_parts(record)["privacy"] = {"epsilon": self.most, "delta": self.delta}

    def _over(self, step: Step, plan: Plan) -> dict[int, float]:
        """Return the clients of a step that may train no more, and what they would have spent."""
        if self.limit is None:
            return {}
        if step.interaction <= self._seen:  # the run went back
            self._read(plan, step.interaction - 1)
        after = {c: self._next.get((c, step.task_of(c)), 0.0) for c in step.cohort}
        return {c: epsilon for c, epsilon in after.items() if epsilon > self.limit * (1 + 1e-9)}

    def _spent(self, epsilon: float) -> str:
        """Return what is wrong with one more training, in words."""
        return (
            f"one more training would make epsilon {epsilon:.4g} at delta {self.delta:g}, beyond "
            f"[privacy] epsilon = {self.limit:g}"
        )

    def may_go_on(self, step: Step, plan: Plan, settle: Settle) -> str:
        """Return why the run ends before a step; empty if enough clients may train."""
        over = self._over(step, plan)
        enough = len(step.cohort) - len(over) >= plan.needed(step.cohort)
        if not over or enough or plan.spares_clients:
            return ""
        return (
            f"{end_before(plan.steps, step)}: the privacy of "
            f"{clients_text([*map(str, over)])} is spent: {self._spent(max(over.values()))}"
        )

    def abstains(self, step: Step, plan: Plan, settle: Settle) -> Collection[int]:
        """Return the clients that may not train any more on what they have."""
        self._came = {}
        over = self._over(step, plan) if plan.spares_clients else {}
        self._abstain = {c: OrderDeclined.SAID + self._spent(over[c]) for c in over}
        return over

    def ends_with(self, error: Exception) -> str:
        """Return why the run ends: too few clients are left that may train."""
        return why_declined(error) if isinstance(error, TooFewClients | ClientFailed) else ""

    def ended(self, records: Sequence[Record]) -> Mapping[str, Any]:
        """Return what the run spent, and under which assumptions."""
        most = [r["metrics"]["epsilon"] for r in records if "epsilon" in r["metrics"]]
        spent = {"epsilon": max([*most, self._ahead]), "delta": self.privacy.delta}
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
