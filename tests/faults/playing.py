"""Plays a plan: starts the processes of a run, lets faults strike, starts again what died."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsrv.transport.remote_cohort import RemoteCohort
from tests.faults.plans import CLIENT, COORDINATOR, HOSTS, Fault, Plan, Reached
from tests.faults.power import lose_power
from tests.faults.processes import Family, Nursery, Site, log_ends

PATIENCE_S = 240.0
LINGERS_S = RemoteCohort.lease_s + 5.0
"""How long clients may go on once the coordinator is done, and it once they are: it waits a lease
for those that were not told of the end."""


@dataclass
class Played:
    """What became of a run."""

    site: Site
    plan: Plan
    folder: Path
    seconds: float = 0.0
    troubles: list[str] = field(default_factory=list)
    struck: list[Fault] = field(default_factory=list)
    killed: int = 0
    left_waiting: int = 0
    """Clients that were started again and found nobody any more: the run was over."""

    def trace(self) -> list[dict[str, Any]]:
        """Return what the processes noted, in order."""
        file = self.folder / "trace.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda fact: fact["t"])

    def census(self) -> list[Reached]:
        """Return the points the processes came to."""
        return [Reached(fact["role"], fact["point"]) for fact in self.trace() if "point" in fact]


class Player:
    """One run under way."""

    def __init__(self, nursery: Nursery, site: Site, plan: Plan) -> None:
        folder = site.out.parent / "faults"
        folder.mkdir()
        (folder / "vault").mkdir()
        (folder / "plan.json").write_text(json.dumps(plan.to_dict()))
        self.family = Family(nursery, site, site.out.parent / "logs")
        self.played = Played(site, plan, folder)
        self._handled = 0
        self._again: set[str] = set()
        self._done: dict[str, float] = {}

    def play(self, patience_s: float = PATIENCE_S) -> Played:
        """Run to the end, or until patience is."""
        begun = time.monotonic()
        try:
            for role in self.played.site.roles:
                self.family.start(role)
            while self._goes_on(begun + patience_s):
                threading.Event().wait(0.01)
        finally:
            self.family.close()
        self.played.seconds = time.monotonic() - begun
        return self.played

    def _goes_on(self, until: float) -> bool:
        """Look once at what happened; tell whether the run goes on."""
        ended = self.family.ended()
        self._handle_faults(ended)
        for role, status in ended.items():
            self._take_end(role, status)
        if self.played.troubles or not self.family.running:
            return False
        if time.monotonic() > until:
            waiting = ", ".join(sorted(self.family.running))
            self.played.troubles.append(f"hang: {waiting} did not end")
            return False
        return not self._is_over()

    def _take_end(self, role: str, status: int) -> None:
        """Start a process again that was killed; note one that failed."""
        if status == 0 or role in self.played.plan.gone:
            self._done[role] = time.monotonic()
        elif status > 0:
            line = log_ends(self.family.logs / f"{role}.log")
            self.played.troubles.append(f"{role} ended with status {status}: {line}")
        elif COORDINATOR not in self._done:  # nobody starts a client of a run that is over
            self._again.add(role)
            self.family.start(role)

    def _is_over(self) -> bool:
        """Tell whether those that are left wait for nobody: it is a trouble but for late clients.

        A client ends when the run is over, so a coordinator that still waits a while later hangs.

        A client that was killed when the coordinator had all from it finds nobody any more.
        """
        left = set(self.family.running)
        if time.monotonic() - max(self._done.values(), default=math.inf) < LINGERS_S:
            return False
        if COORDINATOR in left:
            ended = ", ".join(sorted(self._done))
            self.played.troubles.append(f"hang: the coordinator waits, and {ended} ended")
        elif COORDINATOR in self._done and left <= self._again:
            self.played.left_waiting = len(left)
        else:
            return False
        return True

    # --- faults -----------------------------------------------------------------------------------

    def _handle_faults(self, ended: dict[str, int]) -> None:
        """Do the rest of the faults that struck: kill who else they kill, take the power away."""
        for number in range(self._handled, len(self.played.plan.faults)):
            marker = self.played.folder / f"fault-{number}.struck"
            if not marker.exists():
                return
            self._handle(self.played.plan.faults[number], json.loads(marker.read_text()), ended)
            (self.played.folder / f"fault-{number}.done").touch()
            self._handled = number + 1

    def _handle(self, fault: Fault, fact: dict[str, Any], ended: dict[str, int]) -> None:
        self.played.struck.append(fault)
        for role in fault.strikes:
            pid = fact["pid"] if role == fault.role else self._pid(role)
            self.played.killed += max(self.family.kill(role, pid), role == fault.role)
        ended.update(self.family.ended())
        if fault.power:
            rng = random.Random(self.played.plan.seed) if fault.mercy else None
            vault = self.played.folder / "vault"
            lose_power(vault, self._directories(fault), rng)
            self._note(power=fault.power)
        if fault.waits_for_commit:
            self._wait_for_commit()

    def _pid(self, role: str) -> int | None:
        """Return the process of a role that began last."""
        began = {f["role"]: f for f in self.played.trace() if "began" in f}
        if role == HOSTS:
            clients = [f for name, f in began.items() if name.startswith("client-")]
            return clients[-1]["parent"] if clients else None
        return began[role]["began"] if role in began else None

    def _directories(self, fault: Fault) -> list[Path]:
        """Return the directories on the disk that lost its power."""
        out = self.played.site.out.resolve()
        states = [path for path in self.played.site.states.resolve().glob("*") if path.is_dir()]
        if fault.power == CLIENT:
            ids = fault.role.removeprefix("client-").split(",")
            return [path for path in states if path.name in ids]
        return [out, out / "server", *states]

    def _wait_for_commit(self) -> None:
        """Wait until an interaction is committed that was not when this began, or a while."""
        before = self._commits()
        until = time.monotonic() + 3.0
        while self._commits() == before and time.monotonic() < until:
            threading.Event().wait(0.05)

    def _commits(self) -> int:
        return sum("committed" in fact for fact in self.played.trace())

    def _note(self, **facts: Any) -> None:
        with (self.played.folder / "trace.jsonl").open("a") as trace:
            trace.write(json.dumps({"t": time.monotonic(), "role": "harness", **facts}) + "\n")
