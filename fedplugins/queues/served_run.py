"""The process that serves one run of a queue: its events, and how it ended."""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

import psutil

from fedmodels.console.printable import printable
from fedmodels.host.guarded import Guarded
from fedmodels.host.processes import Program, begun
from fedmodels.host.staying import pauses
from fedmodels.times import RUN_LEAVING_S
from fedplugins.queues.run_queue import QueuedRun
from fedsrv.progress.event_lines import EventFormatter, level_of
from fedsrv.progress.events import Event, Hear

MOST_KILLS = 5
"""After so many ends in a row by a signal, without a commit in between, a run has failed."""
log = logging.getLogger(__name__)


@dataclass
class Life:
    """What the process of a run has told, by its events; of the thread that reads them."""

    formatter: EventFormatter = field(default_factory=EventFormatter)
    line: str = ""
    """The last line that matters."""
    error: str = ""
    """Why it failed, in its own words."""
    missing_since: float | None = None
    """Since when a client that it waits for is not there; monotonic."""


class ServedRun:
    """A run of a queue that has a place; its process may be about to begin again."""

    _life: Guarded[Life] = Guarded("_lock")

    def __init__(self, queued: QueuedRun, place: int, words: Sequence[str]) -> None:
        """Have no process yet; ``words`` are those of ``fedsrv serve``, without ``--resume``."""
        self.queued, self.place, self._words = queued, place, [*words]
        self.name = queued.place.name
        self._lock = threading.RLock()
        self._life = Life()
        self._hear: list[Hear] = []
        self._process: Program | None = None
        self._reader: threading.Thread | None = None
        self._asked = 0.0
        """When the process was asked to end; 0 before. With what follows, of the main thread."""
        self._again_at, self._kills, self._commits = 0.0, 0, -1
        self._pauses: Iterator[float] = pauses()

    # --- its process ------------------------------------------------------------------------------

    def begin(self, resumes: bool, hear: Sequence[Hear]) -> None:
        """Start the process; what it tells goes to ``hear``."""
        words = [*self._words, *(["--resume"] if resumes else [])]
        with (self.queued.place / "log.txt").open("ab") as errors:
            self._process = begun(
                "fedsrv", words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        with self._lock:
            self._life, self._hear = Life(), [*hear]
        assert self._process.stdout is not None
        self._asked = 0.0
        self._reader = threading.Thread(
            target=self._read, args=(self._process.stdout,), name=self.name, daemon=True
        )
        self._reader.start()

    def _read(self, lines: IO[bytes]) -> None:
        with lines:
            for line in lines:
                text = line.decode(errors="replace").strip()
                if text.startswith("error: "):
                    with self._lock:
                        self._life.error = printable(text.removeprefix("error: "))
                    continue
                try:
                    event = Event.from_json(text)
                except (ValueError, TypeError):  # "listening on", or what code of one's own prints
                    continue
                self._take(event)
                self.tell(event)

    def tell(self, event: Event) -> None:
        """Tell of an event who follows the run; of one thread at a time."""
        for take in self._hear:
            take(event)

    def _take(self, event: Event) -> None:
        """Take in an event, and say it as the log's level lets it through."""
        level = level_of(event)
        with self._lock:
            line, status = self._life.formatter.line(event), self._life.formatter.status
            if level > logging.DEBUG:
                self._life.line = line
            if not status.awaited - status.here:
                self._life.missing_since = None
            elif self._life.missing_since is None:
                self._life.missing_since = time.monotonic()
        if level > logging.DEBUG:
            log.log(level, "%s: %s", self.name, line)

    def ask_to_end(self) -> None:
        """Send SIGTERM; the interaction under way may end."""
        if self._process is not None and self._process.poll() is None and not self._asked:
            self._asked = time.monotonic()
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait for the end of a process that was asked to end, for a while."""
        if self._process is None:
            return
        left = self._asked + RUN_LEAVING_S - time.monotonic()
        try:
            self._process.wait(max(left, 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._close(self._process)

    def _close(self, process: Program) -> None:
        assert process.stdin is not None
        process.stdin.close()
        if self._reader is not None:
            self._reader.join()

    def look(self) -> int | None:
        """Return the exit status of a process that has ended, once; else None.

        One that was asked to end long ago is killed.
        """
        if self._process is None:
            return None
        status = self._process.poll()
        if status is None and self._asked and time.monotonic() > self._asked + RUN_LEAVING_S:
            self._process.kill()
        if status is not None:
            self._close(self._process)
            self._process = None
        return status

    def comes_again(self, now: float) -> bool:
        """Tell whether a process that was killed is to begin again, and note when; else it fails.

        A commit since the last time shows that the run goes on.
        """
        commits = self.commits
        self._kills = 1 if commits > self._commits else self._kills + 1
        self._pauses = pauses() if commits > self._commits else self._pauses
        self._commits = max(commits, self._commits)
        self._again_at = now + next(self._pauses)
        return self._kills <= MOST_KILLS

    def is_due(self, now: float) -> bool:
        """Tell whether a process is to begin now."""
        return self._process is None and now >= self._again_at

    def wait_for_lock(self, now: float, seconds: float) -> None:
        """Try again later: a process that a killed front has left ends first."""
        self._again_at = now + seconds

    # --- how it fares -----------------------------------------------------------------------------

    @property
    def commits(self) -> int:
        """The last interaction that it told of; -1 before."""
        with self._lock:
            return self._life.formatter.status.interaction

    @property
    def line(self) -> str:
        """What it does, waits for or failed of."""
        with self._lock:
            life = self._life
            return life.error or life.formatter.status.waiting or life.line or "starting"

    def misses_for(self, now: float) -> float:
        """Return for how long it has missed a client that it waits for, in seconds."""
        with self._lock:
            since = self._life.missing_since
        return 0.0 if since is None else now - since

    def rss(self) -> int:
        """Return the memory of its process, in bytes; 0 where that cannot be told."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss) if self._process else 0
        except psutil.Error:
            return 0
