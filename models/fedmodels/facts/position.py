"""Numbers of a run's time, all from 0: a type for each, so that none is given for another."""

from __future__ import annotations

from typing import NewType

Task = NewType("Task", int)
"""A task of one client, from 0: what it trains on."""
Stage = NewType("Stage", int)
"""What a run counts in place of tasks: a stage of an open run, whose clients are on tasks of their
own. In any other run all clients are on the task of that number."""
Round = NewType("Round", int)
"""One pass of the run's loop."""
Interaction = NewType("Interaction", int)
"""One trip from the server to the cohort and back; a round holds one or several."""

NONE_YET = Interaction(-1)
"""In place of the last committed interaction, before the first one is."""
