"""How an open run grows: which tasks, clients and classes it goes on with, and from when on.

A run of ``[schedule] open`` has no last round. It learns in stages. A stage begins with a
:class:`Growth`: some clients go on to their next task, some join, some leave, and classes may be
new. It lasts ``[schedule] rounds`` rounds, or until the next growth. A growth is stored before it
takes effect, keyed by its first interaction. All else follows from the stored growths, so a replay
comes to the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from fedmodels.config.experiment import Experiment


@dataclass(frozen=True)
class Growth:
    """What a run knows from an interaction on, beyond what it knew before."""

    interaction: int
    tasks: Mapping[int, int] = field(default_factory=dict)
    """The number of tasks of each client that goes on to another one, or is new."""
    classes: tuple[str, ...] = ()
    """Names of the new classes, in label order; of the first growth, those the run begins with."""
    retired: tuple[int, ...] = ()
    """Clients that left for good."""
    forgets: bool = False
    """Whether the server's state drops what it holds of the retired clients alone."""

    def to_json(self) -> dict[str, Any]:
        """Return it for the database and the records."""
        return {**asdict(self), "tasks": [*self.tasks.items()]}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """Rebuild what :meth:`to_json` wrote."""
        return cls(
            int(found["interaction"]),
            {int(client): int(tasks) for client, tasks in found["tasks"]},
            tuple(map(str, found["classes"])),
            tuple(map(int, found["retired"])),
            bool(found["forgets"]),
        )


def movers(
    experiment: Experiment,
    known: Mapping[int, int],
    present: Mapping[int, int],
    resting: Collection[int],
    is_idle: bool,
) -> dict[int, int]:
    """Return the clients that can go on to another task or join, with their new number of tasks.

    Args:
        experiment: bounds the newcomers of one growth.
        known: how many tasks each client has announced.
        present: how many tasks of each client the run has begun.
        resting: the clients that have had all rounds of their present task.
        is_idle: whether no round is due; with ``newcomers``, clients join at no other time.
    """
    most = experiment.schedule.newcomers
    new = sorted(known.keys() - present.keys())[:most] if most is None or is_idle else []
    on = sorted(c for c in known.keys() & present.keys() if known[c] > present[c] and c in resting)
    return {**{c: present[c] + 1 for c in on}, **dict.fromkeys(new, 1)}


def new_classes(known: Sequence[str], announced: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the names that clients announce and the run lacks, in the order of the clients."""
    found = dict.fromkeys(name for names in announced for name in names)
    return tuple(name for name in found if name not in set(known))
