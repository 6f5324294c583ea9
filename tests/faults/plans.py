"""What strikes a run: drawn by a seed from the points that an undisturbed run reached."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

COORDINATOR, LAUNCHER, HOSTS, RELAY = "coordinator", "launcher", "hosts", "relay"
MACHINE, CLIENT = "machine", "client"
COMMIT_S = 3.0
"""How long a lost answer waits for a commit: it may be the last one's."""
SHORT_S, LONG_S = 0.2, 2.0
"""How long processes stand still: no lease ends meanwhile."""


@dataclass(frozen=True)
class Reached:
    """One point that a process of a role came to."""

    role: str
    point: str


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    role: str
    point: str
    nth: int
    """At which of the arrivals since the fault before it."""
    strikes: tuple[str, ...] = ()
    """The roles whose processes are killed."""
    power: str = ""
    """What loses its power: nothing, the machine, or the client's alone."""
    mercy: bool = True
    """Whether a loss of power may spare what was not synced; else all of it is gone."""
    then: str = ""
    """``lose``: the answer to a call never comes. ``stop``: nothing but that somebody stops."""
    stops: tuple[str, ...] = ()
    """The roles whose processes stand still."""
    waits_for: tuple[str, ...] = ()
    """A role and its points: the thread that came to the fault holds until one is reached."""
    seconds: float = 0.0
    """How long processes stand still, and at most how long a thread holds."""


@dataclass(frozen=True)
class Plan:
    """The faults of one run, in the order in which they strike."""

    faults: tuple[Fault, ...] = ()
    broken: str = ""
    """What is taken back in every process: a name of ``fault_breaks``."""
    seed: int = 0
    gone: tuple[str, ...] = ()
    """The roles whose processes are not started again once they were killed."""
    naps: bool = False
    """Whether threads nap where one hands something to another."""
    slow_disk: bool = False
    """Whether each sync takes 20 to 50 ms, and now and then 300."""

    def to_dict(self) -> dict[str, Any]:
        """Return what the processes read."""
        records = any(fault.power for fault in self.faults)
        return {**asdict(self), "records_disk": records}


@dataclass
class Draw:
    """Draws plans for runs that reach these points."""

    census: Sequence[Reached]
    launched: bool = False
    rng: random.Random = field(default_factory=random.Random)

    def plan(self, seed: int, faults: int = 3) -> Plan:
        """Return a plan of some faults at points drawn kind by kind, in the order of the run."""
        self.rng.seed(seed)
        kinds = sorted({(each.role, each.point) for each in self.census})
        places = sorted(self._place(*self._kind(kinds)) for _ in range(faults))
        drawn, since = list[Fault](), 0
        for place in places:
            at = self.census[place]
            nth = max(1, self.census[since : place + 1].count(at))
            drawn.append(self._fault(at, nth))
            since = place + 1
        naps, slow_disk = self.rng.random() < 0.8, self.rng.random() < 0.5
        return Plan(tuple(drawn), seed=seed, naps=naps, slow_disk=slow_disk)

    def _kind(self, kinds: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Draw who, the coordinator as often as all others, then where."""
        ours = [kind for kind in kinds if kind[0] == COORDINATOR]
        others = [kind for kind in kinds if kind[0] != COORDINATOR]
        return self.rng.choice(self.rng.choice([ours, others]))

    def _place(self, role: str, point: str) -> int:
        places = [n for n, at in enumerate(self.census) if (at.role, at.point) == (role, point)]
        return self.rng.choice(places)

    def _fault(self, at: Reached, nth: int) -> Fault:
        roles = {at.role, LAUNCHER} if self.launched else {each.role for each in self.census}
        everybody = tuple(sorted(roles))
        kind = self.rng.choices(
            ("self", "coordinator", "all", "machine", "client", "lose", "stop"),
            (8, 2, 2, 3, 2, 2, 6),
        )[0]
        is_client = at.role not in (COORDINATOR, RELAY)
        if kind == "lose" and is_client:
            at, nth = Reached(at.role, "push.after"), 1
            waits = (COORDINATOR, "commit.after") if self.rng.random() < 0.5 else ()
            return Fault(*_of(at), nth, then="lose", waits_for=waits, seconds=COMMIT_S)
        if kind == "stop":
            roles = sorted({each.role for each in self.census})
            stops = (self.rng.choice(roles),)
            seconds = self.rng.uniform(SHORT_S, LONG_S)
            return Fault(*_of(at), nth, then="stop", stops=stops, seconds=seconds)
        if kind == "coordinator" and is_client:
            return Fault(*_of(at), nth, (COORDINATOR,))
        if kind == "coordinator" and self.launched:
            return Fault(*_of(at), nth, (HOSTS,))
        if kind == "machine":
            return Fault(*_of(at), nth, everybody, MACHINE, self.rng.random() < 0.5)
        if kind == "all":
            return Fault(*_of(at), nth, everybody)
        if kind == "client" and is_client and not self.launched:
            return Fault(*_of(at), nth, (at.role,), CLIENT, self.rng.random() < 0.5)
        return Fault(*_of(at), nth, (at.role,))


def _of(at: Reached) -> tuple[str, str]:
    return at.role, at.point
