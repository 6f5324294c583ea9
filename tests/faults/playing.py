"""Plays a plan: starts the processes of a run, lets faults strike, starts again what died."""

from __future__ import annotations

import json
import math
import random
import signal
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
        self._holding: dict[int, float] = {}
        """When each fault struck at which a thread still holds, by number."""
        self._stopped: dict[int, float] = {}
        """When each process that stands still goes on, by process id."""

    def play(self, patience_s: float = PATIENCE_S) -> Played:
        """Run to the end, or until patience is."""
        begun = time.monotonic()
        try:
            for role in self.played.site.roles:
                self.family.start(role)
            while self._goes_on(begun + patience_s):
                threading.Event().wait(0.01)
        finally:
            self._go_on(math.inf)
            self.family.close()
        self.played.seconds = time.monotonic() - begun
        return self.played

    def _goes_on(self, until: float) -> bool:
        """Look once at what happened; tell whether the run goes on."""
        ended = self.family.ended()
        self._go_on(time.monotonic())
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
        """Do the rest of the faults that struck, and let threads go on that have held enough."""
        for number in range(self._handled, len(self.played.plan.faults)):
            marker = self.played.folder / f"fault-{number}.struck"
            if not marker.exists():
                break
            fault, fact = self.played.plan.faults[number], json.loads(marker.read_text())
            self._handle(fault, fact, ended)
            self._handled, self._holding[number] = number + 1, fact["t"]
        for number, since in list(self._holding.items()):
            fault = self.played.plan.faults[number]
            if not fault.waits_for or self._has_waited(fault, since):
                (self.played.folder / f"fault-{number}.done").touch()
                del self._holding[number]

    def _has_waited(self, fault: Fault, since: float) -> bool:
        """Tell whether a point that a fault waits for was reached, or it has held long enough."""
        role, *points = fault.waits_for
        reached = (
            f["t"]
            for f in self.played.trace()
            if f["role"] == role and "point" in f and f["point"] in points
        )
        is_over = time.monotonic() >= since + fault.seconds or any(t > since for t in reached)
        if is_over:
            self._go_on(math.inf)
        return is_over

    def _handle(self, fault: Fault, fact: dict[str, Any], ended: dict[str, int]) -> None:
        self.played.struck.append(fault)
        for role in fault.strikes:
            pid = fact["pid"] if role == fault.role else self._pid(role)
            self.played.killed += max(self.family.kill(role, pid), role == fault.role)
        for role in fault.stops:
            self._stop(self._pid(role), time.monotonic() + fault.seconds)
        ended.update(self.family.ended())
        if fault.power:
            rng = random.Random(self.played.plan.seed) if fault.mercy else None
            vault = self.played.folder / "vault"
            lose_power(vault, self._directories(fault), rng)
            self._note(power=fault.power)

    def _stop(self, pid: int | None, until: float) -> None:
        """Let a process stand still until a time, if it is there."""
        if pid is not None and self.family.signal(pid, signal.SIGSTOP):
            self._stopped[pid] = until

    def _go_on(self, now: float) -> None:
        """Let those go on that have stood still for long enough."""
        for pid in [pid for pid, until in self._stopped.items() if until <= now]:
            self.family.signal(pid, signal.SIGCONT)
            del self._stopped[pid]

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

    def _note(self, **facts: Any) -> None:
        with (self.played.folder / "trace.jsonl").open("a") as trace:
            trace.write(json.dumps({"t": time.monotonic(), "role": "harness", **facts}) + "\n")
