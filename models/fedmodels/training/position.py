"""Where a run is: the interaction, its round and its task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

Task = NewType("Task", int)
"""A task of one client, from 0: what it trains on."""
Stage = NewType("Stage", int)
"""What a run counts in place of tasks: a stage of an open run, whose clients are on tasks of their
own. In any other run all clients are on the task of that number."""


@dataclass(frozen=True)
class Position:
    """An interaction of a run, with the round it belongs to and the task it trains on."""

    interaction: int
    round: int
    task: int
    began: int = field(default=0, kw_only=True)
    """Of an open run: the round in which the client's present task began."""


START = Position(0, 0, 0)
"""The first interaction of every run."""
