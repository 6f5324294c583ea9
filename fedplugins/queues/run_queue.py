"""Runs that wait to be served: a directory for each.

    QUEUE/0001-wards/config.toml    as it was submitted
                     run/           its run directory, once it has begun
                     log.txt        what its process said
                     place          it is served at so many ports after the front's
                     skipped        a number: others that waited go first
                     ended          over, failed or withdrawn

The directories are all there is. A queue that was killed goes on with the runs that have begun and
have not ended.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

import tomli_w

from fedmodels.config.experiment import Experiment
from fedmodels.config.sent import with_whole_places
from fedmodels.errors import ArchiveError, ConfigError, reason_of
from fedmodels.host.files import write_atomically, write_once
from fedsrv.state.run_directory import is_vacant

State = Literal["waiting", "running", "skipped", "over", "failed", "withdrawn"]
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
            if self.turn:
                return "skipped"
            return "waiting" if is_vacant(self.run) else "running"
        said = self.end.read_text("utf-8", "replace").strip()
        state = next((word for word in get_args(State) if word == said), None)
        if state is None:
            raise ArchiveError(f"{self.end} is damaged: it says {said[:20]!r}")
        return cast("State", state)

    @property
    def goes_on(self) -> bool:
        """Whether it is to be served now: it has not ended, nor does it let others go first."""
        return not (self.end.exists() or self.turn)

    @property
    def turn(self) -> int:
        """After how many that let others go first this run did so; 0 while it does not."""
        return _number_in(self.place / "skipped")

    @property
    def last_place(self) -> int:
        """At how many ports after the front's it was served last; 0 before."""
        return _number_in(self.place / "place")

    def keep_place(self, place: int) -> None:
        """Write down where it is served: sites go on there when it is resumed."""
        write_atomically(self.place / "place", f"{place}\n")

    def skip(self, turn: int) -> None:
        """Let others go first; ``turn`` is higher than that of each which does so."""
        write_atomically(self.place / "skipped", f"{turn}\n", sync=True)

    def ends_as(self, state: State) -> bool:
        """Write down how it ended; False where somebody else has said so before."""
        return write_once(self.end, f"{state}\n".encode())


def _number_in(path: Path) -> int:
    """Return the number that a file holds; 0 where there is none, or it is damaged."""
    try:
        return int(path.read_text("ascii"))
    except (OSError, ValueError):
        return 0


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
    if (state := found[name].state) not in ("waiting", "running", "skipped"):
        raise ConfigError(f"{name} is {state}: there is nothing to withdraw")
    if not found[name].ends_as("withdrawn"):
        raise ConfigError(f"{name} has just ended, and is {found[name].state}")


def next_runs(queue: Path) -> list[QueuedRun]:
    """Return the runs that have not ended, in the order in which they are served.

    Those that let others go first come last, in the order in which they did.
    """
    left = [run for run in runs_of(queue) if not run.end.exists()]
    return sorted(left, key=lambda run: (run.turn, run.state != "running"))  # it is stable
