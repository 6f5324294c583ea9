"""Who trained when, and how far a run may go back if a client lost a private state.

A power failure loses states that were not synced. The run can always go back for such a loss, since
everybody keeps states since the durable watermark. For another loss the run goes back by
``[server] max_rollback`` interactions at most. They count from the newest interaction that was ever
committed, so several small losses do not add up to a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedmodels.errors import RunFailed
from fedmodels.facts.position import NONE_YET, Interaction


class LossTooLarge(Exception):
    """A client lost a private state, and the run may not go back far enough."""


@dataclass(frozen=True)
class History:
    """Who trained for each interaction, and the limit of roll-backs; immutable."""

    trained: Mapping[Interaction, Mapping[int, Interaction]] = field(default_factory=dict)
    """Of each interaction, undone ones included: the clients whose uploads count, and the
    interaction of each one's order, which names the private state behind the upload."""
    started_over: Mapping[int, Interaction] = field(default_factory=dict)
    """By client: the interaction after which it began anew from its initial private state."""
    highest: Interaction = NONE_YET
    """The newest interaction that was ever committed."""
    floor: Interaction = NONE_YET
    """The earliest interaction the run may be rolled back to."""
    max_rollback: int = 0

    def last_trained(self, interaction: Interaction) -> dict[int, Interaction]:
        """Return each client's last order whose upload counts up to an interaction.

        That order names the private state that the client must hold.
        """
        found: dict[int, Interaction] = {}
        for number in sorted(self.trained):
            if number <= interaction:
                since = self.started_over.get
                trained = self.trained[number].items()
                found |= {c: ordered for c, ordered in trained if number > since(c, -1)}
        return found

    def check(self, client: int, versions: Sequence[int]) -> None:
        """Refuse a client (LossTooLarge) if the run would have to go back too far for its loss."""
        since = self.started_over.get(client, -1)
        trained = [
            (number, ordered[client])
            for number, ordered in sorted(self.trained.items())
            if client in ordered and number > since
        ]
        needed = next((k for number, k in reversed(trained) if number <= self.floor), None)
        if needed is None or needed in versions:
            return
        if any(k in versions for number, k in trained if number > self.floor):
            return
        held = ", ".join(str(version + 1) for version in versions) or "none"
        if versions and min(versions) > self.highest:
            raise LossTooLarge(
                f"client {client} lost nothing: the coordinator is older than it is, as after a "
                f"restored backup. The run was committed up to interaction {self.highest + 1}, and "
                f"client {client} holds its private states after interactions {held} alone. "
                "Restore its --state-dir from a copy of the same time; or put back a newer run "
                "directory; or have everything computed again: fedsrv serve "
                f"(or launch) … --resume --set server.max_rollback={self.highest + 1}; or let the "
                "client go on from its initial private state: fedcli join … --start-over"
            )
        raise LossTooLarge(
            f"client {client} lost its private state: it holds those after interactions {held}, "
            f"the run needs that after {trained[-1][1] + 1} and may go back to {self.floor + 1} at "
            f"most ([server] max_rollback = {self.max_rollback}). Restore its --state-dir; or go "
            "back all the way: fedsrv serve (or launch) … --resume --set server.max_rollback="
            f"{self.highest + 1}; or let it go on from its initial private state: "
            "fedcli join … --start-over"
        )

    def after(
        self, interaction: Interaction, ordered: Mapping[int, Interaction], floor: Interaction
    ) -> History:
        """Return this history with one more committed interaction.

        ``ordered`` has the clients whose uploads count, and the interaction of each one's order.
        """
        highest = max(self.highest, interaction)
        trained = {**self.trained, interaction: ordered}
        return replace(self, trained=trained, highest=highest, floor=floor)

    def target(
        self,
        newest: Interaction,
        has_state: Callable[[Interaction], bool],
        versions: Mapping[int, Sequence[int]],
    ) -> Interaction:
        """Return the newest interaction whose server and client states all still exist.

        At -1 everything is derived from the seed: the run begins anew.

        Args:
            newest: the interaction to begin the search with.
            has_state: tells whether the server state after an interaction exists.
            versions: the private states of each client; empty if clients keep none.

        Raises:
            RunFailed: that interaction lies further back than the run may go.
        """
        for interaction in map(Interaction, range(newest, self.floor - 1, -1)):
            trained = self.last_trained(interaction).items()
            if has_state(interaction) and all(
                number in versions[client] for client, number in trained if client in versions
            ):
                return interaction
        raise RunFailed(self._why_nowhere(versions))

    def _why_nowhere(self, versions: Mapping[int, Sequence[int]]) -> str:
        """Return why the run cannot go on with the states that clients hold."""
        for client, held in sorted(versions.items()):
            try:
                self.check(client, held)
            except LossTooLarge as error:
                return str(error)
        return (
            f"the states of the server and of clients fit together at no interaction since "
            f"{self.floor}; put copies of them back, or have everything computed again: --resume "
            f"--set server.max_rollback={self.highest + 1}"
        )
