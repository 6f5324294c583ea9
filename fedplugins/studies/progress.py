"""The runs of a sweep while they go on: a live table on a terminal, else a line now and then.

A run's log tells how far it is, wherever the run is: the machines of a cluster share the directory.
"""

from __future__ import annotations

import locale
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedmodels.console.printable import duration, printable
from fedmodels.host.guarded import Guarded
from fedmodels.times import LOGS_LOOK_S, SAID_EVERY_S
from fedplugins.studies.execution import Say
from fedplugins.studies.plan import PlannedRun
from fedsrv.progress.event_lines import committed_in
from fedsrv.progress.events import Event
from fedsrv.progress.run_status import Pace

MAX_SHOWN = 16
"""Runs under way that are shown by name; the others are counted."""


@dataclass
class RunNow:
    """One run, as its log tells it."""

    run: PlannedRun
    ended: bool = False
    begun: float | None = None
    """When its log grew for the first time."""
    seconds: float = 0.0
    """How long it took; 0 where it had ended before."""
    interactions: int = 0
    """How many are committed."""
    of: int = 0
    """How many there are in all; 0 while nothing says so."""
    line: str = ""
    """The last line of its log."""
    _pace: Pace = field(default_factory=Pace)
    _read: int = 0
    """Bytes of the log that are read."""

    def __post_init__(self) -> None:
        """Pass over what an earlier run has logged."""
        self.ended = self.run.is_finished
        self._read = _size(self.log)

    @property
    def log(self) -> Path:
        """The file that the run's launcher writes to."""
        return self.run.directory.with_name(self.run.directory.name + ".log")

    @property
    def at_work(self) -> bool:
        """Whether it has begun, and not ended."""
        return self.begun is not None and not self.ended

    def look(self, now: float) -> None:
        """Take in what the log says since the last look."""
        if self.ended or _size(self.log) <= self._read:
            return
        self.begun = self.begun or now
        with self.log.open("rb") as file:
            file.seek(self._read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._read += len(whole) + len(end)
        for line in whole.decode(locale.getencoding(), "replace").splitlines():
            self.line = line
            if found := committed_in(line):
                self.interactions, self.of = found
                self._pace.take(Event("commit", interaction=found[0] - 1, unix_time=now))

    def end(self, now: float) -> None:
        """Note that it has ended."""
        self.ended = True
        self.seconds = now - self.begun if self.begun is not None else 0.0

    def seconds_left(self) -> float | None:
        """Return the time that it still needs; None while nothing tells."""
        return self._pace.seconds_left(self.of) if self.of else None

    def text(self) -> str:
        """Return how far it is."""
        if not self.of:
            return f"{self.run.directory.name} begins"
        left = self.seconds_left()
        about = "" if left is None else f", about {duration(left)} left"
        return f"{self.run.directory.name} {self.interactions} of {self.of}{about}"


class SweepProgress:
    """Shows the runs of a sweep while they go on."""

    _said_at: Guarded[float] = Guarded("_lock")
    _told: Guarded[str] = Guarded("_lock")

    def __init__(
        self, runs: Sequence[PlannedRun], say: Say, console: Console | None = None
    ) -> None:
        """Show nothing yet.

        Without a terminal, ``say`` is told a line now and then.
        """
        self.runs = {run.directory: RunNow(run) for run in runs}
        self._say = say
        self._live = None
        if console is not None and console.is_terminal:
            self._live = Live(console=console, auto_refresh=False, transient=True)
        self._stop, self._lock = threading.Event(), threading.RLock()
        self._thread = threading.Thread(target=self._follow, name="progress", daemon=True)
        self._said_at, self._told = monotonic(), ""

    def __enter__(self) -> SweepProgress:
        """Begin to look."""
        if self._live is not None:
            self._live.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop showing."""
        self._stop.set()
        self._thread.join()
        if self._live is not None:
            self._live.stop()

    def _follow(self) -> None:
        while not self._stop.wait(LOGS_LOOK_S):
            self.look(monotonic())

    def look(self, now: float) -> None:
        """Read the logs, and show or say what they tell."""
        with self._lock:
            for each in self.runs.values():
                each.look(now)
                if not each.ended and each.run.is_finished:
                    self._end(each, now)
            if self._live is not None:
                self._live.update(self._render(), refresh=True)
            elif now - self._said_at >= SAID_EVERY_S:
                self._tell(now)

    def end(self, run: PlannedRun) -> None:
        """Note that a run has ended, or failed."""
        with self._lock:
            each = self.runs[run.directory]
            if not each.ended:
                self._end(each, monotonic())

    def _end(self, each: RunNow, now: float) -> None:
        each.end(now)
        if each.run.is_finished:
            took = f" after {duration(each.seconds)}" if each.seconds else ""
            self._say(f"{each.run.directory.name} has finished{took}: {self.summary()}")

    def _tell(self, now: float) -> None:
        """Say how far the runs are, unless nothing has moved."""
        parts = [each.text() for each in self.runs.values() if each.at_work]
        line = "; ".join([*parts[:MAX_SHOWN], self.summary()])
        if parts and line != self._told:
            self._say(line)
            self._told, self._said_at = line, now

    def summary(self) -> str:
        """Return how many runs have ended, and when the last one will have."""
        ended = sum(each.ended for each in self.runs.values())
        left = self.seconds_left()
        about = "" if not left else f", about {duration(left)} left"
        return f"{ended} of {len(self.runs)} runs have ended{about}"

    def seconds_left(self) -> float | None:
        """Return the time until the last run ends; None while nothing tells.

        Runs that have not begun are taken to be as long as the others.
        """
        under_way = [each for each in self.runs.values() if each.at_work]
        lefts = [left for each in under_way if (left := each.seconds_left()) is not None]
        whole = [each.seconds for each in self.runs.values() if each.ended and each.seconds]
        if not lefts or len(lefts) < len(under_way):
            return None
        now = monotonic()
        whole += [
            now - (each.begun or now) + left for each, left in zip(under_way, lefts, strict=True)
        ]
        waiting = sum(not each.ended and each.begun is None for each in self.runs.values())
        work = sum(lefts) + waiting * sum(whole) / len(whole)
        return max(*lefts, work / len(under_way), 0.0)

    def _render(self) -> Group:
        table = Table.grid(padding=(0, 2))
        under_way = [each for each in self.runs.values() if each.at_work]
        for each in under_way[:MAX_SHOWN]:
            bar = ProgressBar(each.of or None, each.interactions, width=20)
            table.add_row(Text(each.text()), bar)
            table.add_row(Text(f"  {printable(each.line, 100)}", style="dim"), "")
        if len(under_way) > MAX_SHOWN:
            table.add_row(f"and {len(under_way) - MAX_SHOWN} more", "")
        return Group(table, Text(self.summary()))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
