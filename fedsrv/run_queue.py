"""Runs that wait for one address: a directory for each, and the run that is served now.

    QUEUE/0001-wards/config.toml    as it was submitted
                     run/           its run directory, once it has begun
                     ended          over, failed or withdrawn

The directories are all there is. A queue that was killed goes on with the run that has begun and
has not ended.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast, get_args

import tomli_w

from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import with_whole_places
from fedmodels.errors import ArchiveError, ConfigError, RunFailed, RunStopped, reason_of
from fedmodels.files import write_atomically, write_once
from fedmodels.processes import run_program
from fedmodels.times import QUEUE_LOOK_S
from fedsrv.state.run_directory import is_vacant, lock, refuse_in_use

State = Literal["waiting", "running", "over", "failed", "withdrawn"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueuedRun:
    """One run of a queue."""

    place: Path

    @property
    def config(self) -> Path:
        """The config as it was submitted."""
        return self.place / "config.toml"

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.place / "run"

    @property
    def end(self) -> Path:
        """The file that says how the run ended here: the state it has from then on."""
        return self.place / "ended"

    @property
    def state(self) -> State:
        """How far the run is."""
        if not self.end.exists():
            return "waiting" if is_vacant(self.run) else "running"
        said = self.end.read_text("utf-8", "replace").strip()
        state = next((word for word in get_args(State) if word == said), None)
        if state is None:
            raise ArchiveError(f"{self.end} is damaged: it says {said[:20]!r}")
        return cast("State", state)

    def ends_as(self, state: State) -> bool:
        """Write down how it ended; False where somebody else has said so before."""
        return write_once(self.end, f"{state}\n".encode())


def submit(experiment: Experiment, queue: Path, name: str) -> QueuedRun:
    """Put a run at the end of a queue, which is made if it is not there.

    Raises:
        ConfigError: the name is none, or the queue cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}", name):
        raise ConfigError(f"{name!r} cannot name a run: letters, digits, dots and dashes can")
    text = tomli_w.dumps(with_whole_places(experiment.to_dict()))
    made = QueuedRun(queue / f".{uuid.uuid4().hex}")
    try:
        made.place.mkdir(parents=True)
        write_atomically(made.config, text, sync=True, private=True)
        with _number_for(queue) as number:
            os.rename(made.place, place := queue / f"{number:04}-{name}")
        return QueuedRun(place)
    except OSError as error:
        raise ConfigError(f"the queue {queue} cannot be used: {reason_of(error)}") from None


@contextmanager
def _number_for(queue: Path) -> Iterator[int]:
    """Keep a number that no run of a queue has, and no other submission at this moment.

    A submission that is killed leaves its number out.
    """
    number = 0
    while True:
        number = max(number, *map(_number, runs_of(queue)), 0) + 1
        kept = queue / f".{number:04}"
        try:
            kept.mkdir()
        except FileExistsError:
            continue
        try:
            if number > max(map(_number, runs_of(queue)), default=0):  # still
                yield number
                return
        finally:
            kept.rmdir()


def runs_of(queue: Path) -> list[QueuedRun]:
    """Return the runs of a queue, first come first; ConfigError if there is no such directory."""
    if not queue.is_dir():
        raise ConfigError(f"{queue} is no queue: fedsrv submit CONFIG --queue {queue} makes one")
    places = queue.glob("[0-9][0-9][0-9][0-9]*-*/config.toml")
    runs = (QueuedRun(path.parent) for path in places)
    return sorted((run for run in runs if _number(run) >= 0), key=lambda r: (_number(r), r.place))


def _number(run: QueuedRun) -> int:
    """Return which of the runs of its queue a run is; -1 where its name begins with no number."""
    found = run.place.name.partition("-")[0]
    return int(found) if re.fullmatch("[0-9]{4,9}", found) else -1


def withdraw(queue: Path, name: str) -> None:
    """Take a run out of a queue; one that is served ends, and its directory stays.

    Raises:
        ConfigError: the queue has no such run, or it has ended.
    """
    found = {run.place.name: run for run in runs_of(queue)}
    if name not in found:
        raise ConfigError(f"{queue} has no run {name!r}; it has {', '.join(found) or 'none'}")
    if (state := found[name].state) not in ("waiting", "running"):
        raise ConfigError(f"{name} is {state}: there is nothing to withdraw")
    if not found[name].ends_as("withdrawn"):
        raise ConfigError(f"{name} has just ended, and is {found[name].state}")


def serve_all(queue: Path, options: Sequence[str]) -> NoReturn:
    """Serve the runs of a queue one after the other, for good.

    Args:
        queue: the directory.
        options: of ``fedsrv serve``, the same for each run.

    Raises:
        ConfigError: the directory cannot be used, or its first run could not begin, as where the
            address is taken: so might each of the others.
        RunFailed: another process serves the queue.
    """
    try:
        handle = lock(queue)
    except OSError as error:
        raise ConfigError(f"the queue {queue} cannot be used: {reason_of(error)}") from None
    try:
        has_begun, is_idle = False, False
        while True:
            if (run := next_of(queue)) is not None:
                serve_one(run, options, may_be_at_fault=has_begun)
                has_begun, is_idle = True, False
                continue
            if not is_idle:
                log.info("%s has no run that waits: fedsrv submit puts one there", queue)
            is_idle = True
            time.sleep(QUEUE_LOOK_S)
    finally:
        os.close(handle)


def next_of(queue: Path) -> QueuedRun | None:
    """Return the run to serve now: the one that has begun, else the first that waits."""
    left = {run.state: run for run in reversed(runs_of(queue))}
    return left.get("running") or left.get("waiting")


def serve_one(run: QueuedRun, options: Sequence[str], *, may_be_at_fault: bool = True) -> None:
    """Serve a run to its end, by a process of its own, and write down how it ended.

    A run that cannot begin has failed only if it may be at fault itself.

    Raises:
        ConfigError: it could not begin, and the options may be at fault; the run waits.
        RunStopped: its process was asked to stop; the run has not ended.
    """
    name = run.place.name
    _wait_for(run)
    resume = [] if is_vacant(run.run) else ["--resume"]
    log.info("%s: %s", name, "goes on" if resume else "begins")
    words = ["serve", str(run.config), "--out", str(run.run), *resume, *options]
    status = run_program("fedsrv", words, lambda: run.state != "withdrawn")
    if run.state == "withdrawn":
        return log.warning("%s: was withdrawn", name)
    if status == ConfigError.exit_code and not may_be_at_fault:
        raise ConfigError(
            f"{name} could not begin, for the reason above, and waits: mend that, or take the run "
            f"out with fedsrv queue {run.place.parent} --withdraw {name}"
        )
    if status == RunStopped.exit_code:  # somebody's SIGTERM meant the run's process alone
        raise RunStopped(f"{name} was stopped; the same command goes on with it")
    if not run.ends_as("failed" if status else "over"):
        log.warning("%s: was withdrawn when it had ended", name)
    elif status:
        log.error("%s: ended with status %d; the queue goes on with the next run", name, status)
    else:
        log.info("%s: is over", name)
    return None


def _wait_for(run: QueuedRun) -> None:
    """Wait while another process serves a run: one that a queue which was killed has left ends."""
    is_told = False
    while run.state in ("waiting", "running"):
        try:
            return refuse_in_use(run.run)
        except RunFailed as error:
            if not is_told:
                log.info("%s: waits: %s", run.place.name, error)
            is_told = True
            time.sleep(QUEUE_LOOK_S)
