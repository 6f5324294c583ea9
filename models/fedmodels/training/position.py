"""Where a run is: the interaction, its round and its task."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """An interaction of a run, with the round it belongs to and the task it trains on."""

    interaction: int
    round: int
    task: int


START = Position(0, 0, 0)
"""The first interaction of every run."""


class HasPosition:
    """The parts of a context's position under their own names."""

    at: Position

    @property
    def interaction(self) -> int:
        """Return the interaction, counted over the whole run."""
        return self.at.interaction

    @property
    def round(self) -> int:
        """Return the round, counted over the whole run."""
        return self.at.round

    @property
    def task(self) -> int:
        """Return the task that clients train on."""
        return self.at.task
