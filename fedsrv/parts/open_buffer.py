"""Asynchronous rounds of an open run: a buffer of uploads, and tasks that come meanwhile.

A stage lasts until each client has trained on its task as often as is owed, by uploads that count.
How many rounds that takes depends on who is fast. So a stage has as many rounds ahead as are needed
at least, and further ones while somebody owes who is there. Who owes the most gets orders first.

An order stays under way over rounds and over growths, and its upload is of the task that the order
was of. Orders end where their client leaves, where their task is set aside, with new classes, and
with the stage: whoever trains then owes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from fedmodels.errors import RunFailed
from fedmodels.facts.position import Interaction
from fedmodels.parts.class_growth import StateGrowth
from fedmodels.parts.growth_by_method import forgotten
from fedmodels.training.asked import asked
from fedmodels.training.contexts import ServerState
from fedsrv.engine.cohort import Answers, AnyOf
from fedsrv.engine.reduction import Reduced
from fedsrv.engine.schedule import Step, draw_cohort, takes_part
from fedsrv.engine.server_part import CurrentInteraction, Kernel
from fedsrv.parts.buffered_rounds import BufferedRounds, not_asynchronous
from fedsrv.parts.open_plan import OpenPlan, opened
from fedsrv.state.record import Record


class OpenBuffer(BufferedRounds):
    """Rounds that end with the first uploads, while tasks, classes and clients come."""

    def __init__(
        self, parts: Kernel, interaction: Interaction, owed: Callable[[OpenPlan], Mapping[int, int]]
    ) -> None:
        """Give the orders again that were under way at a commit.

        ``owed`` says how often clients have still to train on their present tasks.

        Raises:
            ConfigError: the method learns at the end of tasks.
        """
        if asked(parts.method, "learns_at_task_end", {}, False):
            why = "it learns at the end of a task, and which round of a task is last is unknown"
            raise not_asynchronous(parts.method.name, why)
        super().__init__(parts, interaction)
        self._still_owed, self._owed = owed, dict[int, int]()
        self._following = bool(self.followed)

    def _goes_on(self, interaction: Interaction) -> bool:
        """Tell whether orders of earlier rounds are wanted: also while the run rests."""
        return True

    def _orders_at(
        self, interaction: Interaction, under_way: Mapping[int, Interaction]
    ) -> dict[int, Interaction]:
        """Return the orders under way that are still wanted after a commit."""
        return kept_orders(opened(self.parts.plan), interaction, under_way)

    def _state_of(self, begun: Interaction) -> ServerState:
        """Return what the orders of an interaction train from, with what the run grew by then."""
        return grown_at(self.parts, begun, super()._state_of(begun))

    # --- one interaction --------------------------------------------------------------------------

    def train(self, at: CurrentInteraction, state: ServerState) -> Answers:
        """Drop orders that nobody wants any more, let clients begin, and take uploads.

        Raises:
            RunFailed: recorded arrivals are followed, and there are no more of them.
        """
        number, plan = at.step.interaction, opened(at.plan)
        if self._following and number not in self.followed:
            raise RunFailed(
                f"[schedule] arrivals: the run that is followed ended before interaction "
                f"{number + 1}, and this one has more to learn"
            )
        kept = kept_orders(plan, number, self.under_way)
        if gone := self.under_way.keys() - kept.keys():
            self.cohort.recall(gone)
            self.under_way = kept
        self._owed, self.experiment = dict(self._still_owed(plan)), plan.run.experiment
        return super().train(at, state)

    def records(self, at: CurrentInteraction, found: Reduced, record: Record) -> None:
        """Put down which uploads came; end the stage once nobody owes any more."""
        plan, results = opened(at.plan), at.results
        came = {int(c): results.arrivals[int(c)] for c in results.by_client}
        for client in on_present_task(plan, came):
            self._owed[client] = max(0, self._owed.get(client, 0) - 1)
        if not any(self._owed.values()):
            at.step = replace(at.step, ends_stage=True)
            self.ended()
            results.under_way = {}
        super().records(at, found, record)

    def ended(self) -> None:
        """Recall the orders that are under way."""
        self.cohort.recall()
        self.under_way = {}

    # --- who trains -------------------------------------------------------------------------------

    def _idle(self, present: Iterable[int]) -> list[int]:
        """Return the clients that may get an order: others beside those that owe as config says."""
        idle, most = super()._idle(present), self.experiment.schedule.beside_new
        beside = sum(not self._owed.get(client) for client in self.under_way)
        if most is None or beside < most:
            return idle
        return [client for client in idle if self._owed.get(client)]

    def _draw(self, step: Step, present: Iterable[int], free: int) -> tuple[int, ...]:
        """Draw some clients that have no order: first those with the most to learn."""
        idle, most = self._idle(present), self.experiment.schedule.beside_new
        beside = sum(not self._owed.get(client) for client in self.under_way)
        found = list[int]()
        for owed in sorted({self._owed.get(client, 0) for client in idle}, reverse=True):
            room = max(0, free - len(found))
            if not owed and most is not None:
                room = max(0, min(room, most - beside))
            some = [client for client in idle if self._owed.get(client, 0) == owed]
            found += draw_cohort(self.experiment.seed, step.round, some, room)
        return tuple(sorted(found))

    def _flush(self, step: Step, followed: Record | None, present: Iterable[int]) -> AnyOf:
        """Return which uploads end a step: a client that is alone in a round ends no run."""
        flush = super()._flush(step, followed, present)
        if self.followed:
            return flush
        needed = max(0, self.parts.plan.needed_uploads(range(flush.size)))
        return replace(flush, needed=needed)


def kept_orders(
    plan: OpenPlan, interaction: Interaction, under_way: Mapping[int, Interaction]
) -> dict[int, Interaction]:
    """Return the orders under way that are still wanted in an interaction, by client.

    Clients that left have none, and neither have tasks that were set aside. New classes end all
    orders from before, as their uploads lack rows. So do two classes that become one, and a change
    of the config: the same orders would be trained otherwise after a restart.

    Args:
        plan: of the interaction.
        interaction: from 0.
        under_way: the interaction in which each client got its order.
    """
    newest = max(
        one.interaction
        for one in plan.growths
        if one.classes or one.changes or any(map(plan.classes.merges, one.class_changes))
    )
    return {
        client: begun
        for client, begun in under_way.items()
        if begun >= newest
        and takes_part(client, interaction, plan.aside)
        and (client, plan.steps[begun].task_of(client)) not in plan.set_aside
    }


def on_present_task(plan: OpenPlan, orders: Mapping[int, Interaction]) -> list[int]:
    """Return the clients whose orders are of the tasks that they are on by a plan.

    Args:
        plan: of the present interaction.
        orders: the interaction in which each client got its order.
    """
    return [c for c, begun in orders.items() if begun >= plan.began.get(c, (0,))[-1]]


def grown_at(parts: Kernel, begun: Interaction, state: ServerState) -> ServerState:
    """Return the state that an interaction's orders trained from.

    Args:
        parts: their plan has the classes that the run has had since.
        begun: the interaction.
        state: the one that was committed before it.
    """
    plan = opened(parts.plan)
    new = [growth for growth in plan.growths if growth.interaction == begun]
    if begun and (added := sum(len(growth.classes) for growth in new)):
        before = plan.run.for_classes(len(plan.classes.names) - added)
        state = StateGrowth(parts.method, before, plan.run).server(state)
    gone = {client for growth in new for client in growth.forgets}
    return forgotten(parts.method, state, gone) if gone else state
