"""Points of a process at which a fault may strike, and the faults that do.

A process begins when it knows what it is: a coordinator, or the host of some clients. From then on
it writes a line to ``trace.jsonl`` at every point it reaches. ``plan.json`` holds the faults, each
a role, a point and a count::

    {"role": "client-0", "point": "rename.before", "nth": 2, "strikes": ["client-0"]}

A fault is armed when the one before it struck, and strikes when one process of its role reaches the
point for the nth time since then. A process that a fault strikes kills itself where it stands; one
that only marks the moment holds until the others are dead, or stopped.

Apart from faults, a plan may make the whole run uneven: threads nap at points and at borders
between threads, and each sync of the disk takes long. Where and for how long follows from the
plan's seed, the role, the place, and how often the process was there.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOSE = "lose"
"""What :func:`reach` returns where an acknowledgement is to be lost."""
NAPS_S = 3.0
"""How long the threads of a process nap in all: a run shall end."""
SLEEPY = 0.08
"""The share of places at which every other arrival naps, for long; elsewhere few do, briefly."""


class Process:
    """What this process is, which faults there are, and how often it was at their points."""

    def __init__(self, role: str, folder: Path) -> None:
        self.role, self.folder = role, folder
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        self.faults: list[dict[str, Any]] = self.plan["faults"]
        self._reached: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._passed: Counter[str] = Counter()
        self._naps_left_s = NAPS_S if self.plan.get("naps") else 0.0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._trace = os.open(folder / "trace.jsonl", flags, 0o644)

    def note(self, **facts: Any) -> None:
        """Write a line to the trace."""
        line = {"t": time.monotonic(), "role": self.role, **facts}
        os.write(self._trace, json.dumps(line).encode() + b"\n")

    def armed(self) -> int:
        """Return the number of the fault that strikes next."""
        for number in range(len(self.faults)):
            if not self.marker(number).exists():
                return number
        return len(self.faults)

    def marker(self, number: int) -> Path:
        return self.folder / f"fault-{number}.struck"

    def counts(self, number: int) -> bool:
        """Count one more arrival at the point of a fault; tell whether it was the one."""
        with self._lock:
            self._reached[number] += 1
            return self._reached[number] == self.faults[number]["nth"]

    def strike(self, number: int, spoil: Callable[[], None]) -> str | None:
        """Let a fault happen, unless another process of the role was first."""
        marker, fault = self.marker(number), self.faults[number]
        fresh = marker.with_name(f"{marker.name}.{os.getpid()}")
        fresh.write_text(json.dumps({"t": time.monotonic(), "pid": os.getpid()}))
        is_struck = self.role in fault["strikes"]
        if is_struck:  # whoever goes on finishes what it does
            spoil()
        try:
            os.link(fresh, marker)  # whole, and one alone
        except FileExistsError:
            return None
        if is_struck:
            os.kill(os.getpid(), signal.SIGKILL)
        done = self.folder / f"fault-{number}.done"
        while not done.exists():
            threading.Event().wait(0.005)
        return fault.get("then")

    def _draw(self, *what: object) -> float:
        """Return a number from 0 to 1 that follows from the plan's seed and what it is for."""
        said = repr((self.plan.get("seed", 0), self.role, *what)).encode()
        return int.from_bytes(hashlib.blake2b(said, digest_size=4).digest(), "big") / 2**32

    def _arrivals(self, place: str) -> int:
        with self._lock:
            self._passed[place] += 1
            return self._passed[place]

    def nap(self, place: str) -> None:
        """Hold this thread for a while, if the plan says so."""
        if self._naps_left_s <= 0:
            return
        nth = self._arrivals(place)
        is_sleepy = self._draw(place) < SLEEPY
        share, most_s = (0.5, 0.2) if is_sleepy else (0.02, 0.03)
        if self._draw(place, nth, "whether") < share:
            seconds = most_s * self._draw(place, nth, "how long") ** 2
            with self._lock:
                self._naps_left_s -= seconds
            self.note(nap=place, seconds=round(seconds, 3))
            time.sleep(seconds)

    def sync_slowly(self) -> None:
        """Take as long as a disk that really syncs, if the plan says so."""
        if self.plan.get("slow_disk"):
            nth = self._arrivals("disk")
            seconds = 0.02 + 0.03 * self._draw("disk", nth)
            time.sleep(0.3 if self._draw("stalls", nth) < 0.04 else seconds)


_process: Process | None = None


def begin(role: str, folder: Path) -> Process | None:
    """Say what this process is; points count from now on. None where no plan is laid out."""
    global _process
    if not (folder / "plan.json").exists():
        return None
    _process = Process(role, folder)
    _process.note(began=os.getpid(), parent=os.getppid())
    return _process


def current() -> Process | None:
    """Return this process, once it has begun."""
    return _process


def note(**facts: Any) -> None:
    """Write a line to the trace, once this process has begun."""
    if _process is not None:
        _process.note(**facts)


def nap(place: str) -> None:
    """Be at a border between threads: this one may be late there."""
    if _process is not None:
        _process.nap(place)


def sync_slowly() -> None:
    """Be where the disk syncs."""
    if _process is not None:
        _process.sync_slowly()


def reach(point: str, spoil: Callable[[], None] = lambda: None) -> str | None:
    """Be at a point; a fault may strike here.

    Args:
        point: its name, such as ``rename.before``.
        spoil: what a fault leaves behind that strikes in the middle of something.
    """
    process = _process
    if process is None:
        return None
    process.note(point=point)
    process.nap(point)
    number = process.armed()
    if number == len(process.faults):
        return None
    fault = process.faults[number]
    if fault["role"] != process.role or fault["point"] != point or not process.counts(number):
        return None
    return process.strike(number, spoil)
