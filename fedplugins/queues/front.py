"""The front of a queue: which runs are served side by side, and what becomes of each.

What it knows is in the queue's directory, so a front that was killed goes on. Its runs end with it,
and a new front resumes them where they were.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedmodels.errors import RunFailed
from fedmodels.host.guarded import Guarded
from fedmodels.host.machine import cores, free_bytes
from fedmodels.times import QUEUE_LOOK_S
from fedpb.channels import host_of, is_socket, place_after
from fedplugins.queues.run_queue import QueuedRun, next_runs, runs_of
from fedplugins.queues.served_run import ServedRun
from fedsrv.commands.watchers import Follow
from fedsrv.progress.events import HAS_FAILED, Event
from fedsrv.state.run_directory import is_vacant, refuse_in_use

ROOM_BYTES = 1 << 30
"""Memory that has to be free before a run begins beside others; as much as the largest of them."""
log = logging.getLogger(__name__)


class Front:
    """Serves the runs of a queue; one thread looks after them, and others ask how they are."""

    _served: Guarded[dict[str, ServedRun]] = Guarded("_lock")
    """Runs that have a place, by name."""

    def __init__(
        self,
        queue: Path,
        address: str,
        words: Sequence[str],
        *,
        at_once: int,
        patience_s: float,
        pages: Sequence[Follow] = (),
    ) -> None:
        """Serve nothing yet.

        Args:
            queue: the directory.
            address: where the front listens; its runs do at ports behind it.
            words: options of ``fedsrv serve``, the same for each run.
            at_once: how many runs are served side by side at most.
            patience_s: for how long a run may miss a client while others wait to be served.
            pages: what follows the events of each run.
        """
        self.queue, self.address = queue, address
        self._words, self._pages = [*words], pages
        self._at_once, self._patience_s = at_once, patience_s
        self._lock = threading.RLock()
        self._served = {}
        self._wake = threading.Event()
        self._is_idle = False

    # --- asked by others --------------------------------------------------------------------------

    def look_again(self) -> None:
        """Have the queue looked at now: something in it has changed."""
        self._wake.set()

    def served(self) -> list[ServedRun]:
        """Return the runs that have a place, first come first."""
        with self._lock:
            return sorted(self._served.values(), key=lambda run: run.name)

    # --- the work ---------------------------------------------------------------------------------

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Look after the runs, for good; they are asked to end when this is left."""
        try:
            while not until():
                self.look()
                self._wake.wait(QUEUE_LOOK_S)
                self._wake.clear()
        finally:
            for run in self.served():
                run.ask_to_end()
            for run in self.served():
                run.end()

    def look(self, now: float | None = None) -> None:
        """Look once: which processes have ended, which runs are to end, and which to begin."""
        at = time.monotonic() if now is None else now
        for run in self.served():
            if (status := run.look()) is not None:
                self._ended(run, status, at)
            elif not run.queued.goes_on:
                run.ask_to_end()
        waiting = self._waiting()
        self._skip_one(waiting, at)
        self._begin(waiting)
        for run in self.served():
            if run.is_due(at):
                self._start(run, at)
        is_idle = not self.served()
        if is_idle and not self._is_idle:
            log.info("%s has no run that waits: fedsrv submit puts one there", self.queue)
        self._is_idle = is_idle

    def _waiting(self) -> list[QueuedRun]:
        """Return the runs that have no place, in the order in which they are served."""
        names = {run.name for run in self.served()}
        return [run for run in next_runs(self.queue) if run.place.name not in names]

    def _ended(self, run: ServedRun, status: int, now: float) -> None:
        """Write down how a run ended whose process did; or let it begin again."""
        queued = run.queued
        if queued.end.exists():
            log.warning("%s: was withdrawn", run.name)
        elif queued.turn:
            log.warning("%s: stopped; its turn comes again", run.name)
        elif status == 0:
            said = queued.ends_as("over")
            log.info("%s: %s", run.name, "is over" if said else "was withdrawn when it had ended")
        elif (status < 0 or status > 128) and run.comes_again(now):
            log.warning("%s: its process was ended by a signal (%d); continuing", run.name, status)
            return  # it keeps its place
        elif queued.ends_as("failed"):
            why = run.line if run.line != "starting" else f"see {queued.place / 'log.txt'}"
            log.error("%s: ended with status %d: %s", run.name, status, why)
            run.tell(Event("ended", detail={"reason": f"{HAS_FAILED}{why}"}))
        else:
            log.warning("%s: was withdrawn when it had ended", run.name)
        with self._lock:
            del self._served[run.name]
        for follow in self._pages:
            follow(run.name, None)

    def _skip_one(self, waiting: Sequence[QueuedRun], now: float) -> None:
        """Let a run go that has missed a client for long, where others wait for a place."""
        served = self.served()
        if not waiting or self._has_room(served):
            return
        for run in served:
            if run.misses_for(now) > self._patience_s and run.queued.goes_on:
                turns = (one.turn for one in runs_of(self.queue))
                run.queued.skip(max(turns, default=0) + 1)
                log.warning(
                    "%s: lets others go first, since a site has been missing for %.0f s: %s",
                    run.name, run.misses_for(now), run.line,
                )  # fmt: skip
                run.ask_to_end()
                return

    def _has_room(self, served: Sequence[ServedRun]) -> bool:
        """Tell whether a run may begin: the first always, others where cores and memory allow."""
        if not served:
            return True
        if len(served) >= min(self._at_once, max(cores(), 1)):
            return False
        return free_bytes() > max(ROOM_BYTES, *(run.rss() for run in served))

    def _begin(self, waiting: Sequence[QueuedRun]) -> None:
        """Give places to runs that wait, as far as there is room."""
        for queued in waiting:
            if not self._has_room(served := self.served()):
                return
            if (place := self._place_for(queued, served)) is None:
                return
            (queued.place / "skipped").unlink(missing_ok=True)
            queued.keep_place(place)
            words = ["serve", str(queued.config), "--out", str(queued.run), "--events"]
            listen = ["--listen", place_after(self.address, place)]
            run = ServedRun(queued, place, [*words, *listen, *self._words])
            with self._lock:
                self._served[run.name] = run

    def _place_for(self, queued: QueuedRun, served: Sequence[ServedRun]) -> int | None:
        """Return a place that is free, the last one of the run if that is; None if none is."""
        taken = {run.place for run in served}
        left = [place for place in range(1, self._at_once + 1) if place not in taken]
        if (last := queued.last_place) in left and _why_waits(queued):
            return last  # what a killed front has left is still there, and is about to go
        left.sort(key=lambda place: (place != last, place))
        return next((place for place in left if self._is_free(place)), None)

    def _is_free(self, place: int) -> bool:
        """Tell whether nothing listens at a place."""
        address = place_after(self.address, place)
        if is_socket(address):
            return True
        host, port = host_of(address), int(address.rpartition(":")[2])
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((host, port))
            except OSError as error:
                log.warning("no run can be served at %s: %s", address, error.strerror)
                return False
        return True

    def _start(self, run: ServedRun, now: float) -> None:
        """Start the process of a run, once that which a killed front has left has ended."""
        queued = run.queued
        if why := _why_waits(queued):
            log.info("%s: waits: %s", run.name, why)
            return run.wait_for_lock(now, QUEUE_LOOK_S)
        resumes = not is_vacant(queued.run)
        log.info("%s: %s", run.name, "goes on" if resumes else "begins")
        hear = [follow(run.name, queued.run) for follow in self._pages]
        return run.begin(resumes, hear)


def _why_waits(queued: QueuedRun) -> str:
    """Return why a run cannot begin now: another process serves it; nothing where none does."""
    try:
        refuse_in_use(queued.run)
    except RunFailed as error:
        return str(error)
    return ""
