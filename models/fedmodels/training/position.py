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
